"""Readable validation samples: fixed ones, those with the largest loss, and matrices of counts.

>>> examples = Examples()
>>> evaluate(task, model, dataset, accelerator=accelerator, micro=64, examples=examples)
>>> examples.samples    # [{"index": 7, "loss": 4.2, "worst": True, "target": "3", …}, …]
>>> examples.matrices  # {"confusion": {"rows": ["0", …], "columns": […], "counts": [[31, …], …]}}

The task formats a sample (``show`` and ``generate`` of
:class:`oneloop.task_protocol.protocol.Task`).
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from oneloop.basics.generation import TEXTS, generated
from oneloop.basics.tensors import recovered

_Load = Callable[[list[int]], Any]
_PICTURES = ("image", "target", "prediction")


class Shows(Protocol):
    """The protocol of a task that can show samples; it may also have ``generate``."""

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the summed loss and the outputs, as in a task."""

    def show(self, sample: Any, outputs: dict[str, Tensor]) -> dict[str, Any]:
        """Return a sample and its outputs in readable form."""


class Examples:
    """The samples that one evaluation shows.

    Args:
        fixed: number of samples that are evenly spread over the set, and equal at every evaluation.
        worst: number of samples with the largest loss.
    """

    def __init__(self, *, fixed: int = 8, worst: int = 8) -> None:
        self._fixed = fixed
        self._most = worst

        # mean losses of the worst samples on this rank, and their indices
        self._worst: tuple[Tensor, Tensor] | None = None

        self.samples: list[dict[str, Any]] = []
        # matrices by name, as of oneloop.task_protocol.evaluation_metrics.matrices
        self.matrices: dict[str, Any] = {}
        self.problem = ""  # why a sample is missing
        self.generated = False  # whether the samples show what the task generates
        self.weights = "raw"  # the weights that are evaluated: raw, or the name of an EMA

    def take(self, batch: Mapping[str, Any], outputs: Mapping[str, Tensor]) -> None:
        """Keep the samples with the largest mean loss, on the device. No host sync.

        Args:
            batch: a micro-batch, with the samples' ``index``.
            outputs: of the task's loss; without a ``loss`` per sample nothing is kept.
        """
        each = outputs.get("loss") if isinstance(outputs, Mapping) else None
        indices = batch["index"]
        if not self._most or not torch.is_tensor(each):
            return
        if not each.ndim or len(each) != len(indices):
            return  # not a loss per sample

        # Average over the tokens of each sample. The loss of padding is zero.
        each = each.detach()
        each = each.flatten(1).float() if each.ndim > 1 else each.float()[:, None]
        losses = each.sum(1) / (each != 0).sum(1).clamp(min=1)
        losses = losses.nan_to_num(nan=torch.inf, posinf=torch.inf)  # worse than all others

        if self._worst is not None:
            before, indices_before = self._worst
            losses = torch.cat([before, losses])
            indices = torch.cat([indices_before, indices])
        largest, positions = losses.topk(min(self._most, len(losses)))
        self._worst = largest, indices[positions]

    def look(
        self,
        task: Shows,
        model: nn.Module,
        number: int,
        load: _Load,
        *,
        micro: int,
        accelerator: Accelerator,
    ) -> None:
        """Load and show the chosen samples. Collective: call on every rank.

        Args:
            task: formats a sample.
            model: in eval mode.
            number: number of samples of the set.
            load: returns the samples of some indices, and their batch on the device.
            micro: samples that go through the model at once.
            accelerator: gathers the losses.
        """
        worst = self._gathered(accelerator) if self._most else {}
        fixed = sorted({place * number // self._fixed for place in range(self._fixed)})
        for indices, known in ((list(worst), worst), (fixed, {})):
            for start in range(0, len(indices), micro):
                self._show(task, model, indices[start : start + micro], known, load)

    def _gathered(self, accelerator: Accelerator) -> dict[int, float]:
        """Return the mean losses of the worst samples of all ranks, by index. Collective."""
        # Gather tensors of one shape: a rank may have seen fewer samples.
        losses = torch.full((self._most,), -torch.inf, device=accelerator.device)
        indices = torch.zeros(self._most, dtype=torch.int64, device=accelerator.device)
        if self._worst is not None:
            own, own_indices = self._worst
            losses[: len(own)] = own
            indices[: len(own)] = own_indices
        largest, positions = accelerator.gather(losses).topk(self._most)
        chosen = accelerator.gather(indices)[positions]

        worst = {}
        for index, loss in zip(chosen.tolist(), largest.tolist(), strict=True):  # host sync
            if loss > -torch.inf:
                worst[index] = loss
        return worst

    def _show(
        self,
        task: Shows,
        model: nn.Module,
        indices: list[int],
        known: Mapping[int, float],
        load: _Load,
    ) -> None:
        """Show some samples; ``known`` are the losses by index if they are the worst ones."""
        samples, batch = load(indices)
        indices = batch["index"].tolist()  # some samples may be left out; host sync
        _, outputs = task.loss(model, batch)
        outputs = outputs if isinstance(outputs, Mapping) else {}
        if not known and hasattr(task, "generate"):
            made = self._generated(task, model, batch)
            outputs = {**outputs, **made}
            self.generated |= bool(made)

        # Keep the outputs that have a row for each sample.
        rows: dict[str, Any] = {}
        for name, value in outputs.items():
            if torch.is_tensor(value) and value.ndim and len(value) == len(indices):
                rows[name] = value.detach().cpu()
            elif name == TEXTS and len(value) == len(indices):
                rows[name] = value

        for row, (index, sample) in enumerate(zip(indices, samples, strict=True)):
            about = {"index": index, "worst": bool(known), "loss": known.get(index)}
            try:
                own_outputs = {name: value[row] for name, value in rows.items()}
                shown = plain(task.show(sample, own_outputs))
            except Exception as error:  # a failure here must not stop the run
                self.problem = (
                    f"sample {index} cannot be shown ({type(task).__name__}.show: "
                    f"{type(error).__name__}: {error})"
                )
                if known and hasattr(task, "generate"):
                    self.problem += "; samples with the largest losses are shown without generate"
                continue
            self.samples.append(about | shown)

    def _generated(self, task: Any, model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
        """Return what the task generates; empty if it fails."""
        try:
            return generated(task, model, batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            bare = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
            if not recovered(bare):
                raise
            self.problem = (
                f"generation failed ({type(task).__name__}.generate: {type(error).__name__}: "
                f"{error})"
            )
            return {}

    def plain(self) -> dict[str, Any]:
        """Return everything in JSON-serializable form, images as PNG in data URLs."""
        samples = []
        for sample in self.samples:
            sample = dict(sample)
            image = sample.pop("image", None)
            if image is not None:
                from oneloop.show.pictures import data_url

                if "parts" in sample:
                    parts = sample["parts"].items()
                    sample["parts"] = {n: data_url(part, mask=n != "image") for n, part in parts}
                else:
                    sample["image"] = data_url(image)
            samples.append(sample)
        return {
            "weights": self.weights,
            "generated": self.generated,
            "samples": samples,
            "matrices": self.matrices,
        }


_EARLIER = 8  # earlier texts kept per sample; above it, every second one is dropped


def with_earlier(now: dict[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Add the texts of earlier evaluations to each generated text.

    Args:
        now: this evaluation: its step and its samples.
        before: the previous one, as examples.json holds it; texts of later steps are ignored.
    """
    # Find the generated texts of the previous evaluation, by index.
    known = {}
    old_samples = before.get("samples")
    if isinstance(old_samples, list):
        for one in old_samples:
            if "continuation" in one:
                known[one.get("index")] = one

    # Add each one to the earlier texts of its sample; keep every second of many.
    samples = []
    for sample in now["samples"]:
        old = known.get(sample["index"]) if "continuation" in sample else None
        if old:
            pairs = [*old.get("earlier", []), [before.get("step", 0), old["continuation"]]]
            pairs = [pair for pair in pairs if pair[0] < now["step"]]
            if len(pairs) > _EARLIER:
                pairs = pairs[::2]
            if pairs:
                sample = {**sample, "earlier": pairs}
        samples.append(sample)
    return {**now, "samples": samples}


def plain(shown: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of a task's ``show`` as plain data and an image tensor.

    With targets and predictions that are images (masks), ``parts`` holds all images by name, and
    ``image`` one picture of them, side by side.

    Raises:
        ValueError: nothing can be shown.
    """
    if not isinstance(shown, Mapping):
        raise ValueError(f"a dict is needed, not a {type(shown).__name__}")

    # Keep masks and generated images as parts, and draw them next to the image.
    pictures = {}
    for name in _PICTURES:
        if getattr(shown.get(name), "ndim", 0) >= 2:
            pictures[name] = torch.as_tensor(shown[name])
    if pictures.keys() - {"image"}:
        from oneloop.show.pictures import side_by_side

        rest = {name: value for name, value in shown.items() if name not in pictures}
        shown = {**rest, "parts": pictures, "image": side_by_side([*pictures.values()])}

    clean: dict[str, Any] = {}
    for name, value in shown.items():
        is_number = torch.is_tensor(value) and name != "image"
        clean[name] = value.tolist() if is_number else value
    for name in ("text", "target", "prediction", "prompt", "continuation"):
        if name in clean:
            clean[name] = str(clean[name])
    if "image" in clean:
        image = torch.as_tensor(clean["image"])
        if image.ndim not in (2, 3) or not image.numel():
            raise ValueError(
                f"an image of shape {tuple(image.shape)}; (channels, height, width) is needed"
            )
        clean["image"] = image
    return clean
