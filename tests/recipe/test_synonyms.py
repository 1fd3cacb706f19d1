"""Keys as other trainers name them lead to oneloop's key, at once: no task and no torch is
imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from oneloop.basics.exit_codes import BadInput
from oneloop.recipe.class_paths import only_task
from oneloop.recipe.key_parser import parser
from oneloop.recipe.parse import check_keys, find_recipe, read, recipe
from oneloop.recipe.synonyms import suggestion

pytestmark = pytest.mark.covers(
    "oneloop.cli",
    "oneloop.recipe.class_paths",
    "oneloop.recipe.key_parser",
    "oneloop.recipe.parse",
    "oneloop.recipe.synonyms",
    "oneloop.recipe.schema",
    "oneloop.tasks.sft",
)

NEWCOMERS = {
    "epochs": "duration",
    "num_train_epochs": "duration",
    "max_epochs": "duration",
    "max_steps": "duration",
    "learning_rate": "optimizer.lr",
    "lr": "optimizer.lr",
    "base_lr": "optimizer.lr",
    "batch_size": "batch.size",
    "train_batch_size": "batch.size",
    "per_device_train_batch_size": "batch.micro",
    "gradient_accumulation_steps": "batch.micro",
    "accumulate_grad_batches": "batch.micro",
    "warmup_ratio": "schedule.warmup",
    "warmup_steps": "schedule.warmup",
    "warmup_epochs": "schedule.warmup",
    "lr_scheduler_type": "schedule.name",
    "sched": "schedule.name",
    "min_lr": "schedule.final",
    "weight_decay": "optimizer.weight_decay",
    "max_grad_norm": "optimizer.clip",
    "gradient_clip_val": "optimizer.clip",
    "clip_grad": "optimizer.clip",
    "optim": "optimizer.name",
    "opt": "optimizer.name",
    "gradient_checkpointing": "machine.recompute",
    "enable_activation_checkpointing": "machine.recompute",
    "torch_compile": "machine.compile",
    "early_stopping": "stop.patience",
    "save_steps": "save.every",
    "save_total_limit": "save.keep",
    "eval_steps": "eval.every",
    "val_check_interval": "eval.every",
    "metric_for_best_model": "eval.best",
    "logging_steps": "log.every",
    "report_to": "track",
    "output_dir": "run.dir",
    "default_root_dir": "run.dir",
    "resume_from_checkpoint": "run.resume",
    "num_workers": "machine.workers",
    "model_ema_decay": "ema.decay",
    "label_smoothing": "task.smoothing",
    "mixup_alpha": "task.mixup",
    "aug_repeats": "task.repeats",
    "crop_pct": "task.test_crop",
    "ratio": "task.crop_ratio",
    "run.seed": "seed",
    "task.epochs": "duration",
    "batch.siez": "batch.size",
}
LAUNCHER = {
    "bf16": "--mixed_precision",
    "precision": "--mixed_precision",
    "fp16": "--mixed_precision",
}
LAUNCHER |= {"devices": "--num_processes", "num_nodes": "--num_machines"}


def test_every_name_of_another_trainer_leads_to_the_key():
    known = [action.dest for action in parser("image_classification", "adamw", "cosine")._actions]
    found = {name: suggestion(name, known) for name in NEWCOMERS}
    assert found == {name: f"; did you mean {key!r}?" for name, key in NEWCOMERS.items()}
    for name, option in LAUNCHER.items():
        assert (
            f"an option of the launcher; use oneloop launch --config_file ddp {option}"
            in suggestion(name, known)
        )
    assert "use oneloop launch --config_file fsdp2 RECIPE" in suggestion("strategy", known)
    assert suggestion("nothing_like_it", known) == ""


def test_a_key_that_the_task_lacks_is_not_suggested():
    known = [action.dest for action in parser("causal_lm", "adamw", "cosine")._actions]
    assert suggestion("label_smoothing", known) == "" and "task.block" in suggestion(
        "max_seq_length", known
    )


REJECTED = {
    "--learning_rate 3": "unknown key 'learning_rate'; did you mean 'optimizer.lr'?",
    "--optimizer.beta 3": "unknown key 'optimizer.beta'; did you mean 'optimizer.betas'?",
    "--optimizer sgd --optimizer.betas [1,2]": "unknown key 'optimizer.betas'",
    "--batch.size many": "batch.size must be a whole number",
    "--sync_ref_model true": ": The reference is the model before the first step",
    "--task.precompute_ref_log_probs true": "the reference once, before its first step",
    "--bf16 true": "oneloop launch --config_file ddp --mixed_precision bf16 RECIPE",
}


def test_a_key_that_is_gone_says_what_to_do_instead(tmp_path):
    key, sentence = "schedule.pct_start", "It is an argument of torch's class; set schedule.name "
    (tmp_path / "old.yaml").write_text("task: digits\nschedule: {name: cosine, pct_start: 0.3}\n")
    in_python = {"task": "image_classification", "schedule": {"name": "cosine", "pct_start": 0.3}}
    for wrong in (
        lambda: check_keys(["digits", "--schedule", "cosine", f"--{key}", "0.3"]),
        lambda: check_keys([str(tmp_path / "old.yaml"), "--task", "image_classification"]),
        lambda: recipe(**in_python),
    ):
        with pytest.raises(BadInput) as rejected:
            wrong()
        assert str(rejected.value).startswith(f"unknown key {key!r}: {sentence}")
        assert "--help" not in str(rejected.value)


AT_ONCE = """
import sys
from oneloop.cli import main
code = main(["launch", "--config_file", sys.argv[1], "digits", *sys.argv[2:]])
assert code == 2 and not {"torch", "accelerate"} & sys.modules.keys(), code
"""


@pytest.mark.parametrize("words", REJECTED)
def test_a_wrong_key_is_rejected_without_torch_and_accelerate(words, tmp_path):
    with pytest.raises(BadInput) as rejected:
        check_keys(["digits", *words.split()])
    with pytest.raises(BadInput) as again:
        read(["digits", *words.split()])
    assert REJECTED[words] in str(rejected.value) and str(rejected.value) == str(again.value)
    if words == "--learning_rate 3":
        for config in ("single", "ddp"):
            command = [sys.executable, "-c", AT_ONCE, config, *words.split()]
            done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
            assert done.returncode == 0 and REJECTED[words] in done.stderr, done.stderr


def test_a_wrong_key_of_a_packaged_choice_is_known_without_an_import():
    for words in ("sft --task.lora.nothing 1", "digits --optimizer sgd --optimizer.betas 1"):
        with pytest.raises(BadInput, match=r"unknown key '(task.lora.nothing|optimizer.betas)'"):
            check_keys(words.split())


def test_the_keys_of_an_own_task_wait_for_its_import(tmp_path):
    (tmp_path / "own.py").write_text("raise ValueError('imported')\n")
    own = f"{tmp_path / 'own.py'}:Own"
    check_keys([own, "--task.widths", "2", "--mixup", "1", "--batch.size", "8"])
    for words in ("--batch.siez 3", "--optimizer.beta 3", "--batch.size many"):
        with pytest.raises(BadInput, match=words.split()[0][2:]):
            check_keys([own, *words.split()])


def test_right_keys_pass():
    for words in (
        "--batch.size 32",
        "--optimizer muon --optimizer.momentum 0.9",
        "--schedule wsd --schedule.decay 5%",
    ):
        check_keys(["digits", *words.split()])
    check_keys(["sft", "--task.lora.rank", "1"])


FILES = {
    "one.py": (
        (
            "class Own:\n    def model(self): ...\n    def loss(self, model, batch): ...\nclass "
            "Net: pass\n"
        ),
        "one.py:Own",
    ),
    "derived.py": ("from oneloop.tasks.sft import SFT\nclass Mine(SFT): pass\n", "derived.py:Mine"),
    "two.py": (
        "class A:\n    def model(self): ...\n    def loss(self, m, b): ...\nclass B(A): pass\n",
        r"'own_two.py' has 2 tasks \(A, B\); name the class: own_two.py:A",
    ),
    "none.py": (
        "class Net: pass\n",
        r"no class with model\(\) and loss\(\) or batch_loss\(\); name the class: own_none.py",
    ),
    "whole_batch.py": (
        (
            "class Own:\n    def model(self): ...\n    def embed(self, model, batch): ...\n"
            "    def batch_loss(self, parts, columns): ...\n"
        ),
        "whole_batch.py:Own",
    ),
    "assigned.py": (
        "def loss(self, m, b): ...\nclass Own:\n    def model(self): ...\n    loss = loss\n",
        "assigned.py:Own",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_with_one_task_needs_no_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    file = f"own_{name}"  # a module's name must be free
    text, expected = FILES[name]
    (tmp_path / file).write_text(text)
    typed: dict[str, str] = {}
    assert find_recipe(file, typed) == (file.removesuffix(".py"), {})
    assert typed == {"task.name": f"{file}:"}
    if len(expected) > 20:
        with pytest.raises(BadInput, match=expected):
            only_task(f"{file}:")
        return
    assert only_task(f"{file}:") == f"own_{expected}"
