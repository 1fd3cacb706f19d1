"""Losses on pairs of answers equal those of TRL's trainers at every step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import SequentialSampler

from border_pairs import ROWS, TOKENIZERS, tokenizer_of
from preference_rows import a_llama, rows, write
from worlds import run, train

pytestmark = [
    pytest.mark.covers(
        "oneloop.tasks.language.pairs",
        "oneloop.tasks.language.preference_losses",
        "oneloop.tasks.preference",
        "oneloop.tasks.reward",
    ),
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
log: {{every: 1}}
eval: {{every: 0}}
track: none
run: {{dir: run}}
"""


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Write pairs to a file, in the order of training, and save a small Llama."""
    pytest.importorskip("trl")  # needs Python 3.11
    for name, texts in (("data", False), ("texts", True)):
        write(tmp_path / name / "train.jsonl", rows(STEPS * BATCH, texts=texts))
        write(tmp_path / name / "validation.jsonl", rows(8, seed=1, texts=texts))
    a_llama(tmp_path / "llama")
    return tmp_path


def ours(folder: Path, task: str) -> list[dict[str, float]]:
    """Train with oneloop; return the metrics of each step."""
    (folder / "recipe.yaml").write_text(f"{task}{COMMON}")
    shutil.rmtree(folder / "run", ignore_errors=True)
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


def data(*, texts: bool = False) -> Any:
    """Return the rows for TRL. Only its rewards have a margin."""
    from datasets import Dataset

    columns = ["prompt", "chosen", "rejected"] + ["margin"] * (not texts)
    values = rows(STEPS * BATCH, texts=texts)
    return Dataset.from_list([{name: row[name] for name in columns} for row in values])


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
        train_dataset=data(),
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
        < 1e-5
    )


def preference(folder: Path, keys: str) -> list[float]:
    task = "task: {name: preference, data: texts, model: llama, length: 64, pack: padded"
    return [line["train/loss"] for line in ours(folder, f"{task}, {keys}}}")]


def theirs(folder: Path, trainer: type, config: type, **how: Any) -> Any:
    """Train with a trainer of TRL; return it."""
    model = transformers.AutoModelForCausalLM.from_pretrained("llama", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained("llama")
    made: Any = noting(trainer)(
        model=model,
        args=config(**arguments(folder), **how),
        train_dataset=data(texts=True),
        processing_class=tokenizer,
    )
    made.train()
    return made


@pytest.mark.parametrize("name", TOKENIZERS)
def test_forty_pairs_of_texts_have_the_tokens_of_trl(name):
    trainer = pytest.importorskip("trl").DPOTrainer  # needs Python 3.11
    from datasets import Dataset

    from oneloop.tasks.language.pairs import encoded_pair

    tokenizer = tokenizer_of(name)
    settings = SimpleNamespace(dataset_num_proc=None, max_length=None, truncation_mode="keep_start")
    found = 0
    for row in ROWS:
        # TRL prepares the row; its tokenizer adds a second end token, which ours does not keep.
        given = SimpleNamespace(_tokenizer=tokenizer)
        prepared = trainer._prepare_dataset(
            given, Dataset.from_list([row]), tokenizer, settings, "train"
        )[0]
        expected = []
        for side in ("chosen", "rejected"):
            answer = prepared[f"{side}_ids"]
            expected.append(answer[:-1] if answer[-2:-1] == answer[-1:] else answer)

        # Without a common token, TRL leaves out the first token of both answers: we reject it.
        columns = {key: key if key in row else "" for key in ("prompt", "chosen", "rejected")}
        columns |= {"tools": "", "system": ""}
        if not prepared["prompt_ids"]:
            with pytest.raises(ValueError, match="or its first token continues into the answer"):
                encoded_pair(row, columns, tokenizer, None, length=200)
            continue
        pair = encoded_pair(row, columns, tokenizer, None, length=200)
        sides = [pair[2 : 2 + pair[0]], pair[2 + pair[0] :]]
        assert [side[side >= 0].tolist() for side in sides] == expected, row
        assert [(~side[side < 0]).tolist() for side in sides] == [prepared["prompt_ids"]] * 2
        found += 1
    assert len(ROWS) == 40 and found >= 30


DPO = {
    # TRL's sigmoid loss ignores label_smoothing; ours does not (conservative DPO).
    "sigmoid": ("loss: dpo, beta: 0.5", {"beta": 0.5, "label_smoothing": 0.2}),
    # TRL's IPO compares means over the tokens of an answer; the paper's compares sums.
    "ipo": ("loss: ipo_mean, beta: 0.5", {"beta": 0.5}),
    "robust": (
        "loss: robust, beta: 0.5, label_smoothing: 0.2",
        {"beta": 0.5, "label_smoothing": 0.2},
    ),
    "hinge": ("loss: hinge, beta: 0.5", {"beta": 0.5}),
}


@pytest.mark.parametrize("loss", DPO)
def test_losses_with_a_reference(made, monkeypatch, loss):
    from trl import DPOConfig, DPOTrainer

    keys, how = DPO[loss]
    found = preference(made, keys)
    monkeypatch.chdir(made)
    trainer = theirs(
        made, DPOTrainer, DPOConfig, loss_type=[loss], precompute_ref_log_probs=True, **how
    )
    assert furthest(found, trainer.losses) < 1e-5 and found[-1] < 0.97 * found[0]

    # The differences that are named above are real.
    if loss == "sigmoid":
        smooth = preference(made, f"{keys}, label_smoothing: 0.2, store: other")
        assert furthest(smooth, trainer.losses) > 0.01
    if loss == "ipo":
        sums = preference(made, "loss: ipo, beta: 0.5, store: other")
        assert furthest(sums, trainer.losses) > 0.01


def test_log_probabilities_of_tokens_and_answers(made, monkeypatch):
    from trl import DPOConfig, DPOTrainer

    from oneloop.tasks.preference import Preference

    monkeypatch.chdir(made)
    task = Preference("texts", model="llama", length=64, pack="padded")
    model = task.model().eval()
    pairs = task.train_set()
    pairs.outputs = None  # the loss is not computed
    batch = task.collate([pairs[index] for index in range(32)])
    with torch.no_grad():
        logp = -task.token_losses(model, batch)
        plain = transformers.AutoModelForCausalLM.from_pretrained("llama")
        logits = plain(batch["input"]).logits.log_softmax(-1)
    target = batch["target"]
    of_tokens = logits.gather(-1, target.clamp(min=0)[..., None])[..., 0] * (target >= 0)
    assert (logp - of_tokens).abs().max() < 1e-5

    trainer = theirs(made, DPOTrainer, DPOConfig, precompute_ref_log_probs=True)
    for side, sums in zip(("chosen", "rejected"), task._answer_sums(logp, batch), strict=True):
        expected = trainer.train_dataset[f"ref_{side}_logps"][:32]
        assert sums.tolist() == pytest.approx(list(expected), abs=2e-5)


def test_simpo(made, monkeypatch):
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    found = preference(made, "loss: simpo, beta: 2.0, margin: 0.5")
    monkeypatch.chdir(made)
    # Without its coefficient, TRL adds a loss on the chosen answers (CPO-SimPO).
    how = {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.5, "beta": 2.0}
    trainer = theirs(made, CPOTrainer, CPOConfig, **how)
    assert furthest(found, trainer.losses) < 1e-5 and found[-1] < 0.97 * found[0]


def test_orpo(made, monkeypatch):
    """TRL's first term covers the prompt, too, and is a mean over the tokens of a batch. With the
    paper's in its place, its losses are ours."""
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    class AsInThePaper(ORPOTrainer):
        def concatenated_forward(self, model: Any, batch: Any) -> Any:
            chosen, *others, _ = super().concatenated_forward(model, batch)
            return (chosen, *others, -chosen.mean())

    found = preference(made, "loss: orpo, beta: 0.2")
    monkeypatch.chdir(made)
    trainer = theirs(made, AsInThePaper, ORPOConfig, beta=0.2)
    assert furthest(found, trainer.losses) < 1e-5 and found[-1] < 0.97 * found[0]
    plain = theirs(made, ORPOTrainer, ORPOConfig, beta=0.2)
    assert furthest(found, plain.losses) > 0.01
