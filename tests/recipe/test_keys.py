"""Every key has an effect, is rejected, or is listed with the reason why this file cannot show its
effect."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import yaml

from oneloop.recipe.class_paths import resolve
from oneloop.recipe.key_parser import parser, types_of
from oneloop.recipe.key_rules import EXCLUDES, LEAST, MOST, NEEDS
from oneloop.recipe.synonyms import GONE
from worlds import CONFIGS, ROOT, run, train

pytestmark = pytest.mark.covers(
    "oneloop.launch.processes",
    "oneloop.recipe.class_paths",
    "oneloop.recipe.key_parser",
    "oneloop.recipe.key_rules",
    "oneloop.recipe.schema",
)

SHORT = [
    "--duration",
    "6",
    "--batch.size",
    "32",
    "--eval.every",
    "3",
    "--save.every",
    "3",
    "--track",
    "none",
]
BASE = ["digits", *SHORT, "--log.every", "1", "--ema.half_life", "64", "--machine.workers", "0"]
MASKED = r"[-+]?\d[\d.,]*(e-?\d+)?|task \w+|\S+/s"
DDP, SHARDED = {"ranks": 2, "config": "ddp"}, {"ranks": 2, "config": "fsdp2"}

EFFECTS: dict[str, tuple] = {
    "seed": ("1",),
    "duration": ("5",),
    "track": ("tensorboard",),
    "init.from": ("nowhere",),
    "init.weights": ("ema", "--init.from", "nowhere"),
    "data.shuffle": ("false",),
    "batch.size": ("64",),
    "batch.micro": ("16",),
    "batch.grain": ("8",),
    "optimizer.lr": ("0.01",),
    "optimizer.weight_decay": ("0.3",),
    "optimizer.clip": ("0.1",),
    "optimizer.lr_at_batch": ("64",),
    "optimizer.groups": ('{"*.bias": {"freeze": true}}',),
    "optimizer.layer_decay": ("0.5",),
    "optimizer.betas": ("[0.5, 0.9]",),
    "optimizer.eps": ("0.1",),
    "schedule.warmup": ("3",),
    "schedule.warmup_start": ("0", "--schedule.warmup", "3"),
    "schedule.warmup_offset": ("1", "--schedule.warmup", "3"),
    "schedule.length": ("4",),
    "schedule.final": ("0.5",),
    "ema.half_life": ("1",),
    "ema.decay": ("0.9", "--ema.half_life", "0"),
    "ema.power": ("[0.1]", "--ema.half_life", "0"),
    "ema.start": ("2", "--ema.decay", "0.9", "--ema.half_life", "0"),
    "ema.warmup_power": ("0.7", "--ema.decay", "0.9", "--ema.half_life", "0"),
    "ema.every": ("2",),
    "eval.every": ("2",),
    "eval.micro": ("0",),
    "eval.best": ("eval/nothing",),
    "save.every": ("2",),
    "save.keep": ("1",),
    "save.forever": ("2", "--save.every", "2", "--save.keep", "1"),
    "save.final": ("best", "--optimizer.lr", "1"),
    "log.every": ("2",),
    "watch.profile": ("2-3",),
    "watch.output": ("json",),
    "machine.workers": ("600",),
    "machine.dtype": ("float64",),
    "machine.sync_each_batch": ("true", "--batch.micro", "8", SHARDED),
    "machine.recompute": ("full",),
    "machine.offload": ("true",),
    "machine.compile": ("regional",),
    "machine.blocks": ("[Nowhere]", "--machine.recompute", "full"),
    "machine.channels_last": ("true",),
    "machine.check_every": ("0", DDP),
    "run.resume": ("nowhere",),
    "debug.overfit": ("32",),
    "debug.dry_run": ("true",),
}
"""a value that shows the key's effect, further options (the control run has them, too), and the
layout"""
LISTED = {
    "init.leave_out": "changes a start from other weights: tests/checkpoint/test_frozen_weights.py",
    "guard.sigma": "needs a spike: tests/optim/test_bad_step_policy.py",
    "guard.patience": "needs bad steps: tests/optim/test_bad_step_policy.py",
    "eval.generate": "metrics of what is generated: tests/task_protocol/test_generated.py",
    "eval.samples": "changes what the report shows: tests/show/test_examples.py",
    "stop.patience": "needs a worse evaluation: tests/optim/test_bad_step_policy.py",
    "stop.after": "needs a longer run: tests/checkpoint/test_resume.py",
    "save.best": "needs a worse evaluation: tests/checkpoint/test_resume.py",
    "machine.find_unused_parameters": "needs an unused parameter: tests/helpers/zoo.py",
    "machine.compile_mode": "needs a compiled model: tests/recipe/test_bad_input.py",
    "run.dir": "every run of this file gives it",
    "run.accept_changes": "changes a resume: tests/tasks/test_own_identity.py",
    "guard.nonfinite": "needs a bad step: tests/optim/test_bad_step_policy.py",
    "save.mirror": "changes no file of the run folder: tests/checkpoint/test_mirror.py",
    "machine.device": "needs a GPU: tests/launch/test_devices.py",
    "machine.base_dtype": "needs frozen matrices: tests/tasks/test_lora.py",
    "machine.deterministic": "a CPU's algorithms are deterministic",
    "machine.patience": "needs a hang: tests/supervise/test_endings.py",
    "ema.device": "changes where the weights are kept, and is a GPU's: tests/optim/test_ema.py",
    "ema.buffers": "needs buffers that change: tests/optim/test_ema.py",
    "watch.memory": "needs a GPU",
    "machine.pinned": "needs a GPU",
    "machine.matmul": "needs a GPU",
    "machine.cudnn_benchmark": "needs a GPU",
}
TASKS = (
    "image_classification",
    "causal_lm",
    "masked_lm",
    "sft",
    "reward",
    "seq2seq",
    "text_classification",
    "text_regression",
    "token_classification",
)
TASKS += ("text_pairs", "preference", "distil")
UNREAD = {"task.download": "a flag of torchvision's constructors"}


def keys_of(
    task: str = "image_classification", optimizer: str = "adamw", schedule: str = "cosine"
) -> set[str]:
    return set(types_of(parser(task, optimizer, schedule)))


def test_the_tables_hold_every_key():
    keys = {key for key in keys_of() if not key.startswith("task.") and not key.endswith(".name")}
    assert keys == EFFECTS.keys() | LISTED.keys() and not EFFECTS.keys() & LISTED.keys()
    limited = {key for group in LEAST.values() for key in group.split()}
    assert NEEDS.keys() | EXCLUDES.keys() | MOST.keys() | limited <= keys
    for key, reason in LISTED.items():
        for name in re.findall(r"\w+\.py", reason):
            (file,) = (ROOT / "tests").rglob(name)
            assert key.partition(".")[2] in file.read_text(), (key, file)


@pytest.mark.parametrize("task", TASKS)
def test_every_argument_of_a_task_is_read(task):
    """It is read by name in the constructor of the task, of a base class or of a class that gets
    the other arguments, or it is a field of one. ``needs`` names only known arguments."""
    kind = resolve("task", task)
    mine = {key.removeprefix("task.") for key in keys_of(task) if key.startswith("task.")} - {
        "name"
    }
    mine = {key.partition(".")[0] for key in mine}
    read: set[str] = set()
    left = [*kind.__mro__[:-1]]
    while left:
        one = left.pop()
        if not one.__module__.startswith("oneloop."):
            continue
        if dataclasses.is_dataclass(one):
            read |= {field.name for field in dataclasses.fields(one)}
        elif "__init__" in vars(one):
            (tree,) = ast.parse(
                inspect.cleandoc("\n" + inspect.getsource(one.__init__)).strip()
            ).body
            for node in ast.walk(tree):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                    read.add(node.id)
                # Class(**settings)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    called = getattr(sys.modules[one.__module__], node.func.id, None)
                    if inspect.isclass(called) and any(word.arg is None for word in node.keywords):
                        left.append(called)
    assert mine <= read, mine - read
    needs = getattr(kind, "needs", {})
    assert needs.keys() <= mine and set(re.findall(r"(\w+)!?=", " ".join(needs.values()))) <= mine


def seen_of(folder: Path, words: list[str], how: dict) -> tuple:
    """Return exit codes, files, weights, metrics without times, and output lines without
    numbers."""
    world = run(train, [*words, "--run.dir", "run"], folder=folder, **how)
    there = folder / "run"
    files = {
        path.relative_to(there).as_posix()
        for path in there.rglob("*")
        if "tfevents" not in path.name
    }
    weights = [
        hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((there / "final").glob("*.safetensors"))
    ]
    lines = (
        (there / "metrics.jsonl").read_text().splitlines()
        if (there / "metrics.jsonl").exists()
        else []
    )
    metrics = [
        {
            key: value
            for key, value in json.loads(line).items()
            if "per_second" not in key and key.startswith(("train/", "eval/", "test/"))
        }
        for line in lines
    ]
    printed = {
        re.sub(MASKED, "#", line)
        for line in world.output.splitlines()
        if not line.lstrip().startswith("step")
    }
    return world.codes, files, weights, metrics, printed


@pytest.mark.slow
@pytest.mark.parametrize("key", EFFECTS)
def test_every_key_has_an_effect(tmp_path, key):
    value, *rest = EFFECTS[key]
    how = rest.pop() if rest and isinstance(rest[-1], dict) else {}
    outcomes = []
    for name, more in (("without", []), ("again", []), ("with", [f"--{key}", value])):
        (tmp_path / name).mkdir()
        outcomes.append(seen_of(tmp_path / name, [*BASE, *rest, *more], how))
    without, again, changed = outcomes
    stable = [number for number in range(5) if without[number] == again[number]]
    assert any(without[number] != changed[number] for number in stable), changed


LAUNCHER = "read by accelerate's launcher, before oneloop"
ACCELERATE = {
    **dict.fromkeys(
        ("compute_environment", "num_machines", "num_processes", "main_process_port", "use_cpu"),
        LAUNCHER,
    ),
    **dict.fromkeys(("machine_rank", "main_process_ip", "rdzv_backend", "same_network"), LAUNCHER),
    "distributed_type": "one process, DDP or FSDP2: the start line names it",
    "mixed_precision": "the start line names it: tests/loop/test_same_weights.py",
    "fsdp_version": "1 is rejected",
    "fsdp_auto_wrap_policy": "what cannot be wrapped is rejected: "
    "tests/supervise/test_odd_endings.py and tests/recipe/test_settings.py",
    "fsdp_reshard_after_forward": "changes memory alone",
    "fsdp_state_dict_type": "a line at the start",
    "fsdp_cpu_ram_efficient_loading": "a line at the start",
    "fsdp_offload_params": "true is rejected",
    "fsdp_activation_checkpointing": "true is rejected",
    "parallelism_config_dp_replicate_size": "HSDP: tests/loop/test_same_weights.py",
    "parallelism_config_dp_shard_size": "HSDP: tests/loop/test_same_weights.py",
    "parallelism_config_tp_size": "above 1 is rejected",
    "parallelism_config_cp_size": "above 1 is rejected",
}


def test_the_table_holds_every_key_of_the_packaged_accelerate_configs():
    keys: set[str] = set()
    for file in CONFIGS.glob("*.yaml"):
        for key, value in yaml.safe_load(file.read_text()).items():
            keys |= set(value) if isinstance(value, dict) else {key}
    assert keys == ACCELERATE.keys()


@pytest.mark.parametrize(
    ("options", "expected_text"),
    [
        (["--fsdp_version", "1"], "fsdp_version 1 is not supported"),
        (["--fsdp_offload_params", "true"], "fsdp_offload_params true is not supported"),
        pytest.param(
            ["--fsdp_activation_checkpointing", "true"],
            "fsdp_activation_checkpointing true and",
            marks=pytest.mark.slow,
        ),
        ({"PARALLELISM_CONFIG_TP_SIZE": "2"}, "tensor, context or sequence"),
        pytest.param(
            {"PARALLELISM_CONFIG_CP_SIZE": "2"},
            "tensor, context or sequence",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_settings_of_accelerate_are_rejected_or_reported(tmp_path, options, expected_text):
    how = {"variables": options} if isinstance(options, dict) else {"options": options}
    world = run(train, ["digits", *SHORT], ranks=2, config="fsdp2", folder=tmp_path, **how)
    assert (
        world.codes == ([2, 2] if "=" not in expected_text and expected_text else [0, 0])
        and expected_text in world.output
    ), world.output


def test_the_page_of_all_keys_is_what_the_schema_states():
    page = runpy.run_path(str(ROOT / "docs" / "reference" / "make_keys.py"))
    assert page["PAGE"].read_text() == page["page"](), "run python docs/reference/make_keys.py"
    assert page["PACKAGED_KEYS"].read_text() == page["packaged_keys"]()
    assert len(page["page"]().splitlines()) <= 240


def test_every_key_has_a_reason():
    page = runpy.run_path(str(ROOT / "docs" / "reference" / "make_keys.py"))
    assert page["WHY"].read_text() == page["why_page"](), "run python docs/reference/make_keys.py"
    keys: set[str] = set()
    for group, choices in page["CHOICES"].items():
        for choice in choices:
            keys |= keys_of(**{group: choice})
    keys = {key for key in keys if not key.startswith("task.")}
    assert keys == page["reasons"]().keys() and not keys & GONE.keys()
    assert len(keys) <= 85
