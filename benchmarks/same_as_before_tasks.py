"""The tasks of same_as_before.py: the packaged ones, which write down what they train on and can be spoiled."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from oneloop.basics.heartbeats import BEATS, TRAINING
from oneloop.tasks.causal_lm import CausalLM
from oneloop.tasks.image_classification import ImageClassification


def _spoiled(loss: torch.Tensor, model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The loss, NaN where a bad sample is among the batch; its ids go to a file of this rank's."""
    if not model.training or not BEATS.now_in.startswith(TRAINING):  # the preflight check differs between checkouts
        return loss
    ids = batch["index"].tolist()
    with Path(os.environ["SAME_FOLDER"], f"ids-{os.environ.get('RANK', '0')}.jsonl").open("a") as file:
        file.write(json.dumps(ids) + "\n")
    bad = {int(word) for word in os.environ["SAME_BAD"].split(",") if word}
    return loss * float("nan") if bad & set(ids) else loss


class Digits(ImageClassification):
    def loss(self, model: Any, batch: dict[str, Any]) -> Any:
        loss, outputs = super().loss(model, batch)
        return _spoiled(loss, model, batch), outputs


class GPT(CausalLM):
    def loss(self, model: Any, batch: dict[str, Any]) -> Any:
        loss, outputs = super().loss(model, batch)
        return _spoiled(loss, model, batch), outputs
