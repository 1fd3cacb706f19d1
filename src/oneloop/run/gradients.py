"""The gradients of one step: of the summed loss of the global batch, divided by its total weight.

>>> sums = gradients.sums()
>>> with gradients.step(position):
...     for batch, weight in zip(group.batches, group.weights):
...         with accelerator.accumulate(model), gradients.micro_batch(weight):
...             accelerator.backward(loss(batch) * gradients.factor / group.total)
>>> norm = gradients.norm()                     # .grad is the sum over micro-batches and ranks
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from oneloop.basics.exact_sums import tree_sum
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.seeds import reseed
from oneloop.basics.tensors import optimizer_tensors
from oneloop.checkpoint.state_dict import model_tensors
from oneloop.data.step_batches import Batch
from oneloop.ema import EMA
from oneloop.job.build import Job
from oneloop.job.preflight import Preflight
from oneloop.job.two_passes import TwoPasses
from oneloop.launch.processes import Run
from oneloop.machine.blocks import has_batch_statistics
from oneloop.machine.layout_checks import Checks, search_unused
from oneloop.machine.reduction import Reduction, Tree
from oneloop.measure.fingerprint import fingerprint
from oneloop.measure.meter import Sums
from oneloop.measure.noise_scale import Sensor
from oneloop.measure.stragglers import DeviceTime
from oneloop.optim.clip import global_norm
from oneloop.run.start_lines import DEPENDS
from oneloop.tasks.whole_batch import is_whole_batch


class Gradients:
    """Seeds, checks and sums the gradients of a step; with ``batch.grain``, bit-identically on
    every parallel layout.

    Raise BadInput if unused parameters must be searched for, and this torch cannot."""

    def __init__(
        self,
        job: Job,
        run: Run,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        seen: Preflight,
    ) -> None:
        layout = job.layout
        self._job, self._run, self.model, self.parameters = job, run, model, parameters
        self._metrics = tuple(seen.metrics)
        self._sensor = Sensor(run.accelerator, model, exact=job.exact, summed=True)
        self.checks = _checks(job, run, model, seen)
        how: dict[str, Any] = {"accumulate": layout.accumulate, "checks": self.checks}
        self._two_passes = (
            TwoPasses(job, run, model, self._seed) if is_whole_batch(job.task) else None
        )
        self._reduction = (
            Tree(model, parameters, ranks=run.ranks, see=self._sensor.see, **how)
            if job.exact
            else Reduction(model, **how)
        )
        leaves = [layout.leaf(run.rank, micro) for micro in range(layout.accumulate)]
        # indices of this rank's leaves in the step
        self._leaves = torch.tensor(leaves, device=run.device)
        # position of the step; number of the micro-batch in it, and its weight on this rank
        self._at = 0, -1, 0.0
        self.device_time = DeviceTime(model, run.device, alone=not run.sharded)

    @property
    def factor(self) -> int:
        """Factor of the loss that undoes accelerate's mean over the micro-batches."""
        return self._reduction.factor

    def sums(self) -> Sums:
        """Return empty sums for one step, of the loss and of the metrics that the task's loss
        returns."""
        return Sums(self._metrics, apart=self._job.exact)

    def step(self, position: int, *, measured: bool = False) -> AbstractContextManager[None]:
        """Return a context around the micro-batches of one step.

        ``position`` is that of its first sample; ``measured``: measure the device time and, if the
        run does, the noise scale."""
        self._at = position, -1, 0.0
        noise = self._sensor.measuring(measured and self._job.noise_scale)
        return self.device_time.measuring(noise) if measured and self._run.ranks > 1 else noise

    def micro_batch(self, weight: float) -> "Gradients":
        """Return a context around forward and backward of the next micro-batch, of this ``weight``
        on this rank."""
        self._at = self._at[0], self._at[1] + 1, weight
        return self

    def passes(
        self, batches: Iterable[Batch]
    ) -> tuple[Callable[[nn.Module, Batch], Any], Iterable[Batch]]:
        """Return the loss of a micro-batch, and the micro-batches of a step: those of the task. For
        a loss over the whole batch, first make its first pass. Collective: call on every rank."""
        if self._two_passes is None:
            return self._job.task.loss, batches
        return self._two_passes.loss, self._two_passes.first(batches)

    def __enter__(self) -> None:
        self._seed(self._at[1])
        self._reduction.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._reduction.__exit__(kind, error, trace)
        if error is None:
            self._sensor.micro_batch(self._at[2])

    def _seed(self, micro: int | None) -> None:
        """Seed random numbers by step, rank and micro-batch; with ``batch.grain``, by step and
        leaf. None: by step."""
        job, run, position = self._job, self._run, self._at[0]
        own = (
            []
            if micro is None
            else [job.layout.leaf(run.rank, micro)]
            if job.exact
            else [run.rank, micro]
        )
        reseed(
            run.device,
            job.recipe.seed,
            position,
            *own,
            others=job.exact or self._two_passes is not None,
        )

    def norm(self) -> Tensor:
        """Return the global L2 norm of the gradients, 0-dim, equal on all ranks. Collective: call
        on every rank."""
        return global_norm(self.parameters, exact=self._job.exact)

    def noise(self, total: float) -> tuple[float, float, float]:
        """Return :meth:`Sensor.read` of the last measured step, whose total weight is ``total``.
        Collective: call on every rank."""
        return self._sensor.read(total, self._job.layout.size)

    def total(self, losses: Tensor) -> Tensor:
        """Return a step's loss summed over all ranks, 0-dim, on the device. Collective: call on
        every rank.

        With ``batch.grain`` each leaf has its own slot in the all-reduce, so that the tree adds
        them in one order."""
        if not self._job.exact:
            return self._run.total(losses)
        slots = losses.new_zeros(self._run.ranks * len(self._leaves))
        slots[self._leaves] = losses
        return tree_sum(self._run.total(slots))

    def fingerprint(self, optimizer: Optimizer, emas: Sequence[EMA]) -> dict[str, str]:
        """With ``batch.grain``, return hashes of all tensors of a checkpoint. Collective: call on
        every rank."""
        if not self._job.exact or not (self._run.main or self._run.sharded):
            return {}
        averages = {name: tensor for ema in emas for name, tensor in ema.tensors().items()}
        weights = model_tensors(self.model, frozen=False)
        return fingerprint(weights | optimizer_tensors(self.model, optimizer) | averages)


def _checks(job: Job, run: Run, model: nn.Module, seen: Preflight) -> Checks:
    asked = job.recipe.machine.find_unused_parameters
    able = search_unused(model)
    if asked and not able:
        raise BadInput(
            "machine.find_unused_parameters true requires torch 2.15 or newer under FSDP2"
        )

    def report(name: str) -> None:
        run.display.say(f"a forward in training changes the {name}; {DEPENDS}")

    watched = not seen.moved and not has_batch_statistics(model)
    union = run.union if run.sharded and able and (asked or seen.unused) else None
    how: dict[str, Any] = {
        "parameters": run.ranks > 1 or job.exact,
        "buffers": job.exact,
        "union": union,
    }
    return Checks(model, report=report if watched else None, **how)
