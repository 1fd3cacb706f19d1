"""Rows of pairs of answers, and a small Llama with a tokenizer, for tests of preferences."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any


def rows(count: int, *, seed: int = 0, texts: bool = False) -> list[dict[str, Any]]:
    """Return pairs of a right and a wrong sum, of different lengths, with margins."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        one, other = draw.randrange(9), draw.randrange(9)
        prompt = f"What is {one} plus {other}? "
        chosen = f"{one + other}" + " sure" * draw.randrange(4)
        rejected = f"{one + other + draw.randrange(1, 5)}" + " no" * draw.randrange(5)
        row: dict[str, Any] = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        if not texts:
            row = {
                "prompt": [{"role": "user", "content": prompt.strip()}],
                "chosen": [{"role": "assistant", "content": chosen}],
                "rejected": [{"role": "assistant", "content": rejected}],
            }
        made.append({**row, "margin": round(draw.random(), 3)})
    return made


def write(file: Path, values: list[dict[str, Any]]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in values))
    return str(file)


def a_tokenizer(pad: str = "<|pad|>") -> Any:
    """Return a ChatML tokenizer with this padding token, which may be its end token."""
    from oneloop.tasks.language.tokens import chat_tokenizer

    texts = ["What is 12 plus 345678? 90 sure no. system user assistant"] * 9
    tokenizer = chat_tokenizer(texts, 300)
    tokenizer.add_special_tokens({"pad_token": pad})
    return tokenizer


def a_llama(folder: Path, *, pad: str = "<|pad|>", **sizes: Any) -> Path:
    """Save a small new Llama for causal language modelling, with its tokenizer."""
    import torch
    import transformers

    tokenizer = a_tokenizer(pad)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=128,
        eos_token_id=tokenizer.eos_token_id,
        **{
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            **sizes,
        },
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder
