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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from oneloop.basics.exact_sums import tree_sum
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.seeds import reseed
from oneloop.data.step_batches import Batch
from oneloop.job.build import Job
from oneloop.job.preflight_result import Preflight
from oneloop.job.two_passes import TwoPasses
from oneloop.launch.processes import Run
from oneloop.machine.fsdp2_units import Units, search_unused
from oneloop.machine.reduction import Reduction, Tree
from oneloop.measure.meter import Sums
from oneloop.measure.noise_scale import Sensor
from oneloop.optim.clip import global_norm
from oneloop.task_protocol.whole_batch import is_whole_batch


class _MicroBatch(NamedTuple):
    """Where a step is."""

    position: int  # of the step's first sample in the order of all samples
    number: int  # of the micro-batch in the step; -1 before the first one
    weight: float  # of the micro-batch on this rank
    measured: bool  # whether a log line follows the step


class Gradients:
    """Seeds and sums the gradients of a step.

    With ``batch.grain``, it does so bit-identically on every parallel layout.

    Args:
        job: what the recipe describes.
        run: this process.
        model: the prepared model.
        parameters: the trained ones.
        seen: what the preflight check found out.

    Raises:
        BadInput: unused parameters must be searched for, and this torch cannot.
    """

    def __init__(
        self,
        job: Job,
        run: Run,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        seen: Preflight,
    ) -> None:
        layout = job.layout
        self._job = job
        self._run = run
        self.model = model
        self.parameters = parameters
        self.seen = seen
        self._sensor = Sensor(run.accelerator, model, passed=job.exact, summed=True)
        self.units = Units(model, union=self._search())
        whole = is_whole_batch(job.task)
        self._two_passes = TwoPasses(job, run, model, self._seed) if whole else None

        # Sum as torch does, or with batch.grain in one tree over the leaves (micro-batches that
        # hold the same samples on every parallel layout).
        self._reduction: Reduction
        if job.exact:
            self._reduction = Tree(
                model,
                parameters,
                ranks=run.ranks,
                accumulate=layout.accumulate,
                units=self.units,
                see=self._sensor.see,
            )
        else:
            self._reduction = Reduction(model, accumulate=layout.accumulate, units=self.units)

        # Indices of this rank's leaves in the step.
        self._leaves = torch.tensor(layout.leaves(run.rank), device=run.device)

        self._at = _MicroBatch(0, -1, 0.0, False)

    def _search(self) -> Callable[[list[bool]], list[bool]] | None:
        """Return what combines flags of used parameters over all ranks; None: not searched for."""
        asked = self._job.recipe.machine.find_unused_parameters
        able = search_unused(self.model)
        if asked and not able:
            raise BadInput(
                "machine.find_unused_parameters true requires torch 2.15 or newer under FSDP2"
            )
        searched = self._run.sharded and able and (asked or self.seen.unused)
        return self._run.union if searched else None

    @property
    def factor(self) -> int:
        """Factor of the loss that undoes accelerate's mean over the micro-batches."""
        return self._reduction.factor

    def sums(self) -> Sums:
        """Return empty sums for one step, of the loss and of the metrics that it returns."""
        return Sums(self.seen.metrics, apart=self._job.exact)

    def step(self, position: int, *, measured: bool = False) -> AbstractContextManager[None]:
        """Return a context around the micro-batches of one step.

        Args:
            position: of the step's first sample in the order of all samples.
            measured: measure the noise scale, if the run does; find out if the model draws from
                Python's or numpy's generator.
        """
        self._at = _MicroBatch(position, -1, 0.0, measured)
        return self._sensor.measuring(measured and self._job.noise_scale)

    def micro_batch(self, weight: float) -> "Gradients":
        """Return a context around forward and backward of the next micro-batch.

        ``weight`` is its weight on this rank."""
        at = self._at
        self._at = _MicroBatch(at.position, at.number + 1, weight, at.measured)
        return self

    def passes(
        self, batches: Iterable[Batch]
    ) -> tuple[Callable[[nn.Module, Batch], Any], Iterable[Batch]]:
        """Return the loss of a micro-batch, and the micro-batches of a step: those of the task.

        For a loss over the whole batch, first make its first pass. Collective: call on every rank.
        """
        if self._two_passes is None:
            return self._job.task.loss, batches
        return self._two_passes.loss, self._two_passes.first(batches)

    def __enter__(self) -> None:
        self._seed(self._at.number)
        if self._at.measured and not self._always:
            self.seen.others.watch()
        self._reduction.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._reduction.__exit__(kind, error, trace)
        if error is not None:
            return
        self.seen.others.look()
        self._sensor.micro_batch(self._at.weight)

    def _seed(self, micro: int | None) -> None:
        """Seed random numbers by the step and the number of the micro-batch (None: the step)."""
        # A loss over the whole batch draws the same numbers on every rank.
        if micro is None:
            self._seed_by(self._at.position)
        else:
            self.seed_as(self._at.position, self._run.rank, micro)

    def seed_as(self, position: int, rank: int, micro: int) -> None:
        """Seed random numbers as those of a micro-batch.

        Args:
            position: index of its step's first sample in the order of all samples.
            rank: which trains it.
            micro: its number in the step.
        """
        # With batch.grain, it holds the same samples on every layout, and draws the same numbers.
        if self._job.exact:
            self._seed_by(position, self._job.layout.leaf(rank, micro))
        else:
            self._seed_by(position, rank, micro)

    def seed_update(self) -> None:
        """Seed random numbers that the optimizer draws in this step, equal on every rank."""
        self._seed_by(self._at.position, -1)

    def _seed_by(self, position: int, *own: int) -> None:
        others = self._always or self.seen.others.drawn
        seed = self._job.recipe.seed
        reseed(self._run.device, seed, position, *own, others=others)

    @property
    def _always(self) -> bool:
        """Whether the numbers of Python's and numpy's generators must repeat in any case."""
        return self._job.exact or self._two_passes is not None

    def seed_others(self) -> None:
        """Also seed Python's and numpy's generators from now on, because a rank has drawn."""
        self.seen.others.drawn = True
        self.seen.others.drew = False
        self._run.display.say(
            "a forward draws from Python's or numpy's generator, and drew nothing in the check "
            "before the run: from now on they are seeded for each micro-batch; the steps until "
            "now may have repeated numbers, and a rerun draws others there"
        )

    def norm(self) -> Tensor:
        """Return the global L2 norm of the gradients, 0-dim, equal on all ranks.

        Collective: call on every rank."""
        return global_norm(self.parameters, exact=self._job.exact)

    def noise(self, total: float) -> tuple[float, float, float]:
        """Return :meth:`Sensor.read` of the last measured step, whose total weight is ``total``.

        Collective: call on every rank."""
        return self._sensor.read(total, self._job.layout.size)

    def total(self, losses: Tensor) -> Tensor:
        """Return a step's loss summed over all ranks, 0-dim, on the device.

        Collective: call on every rank. With ``batch.grain`` each leaf has its own slot in the
        all-reduce, so that the tree adds them in one order."""
        if not self._job.exact:
            return self._run.total(losses)
        slots = losses.new_zeros(self._run.ranks * len(self._leaves))
        slots[self._leaves] = losses
        return tree_sum(self._run.total(slots))
