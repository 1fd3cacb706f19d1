"""Models, optimizers and data are used as given: dtypes, learning rates, metrics, data splits. A
run is bit-identical with and without the preflight check."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from oneloop.job.model import in_dtype
from oneloop.optim.optimizers import adamw, build, set_lr
from oneloop.recipe.key_rules import described
from oneloop.tasks.causal_lm import CausalLM
from oneloop.tasks.rows.find_files import found
from oneloop.tasks.rows.text_files import TextFile
from oneloop.tools.run_reader import Curve, read_record
from silent_cases import ALL, BASE
from tiny import Ragged, training_flops
from worlds import ROOT, here, run, train

pytestmark = pytest.mark.covers(
    "oneloop.checks.dry_run",
    "oneloop.checks.questions",
    "oneloop.checks.metrics",
    "oneloop.checks.preflight",
    "oneloop.checks.samples",
    "oneloop.job.model",
    "oneloop.machine.recompute",
    "oneloop.optim.optimizers",
    "oneloop.recipe.key_rules",
    "oneloop.tasks.causal_lm",
    "oneloop.tasks.columns",
    "oneloop.tasks.rows.text_files",
    "oneloop.tasks.rows.arrow_tables",
    "oneloop.tasks.rows.find_files",
    "oneloop.tasks.rows.open_data",
    "oneloop.tools.run_reader",
)

# --- models
# --------------------------------------------------------------------------------------------------


def test_machine_dtype_is_for_float32_alone():
    model = nn.ModuleDict(
        {
            "narrow": nn.Linear(2, 2).bfloat16(),
            "single": nn.Linear(2, 2),
            "wide": nn.Linear(2, 2).double(),
        }
    )
    model.register_parameter("complex", nn.Parameter(torch.ones(3, dtype=torch.complex64)))
    model.register_buffer("count", torch.zeros((), dtype=torch.int64))
    before = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    in_dtype(model, torch.float32)
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == before
    in_dtype(model, torch.float64)
    after = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    expected = {
        name: torch.float64 if dtype is torch.float32 else dtype for name, dtype in before.items()
    }
    assert after == expected and isinstance(model.complex, nn.Parameter)


@pytest.mark.parametrize(
    ("ranks", "config"), [(1, "single"), pytest.param(2, "ddp", marks=pytest.mark.slow)]
)
def test_complex_weights_train_are_kept_and_come_back(tmp_path, ranks, config):
    (tmp_path / "mine.py").write_text(BASE + ALL["complex weights"].task)
    typed = [
        "digits",
        "--task",
        "mine.Mine",
        "--duration",
        "12",
        "--batch.size",
        "8",
        "--track",
        "none",
    ]
    typed += ["--save.every", "6", "--save.keep", "9", "--ema.half_life", "20"]
    run(here, [*typed, "--run.dir", "a"], ranks=ranks, config=config, folder=tmp_path).ok()
    final = load_file(tmp_path / "a" / "final" / "model.safetensors")
    assert final["w"].dtype == torch.complex64 and not torch.equal(
        final["w"], torch.full((8,), 0.1 + 0j)
    )
    import shutil

    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b" / "final")
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "step-00000012")
    (tmp_path / "b" / "summary.json").unlink()
    run(here, [*typed, "--run.dir", "b"], ranks=ranks, config=config, folder=tmp_path).ok()
    for name in ("model", "ema"):
        one, other = (
            (tmp_path / run / "final" / f"{name}.safetensors").read_bytes() for run in "ab"
        )
        assert one == other


UNUSED = """
from tiny import Ragged, Net

class More(Net):
    def __init__(self, *given):
        super().__init__(*given)
        self.more = __import__("torch").nn.Linear(3, 3)

class Unused(Ragged):
    def model(self):
        return More(self.width, self.dropout)
