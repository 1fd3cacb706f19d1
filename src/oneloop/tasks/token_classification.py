"""Token classification (names, parts of speech): a class for each word, by a transformers encoder from scratch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oneloop.data.rows.rows import Row
from oneloop.data.rows.sources import Source, named_sources, notes_of, opened, sets_of, whole
from oneloop.tasks.base import Task
from oneloop.tasks.columns import check_as_long, check_words
from oneloop.tasks.labels import classes_of, numbers_of
from oneloop.tasks.metrics import ClassCounts
from oneloop.tasks.readers import Reader, reader

_IGNORE = -100


class TokenClassification(Task):
    """A class for each word of a text, said at the word's first byte or token. The weight of a sample is its
    number of words.

    Args:
        data: a file or folder of parquet, json lines or arrow; hf:NAME[:CONFIG][@REVISION]; or several,
            [{data: PATH, weight: 0.7}, …].
        tokens: column of the words, a list of texts.
        tags: column of their classes, a list as long.
        held_out: share of the rows for validation, and as much for test, where the data has no such parts.
        window: megabytes of parquet rows that a process may hold; samples are shuffled among so many.
        model: bytes (an encoder from scratch that reads byte by byte), a folder that transformers saved, or
            hf:ID[@REVISION], whose last layer is new where it is of other classes.
        pretrained: with the weights of that folder or hf:; false: from scratch, in its shape.
        trust_remote_code: run Python that lies beside those weights (only of people you trust).
        layers: transformer blocks (of bytes).
        heads: attention heads (of bytes).
        width: of the residual stream (of bytes).
        length: bytes, or tokens, of the longest text; what follows is cut, and does not count.
        dropout: of embeddings, attention and residuals (of bytes).
    """

    unit = "tokens"

    def __init__(
        self,
        data: str | list[dict[str, Any]],
        tokens: str = "tokens",
        tags: str = "tags",
        held_out: float = 0.05,
        window: int = 256,
        model: str = "bytes",
        pretrained: bool = True,
        trust_remote_code: bool = False,
        layers: int = 2,
        heads: int = 4,
        width: int = 128,
        length: int = 512,
        dropout: float = 0.0,
    ) -> None:
        shape = {"layers": layers, "heads": heads, "width": width, "length": length, "dropout": dropout}
        weights = {} if model == "bytes" else {"pretrained": pretrained, "trust_remote_code": trust_remote_code}
        self.reader = reader(model, shape, **weights)
        self.columns, self.window = {"tokens": tokens, "tags": tags}, window
        sources = [opened(one, held_out=held_out, window=window) for one in named_sources(data, self.columns)]
        check_words(sources, "tokens")
        check_as_long(sources, "tokens", "tags")
        self.classes, numbers = classes_of(sources, "tags", lists=True)
        self.notes = self._of_data = notes_of(sources)
        self._sets = sets_of(sources, lambda source: _sample(source, self.reader, numbers[source.name]))

    def model(self) -> nn.Module:
        model = self.reader.model(self.classes, words=True)
        self.notes = [*self._of_data, *self.reader.notes]
        return model

    def train_set(self) -> Any:
        return self._sets["train"]

    def eval_sets(self) -> dict[str, Any]:
        return {name: part for name, part in self._sets.items() if name != "train"}

    def samples_of(self, data: str, *, labelled: bool) -> Any:
        source = whole(Source(data, self.columns | ({} if labelled else {"tags": ""})), window=self.window)
        check_words([source], "tokens")
        if labelled:
            check_as_long([source], "tokens", "tags")
        number = numbers_of(source, "tags", self.classes, lists=True) if labelled else int
        return sets_of([source], lambda one: _sample(one, self.reader, number))["all"]

    def collate(self, samples: list[tuple[Any, Tensor]]) -> dict[str, Tensor]:
        texts, targets = zip(*samples, strict=True)
        target = nn.utils.rnn.pad_sequence(list(targets), batch_first=True, padding_value=_IGNORE)
        return {**self.reader.collate(texts), "target": target}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["target"] != _IGNORE).sum()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        logits = self.reader.logits(model, batch)
        target = batch["target"]
        each = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none", ignore_index=_IGNORE)
        return each.sum(), {"logits": logits.detach(), "loss": each.detach().view_as(target)}

    def metrics(self) -> ClassCounts:
        return ClassCounts(len(self.classes))

    def update(self, metrics: ClassCounts, batch: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        metrics.update(outputs["logits"].flatten(0, 1), batch["target"].flatten())

    def predicted(self, batch: dict[str, Tensor], outputs: dict[str, Tensor]) -> dict[str, list[Any]]:
        """The classes of each text's words, as far as they are not cut off."""
        known, found = (batch["target"] != _IGNORE).cpu(), outputs["logits"].argmax(-1).cpu()
        rows = zip(found, known, strict=True)
        return {"prediction": [[self.classes[number] for number in row[at].tolist()] for row, at in rows]}

    def save(self, model: nn.Module, folder: Path) -> None:
        self.reader.save(model, folder)

    def show(self, sample: tuple[Any, Tensor], outputs: dict[str, Tensor]) -> dict[str, Any]:
        text, target = sample
        at = (target != _IGNORE).nonzero().flatten().tolist()
        said = [self.classes[number] for number in outputs["logits"][at].argmax(-1).tolist()]
        wanted = [self.classes[number] for number in target[at].tolist()]
        words = [self.reader.decode(text, *span) for span in zip(at, [*at[1:], len(target)], strict=True)]
        losses = outputs["loss"][at].tolist()
        return {
            "tokens": [(f"{word}[{tag}]", loss) for word, tag, loss in zip(words, said, losses, strict=True)],
            "target": " ".join(wanted),
            "prediction": " ".join(said),
            "right": said == wanted,
        }


def _sample(source: Source, reads: Reader, number: Callable[[Any], int]) -> Callable[[Row], tuple[Any, Tensor]]:
    def make(row: Row) -> tuple[Any, Tensor]:
        words = row[source.columns["tokens"]]
        tags = row.get(source.columns["tags"], [0] * len(words))
        if len(words) != len(tags):
            raise ValueError(f"{len(words)} words and {len(tags)} tags; each word needs one")
        sample, at, length = reads.encode_words(words)
        target = torch.full((length,), _IGNORE)
        target[at] = torch.tensor([number(tag) for tag in tags[: len(at)]], dtype=torch.int64)
        return sample, target

    return make
