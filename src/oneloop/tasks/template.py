"""A task template. It runs unchanged and learns to classify two spirals:

    oneloop launch --config_file single my_task.py:MyTask           # one process; or ddp, fsdp2
    oneloop launch --config_file single my_task.py:MyTask --help    # its arguments and all other keys
    oneloop report runs/my_task

Change it from top to bottom. A task never handles ranks, devices or accelerators: the loop does that.
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
    """Map-style data set: it has a length, and a sample for every index. Put random augmentation here (torch, numpy or
    random): oneloop seeds the generators for each sample by epoch and index."""

    def __init__(self, points: int, noise: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.label = torch.arange(points) % 2
        radius = torch.rand(points, generator=generator).sqrt()
        angle = 2 * math.pi * radius + math.pi * self.label
        position = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        self.point = position + noise * torch.randn(points, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.point)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"point": self.point[index], "label": self.label[index]}


class MyTask:
    """Classification of two spirals.

    Args:
        points: number of training points.
        noise: distance from the spiral (standard deviation).
        width: size of the hidden layers.
    """

    def __init__(self, points: int = 4000, noise: float = 0.02, width: int = 64) -> None:
        # Arguments with a type, a default and a line above become --task.points, --task.noise, …
        self.points, self.noise, self.width = points, noise, width

    # --- Training: every task needs these six methods. ---

    def model(self) -> nn.Module:
        """Return a new model, with weights from torch's global generator, which the loop has seeded."""
        w = self.width
        return nn.Sequential(nn.Linear(2, w), nn.GELU(), nn.Linear(w, w), nn.GELU(), nn.Linear(w, 2))

    def train_set(self) -> Dataset[Any]:
        return Spirals(self.points, self.noise, seed=0)

    def eval_sets(self) -> dict[str, Dataset[Any]]:
        """Return data sets by name: "validation" is logged as eval/…, "test" is evaluated once at the end."""
        return {"validation": Spirals(1000, self.noise, seed=1), "test": Spirals(1000, self.noise, seed=2)}

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        """Return a list of samples as one batch: tensors by name."""
        return {name: torch.stack([sample[name] for sample in samples]) for name in ("point", "label")}

    def weight(self, batch: dict[str, Any]) -> Tensor:
        """Return what the loss is divided by: here samples; for a language model target tokens."""
        return torch.tensor(float(len(batch["label"])))

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the SUM of the losses (the loop divides it once, by the weight of the global batch), and detached
        outputs with one row per sample. A 0-dim output is a metric, which is logged as train/NAME."""
        logits = model(batch["point"])
        each = F.cross_entropy(logits, batch["label"], reduction="none")
        return each.sum(), {"logits": logits.detach(), "loss": each.detach()}

    # --- Metrics and report: optional methods. ---

    def metrics(self) -> Any:
        """Return new evaluation metrics; they are exact for any number of processes."""
        from torchmetrics import MetricCollection
        from torchmetrics.classification import MulticlassAccuracy

        return MetricCollection({"accuracy": MulticlassAccuracy(2, average="micro")})

    def update(self, metrics: Any, batch: dict[str, Any], outputs: dict[str, Tensor]) -> None:
        """Add an evaluation batch to the metrics."""
        metrics.update(outputs["logits"], batch["label"])

    def show(self, sample: dict[str, Tensor], outputs: dict[str, Tensor]) -> dict[str, Any]:
        """Return what the report shows of an evaluation sample: any of text, image, target, prediction, right, …"""
        predicted, label = int(outputs["logits"].argmax()), int(sample["label"])
        x, y = sample["point"].tolist()
        return {"text": f"({x:.2f}, {y:.2f})", "target": label, "prediction": predicted, "right": predicted == label}

    # --- Evaluation and prediction after training. ---

    def samples_of(self, data: str, *, labelled: bool) -> list[dict[str, Tensor]]:
        """Return all samples of a file for `oneloop evaluate` and `predict --data`: lines of "x,y" or "x,y,label".
        If not labelled (predict), any label is fine."""
        rows = [[float(cell) for cell in line.split(",")] for line in Path(data).read_text().split()]
        return [{"point": torch.tensor(row[:2]), "label": torch.tensor(int(row[2]) if labelled else 0)} for row in rows]

    def predicted(self, batch: dict[str, Any], outputs: dict[str, Tensor]) -> dict[str, list[Any]]:
        """Return the columns that `oneloop predict` writes."""
        confidence, predicted = outputs["logits"].softmax(dim=1).max(dim=1)
        return {"prediction": predicted.tolist(), "confidence": confidence.tolist()}