"""


@pytest.mark.slow
def test_unused_parameters_train_alike_everywhere(tmp_path):
    (tmp_path / "unused.py").write_text(UNUSED)
    typed = [
        "digits",
        "--task",
        "unused.Unused",
        "--duration",
        "10",
        "--batch.size",
        "8",
        "--track",
        "none",
    ]
    typed += ["--optimizer.weight_decay", "0.1", "--machine.find_unused_parameters", "true"]
    found = []
    for ranks, config in ((1, "single"), (2, "ddp"), (2, "fsdp2")):
        for micro in (8 // ranks, 2):
            name = f"{config}-{micro}"
            more = ["--batch.micro", str(micro), "--run.dir", name]
            run(here, [*typed, *more], ranks=ranks, config=config, folder=tmp_path).ok()
            found.append(load_file(tmp_path / name / "final" / "model.safetensors"))
    for other in found[1:]:
        assert all(torch.allclose(other[name], found[0][name], rtol=0, atol=1e-6) for name in other)


# --- optimizers
# --------------------------------------------------------------------------------------------------


def two_rates(params, *, lr: float, model: nn.Module):
    """Return an AdamW with a tenth of the learning rate for the first layer."""
    first = {id(parameter) for parameter in model[0].parameters()}
    flat = [parameter for group in params for parameter in group["params"]]
    groups = [
        {"params": [p for p in flat if id(p) in first], "lr": 0.1 * lr},
        {"params": [p for p in flat if id(p) not in first]},
    ]
    return torch.optim.AdamW(groups, lr=lr, weight_decay=0.0)


def test_each_group_keeps_its_share_of_the_rate():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = build(two_rates, model, lr=0.02, weight_decay=0.0)
    assert set_lr(optimizer, 0.005) == 0.005
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.0005, 0.005])
    plain = build(adamw, model, lr=0.02, weight_decay=0.1)
    set_lr(plain, 0.1 + 0.2)
    assert [group["lr"] for group in plain.param_groups] == [0.1 + 0.2] * 2  # bit-identical


def test_groups_of_an_own_optimizer_in_a_run(tmp_path):
    (tmp_path / "mine.py").write_text(
        BASE + "    pass\n" + "\n\ndef rates(params, *, lr: float, model):\n"
        "    first = {id(p) for p in model[0].parameters()}\n    flat = [p for g in params for "
        "p in g['params']]\n"
        "    return torch.optim.AdamW([{'params': [p for p in flat if id(p) in first], 'lr': "
        "0.0 * lr},\n"
        "        {'params': [p for p in flat if id(p) not in first]}], lr=lr, weight_decay=0.0)\n"
    )
    typed = [
        "digits",
        "--task",
        "mine.Mine",
        "--duration",
        "5",
        "--batch.size",
        "8",
        "--track",
        "none",
    ]
    typed += ["--optimizer.name", "mine.rates", "--run.dir", "run"]
    run(here, typed, folder=tmp_path).ok()
    final = load_file(tmp_path / "run" / "final" / "model.safetensors")
    from oneloop.basics.seeds import key

    torch.manual_seed(key(0))
    start = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).state_dict()
    assert torch.equal(final["0.weight"], start["0.weight"]) and not torch.equal(
        final["2.weight"], start["2.weight"]
    )


# --- metrics
# --------------------------------------------------------------------------------------------------


class Measured(Ragged):
    """Also logs the token-weighted mean length of the sequences, and the mean of their squared
    lengths."""

    def loss(self, model, batch):
        loss, outputs = super().loss(model, batch)
        known = (batch["target"] != -100).sum(1)
        metrics = {
            "length": (known * known).sum() / known.sum(),
            "squares": known.double().square().mean(),
        }
        return loss, {**outputs, **metrics}


@pytest.mark.parametrize(
    ("ranks", "config", "micro"),
    [
        pytest.param(1, "single", 8, marks=pytest.mark.slow),
        (1, "single", 2),
        pytest.param(2, "ddp", 2, marks=pytest.mark.slow),
        pytest.param(2, "fsdp2", 4, marks=pytest.mark.slow),
    ],
)
def test_metrics_of_the_loss_are_logged_as_weighted_means(tmp_path, ranks, config, micro):
    (tmp_path / "r.yaml").write_text("task: {name: test_as_they_are.Measured}\n")
    typed = [
        "r.yaml",
        "--duration",
        "12",
        "--batch.size",
        "8",
        "--batch.micro",
        str(micro),
        "--track",
        "none",
    ]
    typed += ["--log.every", "4", "--save.every", "3", "--save.keep", "9", "--run.dir", "a"]
    run(train, typed, ranks=ranks, config=config, folder=tmp_path).ok()
    lines = [
        json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    ]
    found = [
        (line["train/length"], line["train/squares"]) for line in lines if "train/loss" in line
    ]
    import numpy as np

    from oneloop.data.order import Order

    samples, order = Ragged().train_set().samples, Order(37, seed=0)
    for number, (length, squares) in enumerate(found):
        lengths = [
            len(samples[i]) - 1
            for i in order.at(np.arange(32 * number, 32 * (number + 1)))[1].tolist()
        ]
        assert length == pytest.approx(sum(n * n for n in lengths) / sum(lengths), rel=1e-6)
        parts = [lengths[at : at + micro] for at in range(0, 32, micro)]
        expected = sum(sum(part) * sum(n * n for n in part) / len(part) for part in parts) / sum(
            lengths
        )
        assert squares == pytest.approx(expected, rel=1e-6)
    import shutil

    for path in (tmp_path / "a" / "checkpoints").iterdir():
        # step 6 is between two log lines, so its checkpoint holds a partial mean
        if int(path.name[5:]) > 6:
            shutil.rmtree(path)
    shutil.rmtree(tmp_path / "a" / "final")
    (tmp_path / "a" / "summary.json").unlink()
    run(train, typed, ranks=ranks, config=config, folder=tmp_path).ok()
    lines = [
        json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [
        (line["train/length"], line["train/squares"]) for line in lines if "train/loss" in line
    ] == found


# --- preflight check
# --------------------------------------------------------------------------------------------------


def test_recompute_is_not_counted_twice():
    from oneloop.machine.recompute import recompute

    task = CausalLM(
        str(ROOT / "docs" / "reference" / "data.md"), layers=2, width=32, heads=2, block=32
    )
    batch = task.collate([task.train_set()[i] for i in range(2)])
    counts = set()
    for kind in ("none", "full", "selective"):
        torch.manual_seed(0)
        model = task.model()
        recompute(model, kind)
        counts.add(training_flops(model, task.loss, batch))
    assert len(counts) == 1


TEACHER = (
    BASE
    + """
    def __init__(self):
        super().__init__()
        self.teacher, self.calls = nn.Linear(1, 1), []

    def loss(self, model, batch):
        devices = {str(one.device) for one in (*model.parameters(), batch["x"])}
        self.teacher.to(batch["x"].device)  # on the meta device that would lose it
        self.calls.append(devices)
        assert devices == {"cpu"}
        print("CALL", len(batch["x"]), model.training)
        return (model(batch["x"]) - self.teacher(batch["x"]).detach()).square().sum(), {}
