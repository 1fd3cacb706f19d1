"""Losses on pairs of answers equal those of TRL's trainers at every step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import SequentialSampler

from preference_rows import a_llama, rows, write
from worlds import run, train

pytestmark = [
    pytest.mark.covers("oneloop.tasks.language.pairs", "oneloop.tasks.reward"),
    pytest.mark.slow,
]
STEPS = 40
BATCH = 8
COMMON = f"""
duration: {STEPS}
batch: {{size: {BATCH}}}
data: {{shuffle: false}}
optimizer: {{name: adamw, lr: 3e-4, weight_decay: 0, clip: 1.0, betas: [0.9, 0.999]}}
schedule: {{name: constant, warmup: 0}}
log: {{every: 1, noise_scale: false}}
eval: {{every: 0}}
track: none
run: {{dir: run}}
"""


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Write pairs to a file, in the order of training, and save a small Llama."""
    pytest.importorskip("trl")  # needs Python 3.11
    write(tmp_path / "data" / "train.jsonl", rows(STEPS * BATCH))
    write(tmp_path / "data" / "validation.jsonl", rows(8, seed=1))
    a_llama(tmp_path / "llama")
    return tmp_path


def ours(folder: Path, task: str) -> list[dict[str, float]]:
    """Train with oneloop; return the metrics of each step."""
    (folder / "recipe.yaml").write_text(f"{task}{COMMON}")
    run(train, ["recipe.yaml"], folder=folder).ok()
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "train/loss" in line]


def noting(trainer: type) -> type:
    """Return a subclass of a trainer that takes the pairs in order and notes its losses."""

    class Noting(trainer):  # type: ignore[misc]
        def __init__(self, *args: Any, **how: Any) -> None:
            self.losses: list[float] = []
            super().__init__(*args, **how)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **how: Any) -> Any:
            made = super().compute_loss(model, inputs, *args, **how)
            self.losses.append((made[0] if isinstance(made, tuple) else made).item())
            return made

        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(self.train_dataset if dataset is None else dataset)

    return Noting


def arguments(folder: Path) -> dict[str, Any]:
    """Return the settings of TRL that equal ours."""
    return {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": BATCH,
        "max_steps": STEPS,
        "learning_rate": 3e-4,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "max_length": 64,
    }


def data(*, margin: bool = False) -> Any:
    from datasets import Dataset

    columns = ["prompt", "chosen", "rejected"] + ["margin"] * margin
    return Dataset.from_list([{name: row[name] for name in columns} for row in rows(STEPS * BATCH)])


def furthest(one: Sequence[float], other: Sequence[float]) -> float:
    assert len(one) == len(other) == STEPS
    worst = float(np.abs(np.array(one) - np.array(other)).max())
    print(f"largest difference {worst:.1e}, losses {one[0]:.4f} to {one[-1]:.4f}")
    return worst


def test_rewards_with_margin_and_centering(made, monkeypatch):
    from trl import RewardConfig, RewardTrainer

    task = "task: {name: reward, data: data, model: llama, length: 64, margin: margin, centering: "
    found = ours(made, f"{task}0.05}}")

    # The new head is the same: it is a function of the seed. TRL pads with the tokenizer's token.
    monkeypatch.chdir(made)
    from oneloop.basics.seeds import key
    from oneloop.tasks.reward import Reward

    of_task = Reward("data", model="llama", length=64, margin="margin")
    torch.manual_seed(key(0))
    model: Any = of_task.model()
    model.set_attn_implementation("sdpa")
    trainer: Any = noting(RewardTrainer)(
        model=model,
        args=RewardConfig(**arguments(made), center_rewards_coefficient=0.05),
        train_dataset=data(margin=True),
        processing_class=transformers.AutoTokenizer.from_pretrained("llama"),
    )
    trainer.train()
    losses = [line["train/loss"] for line in found]
    assert losses[-1] < 0.7 * losses[0]
    assert furthest(losses, trainer.losses) < 1e-5
    logged = [line for line in trainer.state.log_history if "accuracy" in line]
    assert (
        furthest(
            [line["train/reward_accuracy"] for line in found], [line["accuracy"] for line in logged]
        )
        < 1e-6
    )
    assert (
        furthest(
            [line["train/reward_margin"] for line in found], [line["margin"] for line in logged]
        )
        < 1e-4
    )
