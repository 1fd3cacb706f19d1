"""Text embeddings, trained on pairs of texts; the packaged data are docstrings and functions."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, starmap
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oneloop.task_protocol.protocol import RECORDED
from oneloop.tasks.columns import (
    check_column,
    check_together,
    columns_of,
    number_of_text,
    repeated,
    texts_of,
    unlearnable,
)
from oneloop.tasks.contrastive import info_nce
from oneloop.tasks.docstring_pairs import docstring_pairs
from oneloop.tasks.retrieval_metrics import Retrieval
from oneloop.tasks.rows.open_data import Data, Source
from oneloop.tasks.rows.remote_checks import is_remote
from oneloop.tasks.rows.rows import Row
from oneloop.tasks.text_encoders import LEARNED, TextReader, mean_of
from oneloop.tasks.text_rows import TextRows

_POOLINGS = {"mean": "mean", "cls": "cls", "last": "lasttoken"}  # names of sentence-transformers
_NEEDS = {key: needed.replace("bytes", LEARNED) for key, needed in TextRows.needs.items()}
_NEEDS |= {"held_out": "data!=stdlib", "split_by": "data!=stdlib"}
_NEEDS |= {"vocab": f"model={LEARNED}"}
_NONE = -(1 << 63)  # a number that no text has


class TextPairs(TextRows):
    """Embeddings of texts, whose cosine similarity is large for pairs that belong together. The
    loss is multiple negatives ranking: all other pairs of the global batch are negatives.

    Args:
        data: stdlib (docstrings and functions of Python's standard library); a file or folder of
            parquet, json lines, csv or arrow; hf:NAME[:CONFIG][@REVISION]; parquet at s3://, gs://
            (not tested), hf://datasets/ or https://; or several, [{data: PATH, weight: 0.7}, …].
        anchor: column of the first text, such as a question.
        positive: column of the text that belongs to it, such as its answer.
        negatives: columns of texts that do not belong to it (hard negatives), separated by commas.
        model: bpe (a new encoder; its lower-case byte-pair encoding is learned from the training
            texts), a folder saved by transformers, or hf:ID[@REVISION].
        vocab: number of tokens of bpe.
        pooling: mean, cls (first token) or last: which hidden states make the embedding.
        temperature: divides the similarities.
        symmetric: average the loss of both directions (without the hard negatives in the other
            one).
        matryoshka: numbers of leading dimensions, such as [32, 64]: add the loss of these
            embeddings to that of all dimensions.
        mask_duplicates: equal texts in a batch are not negatives of each other.
        group_answers: the metrics rank distinct texts: copies of a text count once, and each
            positive of an equal anchor is right (false: each copy counts).
    """

    predicts_classes = False
    new_model = LEARNED
    batch_columns = ("index", "anchor_id", "candidate_id")
    needs = _NEEDS

    def __init__(
        self,
        data: Data = "stdlib",
        anchor: str = "anchor",
        positive: str = "positive",
        negatives: str = "",
        model: str = LEARNED,
        vocab: int = 4000,
        pooling: str = "mean",
        temperature: float = 0.05,
        symmetric: bool = False,
        matryoshka: list[int] = [],  # noqa: B006
        mask_duplicates: bool = False,
        group_answers: bool = False,
        **reading: Any,
    ) -> None:
        if pooling not in _POOLINGS:
            raise ValueError(f"task.pooling {pooling!r} is unknown; known: {', '.join(_POOLINGS)}")
        if not 0 < temperature < math.inf:
            raise ValueError(
                f"task.temperature {temperature} must be positive; common values are 0.01 to 0.1"
            )
        self.pooling = pooling
        self.scale = 1 / temperature
        self.symmetric = symmetric
        self.matryoshka = [*map(int, matryoshka)]
        self.mask_duplicates = mask_duplicates
        self.group_answers = group_answers
        self._vocab = vocab

        # Name the columns; hard negatives are numbered from 1.
        columns = {"anchor": anchor, "positive": positive}
        for name in negatives.split(","):
            if name.strip():
                columns[f"negatives_{len(columns) - 1}"] = name.strip()
        _check_distinct("anchor, positive and negatives", [*columns.values()])
        _check_distinct("matryoshka", [*map(str, matryoshka)])

        # Read the user's data, or the packaged pairs. A run that is loaded needs neither.
        super().__init__(None if data == "stdlib" else data, columns, model=model, **reading)
        recorded = RECORDED.get()
        if recorded and model == LEARNED:
            self.reader.use_learned(recorded["tokenizer"])
        elif data == "stdlib" and not recorded:
            self._read_docstrings()
        if model == LEARNED:
            written = self.reader.tokenizer.backend_tokenizer.to_str()
            self.recorded |= {"tokenizer": str(written)}

    def _read_docstrings(self) -> None:
        """Learn the tokens of the packaged pairs, and encode all splits."""
        pairs = docstring_pairs()
        self.reader.learn(lambda: chain.from_iterable(pairs["train"]), self._vocab)
        columns = {"anchor": "docstring", "positive": "function"}
        for split, of_split in pairs.items():
            self._sets[split] = []
            for pair in of_split:
                row = dict(zip(columns.values(), pair, strict=True))
                self._sets[split].append(self.encoded(self.reader, columns, int, row))
        copies = sum(repeated(texts) for texts in zip(*pairs["train"], strict=True))
        self._data_notes = [*self._copies({"train": copies})]

    def _check(self, sources: Sequence[Source]) -> None:
        for key in self.columns:
            check_column(sources, key)
        pairs = chain(columns_of(sources, "anchor"), columns_of(sources, "positive"))
        columns = [(split, rows, column) for _, split, rows, column in pairs]
        training = [(rows, column) for split, rows, column in columns if split == "train"]
        if not training:
            return  # rows to predict

        # Over a network, read no text before the run: learn no tokens, and count no copies.
        if any(is_remote(rows) for rows, _ in training):
            if self.reader.name == LEARNED:
                raise ValueError(
                    f"{sources[0].where}: task.model {LEARNED} learns its tokens from all training "
                    "texts, which are not on a disk; give a folder saved by transformers, hf:ID, "
                    "or a copy of the data on a disk"
                )
            return

        self.reader.learn(lambda: chain.from_iterable(starmap(texts_of, training)), self._vocab)
        copies = Counter[str]()
        for split, rows, column in columns:
            copies[split] += repeated(texts_of(rows, column))
        sources[0].notes += self._copies(copies)

    def _copies(self, copies: Mapping[str, int]) -> Iterator[str]:
        """Yield a line for each split with texts that are copies of another row's text.

        Args:
            copies: number of texts by split, which are equal to an earlier one of their column.
        """
        for split, count in copies.items():
            if count and split == "train":
                line = (
                    f"{count:,} anchors and positives of the training pairs are equal to an "
                    "earlier one; in a batch, they are"
                )
                if self.mask_duplicates:
                    yield f"{line} not negatives of each other"
                else:
                    yield (
                        f"{line} negatives of each other: --task.mask_duplicates true prevents this"
                    )
            elif count and not self.group_answers:
                yield (
                    f"{count:,} texts of {split} are copies of another row's text, and each copy "
                    "counts in the ranks: --task.group_answers true ranks distinct texts"
                )

    def _numbers(self, sources: Sequence[Source]) -> Mapping[str, Callable[[Any], int]]:
        """Check that something can be learned from each pair, which has no other target."""
        check_together(sources, [*self.columns], unlearnable)
        return {source.name: int for source in sources}

    @staticmethod
    def encoded(
        reader: TextReader,
        columns: Mapping[str, str],
        number: Callable[[Any], Any],
        row: Row,
    ) -> Any:
        """Return the sample of a row: the encoded text of each column, and the text's number."""
        sample = []
        for column in filter(None, columns.values()):
            sample.append((reader.encode(row[column]), number_of_text(row[column])))
        return sample

    def model(self) -> nn.Module:
        model = self.reader.model(None)
        width = model.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
        for size in self.matryoshka:
            if not 0 < size < width:
                raise ValueError(
                    f"task.matryoshka {size} must be between 1 and {width - 1}: embeddings "
                    f"have {width}"
                )
        # Freeze the pooler: it has no effect on the hidden states.
        pooler = getattr(model, "pooler", None)
        if pooler is not None:
            pooler.requires_grad_(False)
        self.notes = [*self._data_notes, *self.reader.notes]
        return model

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        """Return tokens of the anchors, and those of the candidates.

        The candidates are positive and negatives of each sample in turn.
        """
        batch = {}
        sides = {"anchor": slice(1), "candidate": slice(1, None)}
        for name, side in sides.items():
            # Separate the encoded texts from their numbers.
            texts = chain.from_iterable(sample[side] for sample in samples)
            encoded, numbers = zip(*texts, strict=True)
            batch[f"{name}_id"] = torch.tensor(numbers).view(len(samples), -1)
            for key, value in self.reader.collate(encoded).items():
                batch[f"{name}.{key}"] = value
        batch["anchor_id"] = batch["anchor_id"][:, 0]
        return batch

    def embed(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return ``anchor`` (samples, width), and ``candidate`` (samples, 1 + negatives, width)."""
        anchor = self._embedded(model, batch, "anchor.")
        candidate = self._embedded(model, batch, "candidate.")
        return {"anchor": anchor, "candidate": candidate.unflatten(0, (len(anchor), -1))}

    def _embedded(self, model: nn.Module, batch: dict[str, Tensor], side: str) -> Tensor:
        """Return the embeddings of the texts of a side of the batch, shape (texts, width)."""
        inputs = self.reader.inputs(batch, side)
        hidden: Tensor = model(**inputs, **self.reader.options).last_hidden_state
        mask = inputs["attention_mask"]
        if self.pooling == "cls":
            return hidden[:, 0]
        if self.pooling == "last":
            return hidden[torch.arange(len(hidden), device=hidden.device), mask.sum(1) - 1]
        return mean_of(hidden, mask)

    def batch_loss(
        self, parts: dict[str, Tensor], columns: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss over all pairs of a global batch.

        Args:
            parts: embeddings of the whole batch, as :meth:`embed` returns them.
            columns: ``index`` of each sample, and the numbers of the texts: ``anchor_id``
                (samples,) and ``candidate_id`` (samples, 1 + negatives).
        """
        anchor = parts["anchor"]
        candidate = parts["candidate"]
        ids = self._same(columns)
        total = anchor.new_zeros(())
        for size in (*self.matryoshka, anchor.shape[1]):
            # The keys are the positives of all samples, then their hard negatives.
            queries = F.normalize(anchor[..., :size], dim=-1)
            normalized = F.normalize(candidate[..., :size], dim=-1)
            positive = normalized[:, 0]
            keys = torch.cat([positive, normalized[:, 1:].flatten(0, 1)])
            loss = info_nce(queries, keys, self.scale, ids=ids)

            # In the other direction the keys are the anchors, without hard negatives.
            if self.symmetric:
                both = [(numbers, numbers) for numbers, _ in ids]
                loss = (loss + info_nce(positive, queries, self.scale, ids=both)) / 2
            total = total + loss
        return total, {}

    def _same(self, columns: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of numbers, of the queries and of the keys: equal ones are no negatives."""
        positive_id = columns["candidate_id"][:, 0]
        key_id = torch.cat([positive_id, columns["candidate_id"][:, 1:].flatten()])

        def with_keys(number: Tensor) -> tuple[Tensor, Tensor]:
            # Hard negatives get a number that no query has.
            return number, F.pad(number, (0, len(key_id) - len(number)), value=_NONE)

        # A row is not its own negative, if the batch holds it twice.
        ids = [with_keys(columns["index"])]
        if self.mask_duplicates:
            ids.append(with_keys(columns["anchor_id"]))
            ids.append((positive_id, key_id))
        return ids

    def metrics(self) -> Retrieval:
        return Retrieval(group=self.group_answers)

    def update(
        self, metrics: Retrieval, batch: dict[str, Tensor], outputs: dict[str, Tensor]
    ) -> None:
        anchor = F.normalize(outputs["anchor"], dim=-1)
        positive = F.normalize(outputs["candidate"][:, 0], dim=-1)
        metrics.update(anchor, positive, ids=[batch["anchor_id"], batch["candidate_id"][:, 0]])

    def predicted(
        self, batch: dict[str, Tensor], outputs: dict[str, Tensor]
    ) -> dict[str, list[Any]]:
        similarity = F.cosine_similarity(outputs["anchor"], outputs["candidate"][:, 0])
        return {"similarity": similarity.tolist()}

    def show(self, sample: list[Any], outputs: dict[str, Tensor]) -> dict[str, Any]:
        similarity = float(F.cosine_similarity(outputs["anchor"], outputs["candidate"][0], dim=0))
        (anchor, _), (positive, _), *_ = sample
        return {
            "text": self.reader.decode(anchor),
            "target": self.reader.decode(positive),
            "prediction": f"similarity {similarity:.3f}",
        }

    def save(self, model: nn.Module, folder: Path) -> None:
        """Save what transformers and sentence-transformers need to load the encoder.

        sentence-transformers must be 6.2 or newer.
        """
        # sentence-transformers also cuts texts at this length.
        self.reader.tokenizer.model_max_length = self.reader.length
        self.reader.save(model, folder)

        # Write the files of sentence-transformers: its two modules, and the settings of pooling.
        for file in Path(__file__).with_name("sentence_transformers").glob("*.json"):
            copyfile(file, folder / file.name)  # without the permissions of the package
        width = model.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
        settings = {
            "embedding_dimension": width,
            "pooling_mode": _POOLINGS[self.pooling],
            "include_prompt": True,
        }
        pooling = folder / "1_Pooling"  # as modules.json says
        pooling.mkdir(exist_ok=True)
        (pooling / "config.json").write_text(json.dumps(settings, indent=1))


def _check_distinct(key: str, names: Sequence[str]) -> None:
    """Raise ValueError if a name is there twice."""
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"task.{key}: {name!r} is there twice; name each one once")
