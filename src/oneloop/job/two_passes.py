"""The exact gradient of a loss over the whole global batch, with the memory of one micro-batch.

The first pass embeds all micro-batches without gradients. Every rank gathers the embeddings, and
computes the loss and its gradient with respect to them. The second pass repeats each forward with
the same random numbers, and continues this gradient into the model (gradient caching: Gao et al.
2021, but also exact with dropout, and over all ranks).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oneloop.basics.tensors import gathered, restored_buffers
from oneloop.data.step_batches import Batch
from oneloop.job.build import Job
from oneloop.launch.processes import Run
from oneloop.task_protocol.whole_batch import Described, check_alike, columns_of, described


class TwoPasses:
    """The two passes of each step.

    Args:
        job: what the recipe describes; its task has ``embed`` and ``batch_loss``.
        run: this process.
        model: the prepared model.
        seed: seeds the random numbers of a micro-batch, by its number in the step (None: of the
            loss).
    """

    def __init__(
        self, job: Job, run: Run, model: nn.Module, seed: Callable[[int | None], None]
    ) -> None:
        self._job = job
        self._run = run
        self._model = model
        self._seed = seed
        self._rows: Described = {}  # of rank 0's first micro-batch
        self._micro = 0  # number of the next micro-batch of the second pass

        # of the parts of the global batch; a micro-batch's share of that of a 0-dim part
        self._gradients: dict[str, Tensor] = {}
        self._result: tuple[Tensor, dict[str, Tensor]] = torch.zeros(()), {}

    @torch.no_grad()
    def first(self, batches: Iterable[Batch]) -> list[Batch]:
        """Make the first pass. Collective: call on every rank.

        Args:
            batches: this rank's micro-batches of a step.

        Returns:
            The micro-batches.

        Raises:
            Inexact: embed or collate do not return the same rows in each micro-batch.
        """
        task = self._job.task
        batches = list(batches)
        columns: list[dict[str, Tensor]] = []
        self._micro = 0
        found: list[dict[str, Tensor]] = []

        # Embed all micro-batches. Only the second pass changes the statistics of BatchNorm.
        with restored_buffers(self._model):
            for micro, batch in enumerate(batches):
                self._seed(micro)
                parts = task.embed(self._model, {**batch})  # type: ignore[attr-defined]
                # CUDA graphs write the next result into the same memory.
                found.append({name: part.clone() for name, part in parts.items()})
                columns.append(columns_of(task, batch))
                tensors = found[-1] | columns[-1]
                self._rows = self._rows or self._run.from_main(described(tensors))  # once
                check_alike(tensors, self._rows, samples=self._job.layout.each)

        # Gather them on every rank, which all compute the same loss and gradients.
        self._differentiate(self._whole(found), self._whole(columns))
        return batches

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the micro-batch's share of the loss, whose gradient is exact, and outputs."""
        layout = self._job.layout
        row = layout.leaf(self._run.rank, self._micro) * layout.each
        self._micro += 1
        parts = self._job.task.embed(model, {**batch})  # type: ignore[attr-defined]

        # The value is that of the first pass. Continue the gradients of the parts into the model.
        value, outputs = self._result
        used = []
        gradients = []
        for name, part in parts.items():
            gradient = self._gradients.get(name)
            if part.requires_grad and gradient is not None:
                used.append(part)
                gradients.append(gradient[row : row + layout.each] if part.ndim else gradient)
        return _Continued.apply(value, gradients, *used), outputs

    def _differentiate(self, parts: dict[str, Tensor], columns: dict[str, Tensor]) -> None:
        """Compute the loss of the whole batch, and its gradients of the parts."""
        task: Any = self._job.task
        self._seed(None)
        with torch.enable_grad():
            floating = [part for part in parts.values() if part.is_floating_point()]
            for part in floating:
                part.requires_grad_()
            loss, outputs = task.batch_loss({**parts}, columns)
            torch.autograd.backward(loss, inputs=floating)

        # Each micro-batch has an equal share of the loss and of the gradients of 0-dim parts.
        number = self._run.ranks * self._job.layout.accumulate
        self._gradients = {}
        for name, part in parts.items():
            if part.grad is not None:
                self._gradients[name] = part.grad if part.ndim else part.grad / number
        scalars = {name: part.detach() for name, part in parts.items() if not part.ndim}
        self._result = loss.detach() / number, {**scalars, **(outputs or {})}

    def _whole(self, micro_batches: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the tensors of the global batch, in the order of its samples."""
        layout = self._job.layout
        whole: dict[str, Tensor] = {}
        for name in self._rows:  # all ranks in one order
            if name not in micro_batches[0]:
                continue
            # Gather the rows of all ranks; of a 0-dim part, keep one value.
            rows = gathered(torch.stack([tensors[name] for tensors in micro_batches]))
            if rows.ndim == 1:
                whole[name] = rows[0].clone()
                continue
            # Under FSDP2 with batch.grain, neighbouring leaves are on other ranks.
            if layout.grain and layout.sharded:
                by_rank = rows.unflatten(0, (self._run.ranks, -1))
                rows = by_rank.transpose(0, 1).flatten(0, 1)
            whole[name] = rows.flatten(0, 1)
        return whole


class _Continued(torch.autograd.Function):
    """A value whose gradients with respect to some tensors are already known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *parts: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> Any:  # type: ignore[override]
        scaled = []
        for gradient in ctx.gradients:
            scaled.append((outer * gradient).to(gradient.dtype))
        return None, None, *scaled
