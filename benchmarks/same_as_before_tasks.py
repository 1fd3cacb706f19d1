"""The tasks of same_as_before.py: the packaged ones, which record their samples and can be given
bad ones."""

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
    """Return the loss, or NaN if the batch has a bad sample; append the batch's ids to this rank's
    file."""
    # the preflight check differs between checkouts
    if not model.training or not BEATS.now_in.startswith(TRAINING):
        return loss
    ids = batch["index"].tolist()
    with Path(os.environ["SAME_FOLDER"], f"ids-{os.environ.get('RANK', '0')}.jsonl").open(
        "a"
    ) as file:
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
