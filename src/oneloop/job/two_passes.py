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

from oneloop.basics.exit_codes import Inexact
from oneloop.data.step_batches import Batch
from oneloop.job.build import Job
from oneloop.job.preflight import tolerance_of
from oneloop.job.trial_passes import restored_buffers
from oneloop.launch.processes import Run
from oneloop.tasks.whole_batch import apart, columns_of


class TwoPasses:
    """The two passes of each step. ``seed`` seeds a micro-batch (None: the loss)."""

    def __init__(
        self, job: Job, run: Run, model: nn.Module, seed: Callable[[int | None], None]
    ) -> None:
        self._job, self._run, self._model, self._seed = job, run, model, seed
        self._tolerance = tolerance_of(job, run, model)
        self._shapes: dict[str, str] = {}  # of each part and column
        self._micro = 0  # number of the next micro-batch of the second pass
        # of each micro-batch: the parts of the first pass
        self._expected: list[dict[str, Tensor]] = []
        # of each micro-batch: the loss's gradients of its parts
        self._gradients: list[dict[str, Tensor]] = []
        self._result: tuple[Tensor, dict[str, Tensor]] = torch.zeros(()), {}

    @torch.no_grad()
    def first(self, batches: Iterable[Batch]) -> list[Batch]:
        """Make the first pass; return the micro-batches. Collective: call on every rank. Raise
        Inexact if a tensor does not have the same shape in each micro-batch."""
        task, batches = self._job.task, list(batches)
        self._first_step = not self._shapes
        self._micro, self._expected, columns = 0, [], list[dict[str, Tensor]]()
        with restored_buffers(self._model):  # BatchNorm: only the second pass changes them
            for micro, batch in enumerate(batches):
                self._seed(micro)
                parts = task.embed(self._model, {**batch})  # type: ignore[attr-defined]
                # CUDA graphs reuse it
                self._expected.append({name: part.clone() for name, part in parts.items()})
                columns.append(columns_of(task, batch))
                self._check_shapes(self._expected[-1] | columns[-1])
        self._differentiate(self._whole(self._expected), self._whole(columns))
        return batches

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the micro-batch's share of the loss, whose gradient is exact, and outputs. Raise
        Inexact if the parts differ from those of the first pass."""
        expected, gradients = self._expected[self._micro], self._gradients[self._micro]
        self._micro += 1
        parts = self._job.task.embed(model, {**batch})  # type: ignore[attr-defined]
        differ = (
            torch.stack([apart(parts[name].detach(), expected[name]) for name in parts])
            > self._tolerance
        )
        if self._readable(differ) and differ.any():  # later on a GPU, the loss is NaN
            names = ", ".join(name for name, one in zip(parts, differ.tolist(), strict=True) if one)
            found = (
                f"the method embed returned {names} with other values for the same micro-batch and "
                "random numbers"
            )
            fix = "use torch's global generator"
            raise Inexact(f"{found}; the model or embed keeps its own generator or counter: {fix}")
        known = {
            name: part for name, part in parts.items() if part.requires_grad and name in gradients
        }
        value, outputs = torch.where(differ.any(), torch.nan, self._result[0]), self._result[1]
        return _Continued.apply(
            value, [gradients[name] for name in known], *known.values()
        ), outputs

    def _readable(self, tensor: Tensor) -> bool:
        """Whether to read a value: on a GPU only in the first step, because it is a host sync. A
        plan has no values."""
        return type(tensor) is Tensor and (self._first_step or not tensor.is_cuda)

    def _differentiate(self, parts: dict[str, Tensor], columns: dict[str, Tensor]) -> None:
        """Compute the loss of the whole batch and its gradients of the parts, and divide them among
        micro-batches."""
        layout, number = self._job.layout, self._run.ranks * self._job.layout.accumulate
        self._seed(None)
        with torch.enable_grad():
            leaves = {
                name: part.requires_grad_(part.is_floating_point()) for name, part in parts.items()
            }
            loss, outputs = self._job.task.batch_loss(leaves, columns)  # type: ignore[attr-defined]
            wanted = [name for name, part in leaves.items() if part.requires_grad]
            found = torch.autograd.grad(loss, [leaves[name] for name in wanted], allow_unused=True)
        known = {
            name: gradient
            for name, gradient in zip(wanted, found, strict=True)
            if gradient is not None
        }
        scalars = {name: part.detach() for name, part in parts.items() if not part.ndim}
        self._expected = [one | scalars for one in self._expected]
        self._result = loss.detach() / number, {**scalars, **(outputs or {})}
        rows = [
            layout.leaf(self._run.rank, micro) * layout.each for micro in range(layout.accumulate)
        ]
        self._gradients = [
            {
                name: own[row : row + layout.each] if own.ndim else own / number
                for name, own in known.items()
            }
            for row in rows
        ]

    def _whole(self, micro_batches: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the tensors of the global batch, in the order of its samples."""
        layout, whole = self._job.layout, {}
        for name, first in micro_batches[0].items():
            own = torch.cat([one[name] if first.ndim else one[name][None] for one in micro_batches])
            rows = self._run.accelerator.gather(own) if self._run.ranks > 1 else own
            if not first.ndim:
                whole[name] = rows[0].clone()
                if self._readable(differ := apart(rows, whole[name]) > self._tolerance) and differ:
                    problem = (
                        f"embed returned {name!r}, which is 0-dim and differs between micro-batches"
                    )
                    raise Inexact(f"the method {problem}; give it one row per sample")
                continue
            # neighbouring leaves are on other ranks
            if layout.leaf(0, layout.accumulate - 1) != layout.accumulate - 1:
                by_rank = rows.unflatten(0, (self._run.ranks, layout.accumulate, layout.each))
                rows = by_rank.transpose(0, 1).flatten(0, 2)
            whole[name] = rows
        return whole

    def _check_shapes(self, tensors: dict[str, Tensor]) -> None:
        shapes = {
            name: f"{name} {tuple(part.shape)} {part.dtype}" for name, part in tensors.items()
        }
        self._shapes = self._shapes or self._run.from_main(shapes)
        if shapes != self._shapes:
            now, before = (", ".join(values.values()) for values in (shapes, self._shapes))
            raise Inexact(
                f"the results of embed and collate were {before}, and now {now}; let all rows "
                "have one shape"
            )


class _Continued(torch.autograd.Function):
    """A value whose gradients with respect to some tensors are already known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *parts: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> Any:  # type: ignore[override]
        return None, None, *((outer * gradient).to(gradient.dtype) for gradient in ctx.gradients)