"""
)


def test_the_loss_is_called_on_real_samples_only_and_not_often(tmp_path):
    (tmp_path / "mine.py").write_text(TEACHER)
    typed = [
        "digits",
        "--task",
        "mine.Mine",
        "--duration",
        "2",
        "--batch.size",
        "8",
        "--run.dir",
        "run",
    ]
    world = run(here, [*typed, "--eval.every", "0", "--eval.samples", "0"], folder=tmp_path)
    world.ok()
    calls = [line.split()[1:] for line in world.output.splitlines() if line.startswith("CALL")]
    tried = calls[: next(at for at, call in enumerate(calls) if call == ["8", "True"])]
    # the batch twice, then each sample alone
    trained = 2 * [["4", "True"]] + 4 * [["1", "True"]]
    assert tried == [["1", "False"], ["2", "False"], ["4", "False"], *trained]


BATCH_NORM = (
    BASE
    + """
    def model(self):
        return nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), Counting(), nn.Dropout(0.2), nn.Linear(8, 1))


class Counting(nn.Module):
    def __init__(self):  # puts new tensors in the place of its buffers
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen = self.seen + 1
        return x + 0 * self.seen
"""  # noqa: E501
)


def without_preflight(words: list[str]) -> None:
    """Train without the preflight check."""
    import oneloop.train as module
    from oneloop.job.preflight_result import Preflight

    module.preflight = lambda *_: Preflight(draws=True)
    here(words)


def without_restore(words: list[str]) -> None:
    """Train with a preflight check that restores nothing."""
    import contextlib

    from oneloop.checks import dry_run, questions

    def nothing(*_, **__):
        return contextlib.nullcontext()

    dry_run.restored = questions.restored_buffers = nothing
    here(words)


def test_a_rehearsal_that_puts_nothing_back_is_found(tmp_path):
    with pytest.raises(AssertionError):
        compare_without_preflight(tmp_path, "norm", 1, "single", tried=without_restore)


@pytest.mark.parametrize(
    ("task", "ranks", "config"),
    [
        ("norm", 1, "single"),
        pytest.param("norm", 2, "ddp", marks=pytest.mark.slow),
        pytest.param("norm", 2, "fsdp2", marks=pytest.mark.slow),
        pytest.param("digits", 1, "single", marks=pytest.mark.slow),
        pytest.param("digits", 2, "ddp", marks=pytest.mark.slow),
        pytest.param("digits", 2, "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_what_is_tried_changes_no_bit(tmp_path, task, ranks, config):
    compare_without_preflight(tmp_path, task, ranks, config, tried=here)


def compare_without_preflight(tmp_path: Path, task: str, ranks: int, config: str, *, tried) -> None:
    (tmp_path / "mine.py").write_text(BATCH_NORM)
    own = (
        ["digits", "--task", "mine.Mine"]
        if task == "norm"
        else ["digits", "--task.width", "8", "--task.dropout", "0.1"]
    )
    typed = [*own, "--duration", "6", "--batch.size", "16", "--batch.micro", "4", "--track", "none"]
    typed += ["--ema.half_life", "1ep", "--log.every", "2"]
    ends = []
    for name, function in (("tried", tried), ("untried", without_preflight)):
        run(function, [*typed, "--run.dir", name], ranks=ranks, config=config, folder=tmp_path).ok()
        last = sorted((tmp_path / name / "checkpoints").iterdir())[-1]
        ends.append([file.read_bytes() for file in sorted(last.glob("*.safetensors"))])
        lines = [
            json.loads(line)
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        ends[-1].append(
            [
                (line["train/loss"], line["train/grad_norm"])
                for line in lines
                if "train/loss" in line
            ]
        )
    assert ends[0] == ends[1]


# --- data
# --------------------------------------------------------------------------------------------------


def test_parts_that_are_there_are_used(tmp_path):
    for name, text in (
        ("train-0.txt", "a" * 400),
        ("train-1.txt", "b" * 400),
        ("valid.txt", "c" * 400),
    ):
        (tmp_path / name).write_text(text)
    task = CausalLM(str(tmp_path), block=16, layers=1, width=16, heads=2)
    seen = {
        name: {token for sample in part for token in sample.documents[0].tolist()}
        for name, part in task._sets.items()
    }
    assert seen == {"train": {97, 98, 256}, "validation": {99, 256}}
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "one.txt").write_text("dd, dd\nd" + "d" * 30)
    task = CausalLM(str(tmp_path), block=16, layers=1, width=16, heads=2)
    assert set(task._sets) == {"train", "validation", "test"}
    assert {token for sample in task._sets["test"] for token in sample.documents[0].tolist()} <= {
        100,
        44,
        32,
        10,
        256,
    }


def test_a_folder_of_code_is_one_corpus(tmp_path):
    (tmp_path / "test").mkdir()
    for name in ("train.py", "model.py", "test/a.py"):
        (tmp_path / name).write_text("x = 1\n" * 9)
    assert {part: len(files) for part, files in found(tmp_path, ["text"]).parts.items()} == {"": 3}


def test_texts_as_other_programs_write_them(tmp_path):
    (tmp_path / "notes.md").mkdir()
    (tmp_path / "notes.md" / "a.TXT").write_bytes(b"\xef\xbb\xbf" + b"x" * 200_000)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "b.txt").write_text("more")
    there = found(tmp_path, ["text"])
    assert {
        part: [len(TextFile(file, tmp_path).text) for file in files]
        for part, files in there.parts.items()
    } == {"": [4, 200_000]}


def test_splits_of_a_data_set_are_its_own(tmp_path, monkeypatch):
    """``datasets`` loads a local folder with the same code as a data set from the Hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from oneloop.tasks.columns import check_column
    from oneloop.tasks.rows.arrow_tables import hub
    from oneloop.tasks.rows.open_data import Source

    (tmp_path / "data").mkdir()
    for name, count in (("train", 60), ("validation", 7)):
        rows = "".join(
            json.dumps({"text": f"{name} {n}", "chat": [{"role": "user"}]}) + "\n"
            for n in range(count)
        )
        (tmp_path / "data" / f"{name}.jsonl").write_text(rows)
    parts = hub(str(tmp_path / "data"), ["text"])
    assert {name: len(part) for name, part in parts.items()} == {"train": 60, "validation": 7}
    assert all(parts["validation"][n]["text"].startswith("validation") for n in range(7))
    chats = Source("data", {"text": "chat"}, parts=hub(str(tmp_path / "data"), ["chat"]))
    with pytest.raises(ValueError, match="'chat' holds .*; expected text"):
        check_column([chats], "text")

    # A word is enough (train1), unless several splits have it.
    names = {"train1": "train", "test_a": "validation", "test_b": "validation", "Dev": "validation"}
    files = [f"  - {{split: {name}, path: {of}.jsonl}}" for name, of in names.items()]
    config = ["---", "configs:", "- config_name: default", "  data_files:", *files, "---"]
    (tmp_path / "data" / "README.md").write_text("\n".join(config))
    assert set(hub(str(tmp_path / "data"), ["text"])) == {"train", "validation"}


