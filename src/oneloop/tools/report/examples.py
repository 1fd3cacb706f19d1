"""Readable validation samples: fixed ones, those with the largest loss, and matrices of counts.

>>> examples = Examples()
>>> evaluate(task, model, dataset, accelerator=accelerator, micro=64, examples=examples)
>>> examples.samples    # [{"index": 7, "loss": 4.2, "worst": True, "target": "3", …}, …]
>>> examples.matrices  # {"confusion": {"rows": ["0", …], "columns": […], "counts": [[31, …], …]}}

The task formats a sample (``show`` and ``generate`` of
:class:`oneloop.task_protocol.protocol.Task`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from oneloop.basics.generation import TEXTS, generated
from oneloop.data.step_batches import to_device
from oneloop.task_protocol.evaluation_metrics import is_matrix
from oneloop.tools.report.pictures import data_url, log_samples

_CHARACTERS = 100_000  # of a text of a sample, at most
_TOKENS = 10_000  # of a sample, at most
_OF_LABELS = ("true negative", "false positive", "false negative", "true positive")


class Examples:
    """The samples that one evaluation shows.

    Args:
        number: number of samples that are evenly spread over the set, and equal at every
            evaluation; and of those with the largest loss.
    """

    def __init__(self, number: int = 8) -> None:
        self._number = number

        # mean losses of this rank's samples, and their indices
        self._losses: list[tuple[Tensor, Tensor]] = []

        self.samples: list[dict[str, Any]] = []
        # matrices by name, as of :func:`matrices`
        self.matrices: dict[str, Any] = {}
        self.problem = ""  # why a sample is missing
        self.weights = "raw"  # the weights that are evaluated: raw, or the name of an EMA

    def take(self, batch: Mapping[str, Any], outputs: Mapping[str, Tensor]) -> None:
        """Keep the samples' mean losses, on the device. No host sync.

        Args:
            batch: a micro-batch, with the samples' ``index``.
            outputs: of the task's loss; without a ``loss`` per sample nothing is kept.
        """
        each: Any = outputs.get("loss") if isinstance(outputs, Mapping) else None
        indices = batch["index"]
        if getattr(each, "shape", ())[:1] != indices.shape:
            return  # not a loss per sample

        # Average over the tokens of each sample. The loss of padding is zero.
        each = each.detach().float().reshape(len(indices), -1)
        losses = each.sum(1) / (each != 0).sum(1).clamp(min=1)
        # Not a number is worse than all others.
        self._losses.append((losses.nan_to_num(nan=torch.inf, posinf=torch.inf), indices))

    def draw(self, task: object, values: Mapping[str, Tensor]) -> None:
        """Keep the :func:`matrices` that metrics have computed."""
        self.matrices = matrices(task, values)

    def look(
        self,
        task: Any,
        model: nn.Module,
        size: int,
        load: Callable[[list[int]], Any],
        *,
        device: torch.device,
        micro: int,
    ) -> None:
        """Load and show the chosen samples. Collective: call on every rank.

        Args:
            task: formats a sample by ``show``; it may also have ``generate``.
            model: in eval mode.
            size: number of samples of the set.
            load: returns the samples of some indices, and their batch on the host.
            device: of the model.
            micro: samples that go through the model at once.
        """
        worst = self._worst()
        fixed = sorted({place * size // self._number for place in range(self._number)})
        for indices, losses in ((list(worst), worst), (fixed, {})):
            for start in range(0, len(indices), micro):
                samples, batch = load(indices[start : start + micro])
                self._show(task, model, samples, to_device(batch, device), losses)

    def _worst(self) -> dict[int, float]:
        """Return the mean losses of the worst samples of all ranks, by index. Collective."""
        worst: list[tuple[float, int]] = []
        if self._losses:
            losses, indices = map(torch.cat, zip(*self._losses, strict=True))
            largest, positions = losses.topk(min(self._number, len(losses)))
            worst = [*zip(largest.tolist(), indices[positions].tolist(), strict=True)]  # host sync
        worst = sorted(gather_object(worst), key=lambda pair: -pair[0])
        return {index: loss for loss, index in worst[: self._number]}

    def _show(
        self,
        task: Any,
        model: nn.Module,
        samples: list[Any],
        batch: dict[str, Any],
        losses: Mapping[int, float],
    ) -> None:
        """Show some samples; ``losses`` are those of the worst ones, by index."""
        indices = batch["index"].tolist()  # some samples may be left out; host sync
        _, outputs = task.loss(model, batch)
        outputs = dict(outputs) if isinstance(outputs, Mapping) else {}
        method = "generate"
        try:
            if not losses and hasattr(task, "generate"):
                outputs |= generated(task, model, batch)

            # Keep the outputs that have a row for each sample.
            method = "show"
            rows: dict[str, Any] = {}
            for name, value in outputs.items():
                has_rows = name == TEXTS or (torch.is_tensor(value) and value.ndim)
                if has_rows and len(value) == len(indices):
                    rows[name] = value.cpu() if torch.is_tensor(value) else value

            for row, (index, sample) in enumerate(zip(indices, samples, strict=True)):
                shown = task.show(sample, {name: value[row] for name, value in rows.items()})
                about = {"index": index, "worst": bool(losses), "loss": losses.get(index)}
                self.samples.append(about | plain(shown))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a failure here must not stop the run
            # FSDP2 can reset its state after a forward that failed, since torch 2.15.
            if method == "generate" and isinstance(model, FSDPModule):
                reset: Any = getattr(model, "reset_iter_state", None)
                if reset is None:
                    raise
                reset()
            self.problem = (
                f"a sample cannot be shown ({type(task).__name__}.{method}: "
                f"{type(error).__name__}: {error})"
            )

    def as_json(self, step: int) -> dict[str, Any]:
        """Return the content of examples.json after an evaluation at this step."""
        return {
            "step": step,
            "weights": self.weights,
            "samples": self.samples,
            "matrices": self.matrices,
        }

    def log(self, tracker: Any, step: int) -> None:
        """Log them in the way that a tracker of accelerate supports."""
        log_samples(tracker, self.as_json(step))


def plain(shown: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of a task's ``show`` as JSON values of bounded size.

    Images, masks and generated images are in ``parts`` by name, as PNG in data URLs.
    """
    clean: dict[str, Any] = {"parts": {}}
    for name, value in shown.items():
        if getattr(value, "ndim", 0) >= 2:
            clean["parts"][name] = data_url(value, mask=name != "image")
            continue
        if torch.is_tensor(value):
            value = value.tolist()
        if name == "tokens":
            value = [(str(text), loss) for text, loss in value][:_TOKENS]
        elif not isinstance(value, bool | float):
            value = str(value)[:_CHARACTERS]
        clean[name] = value
    return clean


def matrices(task: object, values: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the matrices that metrics have computed, by name.

    A matrix of 2 x 2 for each label (torchmetrics' MultilabelConfusionMatrix) becomes one with a
    row for each label.

    Args:
        task: may name rows and columns in ``matrices``, ``{"NAME": (rows, columns)}``, and the
            classes of a square matrix in ``classes``. Without as many names, they are numbered.
        values: the metrics.

    Returns:
        ``rows`` and ``columns``, the names, and ``counts``, a list of numbers for each row.
    """
    classes = getattr(task, "classes", ())
    drawn = {}
    for name, value in values.items():
        if not is_matrix(value):
            continue
        columns: Sequence[Any] = classes
        if value.ndim == 3:
            value = value.flatten(1)
            columns = _OF_LABELS

        rows, columns = getattr(task, "matrices", {}).get(name, (classes, columns))
        drawn[name] = {
            "rows": _names_of(rows, value.shape[0]),
            "columns": _names_of(columns, value.shape[1]),
            "counts": value.tolist(),
        }
    return drawn


def _names_of(names: Sequence[Any], size: int) -> list[str]:
    """Return names as text, or numbers if they are not as many."""
    return [*map(str, names if len(names) == size else range(size))]
