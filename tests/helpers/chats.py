"""Families of chat templates, with tokenizers and small models."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from oneloop.tasks.language.tokens import chat_tokenizer

Messages = list[dict[str, Any]]


TEXTS = [
    "the answer is it, what is there?\n\n  x\n\n  the word",
    "ok \n and more 42 tool f(x)",
    "é ü 你好 the end.\n",
]


class Family(NamedTuple):
    """Models with similar chat templates."""

    special: tuple[str, ...]
    """the last one ends a text"""
    begin: str | None
    template: str
    """file of TRL: as the models have it"""
    training: str
    """the one that is trained with: its own, or TRL's of that file"""
    spoken: str
    """what the assistant answers, in its only group"""
    known_by: str
    tools: bool = True
    """the template writes calls and results of tools, and thoughts"""
    rejects: Callable[[Messages], bool] = lambda messages: False


def calls(messages: Messages) -> bool:
    return any("tool_calls" in one for one in messages)


def call_with_both(messages: Messages) -> bool:
    return any(
        "tool_calls" in one and one["content"] and "reasoning_content" in one for one in messages
    )


# what the log says about the template
PREFIXES = "found by comparing prefixes"
MARKS = "the template's {% generation %} tags mark the assistant's tokens"
TRLS = "TRL's is used"


CHATML = ("<|im_start|>", "<|im_end|>")


FAMILIES = {
    "ours": Family(
        CHATML, None, "", "", r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", MARKS, tools=False
    ),
    "llama 3": Family(
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
        "llama3",
        "llama3",
        r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)",
        PREFIXES,
        tools=False,
    ),
    "qwen 2.5": Family(
        CHATML, None, "qwen2_5", "qwen2_5", r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", PREFIXES
    ),
    "qwen 3": Family(
        CHATML,
        None,
        "qwen3",
        "qwen3_training",
        r"<\|im_start\|>assistant\n(.*?<\|im_end\|>\n)",
        TRLS,
    ),
    "gemma 3": Family(
        ("<start_of_turn>", "<end_of_turn>", "<eos>"),
        "<bos>",
        "gemma3",
        "gemma3",
        r"<start_of_turn>model\n(.*?<end_of_turn>)",
        PREFIXES,
        rejects=calls,  # it has no tools, and requires user and assistant in turn
    ),
    "phi 3": Family(
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
        None,
        "phi3",
        "phi3_training",
        r"<\|assistant\|>\n(.*?<\|end\|>\n(?:<\|endoftext\|>$)?)",
        TRLS,
        tools=False,
    ),
    "gpt-oss": Family(
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>"),
        None,
        "gptoss",
        "gptoss_training",
        # TRL's generation tags include the turn's name: a model also writes it between thoughts and
        # answer.
        r"(<\|start\|>assistant.*?(?:<\|end\|>|<\|call\|>|<\|return\|>))",
        TRLS,
        rejects=call_with_both,
    ),
    "glm 4": Family(
        (
            "[gMASK]",
            "<sop>",
            "<|system|>",
            "<|user|>",
            "<|assistant|>",
            "<|observation|>",
            "<|endoftext|>",
        ),
        None,
        "glm4moe",
        "glm4moe_training",
        # a turn ends at the token that begins the next
        r"<\|assistant\|>(.*?(?:<\|user\|>|<\|observation\|>))",
        TRLS,
    ),
}


def of_trl(name: str) -> str:
    place = find_spec("trl")
    if place is None or not place.submodule_search_locations:
        pytest.skip("TRL, whose templates these are, is not installed")
    return (
        Path(place.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja"
    ).read_text()


def tokenizer_with(
    special: Sequence[str], template: str | None, *, begin: str | None = None, **how: Any
) -> Any:
    """Return a byte-level BPE with these special tokens; the last one is the end-of-text token."""
    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS * 5, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet)
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=begin, eos_token=special[-1]
    )
    added = [AddedToken(token, special=True, normalized=False, **how) for token in special]
    tokenizer.add_special_tokens({"additional_special_tokens": added})
    tokenizer.chat_template = template
    return tokenizer


@cache
def tokenizer_of(name: str) -> Any:
    family = FAMILIES[name]
    if name == "ours":
        return chat_tokenizer(TEXTS * 5, 320)
    return tokenizer_with(family.special, of_trl(family.template), begin=family.begin)


def turns(*contents: str, first: str = "user") -> Messages:
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[at % 2], "content": one} for at, one in enumerate(contents)]


def written(folder: Path, rows: Sequence[Any], *, held: Sequence[Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for part, made in (("train", rows), ("validation", held or rows[:1])):
        (folder / f"{part}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in made))
    return folder


def a_model(folder: Path, tokenizer: Any, *, positions: int = 1024, seed: int = 0) -> Path:
    """Save a small Llama with this tokenizer, like transformers."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=positions,
        initializer_range=0.3,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
