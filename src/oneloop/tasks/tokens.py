"""Texts as tokens, and tokens as samples of a language model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oneloop.basics.files import replacing
from oneloop.basics.progress import Working
from oneloop.data.rows.cache import alone, key_of
from oneloop.data.rows.ragged import Ragged
from oneloop.tasks.transformers_models import tokenizer_of


class Bytes:
    """One token per byte, and a separator between texts."""

    separator = 256

    def __init__(self) -> None:
        self.token_bytes = np.ones(257, dtype=np.int64)
        self.token_bytes[self.separator] = 0

    def encode(self, text: str) -> NDArray[np.int32]:
        tokens = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)
        return np.append(tokens, np.int32(self.separator))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def save(self, folder: Path) -> None:
        """Nothing to keep: a byte is a byte."""


class BPE:
    """Byte-level byte-pair encoding, trained on these texts by ``tokenizers``."""

    separator = 0

    def __init__(self, texts: Iterable[str], vocab: int, *, kept: Any = None) -> None:
        """Args:
        texts: to train it on.
        vocab: entries.
        kept: what tells these texts from others, as JSON: it is then trained once, and kept. None: it is trained anew.

        Raises:
            ValueError: ``vocab`` is smaller than the bytes.
        """
        from tokenizers import Tokenizer

        if vocab < 257:
            raise ValueError(f"task.vocab {vocab} is too small: a byte-level BPE needs at least 257")
        if kept is None:
            self.model = self._trained(texts, vocab)
        else:
            with alone(f"bpe/{key_of(kept, vocab)}.json") as place:
                if not place.exists():
                    with replacing(place) as draft:
                        self._trained(texts, vocab).save(str(draft))
                self.model = Tokenizer.from_file(str(place))
        lengths = [len(self.model.id_to_token(token)) for token in range(self.model.get_vocab_size())]
        self.token_bytes = np.array([0, *lengths[1:]], dtype=np.int64)  # byte-level tokens hold a letter per byte

    @staticmethod
    def _trained(texts: Iterable[str], vocab: int) -> Any:
        from tokenizers import ByteLevelBPETokenizer

        model = ByteLevelBPETokenizer()
        with Working("training the tokenizer"):
            model.train_from_iterator(texts, vocab_size=vocab, show_progress=False, special_tokens=["<|endoftext|>"])
        return model

    def encode(self, text: str) -> NDArray[np.int32]:
        return np.array([*self.model.encode(text).ids, self.separator], dtype=np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.model.decode(list(tokens)))

    def save(self, folder: Path) -> None:
        self.model.save(str(folder / "tokenizer.json"))


class Vocabulary:
    """The tokenizer of a model that transformers knows, with its own special tokens; each text ends with its end token.

    Args:
        name: a folder, or ``hf:ID[@REVISION]``.
        trust_remote_code: run code that lies beside it.

    Raises:
        ValueError: there is none, or it has no end token.
    """

    def __init__(self, name: str, *, trust_remote_code: bool = False) -> None:
        self.model = tokenizer_of(name, trust_remote_code=trust_remote_code)
        if self.model.eos_token_id is None:
            raise ValueError(f"task.model {name!r}: its tokenizer has no end token, which parts one text from the next")
        self.separator: int = self.model.eos_token_id
        self.content = key_of(self.model.backend_tokenizer.to_str())
        tokens = self.model.convert_ids_to_tokens(range(len(self.model)))
        special = set(self.model.all_special_ids)
        by_bytes = "ByteLevel" in type(self.model.backend_tokenizer.decoder).__name__
        lengths = [len(token) if by_bytes and at not in special else 0 for at, token in enumerate(tokens)]
        self.token_bytes = np.array(lengths, dtype=np.int64)  # byte-level tokens hold a letter per byte

    def encode(self, text: str) -> NDArray[np.int32]:
        tokens = self.model(text, verbose=False)["input_ids"]
        return np.array([*tokens, *([] if tokens[-1:] == [self.separator] else [self.separator])], dtype=np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.model.decode(list(tokens)))

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)


class Blocks:
    """Samples of ``block + 1`` tokens that overlap by one, so that every token but the first is a target once.

    Args:
        texts: tokens of each text.
        block: tokens of a sample, beside the first.
        pack: samples are cut from all texts one after the other; false: each text by itself.
        whole: leave out a shorter one at the end of all.
        content: what the texts are, for :meth:`fingerprint`.
    """

    def __init__(self, texts: Ragged, block: int, *, pack: bool, whole: bool, content: dict[str, Any] | None) -> None:
        self.tokens, self.block, self.content = texts.values, block, content
        self._ends = np.array([len(texts.values)]) if pack else texts.ends
        lengths = np.diff(self._ends, prepend=0)
        self._upto = np.cumsum(np.maximum(0, -(-(lengths - 1) // block)))
        """samples of the texts up to each"""
        self._length = int(self._upto[-1]) if len(self._upto) else 0
        if pack and whole and self._length and (len(self.tokens) - 1) % block:
            self._length -= 1  # training samples are all of one length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self._length:
            raise IndexError(index)
        text = int(np.searchsorted(self._upto, index, side="right"))
        end = int(self._ends[text])
        first = int(self._ends[text - 1]) if text else 0
        start = first + (index - (int(self._upto[text - 1]) if text else 0)) * self.block
        return torch.from_numpy(self.tokens[start : min(start + self.block + 1, end)].astype(np.int64))

    def fingerprint(self) -> dict[str, Any] | None:
        """What the texts are, by content; None where they do not tell."""
        return self.content and {"samples": len(self), **self.content}
