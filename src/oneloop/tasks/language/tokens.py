"""Tokenizers, and samples of concatenated texts for a language model."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.basics.progress import Working
from oneloop.tasks.rows.cache import cached_text, key_of
from oneloop.tasks.rows.cached_arrays import Ragged
from oneloop.tasks.text_notes import remark_unknown

# ChatML template with {% generation %} tags
_CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{% generation %}{{- message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}{{- '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


END_OF_TEXT = ("<|endoftext|>",)
# padding, unknown, class, separator and mask
MASK_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class Bytes:
    """One token per byte, and a separator between texts."""

    separator = 256
    cache_key = "bytes"

    def __init__(self) -> None:
        self.token_bytes = np.ones(257, dtype=np.int64)
        self.token_bytes[self.separator] = 0

    def encode(self, text: str) -> NDArray[np.int32]:
        tokens = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)
        return np.append(tokens, np.int32(self.separator))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def save(self, folder: Path) -> None:
        """Do nothing: this tokenizer has no files."""


class BPE:
    """Byte-level byte-pair encoding, trained on these texts by ``tokenizers``."""

    separator = 0

    def __init__(
        self,
        texts: Iterable[str],
        vocab: int,
        *,
        cache_key: Any = None,
        special: Sequence[str] = END_OF_TEXT,
    ) -> None:
        """Train the tokenizer, or load it from the cache.

        Args:
            texts: training texts.
            vocab: vocabulary size.
            cache_key: JSON that identifies the texts (None: do not cache).
            special: special tokens, which get the first ids.

        Raises:
            ValueError: ``vocab`` is below the number of bytes and special tokens.
        """
        from tokenizers import Tokenizer

        least = 256 + len(special)
        if vocab < least:
            raise ValueError(
                f"task.vocab {vocab} is too small: a byte-level BPE needs at least {least}"
            )
        if cache_key is None:
            self.model = self._train(texts, vocab, special)
        else:
            name = f"bpe/{key_of(cache_key, vocab, *special)}.json"
            made = cached_text(name, lambda: self._train(texts, vocab, special).to_str())
            self.model = Tokenizer.from_str(made)

        self.cache_key = key_of(self.model.to_str())
        # A byte-level token has one character per byte; the first one separates texts.
        lengths = [
            len(self.model.id_to_token(token)) for token in range(self.model.get_vocab_size())
        ]
        self.token_bytes = np.array([0, *lengths[1:]], dtype=np.int64)

    @staticmethod
    def _train(texts: Iterable[str], vocab: int, special: Sequence[str]) -> Any:
        from tokenizers import ByteLevelBPETokenizer

        model = ByteLevelBPETokenizer()
        with Working("training the tokenizer"):
            model.train_from_iterator(
                texts,
                vocab_size=vocab,
                show_progress=False,
                special_tokens=[*special],
            )
        return model

    def encode(self, text: str) -> NDArray[np.int32]:
        return np.array([*self.model.encode(text).ids, self.separator], dtype=np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.model.decode(list(tokens)))

    def save(self, folder: Path) -> None:
        from transformers import PreTrainedTokenizerFast

        PreTrainedTokenizerFast(
            tokenizer_object=self.model, eos_token="<|endoftext|>"
        ).save_pretrained(folder)


def tokenizer_key(model: Any) -> str:
    """Return a cache key of a tokenizer of transformers."""
    # The special tokens are not in the tokenizer's file.
    settings = {
        "eos_token_id": getattr(model, "eos_token_id", None),
        "bos_token_id": getattr(model, "bos_token_id", None),
        "add_bos_token": getattr(model, "add_bos_token", None),
        "add_eos_token": getattr(model, "add_eos_token", None),
        "special": sorted(model.all_special_ids),
    }
    return key_of(
        type(model).__name__,
        model.backend_tokenizer.to_str(),
        settings,
        model.special_tokens_map,
    )


class Vocabulary:
    """A tokenizer of transformers with its own special tokens, one of which ends each text."""

    def __init__(self, model: Any, name: str) -> None:
        """Use a tokenizer. Raise ValueError with the model's ``name`` if it has no end token."""
        self.model = model
        if self.model.eos_token_id is None:
            raise ValueError(
                f"task.model {name!r}: its tokenizer has no end token to separate texts"
            )
        self.separator: int = self.model.eos_token_id
        self.cache_key = tokenizer_key(self.model)

        # A byte-level token has one character per byte; the bytes of other tokens are unknown.
        tokens = self.model.convert_ids_to_tokens(range(len(self.model)))
        special = set(self.model.all_special_ids)
        by_bytes = "ByteLevel" in type(self.model.backend_tokenizer.decoder).__name__
        lengths = [
            len(token) if by_bytes and token_id not in special else 0
            for token_id, token in enumerate(tokens)
        ]
        self.token_bytes = np.array(lengths, dtype=np.int64)

    def encode(self, text: str) -> NDArray[np.int32]:
        tokens = self.model(text, verbose=False)["input_ids"]
        remark_unknown(tokens, self.model)
        # Some tokenizers end a text themselves.
        if tokens[-1:] != [self.separator]:
            tokens = [*tokens, self.separator]
        return np.array(tokens, dtype=np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.model.decode(list(tokens)))

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)


