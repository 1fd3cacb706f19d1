"""The log lines of training steps: metrics, slow ranks, noise scale, advice; and the profiler."""

import os
import socket
import time
from pathlib import Path

from torch import Tensor

from oneloop.basics.launcher import HOST
from oneloop.basics.optimizer_tensors import optimizer_tensors
from oneloop.checkpoint.state_dict import model_tensors
from oneloop.data.step_batches import in_memory
from oneloop.loop.parts import Parts
from oneloop.measure.advice import Advice
from oneloop.measure.profiling import Profiling
from oneloop.measure.stragglers import Stragglers


class LogSteps:
    """Writes the log lines of training steps, and advises what would save time.

    Args:
        parts: of the run.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        job = parts.job
        run = parts.run

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
        parts = self._parts
        state = parts.state
        gradients = parts.gradients
        log = parts.run_log

        # Read the meter (host sync, collective): metrics, and what each rank measured alone.
        wait = parts.steps.data_wait()
        device_times = gradients.device_time.read() if parts.run.ranks > 1 else (0.0, 0.0, 0.0)
        metrics = {
            "train/lr": lr,
            **state.meter.read([wait, *device_times, float(gradients.seen.others.drew)]),
            "train/epoch": state.count.samples / len(parts.job.train_set),
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
            log.write(log.line(event="straggler", why=why))
            parts.run.display.say(f"{why} (oneloop doctor)")

        # Add the noise scale. Reading it is collective.
        if parts.job.noise_scale:
            state.noise.add(*gradients.noise(total), norm=metrics["train/grad_norm"])
            metrics |= state.noise.metrics()

        # With batch.grain, log hashes of all tensors: they show where two runs differ.
        remarks = self.advice(clock.overall)
        log.log(metrics, remarks, **self._hashes())

    def _hashes(self) -> dict[str, str]:
        """With ``batch.grain``, return hashes of all tensors of a checkpoint.

        Collective: call on every rank."""
        run = self._parts.run
        if not self._parts.job.exact or not (run.main or run.sharded):
            return {}
        from oneloop.basics.fingerprint import fingerprint

        state = self._parts.state
        averages: dict[str, Tensor] = {}
        for ema in state.emas:
            averages |= ema.tensors()
        weights = model_tensors(state.model, frozen=False)
        return fingerprint(weights | optimizer_tensors(state.model, state.optimizer) | averages)

    def profiling(self, folder: Path) -> Profiling:
        """Return the profiler for the steps in the recipe.

        It records on rank 0, to ``profile`` in the run folder."""
        run = self._parts.run
        watch = self._parts.job.recipe.watch
        folder = folder / "profile"
        run_log = self._parts.run_log

        def log(metrics: dict[str, float]) -> None:
            line = run_log.line(**metrics)
            run_log.write(line)

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
