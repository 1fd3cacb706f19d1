"""How tasks read text: bytes with an encoder from scratch, or a transformers model with its tokenizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from oneloop.tasks.transformers_models import auto_model, is_transformers, tokenizer_of

PAD = 256  # beside the bytes


class Encoder(nn.Module):
    """Averaged over the text, and a linear head: (texts, bytes) -> (texts, outputs)."""

    _no_split_modules = ("BertLayer",)

    def __init__(self, outputs: int, *, layers: int, heads: int, width: int, length: int, dropout: float) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        if width % heads:
            raise ValueError(f"task.width {width} cannot be divided by task.heads {heads}")
        config = BertConfig(
            vocab_size=257,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            max_position_embeddings=length,
            pad_token_id=PAD,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
        self.encoder = BertModel(config, add_pooling_layer=False)
        self.head = nn.Linear(width, outputs)

    def hidden(self, text: Tensor, known: Tensor) -> Tensor:
        """(texts, bytes, width), of the bytes that are no padding."""
        # Ready and 4-D (batch, 1, query, key): transformers would ask a 2-D mask whether it hides anything.
        mask = known[:, None, None, :].expand(-1, 1, text.shape[1], -1)
        hidden: Tensor = self.encoder(input_ids=text, attention_mask=mask).last_hidden_state
        return hidden

    def forward(self, text: Tensor) -> Tensor:
        known = text != PAD
        hidden = self.hidden(text, known)
        share = known[:, :, None].to(hidden.dtype)
        return self.head((hidden * share).sum(1) / share.sum(1))  # type: ignore[no-any-return]


class ByteEncoder(Encoder):
    """The head at every byte: (texts, bytes) -> (texts, bytes, outputs)."""

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.hidden(text, text != PAD))  # type: ignore[no-any-return]


def as_bytes(text: str, length: int) -> Tensor:
    """The first so many bytes of a text; of an empty one, one that occurs in no text."""
    return torch.tensor(list(text.encode()[:length]) or [PAD - 1])


def padded(texts: list[Any]) -> Tensor:
    """Texts of one batch, as long as the longest."""
    return nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=PAD)


_BETWEEN = "\n\0\n"  # between the two texts of a pair


class Reader(Protocol):
    """Texts to model inputs, and what the model says of them."""

    notes: list[str]  # what a person should know of the model

    def encode(self, text: str, second: str | None = None) -> Any:
        """A text or a pair of them, cut to the longest length."""

    def encode_words(self, words: Sequence[str]) -> tuple[Any, list[int], int]:
        """Return the words, where each one that is not cut begins, and the total length. Raises ValueError if nothing
        of a word is left."""

    def collate(self, samples: Sequence[Any]) -> dict[str, Tensor]:
        """One batch, padded to its longest sample."""

    def model(self, classes: Sequence[str], *, words: bool = False) -> nn.Module:
        """A new model with so many outputs, for each text or for each place in it."""

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """(texts, outputs) or (texts, places, outputs)."""

    def decode(self, sample: Any, start: int = 0, stop: int | None = None) -> str:
        """What was read, for a person."""

    def save(self, model: nn.Module, folder: Path) -> None:
        """Files that make another library load the weights."""


def reader(name: str, shape: dict[str, Any], **options: Any) -> Reader:
    """Return the reader of a model's name: ``bytes`` (an encoder of this ``shape``), a folder of transformers, or
    ``hf:ID[@REVISION]`` (with options of :class:`TokenReader`). Raises ValueError if there is no such model."""
    if name == "bytes":
        return ByteReader(shape)
    if not is_transformers(name):
        raise ValueError(
            f"task.model {name!r} is not a folder saved by transformers; give such a folder, bytes, or hf:ID"
        )
    return TokenReader(name, length=shape["length"], **options)


class ByteReader:
    """Byte by byte, by an encoder from scratch."""

    def __init__(self, shape: dict[str, Any]) -> None:
        if shape["width"] % shape["heads"]:
            raise ValueError(f"task.width {shape['width']} cannot be divided by task.heads {shape['heads']}")
        self.shape, self.length, self.notes = shape, int(shape["length"]), list[str]()

    def encode(self, text: str, second: str | None = None) -> Tensor:
        return as_bytes(text if second is None else text + _BETWEEN + second, self.length)

    def encode_words(self, words: Sequence[str]) -> tuple[Tensor, list[int], int]:
        text, at = b"", list[int]()
        for word in words:
            if len(text) < self.length:
                at.append(len(text))
            text += word.encode() + b" "
        found = torch.tensor(list(text[: self.length]) or [32])
        return found, at, len(found)

    def collate(self, samples: Sequence[Any]) -> dict[str, Tensor]:
        return {"text": padded(list(samples))}

    def model(self, classes: Sequence[str], *, words: bool = False) -> nn.Module:
        return (ByteEncoder if words else Encoder)(len(classes), **self.shape)

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["text"])  # type: ignore[no-any-return]

    def decode(self, sample: Any, start: int = 0, stop: int | None = None) -> str:
        return bytes(sample.tolist()[start:stop]).decode(errors="replace")

    def save(self, model: nn.Module, folder: Path) -> None:
        pass


class TokenReader:
    """Reads tokens of a transformers model. Raises ValueError unless it has a fast tokenizer, which maps tokens to
    words."""

    def __init__(self, name: str, *, length: int, pretrained: bool = True, trust_remote_code: bool = False) -> None:
        self.name, self.length, self.notes = name, length, list[str]()
        self._options = {"pretrained": pretrained, "trust_remote_code": trust_remote_code}
        made = tokenizer_of(name, trust_remote_code=trust_remote_code)
        if made.pad_token_id is None:
            made.pad_token = made.eos_token
        if made.pad_token_id is None:
            raise ValueError(f"task.model {name!r}: its tokenizer has no padding token and no end token")
        self.tokenizer = made

    def encode(self, text: str, second: str | None = None) -> dict[str, list[int]]:
        return self._encoded(text, second)[0]

    def encode_words(self, words: Sequence[str]) -> tuple[dict[str, list[int]], list[int], int]:
        sample, of_word = self._encoded(list(words), None, is_split_into_words=True)
        at: dict[int, int] = {}
        for place, word in enumerate(of_word):
            if word is not None:
                at.setdefault(word, place)
        gaps = [word for word, found in enumerate(at) if word != found]
        if gaps:
            gap = gaps[0]
            raise ValueError(f"word {gap} ({words[gap]!r}) has no tokens; remove it")
        return sample, [*at.values()], len(of_word)

    def _encoded(self, *texts: Any, **how: Any) -> tuple[dict[str, list[int]], list[int | None]]:
        made = self.tokenizer(*texts, truncation=True, max_length=self.length, return_attention_mask=False, **how)
        if not made["input_ids"]:
            raise ValueError("the text has no tokens; remove the row")
        if len(made["input_ids"]) > self.length:
            raise ValueError(f"task.length {self.length} has no room for text next to the special tokens; raise it")
        return {key: list(values) for key, values in made.items()}, made.word_ids()

    def collate(self, samples: Sequence[Any]) -> dict[str, Tensor]:
        longest = max(len(sample["input_ids"]) for sample in samples)
        fill = {"input_ids": self.tokenizer.pad_token_id}
        batch = {
            key: torch.tensor([one[key] + [fill.get(key, 0)] * (longest - len(one[key])) for one in samples])
            for key in samples[0]
        }
        lengths = torch.tensor([len(one["input_ids"]) for one in samples])
        return {**batch, "attention_mask": (torch.arange(longest) < lengths[:, None]).long()}

    def model(self, classes: Sequence[str], *, words: bool = False) -> nn.Module:
        kind = f"AutoModelFor{'Token' if words else 'Sequence'}Classification"
        model, self.notes = auto_model(kind, self.name, classes, **self._options)
        config: Any = model.config
        longest = getattr(config.get_text_config(), "max_position_embeddings", None) or self.length
        longest = min(longest, self.tokenizer.model_max_length)
        if self.length > longest:
            raise ValueError(f"task.length {self.length} is more than the {longest} positions of {self.name}; lower it")
        if config.get_text_config().pad_token_id is None:
            config.pad_token_id = config.get_text_config().pad_token_id = self.tokenizer.pad_token_id
        return model

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        known = ("input_ids", "attention_mask", "token_type_ids")
        return model(**{key: batch[key] for key in known if key in batch}).logits  # type: ignore[no-any-return]

    def decode(self, sample: Any, start: int = 0, stop: int | None = None) -> str:
        return str(self.tokenizer.decode(sample["input_ids"][start:stop]))

    def save(self, model: nn.Module, folder: Path) -> None:
        model.config.save_pretrained(folder)  # type: ignore[union-attr, operator]
        self.tokenizer.save_pretrained(folder)