def mask_tokenizer(model: Any, length: int) -> Any:
    """Return a byte-level BPE as a tokenizer of transformers with BERT's special tokens.

    Args:
        model: the BPE, of ``tokenizers``; its special tokens are MASK_SPECIAL.
        length: positions of the model.
    """
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer.from_str(model.to_str())
    pad, unknown, begin, separator, mask = MASK_SPECIAL
    bpe.post_processor = TemplateProcessing(
        single=f"{begin} $A {separator}",
        pair=f"{begin} $A {separator} $B:1 {separator}:1",
        special_tokens=[(begin, bpe.token_to_id(begin)), (separator, bpe.token_to_id(separator))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=pad,
        unk_token=unknown,
        cls_token=begin,
        sep_token=separator,
        mask_token=mask,
        model_max_length=length,
    )


def chat_tokenizer(texts: Iterable[str], vocab: int) -> Any:
    """Train a byte-level BPE; return a tokenizer of transformers with a ChatML template.

    Raise ValueError if ``vocab``, the vocabulary size, is below 258.
    """
    from transformers import PreTrainedTokenizerFast

    # A turn ends with <|im_end|>, which is also the end token.
    special = ["<|im_start|>", "<|im_end|>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(texts, vocab, special),
        eos_token=special[1],
        pad_token=special[1],
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special[:1]})
    tokenizer.chat_template = _CHATML
    return tokenizer


def ending_tokenizer(texts: Iterable[str], vocab: int, *, cache_key: Any = None) -> Any:
    """Train a byte-level BPE; return a tokenizer of transformers that ends each text, as T5's.

    Args:
        texts: the training texts.
        vocab: vocabulary size.
        cache_key: JSON that identifies the texts (None: do not cache).

    Raises:
        ValueError: the vocabulary size is below 258.
    """
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "</s>"]
    if cache_key is None:
        bpe = _byte_level(texts, vocab, special)
    else:
        name = f"bpe/{key_of(cache_key, vocab, *special)}.json"
        made = cached_text(name, lambda: _byte_level(texts, vocab, special).to_str())
        bpe = Tokenizer.from_str(made)
    bpe.post_processor = TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=special[0], eos_token=special[1])


def _byte_level(texts: Iterable[str], vocab: int, special: list[str]) -> Any:
    """Train a byte-level BPE that divides numbers into digits, so that sums can be learned.

    Args:
        texts: the training texts.
        vocab: vocabulary size.
        special: special tokens, which get the first numbers.

    Raises:
        ValueError: the vocabulary is too small for all bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + len(special)
    if vocab < least:
        raise ValueError(
            f"task.vocab {vocab} is too small: a byte-level BPE needs at least {least}"
        )
    bpe: Any = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe


class Blocks:
    """Samples of ``block + 1`` tokens, cut from the concatenated texts.

    They overlap by one token, so that every token except the first is a target once.
    """

    def __init__(
        self, texts: Ragged, block: int, *, whole: bool, content: dict[str, Any] | None
    ) -> None:
        """Cut the texts.

        Args:
            texts: tokens of each text.
            block: targets per sample.
            whole: drop a shorter last sample.
            content: a key of the texts' content (None: unknown).
        """
        self.tokens = texts.values
        self.block = block
        self.content = content
        targets = max(0, len(texts.values) - 1)
        self._length = targets // block if whole else -(-targets // block)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        if not 0 <= index < self._length:
            raise IndexError(index)
        start = index * self.block
        return np.asarray(self.tokens[start : start + self.block + 1])

    def fingerprint(self) -> dict[str, Any] | None:
        """Return a key of the content; None if it is unknown."""
        return self.content and {"samples": len(self), **self.content}
