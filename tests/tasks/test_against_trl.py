"""The losses equal those of TRL's SFTTrainer at every step, and are the same on every parallel
layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from lessons import lesson_texts, lessons
from oneloop.basics.seeds import key
from oneloop.data.order import order_of
from oneloop.tasks.language.tokens import chat_tokenizer
from oneloop.tasks.sft import SFT
from worlds import run, train

pytestmark = [
    pytest.mark.covers(
        "oneloop.tasks.language.tokens",
        "oneloop.tasks.sft",
    ),
    pytest.mark.slow,
]
STEPS, BATCH = 40, 16
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}
COMMON = [
    "--task.model",
    "llama",
    "--task.data",
    "data",
    "--task.length",
    "256",
    "--duration",
    str(STEPS),
]
COMMON += [
    "--batch.size",
    str(BATCH),
    "--optimizer.name",
    "adamw",
    "--optimizer.lr",
    "2e-3",
    "--optimizer.clip",
    "1.0",
]
COMMON += [
    "--optimizer.weight_decay",
    "0",
    "--schedule.name",
    "constant",
    "--schedule.warmup",
    "0",
    "--log.every",
    "1",
]
COMMON += [
    "--optimizer.betas",
    "[0.9,0.999]",
    "--eval.every",
    "0",
    "--track",
    "none",
]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Write conversations to files, and save a small Llama with its tokenizer."""
    (tmp_path / "data").mkdir()
    for part in ("train", "validation"):
        lines = [json.dumps({"messages": one}) for one in lessons(part)[:800]]
        (tmp_path / "data" / f"{part}.jsonl").write_text("\n".join(lines))
    tokenizer = chat_tokenizer(
        lesson_texts("train"),
        400,
    )
    tokenizer.save_pretrained(tmp_path / "llama")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        intermediate_size=128,
        max_position_embeddings=256,
        eos_token_id=1,
        **SIZES,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    return tmp_path


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


def test_the_losses_are_those_of_trl(made, monkeypatch):
    pytest.importorskip("trl")  # needs Python 3.11
    words = ["sft", *COMMON, "--task.pack", "padded"]
    run(train, [*words, "--run.dir", "ours"], folder=made).ok()
    ours = losses(made / "ours")

    from trl import SFTConfig, SFTTrainer

    monkeypatch.chdir(made)
    task = SFT("data", model="llama", length=256, pack="padded")
    torch.manual_seed(key(0))
    model = task.model()
    model.set_attn_implementation("sdpa")
    train_set = task.train_set()
    _, ids = order_of(train_set, seed=0, batch=BATCH)[0 : STEPS * BATCH]
    ends = task.rows.tokens("data/train.jsonl", task.rows.kinds, task.rows.encode)[0].ends
    texts = np.searchsorted(ends, train_set.starts[ids], side="right")
    rows = [lessons("train")[:800][text] for text in texts.tolist()]

    from datasets import Dataset

    theirs = []

    class Noting(SFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            theirs.append((loss[0] if isinstance(loss, tuple) else loss).item())
            return loss

    how: dict[str, Any] = {
        "per_device_train_batch_size": BATCH,
        "max_steps": STEPS,
        "learning_rate": 2e-3,
    }
    how |= {
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "report_to": [],
        "use_cpu": True,
    }
    how |= {
        "train_sampling_strategy": "sequential",
        "disable_tqdm": True,
        "save_strategy": "no",
        "max_length": 257,
    }
    how |= {
        "assistant_only_loss": True,
        "gradient_checkpointing": False,
        "bf16": False,
        "shuffle_dataset": False,
    }
    trainer = Noting(
        model=model,
        args=SFTConfig(str(made / "trl"), **how),
        train_dataset=Dataset.from_list([{"messages": row} for row in rows]),
        processing_class=task.tokenizer,
    )
    trainer.train()
    assert len(ours) == len(theirs) == STEPS and ours[-1] < 0.8 * ours[0]
    worst = float(np.abs(np.array(ours) - np.array(theirs)).max())
    print(f"largest difference {worst:.1e}, losses {ours[0]:.4f} to {ours[-1]:.4f}")
    assert worst < 1e-4


@pytest.mark.parametrize("pack", ["packed", "padded"])
def test_accumulated_on_two_processes_it_is_the_big_batch(made, pack):
    found = {}
    ways = {
        "big": ("single", 1, []),
        "ddp": ("ddp", 2, ["--batch.micro", "2"]),
        "fsdp2": ("fsdp2", 2, ["--batch.micro", "2"]),
    }
    for way, (config, ranks, words) in ways.items():
        words = ["sft", *COMMON, "--task.pack", pack, *words, "--run.dir", way]
        run(train, words, ranks=ranks, config=config, folder=made).ok()
        found[way] = losses(made / way)
    for way in ("ddp", "fsdp2"):  # four micro-batches on each of two processes
        worst = max(abs(a - b) for a, b in zip(found[way], found["big"], strict=True))
        print(
            f"{pack}, {way}: largest difference {worst:.1e}, losses {found['big'][0]:.4f} to "
            f"{found['big'][-1]:.4f}"
        )
        assert worst < 1e-4
