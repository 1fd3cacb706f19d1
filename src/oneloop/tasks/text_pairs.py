"""Text embeddings, trained on pairs of texts that belong together; the packaged data are docstrings
and functions."""

import ast
import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oneloop.data.rows.open_data import Source, sets_of
from oneloop.tasks.columns import check_texts, columns_of, number_of_text, repeated, texts_of
from oneloop.tasks.contrastive import info_nce
from oneloop.tasks.evaluation_metrics import Retrieval
from oneloop.tasks.labels import RECORDED
from oneloop.tasks.language.texts import held_out, stdlib
from oneloop.tasks.text_encoders import LEARNED, NewReader, TokenReader
from oneloop.tasks.text_rows import TextRows
from oneloop.tasks.transformers_models import is_transformers

_POOLINGS = {"mean": "mean", "cls": "cls", "last": "lasttoken"}  # names of sentence-transformers
_POOLING = "1_Pooling"  # folder of sentence-transformers
_NEEDS = {key: needed.replace("bytes", LEARNED) for key, needed in TextRows.needs.items()}
_NEEDS |= {"held_out": "data!=stdlib", "vocab": f"model={LEARNED}"}
_NONE = -(1 << 63)  # a number that no text has


class TextPairs(TextRows):
    """Embeddings of texts, whose cosine similarity is large for pairs that belong together. The
    loss is multiple negatives ranking: all other pairs of the global batch are negatives.

    Args:
        data: stdlib (docstrings and functions of Python's standard library); a file or folder of
            parquet, json lines, csv or arrow; hf:NAME[:CONFIG][@REVISION]; or several, [{data:
            PATH, weight: 0.7}, …].
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
    """

    reader: TokenReader
    sample_weight = 1.0
    batch_columns = ("index", "anchor_id", "candidate_id")
    needs = _NEEDS

    def __init__(
        self,
        data: str | list[dict[str, Any]] = "stdlib",
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
        **reading: Any,
    ) -> None:
        if pooling not in _POOLINGS:
            raise ValueError(f"task.pooling {pooling!r} is unknown; known: {', '.join(_POOLINGS)}")
        if not 0 < temperature < math.inf:
            raise ValueError(
                f"task.temperature {temperature} must be positive; common values are 0.01 to 0.1"
            )
        self.pooling, self.scale, self.symmetric = pooling, 1 / temperature, symmetric
        self.matryoshka, self.mask_duplicates, self._vocab = (
            [int(size) for size in matryoshka],
            mask_duplicates,
            vocab,
        )
        self._negatives = [name.strip() for name in negatives.split(",") if name.strip()]
        columns = {"anchor": anchor, "positive": positive}
        columns |= {f"negatives_{number}": name for number, name in enumerate(self._negatives, 1)}
        sizes = [*map(str, matryoshka)]
        for key, names in (
            ("anchor, positive and negatives", [*columns.values()]),
            ("matryoshka", sizes),
        ):
            if twice := [name for name in names if names.count(name) > 1]:
                raise ValueError(f"task.{key}: {twice[0]!r} is there twice; name each one once")
        super().__init__(None if data == "stdlib" else data, columns, model=model, **reading)
        if data == "stdlib" and not RECORDED.get():
            pairs = _docstrings()
            self.reader.learn(lambda: (text for pair in pairs["train"] for text in pair))
            make = self._maker([0, 1])
            self._sets = {split: [make(pair) for pair in pairs[split]] for split in pairs}
            self._data_notes = self._duplicates(
                [repeated(texts) for texts in zip(*pairs["train"], strict=True)]
            )
        if isinstance(self.reader, NewReader):
            self.recorded |= {"tokenizer": self.reader.written()}

    def _reader(self, name: str, shape: dict[str, Any], **options: Any) -> TokenReader:
        if name == LEARNED:
            return NewReader(
                shape, vocab=self._vocab, written=(RECORDED.get() or {}).get("tokenizer")
            )
        if not is_transformers(name):
            fix = f"give one, {LEARNED}, or hf:ID"
            raise ValueError(f"task.model {name!r} is not a folder saved by transformers; {fix}")
        return TokenReader(name, length=shape["length"], **options)

    def _check(self, sources: Sequence[Source]) -> None:
        for key in self.columns:
            check_texts(sources, key)
        texts = [
            part
            for key in ("anchor", "positive")
            for part in columns_of(sources, key)
            if part[1] == "train"
        ]
        if texts:
            self.reader.learn(
                lambda: (text for *_, rows, column in texts for text in texts_of(rows, column))
            )
            counts = [repeated(texts_of(rows, column)) for *_, rows, column in texts]
            sources[0].notes += self._duplicates(
                [sum(counts[: len(sources)]), sum(counts[len(sources) :])]
            )

    def _duplicates(self, counts: Sequence[int]) -> list[str]:
        """Return the line for the log about training texts that are equal to an earlier one."""
        found = (
            f"{counts[0]:,} anchors and {counts[1]:,} positives of the training pairs are equal to "
            "an earlier one"
        )
        effect = "are negatives of each other: --task.mask_duplicates true prevents this"
        effect = "are not negatives of each other" if self.mask_duplicates else effect
        return [f"{found}; in a batch, they {effect}"] if any(counts) else []

    def _samples(self, sources: Sequence[Source], *, labelled: bool = True) -> dict[str, Any]:
        self._check(sources)
        return sets_of(
            sources, lambda source: self._maker([source.columns[key] for key in self.columns])
        )

    def _maker(self, columns: Sequence[Any]) -> Callable[[Any], Any]:
        """Return the function from a row to its sample: the encoded texts, and their numbers."""
        encode = self.reader.encode
        return lambda row: [
            (encode(row[column]), number_of_text(row[column])) for column in columns
        ]

    def model(self) -> nn.Module:
        model = self.reader.model(None)
        width = model.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
        if wrong := [size for size in self.matryoshka if not 0 < size < width]:
            raise ValueError(
                f"task.matryoshka {wrong[0]} must be between 1 and {width - 1}: embeddings "
                f"have {width}"
            )
        if (pooler := getattr(model, "pooler", None)) is not None:
            pooler.requires_grad_(False)  # it has no effect on the hidden states
        self.notes = [*self._data_notes, *self.reader.notes]
        return model

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        """Return tokens of the anchors, and those of the candidates: positive and negatives of each
        sample in turn."""
        anchors, candidates = (
            [sample[0] for sample in samples],
            [text for sample in samples for text in sample[1:]],
        )
        batch = {"anchor_id": torch.tensor([number for _, number in anchors])}
        batch["candidate_id"] = torch.tensor([number for _, number in candidates]).unflatten(
            0, (len(samples), -1)
        )
        for name, texts in (("anchor", anchors), ("candidate", candidates)):
            batch |= {
                f"{name}.{key}": value
                for key, value in self.reader.collate([text for text, _ in texts]).items()
            }
        return batch

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(float(len(batch["anchor_id"])))

    def embed(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return embeddings: the anchors' (samples, width), and the candidates' (samples, 1 +
        negatives, width)."""
        anchor, candidate = (
            self._embedded(model, batch, f"{name}.") for name in ("anchor", "candidate")
        )
        return {"anchor": anchor, "candidate": candidate.unflatten(0, (len(anchor), -1))}

    def _embedded(self, model: nn.Module, batch: dict[str, Tensor], prefix: str) -> Tensor:
        inputs = {
            key.removeprefix(prefix): value
            for key, value in batch.items()
            if key.startswith(prefix)
        }
        hidden: Tensor = model(**inputs).last_hidden_state
        mask = inputs["attention_mask"]
        if self.pooling == "cls":
            return hidden[:, 0]
        if self.pooling == "last":
            return hidden[torch.arange(len(hidden), device=hidden.device), mask.sum(1) - 1]
        share = mask[:, :, None].to(hidden.dtype)
        return (hidden * share).sum(1) / share.sum(1)

    def batch_loss(
        self, parts: dict[str, Tensor], columns: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        anchor, candidate = parts["anchor"], parts["candidate"]
        anchor_id, candidate_id = columns["anchor_id"], columns["candidate_id"]
        key_id = torch.cat([candidate_id[:, 0], candidate_id[:, 1:].flatten()])
        # a row is not its own negative
        of_rows = [columns["index"], *([anchor_id] if self.mask_duplicates else [])]
        ids = [
            (number, F.pad(number, (0, len(key_id) - len(number)), value=_NONE))
            for number in of_rows
        ]
        ids += [(candidate_id[:, 0], key_id)] if self.mask_duplicates else []
        total = anchor.new_zeros(())
        for size in (*self.matryoshka, anchor.shape[1]):
            queries, keys = (
                F.normalize(value[..., :size], dim=-1) for value in (anchor, candidate)
            )
            positive, negatives = keys[:, 0], keys[:, 1:].flatten(0, 1)
            loss = info_nce(queries, torch.cat([positive, negatives]), self.scale, ids=ids)
            if self.symmetric:
                both = [(numbers, numbers) for numbers, _ in ids]
                loss = (loss + info_nce(positive, queries, self.scale, ids=both)) / 2
            total = total + loss
        return total, {}

    def metrics(self) -> Retrieval:
        return Retrieval()

    def update(
        self, metrics: Retrieval, batch: dict[str, Tensor], outputs: dict[str, Tensor]
    ) -> None:
        anchor, positive = (
            F.normalize(outputs["anchor"], dim=-1),
            F.normalize(outputs["candidate"][:, 0], dim=-1),
        )
        metrics.update(anchor, positive, ids=[batch["anchor_id"], batch["candidate_id"][:, 0]])

    def predicted(
        self, batch: dict[str, Tensor], outputs: dict[str, Tensor]
    ) -> dict[str, list[Any]]:
        return {
            "similarity": F.cosine_similarity(
                outputs["anchor"], outputs["candidate"][:, 0]
            ).tolist()
        }

    def show(self, sample: list[Any], outputs: dict[str, Tensor]) -> dict[str, Any]:
        similarity = float(F.cosine_similarity(outputs["anchor"], outputs["candidate"][0], dim=0))
        anchor, positive = (self.reader.decode(text) for text, _ in sample[:2])
        return {"text": anchor, "target": positive, "prediction": f"similarity {similarity:.3f}"}

    def save(self, model: nn.Module, folder: Path) -> None:
        """Save what transformers and sentence-transformers (6.2 or newer) need to load the
        encoder."""
        # sentence-transformers also cuts texts there
        self.reader.tokenizer.model_max_length = self.reader.length
        self.reader.save(model, folder)
        width = model.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
        kinds = {
            "": "base.modules.transformer.Transformer",
            _POOLING: "sentence_transformer.modules.pooling.Pooling",
        }
        modules = [
            {
                "idx": number,
                "name": str(number),
                "path": path,
                "type": f"sentence_transformers.{kind}",
            }
            for number, (path, kind) in enumerate(kinds.items())
        ]
        pooling = {
            "embedding_dimension": width,
            "pooling_mode": _POOLINGS[self.pooling],
            "include_prompt": True,
        }
        about = {"model_type": "SentenceTransformer", "similarity_fn_name": "cosine"}
        (folder / _POOLING).mkdir(exist_ok=True)
        files = {
            "modules": modules,
            f"{_POOLING}/config": pooling,
            "config_sentence_transformers": about,
        }
        for name, content in files.items():
            (folder / f"{name}.json").write_text(json.dumps(content, indent=1))


def _docstrings() -> dict[str, list[tuple[str, str]]]:
    """Return pairs by split: the first paragraph of a docstring, and its function without it, if it
    has two more lines. No file is in two splits."""
    files = held_out(stdlib(), percent=10)
    return {
        split: [pair for file in files[split] for pair in _functions(file.text)] for split in files
    }


def _functions(source: str) -> Iterator[tuple[str, str]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences
            tree = ast.parse(source)
    except SyntaxError:
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
            text := ast.get_docstring(node)
        ):
            body = [
                line for part in node.body[1:] for line in lines[part.lineno - 1 : part.end_lineno]
            ]
            if len(body) >= 2 and text.strip():
                head = f"def {node.name}({ast.unparse(node.args)}):"
                yield " ".join(text.strip().split("\n\n")[0].split()), "\n".join([head, *body])
