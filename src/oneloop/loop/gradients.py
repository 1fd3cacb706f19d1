"""The gradients of one step: of the summed loss of the global batch, divided by its total weight.

>>> with gradients.summing(position):
...     for batch, weight in zip(group.batches, group.weights):
...         with accelerator.accumulate(model), gradients.micro_batch(weight):
...             accelerator.backward(loss(batch) * gradients.factor / group.total)
>>> norm = gradients.norm()                     # .grad is the sum over micro-batches and ranks
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

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
from oneloop.optim.clip import clear_gradients, global_norm
from oneloop.task_protocol.whole_batch import is_whole_batch


class Gradients:
    """Seeds and sums the gradients of a step, and its losses and metrics (``sums``).

    With ``batch.grain``, it does so bit-identically on every parallel layout. Its ``sensor``
    measures what the noise scale is computed from, and ``metrics`` are the names of the task's.

    Args:
        job: what the recipe describes.
        run: this process.
        model: the prepared model.
        parameters: the trained ones.
        trial: what the preflight check found out.

    Raises:
        BadInput: unused parameters must be searched for, and this torch cannot.
    """

    def __init__(
        self,
        job: Job,
        run: Run,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        trial: Preflight,
    ) -> None:
        layout = job.layout
        self._job = job
        self._run = run
        self.model = model
        self.parameters = parameters
        self.metrics = trial.metrics
        self.sensor = Sensor(run.accelerator, model, passed=job.exact, summed=True)

        # Under FSDP2, may other parameters be unused on each rank?
        asked = job.recipe.machine.find_unused_parameters
        able = search_unused(model)
        if asked and not able:
            raise BadInput(
                "machine.find_unused_parameters true requires torch 2.15 or newer under FSDP2"
            )
        searched = run.sharded and able and (asked or trial.unused)
        self.units = Units(model, union=run.union if searched else None)

        whole = is_whole_batch(job.task)
        # Must the numbers of Python's and numpy's generators repeat, too?
        self._seeds_others = job.exact or whole or trial.draws_others
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
                see=self.sensor.see,
            )
        else:
            self._reduction = Reduction(model, accumulate=layout.accumulate, units=self.units)

        # Indices of this rank's leaves in the step.
        self._leaves = torch.tensor(layout.leaves(run.rank), device=run.device)

        # Where the step is: the position of its first sample, and the number of the micro-batch.
        self._position = 0
        self._number = -1

    @property
    def factor(self) -> int:
        """Factor of the loss that undoes accelerate's mean over the micro-batches."""
        return self._reduction.factor

    def summing(self, position: int, *, measured: bool = False) -> AbstractContextManager[None]:
        """Return a context around the micro-batches of one step, with empty ``sums``.

        Args:
            position: of the step's first sample in the order of all samples.
            measured: measure the noise scale, if the run does.
        """
        self._position = position
        self._number = -1
        self.sums = Sums(self.metrics, apart=self._job.exact)
        return self.sensor.measuring(measured and self._job.noise_scale)

    @contextmanager
    def micro_batch(self, weight: float) -> Iterator[None]:
        """Seed and reduce in this context: forward and backward of the next micro-batch.

        ``weight`` is its weight on this rank."""
        self._number += 1
        self._seed(self._number)
        with self._reduction:
            yield
        self.sensor.micro_batch(weight)

    def passes(
        self, batches: Iterable[Batch]
    ) -> tuple[Callable[[nn.Module, Batch], Any], Iterable[Batch]]:
        """Return the loss of a micro-batch, and the micro-batches of a step: those of the task.

        For a loss over the whole batch, first make its first pass. Collective: call on every rank.
        """
        if self._two_passes is None:
            return self._job.task.loss, batches
        return self._two_passes.loss, self._two_passes.first(batches)

    def _seed(self, micro: int | None) -> None:
        """Seed random numbers by the step and the number of the micro-batch (None: the step)."""
        # A loss over the whole batch draws the same numbers on every rank.
        if micro is None:
            self._seed_by(self._position)
        else:
            self.seed_as(self._position, self._run.rank, micro)

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
        self._seed_by(self._position, -1)

    def _seed_by(self, position: int, *own: int) -> None:
        seed = self._job.recipe.seed
        reseed(self._run.device, seed, position, *own, others=self._seeds_others)

    def clear(self) -> None:
        """Drop the gradients."""
        clear_gradients(self.parameters)

    def norm(self) -> Tensor:
        """Return the global L2 norm of the gradients, 0-dim, equal on all ranks.

        Collective: call on every rank."""
        return global_norm(self.parameters, exact=self._job.exact)

    def total(self, losses: Tensor) -> Tensor:
        """Return a step's loss summed over all ranks, 0-dim, on the device.

        Collective: call on every rank. With ``batch.grain`` each leaf has its own slot in the
        all-reduce, so that the tree adds them in one order."""
        if not self._job.exact:
            return self._run.total(losses)
        slots = losses.new_zeros(self._run.ranks * len(self._leaves))
        slots[self._leaves] = losses
        return tree_sum(self._run.total(slots))
