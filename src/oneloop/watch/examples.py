"""Held-out samples as a person sees them: some that stay the same, the worst mistakes, and which classes are confused.

>>> examples = Examples()
>>> evaluate(task, model, dataset, accelerator=accelerator, micro=64, examples=examples)
>>> examples.samples        # [{"index": 7, "loss": 4.2, "worst": True, "image": …, "target": "3", "prediction": "8"}, …]
>>> examples.confusion      # {"classes": ["0", …], "counts": [[31, 0, …], …]}, rows are the true classes

How a sample looks is its task's to say (``show`` and ``generate`` of :class:`oneloop.tasks.base.Task`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from oneloop.watch.pictures import data_url


class Examples:
    """What one evaluation leaves to look at.

    Args:
        fixed: samples, spread evenly over the set, that are shown at every evaluation.
        worst: samples with the largest loss.
    """

    def __init__(self, *, fixed: int = 8, worst: int = 8) -> None:
        self._fixed, self._most = fixed, worst
        self._worst: Tensor | None = None
        self.samples: list[dict[str, Any]] = []
        self.confusion: dict[str, Any] | None = None

    def take(self, batch: Mapping[str, Any], outputs: Mapping[str, Tensor]) -> None:
        """Remembers the worst samples of a micro-batch, on the device, by their mean loss; no host sync."""
        each = outputs.get("loss")
        if each is None:
            return
        each = each.reshape(len(batch["index"]), -1).double()
        mean = each.sum(1) / (each != 0).sum(1).clamp(min=1)  # padding's loss is zero
        found = torch.stack([mean, batch["index"].to(mean)], 1)
        found = found if self._worst is None else torch.cat([self._worst, found])
        self._worst = found[found[:, 0].topk(min(self._most, len(found))).indices]

    def look(self, task: Any, model: nn.Module, number: int, load: Callable[[list[int]], Any], *,
             accelerator: Accelerator) -> None:  # fmt: skip
        """Looks at the chosen samples once more, for what is to be seen of them. Every rank must get here.

        Args:
            task: shows samples.
            model: as prepared, in eval mode.
            number: of samples in the set.
            load: of indices: (sample, …) and their batch on the device.
            accelerator: whose ranks shared the set.
        """
        mine = torch.full((self._most, 2), -torch.inf, dtype=torch.float64, device=accelerator.device)
        if self._worst is not None:
            mine[: len(self._worst)] = self._worst
        everyone = accelerator.gather(mine)
        chosen = everyone[everyone[:, 0].topk(self._most).indices].tolist()
        worst = {int(index): loss for loss, index in chosen if loss > -torch.inf}
        fixed = sorted({place * number // self._fixed for place in range(self._fixed)}) if self._fixed else []
        for indices, losses in ((list(worst), worst), (fixed, {})):
            if not indices:
                continue
            samples, batch = load(indices)
            _, outputs = task.loss(model, batch)
            if indices is fixed and hasattr(task, "generate"):
                outputs = {**outputs, **task.generate(model, batch)}
            outputs = {name: value.cpu() for name, value in outputs.items()}
            for row, (index, sample) in enumerate(zip(indices, samples, strict=True)):
                said = {name: value[row] for name, value in outputs.items() if len(value) == len(indices)}
                shown = task.show(sample, said)
                self.samples.append({"index": index, "worst": bool(losses), "loss": losses.get(index), **shown})

    def plain(self) -> dict[str, Any]:
        """All of it as JSON can hold it; images as PNG in data URLs."""
        samples = [{**one, "image": data_url(one["image"])} if "image" in one else one for one in self.samples]
        return {"samples": samples, "confusion": self.confusion}
