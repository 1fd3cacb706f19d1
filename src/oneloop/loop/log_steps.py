"""The log lines of training steps: metrics, slow ranks, noise scale; and the profiler."""

import os
import socket
import time
from pathlib import Path

from torch import Tensor

from oneloop.basics.launcher import HOST
from oneloop.basics.optimizer_tensors import optimizer_tensors
from oneloop.checkpoint.state_dict import model_tensors
from oneloop.loop.parts import Parts
from oneloop.measure.profiling import Profiling
from oneloop.measure.stragglers import Stragglers, product_seconds


class LogSteps:
    """Writes the log lines of training steps.

    Args:
        parts: of the run.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        host = os.environ.get(HOST) or socket.gethostname()
        self._stragglers = Stragglers(parts.run.gathered(host))

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

        # Read the meter. Host sync, collective.
        metrics = {
            "train/lr": lr,
            **state.meter.read(),
            "train/epoch": state.count.samples / len(parts.job.train_set),
        }

        # Gather what each rank measures alone. A wait for data counts if it left the device idle.
        step_seconds = metrics.get("speed/step_seconds", 0.0)
        wait = min(parts.steps.data_wait(), metrics["share/data"] * step_seconds)
        product = product_seconds(parts.run.device) if parts.run.ranks > 1 else 1.0
        ranks = parts.run.gathered((wait, product, gradients.seen.others.drew))

        # What one rank draws, all ranks seed.
        if any(drew for *_, drew in ranks):
            gradients.seed_others()

        # Report a rank that slows down the others.
        times = [(wait, product) for wait, product, _ in ranks]
        slow = self._stragglers.judge(times, step_seconds=step_seconds, now=time.monotonic())
        for why in slow:
            log.write(log.line(event="straggler", why=why))
            parts.run.display.say(f"{why} (oneloop doctor)")

        # Add the noise scale. Reading it is collective.
        if parts.job.noise_scale:
            state.noise.add(*gradients.noise(total), norm=metrics["train/grad_norm"])
            if state.noise.value is not None:
                metrics["train/noise_scale"] = state.noise.value

        # With batch.grain, log hashes of all tensors: they show where two runs differ.
        log.log(metrics, **self._hashes())

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
        return Profiling(
            folder / "profile",
            run.device,
            profile=watch.profile if run.main else None,
            memory=watch.memory if run.main else None,
            say=run.display.say,
        )