# --- long runs
# --------------------------------------------------------------------------------------------------


def long_run(folder: Path, lines: int) -> Path:
    folder.mkdir()
    names = [f"share/{name}" for name in "abcdefgh"] + [
        "train/grad_norm",
        "train/lr",
        "speed/mfu",
        "memory/peak_gib",
    ]
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, lines + 1):
            value = 1.0 + math.sin(step / 1000)
            line = {"step": step, "samples": 64 * step, "time": 0.1 * step, "train/loss": value}
            line |= {name: value + number for number, name in enumerate(names)}
            if step == lines // 3:
                line["train/loss"] = 1000.0
            if step == lines // 2:
                line["train/loss"] = "nan"
            file.write(json.dumps(line) + "\n")
            if step % 100 == 0:
                file.write(json.dumps({"step": step, "event": "save"}) + "\n")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("lines", [30_000, 1_000_000])
def test_a_long_run_is_shown_in_little_time_and_memory(tmp_path, lines):
    folder = long_run(tmp_path / "run", lines)
    record = read_record(folder)
    steps, values = record.curve("train/loss")
    assert len(steps) <= 6200 and steps == sorted(steps) and steps[0] == 1 and steps[-1] == lines
    assert max(value for value in values if value == value) == 1000.0 and any(
        value != value for value in values
    )
    assert len(record.events) == 2000
    tool = str(Path(sys.executable).with_name("oneloop"))
    watched = (
        "import resource,subprocess,sys,time; began=time.time(); "
        "subprocess.run(sys.argv[1:], check=True); "
        "print('TOOK', time.time()-began, "
        "resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss/1024)"
    )
    for typed in (["report", str(folder)], ["watch", str(folder), "--once"]):
        ended = subprocess.run(
            [sys.executable, "-c", watched, tool, *typed],
            capture_output=True,
            text=True,
            check=True,
        )
        seconds, memory = map(float, ended.stdout.splitlines()[-1].split()[1:])
        print(typed[0], lines, f"{seconds:.1f} s, {memory:.0f} MiB")
        assert memory < 200
    assert (folder / "report.html").stat().st_size < 10e6


