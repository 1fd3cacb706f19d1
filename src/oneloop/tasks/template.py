"""A task of one's own. It runs as it stands, and learns to tell two spirals from one another:

    oneloop launch --config_file single my_task.py:MyTask           # one process; ddp and fsdp2 are the others
    oneloop launch --config_file single my_task.py:MyTask --help    # its arguments, and all other keys
    oneloop report runs/my_task

Change it from above to below. A task never sees a rank, a device or an accelerator: those are the loop's.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset


class Spirals(Dataset[dict[str, Tensor]]):
    """Map-style: it has a length, and a sample for every index. Random augmentation belongs in here (torch, numpy or
    random: each sample's draws are seeded by epoch and index)."""

    def __init__(self, points: int, noise: float, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.label = torch.arange(points) % 2
        along = torch.rand(points, generator=drawn).sqrt()
        angle = 2 * math.pi * along + math.pi * self.label
        place = torch.stack([along * angle.cos(), along * angle.sin()], dim=1)
        self.point = place + noise * torch.randn(points, 2, generator=drawn)

    def __len__(self) -> int:
        return len(self.point)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"point": self.point[index], "label": self.label[index]}


class MyTask:
    """Two spirals.

    Args:
        points: training points.
        noise: how far they lie from their spiral.
        width: of the hidden layers.
    """

    def __init__(self, points: int = 4000, noise: float = 0.02, width: int = 64) -> None:
        # Typed arguments with a default, and a line on each above: they become --task.points, --task.noise, …
        self.points, self.noise, self.width = points, noise, width

    # --- What is learned: these six every task has. ---

    def model(self) -> nn.Module:
        """A new model; its weights are drawn from torch's global generator, which the loop has seeded."""
        w = self.width
        return nn.Sequential(nn.Linear(2, w), nn.GELU(), nn.Linear(w, w), nn.GELU(), nn.Linear(w, 2))

    def train_set(self) -> Dataset[Any]:
        return Spirals(self.points, self.noise, seed=0)

    def eval_sets(self) -> dict[str, Dataset[Any]]:
        """By name: "validation" is logged as eval/…, "test" is evaluated once, at the end."""
        return {"validation": Spirals(1000, self.noise, seed=1), "test": Spirals(1000, self.noise, seed=2)}

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        """One batch of a list of samples: tensors by name."""
        return {name: torch.stack([sample[name] for sample in samples]) for name in ("point", "label")}

    def weight(self, batch: dict[str, Any]) -> Tensor:
        """How much the batch counts: its samples here; for a language model its target tokens."""
        return torch.tensor(float(len(batch["label"])))

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """The SUM of the losses over what `weight` counts (the loop divides once, by the weight of the whole global
        batch), and detached outputs, a row for each sample. A 0-dim output is a metric, logged as train/NAME."""
        logits = model(batch["point"])
        each = F.cross_entropy(logits, batch["label"], reduction="none")
        return each.sum(), {"logits": logits.detach(), "loss": each.detach()}

    # --- What is seen of it: leave out what you do not need. ---

    def metrics(self) -> Any:
        """Metrics beside the loss, of all held-out samples, exact for any number of processes."""
        from torchmetrics import MetricCollection
        from torchmetrics.classification import MulticlassAccuracy

        return MetricCollection({"accuracy": MulticlassAccuracy(2, average="micro")})

    def update(self, metrics: Any, batch: dict[str, Any], outputs: dict[str, Tensor]) -> None:
        """One batch of them."""
        metrics.update(outputs["logits"], batch["label"])

    def show(self, sample: dict[str, Tensor], outputs: dict[str, Tensor]) -> dict[str, Any]:
        """How a person sees one held-out sample in the report: any of text, image, target, prediction, right, …"""
        predicted, label = int(outputs["logits"].argmax()), int(sample["label"])
        x, y = sample["point"].tolist()
        return {"text": f"({x:.2f}, {y:.2f})", "target": label, "prediction": predicted, "right": predicted == label}

    # --- What is done with it afterwards. ---

    def samples_of(self, data: str, *, labelled: bool) -> list[dict[str, Tensor]]:
        """Every row of another place, for `oneloop evaluate` and `predict --data`: here lines of "x,y" or "x,y,label".
        Without labels (predict) any will do."""
        rows = [[float(cell) for cell in line.split(",")] for line in Path(data).read_text().split()]
        return [{"point": torch.tensor(row[:2]), "label": torch.tensor(int(row[2]) if labelled else 0)} for row in rows]

    def predicted(self, batch: dict[str, Any], outputs: dict[str, Tensor]) -> dict[str, list[Any]]:
        """The columns of what `oneloop predict` writes."""
        sure, predicted = outputs["logits"].softmax(dim=1).max(dim=1)
        return {"prediction": predicted.tolist(), "confidence": sure.tolist()}
