"""The log lines of training steps: metrics, slow ranks, noise scale, advice; and the profiler."""

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from oneloop.basics.launcher import HOST
from oneloop.basics.tensors import optimizer_tensors
from oneloop.checkpoint.state_dict import model_tensors
from oneloop.data.step_batches import in_memory
from oneloop.ema import EMA
from oneloop.job.build import Job
from oneloop.launch.processes import Run
from oneloop.loop.counters import RunLog
from oneloop.loop.gradients import Gradients
from oneloop.loop.steps import Steps
from oneloop.loop.training_state import State
from oneloop.measure.advice import Advice
from oneloop.measure.fingerprint import fingerprint
from oneloop.measure.profiling import Profiling
from oneloop.measure.stragglers import Stragglers


class LogSteps:
    """Writes the log lines of training steps, and advises what would save time.

    Args:
        job: what the recipe describes.
        run: this process.
        state: its meter and its noise scale are read.
        run_log: metrics.jsonl, the trackers and the terminal.
        gradients: measure device time and noise scale of a log step.
        steps: load the micro-batches.
        emas: EMAs of the weights.
    """

    def __init__(
        self,
        job: Job,
        run: Run,
        state: State,
        run_log: RunLog,
        gradients: Gradients,
        steps: Steps,
        emas: Sequence[EMA],
    ) -> None:
        self._job = job
        self._run = run
        self._state = state
        self._run_log = run_log
        self._gradients = gradients
        self._steps = steps
        self._emas = emas

        # Advise more workers only if there are cores for them. Without a GPU, training uses all
        # cores. Data in memory needs no workers.
        cores = run.cores
        if run.device.type == "cpu" or in_memory(job.train_set):
            cores = 0
        self.advice = Advice(
            workers=run.workers(job.recipe.machine.workers),
            cores=cores,
            steps=job.steps,
            eval_every=job.intervals.every["eval"],
            save_every=job.intervals.every["save"],
        )
        self._stragglers = Stragglers(run.gathered(os.environ.get(HOST) or socket.gethostname()))

    def write(self, lr: float, total: float) -> None:
        """Write a log line. Host sync; collective: call on every rank.

        Args:
            lr: learning rate of the step.
            total: weight of the step's global batch.
        """
        job = self._job
        run = self._run
        state = self._state
        gradients = self._gradients

        # Read the meter (host sync, collective): metrics, and what each rank measured alone.
        wait = self._steps.data_wait()
        device_times = gradients.device_time.read() if run.ranks > 1 else (0.0, 0.0, 0.0)
        metrics = {
            "train/lr": lr,
            **state.meter.read([wait, *device_times, float(gradients.seen.others.drew)]),
            "train/epoch": state.count.samples / len(job.train_set),
        }
        clock = state.meter.clock
        state.count.measured(clock.spent())

        # What one rank draws, all ranks seed.
        if any(drew for *_, drew in state.meter.own):
            gradients.seed_others()

        # Report a rank that slows down the others.
        found = self._stragglers.judge(
            [times for *times, _ in state.meter.own],
            step_seconds=metrics.get("speed/step_seconds", 0.0),
            now=time.monotonic(),
        )
        for _, why in found:
            self._run_log.write(self._run_log.line(event="straggler", why=why))
            run.display.say(f"{why} (oneloop doctor)")

        # Add the noise scale. Reading it is collective.
        if job.noise_scale:
            state.noise.add(*gradients.noise(total), norm=metrics["train/grad_norm"])
            metrics |= state.noise.metrics()

        # With batch.grain, log hashes of all tensors: they show where two runs differ.
        remarks = self.advice(clock.overall)
        self._run_log.log(metrics, remarks, **self._hashes())

    def _hashes(self) -> dict[str, str]:
        """With ``batch.grain``, return hashes of all tensors of a checkpoint.

        Collective: call on every rank."""
        if not self._job.exact or not (self._run.main or self._run.sharded):
            return {}
        state = self._state
        averages: dict[str, Tensor] = {}
        for ema in self._emas:
            averages |= ema.tensors()
        weights = model_tensors(state.model, frozen=False)
        return fingerprint(weights | optimizer_tensors(state.model, state.optimizer) | averages)

    def profiling(self, folder: Path) -> Profiling:
        """Return the profiler for the steps in the recipe.

        It records on rank 0, to ``profile`` in the run folder."""
        run = self._run
        watch = self._job.recipe.watch
        folder = folder / "profile"

        def log(metrics: dict[str, float]) -> None:
            self._run_log.write(self._run_log.line(**metrics))

        if not run.main:
            return Profiling(folder, run.device)
        return Profiling(
            folder,
            run.device,
            profile=watch.profile,
            memory=watch.memory,
            say=run.display.say,
            log=log,
        )