def test_a_thinned_curve_keeps_what_matters():
    curve, plain = Curve(), []
    generator = torch.Generator().manual_seed(0)
    for step, value in enumerate(torch.randn(100_000, generator=generator).tolist()):
        curve.add(step, value)
        plain.append(value)
    steps, values = zip(*curve.points, strict=True)
    assert (
        2000 < len(steps) < 4200
        and list(steps) == sorted(set(steps))
        and steps[0] == 0
        and steps[-1] == len(plain) - 1
    )
    assert max(values) == max(plain) and min(values) == min(plain)
    assert all(plain[step] == value for step, value in zip(steps, values, strict=True))
    window = len(plain) // 200
    for start in range(0, len(plain), window):  # every window keeps a point
        assert any(start <= step < start + window for step in steps)


# --- help texts
# --------------------------------------------------------------------------------------------------


def test_help_shows_the_docstring_of_a_class(tmp_path):
    code = """class Sines:
        \"\"\"Sines.

        Args:
            samples: training points.
            width: of the network.
        \"\"\"

        def __init__(self, samples: int = 1000, width: int = 64):
            pass

        model = train_set = eval_sets = collate = weight = loss = lambda *_: None
    """
    (tmp_path / "my_task.py").write_text(code)
    ended = run(here, ["digits", "--task", "my_task.Sines", "--help"], folder=tmp_path)
    ended.ok()
    shown = " ".join(ended.output.split())
    assert (
        "--task.samples INT training points." in shown
        and "--task.width INT of the network." in shown
    )


def test_what_a_key_takes_in_words():
    from typing import Literal

    assert described(int | Literal["auto"] | None) == "a whole number (int) or {auto} or null"
    assert described(tuple[float, float]) == "[a number (float),a number (float)]"
    assert described(list[str]) == "[text,…]" and described(object) == ""
