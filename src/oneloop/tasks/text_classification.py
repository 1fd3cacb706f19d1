"""Text classification: a transformers encoder from scratch; packaged data: from which package is this snippet?"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oneloop.tasks.base import Task
from oneloop.tasks.corpora import held_out, stdlib
from oneloop.tasks.metrics import ClassCounts

_PAD = 256


class TextClassification(Task):
    """Texts into classes, byte by byte.

    Args:
        data: stdlib (snippets of Python's standard library; the class is the package, held out by file), or a folder
            with train.jsonl, validation.jsonl and, if there is one, test.jsonl of {"text", "label"}.
        layers: transformer blocks.
        heads: attention heads.
        width: of the residual stream.
        length: bytes of the longest text; longer ones are cut.
        packages: the largest packages of the standard library to tell apart.
        lines: lines of a snippet.
        dropout: of embeddings, attention and residuals.
    """

    sample_weight = 1.0

    def __init__(
        self,
        data: str = "stdlib",
        layers: int = 2,
        heads: int = 4,
        width: int = 128,
        length: int = 256,
        packages: int = 8,
        lines: int = 12,
        dropout: float = 0.0,
    ) -> None:
        if width % heads:
            raise ValueError(f"task.width {width} cannot be divided by task.heads {heads}")
        self.layers, self.heads, self.width, self.length, self.dropout = layers, heads, width, length, dropout
        parts = _snippets(packages, lines) if data == "stdlib" else _jsonl(data)
        self.classes = sorted({label for _, label in parts["train"]})
        number = {label: index for index, label in enumerate(self.classes)}
        unknown = {label for part in parts.values() for _, label in part} - set(self.classes)
        if unknown:
            raise ValueError(f"task.data {data!r}: labels {sorted(unknown)} are held out but never trained on")
        self._sets = {
            name: Texts([(text, number[label]) for text, label in part], length) for name, part in parts.items()
        }

    def model(self) -> nn.Module:
        return Encoder(
            len(self.classes),
            layers=self.layers,
            heads=self.heads,
            width=self.width,
            length=self.length,
            dropout=self.dropout,
        )

    def train_set(self) -> Texts:
        return self._sets["train"]

    def eval_sets(self) -> dict[str, Any]:
        return {name: part for name, part in self._sets.items() if name != "train"}

    def collate(self, samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
        texts, labels = zip(*samples, strict=True)
        return {
            "text": nn.utils.rnn.pad_sequence(list(texts), batch_first=True, padding_value=_PAD),
            "label": torch.tensor(labels),
        }

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(float(len(batch["label"])))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        logits = model(batch["text"])
        each = F.cross_entropy(logits, batch["label"], reduction="none")
        return each.sum(), {"logits": logits.detach(), "loss": each.detach()}

    def metrics(self) -> ClassCounts:
        return ClassCounts(len(self.classes))

    def update(self, metrics: ClassCounts, batch: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        metrics.update(outputs["logits"], batch["label"])

    def show(self, sample: tuple[Tensor, int], outputs: dict[str, Tensor]) -> dict[str, Any]:
        text, label = sample
        confidence, found = outputs["logits"].float().softmax(-1).max(-1)
        return {
            "text": bytes(text.tolist()).decode(errors="replace"),
            "target": self.classes[label],
            "prediction": self.classes[int(found)],
            "right": int(found) == label,
            "confidence": float(confidence),
        }


class Encoder(nn.Module):
    """A BERT encoder on bytes, averaged over the text, and a linear head."""

    _no_split_modules = ("BertLayer",)

    def __init__(self, classes: int, *, layers: int, heads: int, width: int, length: int, dropout: float) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=257,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            max_position_embeddings=length,
            pad_token_id=_PAD,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
        self.encoder = BertModel(config, add_pooling_layer=False)
        self.head = nn.Linear(width, classes)

    def forward(self, text: Tensor) -> Tensor:
        known = text != _PAD
        # Ready and 4-D (batch, 1, query, key): transformers would ask a 2-D mask whether it hides anything.
        mask = known[:, None, None, :].expand(-1, 1, text.shape[1], -1)
        hidden = self.encoder(input_ids=text, attention_mask=mask).last_hidden_state
        share = known[:, :, None].to(hidden.dtype)
        return self.head((hidden * share).sum(1) / share.sum(1))  # type: ignore[no-any-return]


class Texts:
    """(bytes of the text, label)."""

    def __init__(self, samples: list[tuple[str, int]], length: int) -> None:
        self.samples = [(torch.tensor(list(text.encode()[:length]) or [_PAD - 1]), label) for text, label in samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.samples[index]


def _snippets(packages: int, lines: int) -> dict[str, list[tuple[str, str]]]:
    """Snippets of the largest packages, divided by file, so that no file is in two parts."""
    documents = [one for one in stdlib() if "/" in one.name]
    size = Counter[str]()
    for one in documents:
        size[one.name.split("/")[0]] += len(one.text)
    largest = {name for name, _ in size.most_common(packages)}
    parts: dict[str, list[tuple[str, str]]] = {}
    for part, chosen in held_out([one for one in documents if one.name.split("/")[0] in largest], percent=10).items():
        parts[part] = []
        for one in chosen:
            code = [line for line in one.text.splitlines() if line.strip()]
            for start in range(0, len(code), lines):
                parts[part].append(("\n".join(code[start : start + lines]), one.name.split("/")[0]))
    return parts


def _jsonl(data: str) -> dict[str, list[tuple[str, str]]]:
    parts = {}
    for name in ("train", "validation", "test"):
        file = Path(data) / f"{name}.jsonl"
        if not file.is_file():
            continue
        try:
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            parts[name] = [(str(row["text"]), str(row["label"])) for row in rows]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f'{file}: every line must be a JSON object with "text" and "label"') from error
    if "train" not in parts or len(parts) < 2:
        raise ValueError(f"task.data {data!r} is neither stdlib nor a folder with train.jsonl and validation.jsonl")
    return parts
