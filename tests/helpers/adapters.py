"""A small base model, adapters trained on it, and the distance between two adapters."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from lessons import lesson_texts
from worlds import run, train

SPLITS = [("single", 1), ("ddp", 2), ("fsdp2", 2)]


WORDS = [
    "sft",
    "--task.length",
    "96",
    "--task.pack",
    "padded",
    "--optimizer.lr",
    "0.001",
    "--schedule.name",
    "constant",
    "--schedule.warmup",
    "0",
    "--batch.size",
    "8",
    "--track",
    "none",
    "--eval.every",
    "0",
    "--log.every",
    "1",
    "--eval.samples",
    "0",
    "--run.dir",
    "run",
]


def a_base(
    folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, kind: str = "Llama"
) -> Path:
    """Save a small Llama (or another ``kind`` of model) with a tokenizer, like transformers.

    Its matrices fill whole blocks of bitsandbytes.
    """
    from oneloop.tasks.language.tokens import chat_tokenizer

    tokenizer = chat_tokenizer(lesson_texts("validation"), 320)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    names = {"Gemma3": "Gemma3TextConfig"}
    config = getattr(transformers, names.get(kind, f"{kind}Config"))(
        vocab_size=len(tokenizer),
        max_position_embeddings=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
    )
    getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).save_pretrained(folder)
    return folder


def of_words(
    folder: Path, *more: str, config: str = "single", ranks: int = 1, timeout: float = 120
):
    return run(train, [*WORDS, *more], ranks=ranks, config=config, folder=folder, timeout=timeout)


def adapters_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "run" / "final" / "adapter_model.safetensors")


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two adapters, as a share of the largest weight."""
    assert one.keys() == other.keys()
    scale = max(tensor.abs().max().item() for tensor in other.values())
    largest = max((one[name] - other[name]).abs().max().item() for name in one)
    return largest / scale
