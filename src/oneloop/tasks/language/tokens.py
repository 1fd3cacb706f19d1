"""Tokenizers, and samples of concatenated texts for a language model."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.basics.progress import Working
from oneloop.tasks.rows.cache import cached_json, key_of
from oneloop.tasks.text_notes import remark_unknown

# ChatML template with {% generation %} tags
_CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{% generation %}{{- message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}{{- '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)

END_OF_TEXT = "<|endoftext|>"
MASK_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""special tokens of BERT: padding, unknown, class, separator and mask"""


def learn_bpe(
    texts: Iterable[str],
    vocab: int,
    special: Sequence[str],
    *,
    cache_key: Any = None,
    digits: bool = False,
    words: bool = False,
) -> str:
    """Train a byte-level BPE, or load it from the cache; return it as JSON of ``tokenizers``.

    Args:
        texts: training texts.
        vocab: vocabulary size.
        special: special tokens, which get the first ids.
        cache_key: JSON that identifies the texts (None: do not cache).
        digits: divide numbers into digits, so that sums can be learned.
        words: divide texts into lower-case words, which have the same tokens everywhere.

    Raises:
        ValueError: ``vocab`` is below the number of bytes and special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + len(special)
    if vocab < least:
        raise ValueError(
            f"task.vocab {vocab} is too small: a byte-level BPE needs at least {least}"
        )

    def trained() -> str:
        model: Any = Tokenizer(models.BPE())
        model.decoder = decoders.ByteLevel()
        steps = list[Any]()
        if words:
            model.normalizer = normalizers.BertNormalizer()
            steps.append(pre_tokenizers.BertPreTokenizer())
        if digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=words, use_regex=not words))
        model.pre_tokenizer = pre_tokenizers.Sequence(steps)
        trainer: Any = trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=[*special],
            initial_alphabet=alphabet,
            show_progress=False,
        )
        with Working("training the tokenizer"):
            model.train_from_iterator(texts, trainer)
        return str(model.to_str())

    if cache_key is None:
        return trained()
    key = key_of(cache_key, vocab, special, digits, words)
    return str(cached_json(f"bpe/{key}.text.json", trained))


def tokenizer_from(written: str, template: str = "", **roles: Any) -> Any:
    """Return a tokenizer of transformers.

    Args:
        written: the tokenizer, as JSON of ``tokenizers``.
        template: the special tokens around a text ``$A``, the last of which ends a text.
        roles: special tokens by role, and other options of ``PreTrainedTokenizerFast``.
    """
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer.from_str(written)
    if template:
        special = [token for token in template.split() if token != "$A"]
        model.post_processor = TemplateProcessing(
            single=template,
            pair=f"{template} $B:1 {special[-1]}:1",
            special_tokens=[(token, model.token_to_id(token)) for token in special],
        )
    return PreTrainedTokenizerFast(tokenizer_object=model, **roles)


def byte_tokenizer(**roles: str) -> Any:
    """Return a tokenizer of transformers with one token per byte, and a special token.

    Args:
        roles: the special token, by its role; its number is 256.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    numbers = {character: number for number, character in bytes_to_unicode().items()}
    model: Any = Tokenizer(models.BPE(numbers, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    # The name of a special token in a text is bytes, too.
    return tokenizer_from(model.to_str(), split_special_tokens=True, **roles)


def mask_tokenizer(written: str, length: int) -> Any:
    """Return a byte-level BPE as a tokenizer of transformers with BERT's special tokens.

    Args:
        written: the BPE, as :func:`learn_bpe` returns it for MASK_SPECIAL.
        length: positions of the model.
    """
    pad, unknown, begin, separator, mask = MASK_SPECIAL
    return tokenizer_from(
        written,
        f"{begin} $A {separator}",
        pad_token=pad,
        unk_token=unknown,
        cls_token=begin,
        sep_token=separator,
        mask_token=mask,
        model_max_length=length,
        model_input_names=["input_ids", "attention_mask"],
    )


def chat_tokenizer(texts: Iterable[str], vocab: int) -> Any:
    """Train a byte-level BPE; return a tokenizer of transformers with a ChatML template.

    Raise ValueError if ``vocab``, the vocabulary size, is below 258.
    """
    # A turn ends with <|im_end|>, which is also the end token.
    begin, end = special = ("<|im_start|>", "<|im_end|>")
    written = learn_bpe(texts, vocab, special, digits=True)
    tokenizer = tokenizer_from(
        written, eos_token=end, pad_token=end, additional_special_tokens=[begin]
    )
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
    pad, end = special = ("<pad>", "</s>")
    written = learn_bpe(texts, vocab, special, cache_key=cache_key, digits=True)
    return tokenizer_from(written, f"$A {end}", pad_token=pad, eos_token=end)


def tokenizer_key(model: Any) -> str:
    """Return a cache key of a tokenizer of transformers."""
    # The special tokens are not in the tokenizer's file; which of them are added to a text is.
    return key_of(
        type(model).__name__,
        model.backend_tokenizer.to_str(),
        model.special_tokens_map,
        sorted(model.all_special_ids),
    )


def encode_text(tokenizer: Any, text: str) -> NDArray[np.int32]:
    """Return the tokens of a text, the last of which is the tokenizer's end token."""
    tokens = tokenizer(text, verbose=False)["input_ids"]
    remark_unknown(tokens, tokenizer)
    # Some tokenizers end a text themselves.
    if tokens[-1:] != [tokenizer.eos_token_id]:
        tokens = [*tokens, tokenizer.eos_token_id]
    return np.array(tokens, dtype=np.int32)


def encode_bytes(text: str) -> NDArray[np.int32]:
    """Return what :func:`encode_text` returns with :func:`byte_tokenizer`, much faster."""
    return np.array([*text.encode(), 256], dtype=np.int32)


def token_bytes(tokenizer: Any) -> NDArray[np.int64]:
    """Return the number of bytes of each token; 0 for special tokens, or if it is unknown."""
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    # A byte-level token has one character per byte; the bytes of other tokens are unknown.
    if "ByteLevel" not in type(tokenizer.backend_tokenizer.decoder).__name__:
        tokens = [""] * len(tokens)
    lengths = np.array([len(token) for token in tokens], dtype=np.int64)
    lengths[tokenizer.all_special_ids] = 0
    return lengths
