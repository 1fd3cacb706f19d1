"""Pairs of texts whose tokens merge across the border of prompt and answer, and tokenizers."""

from __future__ import annotations

from functools import cache
from typing import Any

# prompt, chosen and rejected answer
EXPLICIT = [
    ("3 the c", "at", "u"),
    ("3 the c", "u", "at"),
    ("the ca", "t sat", "n"),
    ("the ", "cat", "mat"),
    ("the", " cat", "mat"),
    ("the", "cat", " mat"),
    ("the  ", "cat", " mat"),
    ("the\n", "\ncat", "mat"),
    ("the \n", "cat", " \n"),
    ("Q: yes?\nA:", " yes", " yes indeed"),
    ("Q: yes?\nA: ", "yes", "yes indeed"),
    ("12 plus 3", "4", " is 15"),
    ("what is it", "?", "!?"),
    ("don", "'t", "e"),
    ("the weath", "er in Paris", "erman"),
    ("你好吗", "我很好", "我不好"),
    ("今天天气", "很好", "不错"),
    ("今天天气很", "好", "差"),
    ("答案是", "42", "四十二"),
    ("東京は", "日本の首都です", "中国の首都です"),
    ("smile ", "😀", "😁"),
    ("smile 😀", "😀", "😁"),
    ("family 👩", "\u200d👩\u200d👧", " and more"),
    ("thumb 👍", "🏽", "🏿"),
    ("cafe", "\u0301 noir", " noir"),
    ("é", "é", "è"),
    ("the cat<|im_end|>", "sat", "ran"),
    ("the cat", "<|im_end|>", " sat"),
]
# chosen and rejected whole texts
IMPLICIT = [
    ("number 3 weather", "number 3 we go"),
    ("the word is good", "the word is not"),
    ("the word is it", "the word is in it"),
    ("the cat sat", "the cats"),
    ("the cat  sat", "the cat ran"),
    ("你好吗我很好", "你好吗我不好"),
    ("今天天气很好", "今天天气不错"),
    ("smile 😀", "smile 😁"),
    ("smile 👩\u200d👩\u200d👧", "smile 👩\u200d👧"),
    ("a\n\nb", "a\nb"),
    ("x = 10", "x = 12"),
    ("the cat sat on", "the cat sat in"),
]
ROWS: list[dict[str, str]] = [
    {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    for prompt, chosen, rejected in EXPLICIT
]
ROWS += [{"chosen": chosen, "rejected": rejected} for chosen, rejected in IMPLICIT]
_TEXTS = [
    "the cat sat on the mat, number 3: good bad movie weather in Paris",
    "Q: yes?\nA: yes indeed, the word is not in it",
    "你好吗我很好 今天天气很好 今天天气不错 答案是四十二",
    "smile 😀 😁 cafe\u0301 noir",
]


@cache
def tokenizer_of(name: str) -> Any:
    """Return a tokenizer of this name.

    ``bytes``, ``bytes with a blank`` (add_prefix_space), ``begin`` (with a BOS token), ``ends``
    (appends its end token), ``metaspace`` (as SentencePiece, with bytes as fallback), or ``across``
    (merges also across blanks and lines).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    # Train a tokenizer.
    special = ["<|im_end|>", "<s>", "<unk>"]
    sentences = name == "metaspace"
    made: Any = Tokenizer(models.BPE(byte_fallback=sentences, unk_token="<unk>"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if sentences:
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Metaspace()
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        alphabet = []
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=name == "bytes with a blank", use_regex=name != "across"
        )
        made.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(_TEXTS * 9, trainer)

    # Let it add tokens at the beginning or the end.
    single = {"begin": "<s> $A", "metaspace": "<s> $A", "ends": "$A <|im_end|>"}.get(name)
    if single:
        made.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", 1), ("<|im_end|>", 0)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="<|im_end|>")


TOKENIZERS = ("bytes", "bytes with a blank", "begin", "ends", "metaspace", "across")
