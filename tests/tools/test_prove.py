"""`oneloop prove` reports whether a layout trains like one process, and if not, where and why."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from adapters import a_base
from oneloop.basics.exit_codes import BadInput
from oneloop.cli import main
from oneloop.launch.command import launch_options
from oneloop.tools.prove import recorded_run
from oneloop.tools.prove.command import prove
from oneloop.tools.prove.prove import _Proof
from own_files import images
from sum_cases import InHalf
from worlds import ROOT, run
from zoo import Plain

pytestmark = pytest.mark.covers(
    "oneloop.launch.command",
    "oneloop.tools.prove.command",
    "oneloop.tools.prove.short_run",
    "oneloop.tools.prove.prove",
    "oneloop.tools.prove.recorded_run",
)

TASKS = '''
import os

import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    """Layers by name; `odd` is wrong on every rank but the first, after so many updates."""

    def __init__(self, kind, since):
        super().__init__()
        self.first, self.odd, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        more = {"dropout": nn.Dropout(0.3), "batchnorm": nn.BatchNorm1d(8)}
        self.more, self.kind, self.since = more.get(kind, nn.Identity()), kind, since
        self.updates, self.seen = 0, None

    def forward(self, x):
        # An update changes the weights; a trial and a repeated micro-batch do not.
        weights = self.last.weight.tolist()
        self.updates += self.seen not in (None, weights)
        self.seen = weights
        x = torch.tanh(self.more(self.first(x)))
        if self.kind == "fails" and self.updates > 1 and "RANK" in os.environ:
            raise RuntimeError("no such kernel")
        after = self.odd(x)
        if self.kind == "rank" and self.updates >= self.since and os.environ.get("RANK", "0") != "0":
            after = after.detach() + 1.5 * (after - after.detach())  # its gradient, and that of what is before it
        return self.last(torch.tanh(after + x.detach()))


class Odd:
    def __init__(self, kind: str = "plain", since: int = 0):
        self.kind, self.since = kind, since

    def model(self):
        if self.kind == "float32":
            return Float32(self.kind, self.since)
        return Net(self.kind, self.since)

    def train_set(self):
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())

    def eval_sets(self):
        return {}

    def collate(self, samples):
        x, y = zip(*samples)
        return {"x": torch.stack(x), "y": torch.stack(y)}

    def weight(self, batch):
        return torch.tensor(float(len(batch["x"])))

    def loss(self, model, batch):
        each = F.mse_loss(model(batch["x"]), batch["y"], reduction="none")
        return each.sum(), {"loss": each.detach()}


class Float32(Net):
    """A kernel that takes no other type."""

    def forward(self, x):
        if x.dtype != torch.float32:
            raise RuntimeError("expected float32")
        return super().forward(x)
'''  # noqa: E501
SMALL = ["--batch.size", "16", "--steps", "5", "--duration", "1ep", "--optimizer.lr", "1e-2"]


def warm(words, output):
    """Do what `oneloop launch` does, in processes from the warm server."""
    options, training, _ = launch_options(words)
    given = dict(zip(options[::2], options[1::2], strict=True))
    ranks, config = int(given.get("--num_processes", 1)), Path(given["--config_file"]).stem
    more = ["--mixed_precision", given["--mixed_precision"]]
    world = run(recorded_run.main, training, ranks=ranks, config=config, options=more)
    output.write_text(world.output.split("--- rank 1\n")[0])
    return max(world.codes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the tasks, which lasts all tests because a module is imported once."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "odd.py").write_text(TASKS)
    return folder


@pytest.fixture
def proved(folder, monkeypatch, capfd):
    """Return the verdict of `oneloop prove` with these words."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("ONELOOP_CACHE", str(folder / "cache"))

    def proved(*words):
        code = prove([*words, "--json"], start=warm)
        found = json.loads(capfd.readouterr().out)
        assert code == (0 if found["verdict"] in ("equal", "bit-identical") else 1), found
        return found

    return proved


@pytest.mark.parametrize("config", ["fsdp2", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_plain_model_is_equal_in_float64(proved, config):
    found = proved("odd.py:Odd", "--config_file", config, *SMALL)
    assert (found["verdict"], found["dtype"], found["layout"]) == (
        "equal",
        "float64",
        f"{config} on 2 processes",
    )
    assert found["gradients"] < 1e-14 and found["weights"] < 1e-14 and found["step"] is None
    assert "gloo" in found["notes"][0]


@pytest.mark.slow
@pytest.mark.parametrize(("since", "step"), [(3, 4), (0, 1)])
def test_a_wrong_rank_is_found_at_its_step_and_tensor(proved, since, step):
    """The weights before `odd` get wrong gradients on rank 1; clipping scales all others, too."""
    words = ["--task.kind", "rank", "--task.since", str(since), "--optimizer.clip", "0.1"]
    found = proved("odd.py:Odd", "--config_file", "ddp", *SMALL, *words)
    assert (found["verdict"], found["step"]) == ("different", step) and found["by"] > 1e-4
    assert found["tensor"] == "first.weight", found
    assert found["tensors"].endswith("5 more, of 6 tensors"), found
    assert found["reason"].startswith(f"step {step}: ranks "), found
    assert re.search(r"got other gradients of (first|odd)\.", found["reason"]), found


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("dropout", "draw random numbers (dropout)"),
        pytest.param("batchnorm", "has BatchNorm", marks=pytest.mark.slow),
    ],
)
def test_randomness_is_the_reason(proved, kind, reason):
    found = proved("odd.py:Odd", "--config_file", "ddp", *SMALL, "--task.kind", kind)
    assert found["verdict"] == "different" and found["step"] == 1 and reason in found["reason"]


def test_batch_grain_is_bit_identical_with_dropout(proved):
    found = proved(
        "odd.py:Odd",
        "--config_file",
        "ddp",
        *SMALL,
        "--task.kind",
        "dropout",
        "--batch.grain",
        "4",
    )
    assert found["verdict"] == "bit-identical" and found["dtype"] == "float32"


@pytest.mark.slow
def test_batch_grain_names_what_differs(proved):
    words = ["--batch.grain", "4", "--task.kind", "rank"]
    found = proved("odd.py:Odd", "--config_file", "ddp", *SMALL, *words)
    assert (found["verdict"], found["step"]) == ("different", 1), found  # the run itself ends
    assert "step 1: ranks 0 and 1 got other gradients of " in found["reason"], found


@pytest.mark.slow
@pytest.mark.parametrize("every", [[], ["--every_step"]])
def test_late_state_is_named_with_its_step(proved, every):
    """The queue acts from the 7th forward on; without --every_step, prove runs a second time."""
    words = ["digits", "--task", "late_state.LateQueue", "--batch.size", "16", "--duration", "16"]
    words += ["--config_file", "ddp", *every]
    found = proved(*words, "--batch.micro", "4")
    assert (found["verdict"], found["dtype"]) == ("different", "float64"), found
    assert found["reason"].startswith("step ") and "model.queue" in found["reason"], found

    # With the grain, the run itself ends.
    found = proved(*words, "--batch.grain", "4", "--double")
    assert found["verdict"] == "different" and found["step"], found
    stopped = f"the layout run stopped: step {found['step']}: "
    assert found["reason"].startswith(stopped) and "model.queue" in found["reason"], found


@pytest.mark.slow
def test_what_the_run_finds_counts_if_the_weights_agree(proved, capfd):
    def start(words, output):
        code = warm(words, output)
        with output.open("a") as stream:
            stream.write("\nstep 3: rank 1 got another loss; x trains a different model\n")
        return code

    assert prove(["odd.py:Odd", "--config_file", "single", *SMALL], start=start) == 1
    text = capfd.readouterr().out
    assert text.startswith("different: single on 1 process: step 3: rank 1 got another loss"), text


class RightInHalf(InHalf):
    """Weights in 16 bits, which are converted: they would round more than float64 shows."""

    loss = Plain.loss


SMALL_TERMS = {
    "zoo_silent_sums.SmallPenalty": "additive",
    "zoo_silent_sums.StableByBatch": "additive",
    "sum_cases.TinyPenalty": "additive",
    "sum_cases.FirstCounts": "additive",
    "sum_cases.InHalf": "additive",
    "zoo_silent_sums.SmallNudge": "layers.0.inner",
    "sum_cases.UpAndDown": "",
    "test_prove.RightInHalf": "",
}
SLOW = [pytest.param(task, marks=pytest.mark.slow) for task in SMALL_TERMS]
SMALL_TERMS["zoo_silent_sums.SoftMask"] = "additive"


@pytest.mark.parametrize("task", ["zoo_silent_sums.SoftMask", *SLOW])
def test_small_terms_are_found_in_float64(proved, task):
    words = ["digits", "--task", task, "--config_file", "single", "--double", "--duration", "8"]
    try:
        found = proved(*words, "--batch.size", "16", "--steps", "2")
    except BadInput as error:
        found = {"verdict": "different", "reason": str(error)}
    assert found["verdict"] == ("different" if SMALL_TERMS[task] else "equal"), found
    assert SMALL_TERMS[task] in (found["reason"] or ""), found


@pytest.mark.slow
def test_a_small_term_is_no_reason_for_float32(proved, capfd):
    with pytest.raises(BadInput, match="another parallel layout would train a different model"):
        proved("digits", "--task", "zoo_silent_sums.SmallPenalty", "--batch.size", "16")
    assert capfd.readouterr().err.count("layout …") == 1


@pytest.mark.slow
def test_what_cannot_train_in_float64_is_rejected_if_float64_is_requested(proved):
    with pytest.raises(BadInput, match="expected float32"):
        proved("odd.py:Odd", "--double", *SMALL, "--task.kind", "float32")


def options_of(*, config_file, processes=None, steps=8, double=False):
    """Return the parsed options of the command."""
    return Namespace(
        config_file=config_file,
        processes=processes,
        steps=steps,
        every_step=False,
        double=double,
        json=False,
    )


class Recorded(_Proof):
    """Records the keys of each run in place of running it."""

    def _run(self, name, options, keys):
        self.keys = {**getattr(self, "keys", {}), name: keys}
        return Path("nowhere")


def test_one_process_recomputes_nothing(monkeypatch, folder):
    monkeypatch.chdir(folder)
    options = options_of(config_file="ddp", processes=2, steps=2)
    for more, runs in (([], 3), (["--batch.grain", "2"], 2)):
        words = ["odd.py:Odd", "--batch.size", "16", "--machine.recompute", "full", *more]
        proof = Recorded(words, options, folder, warm)
        with pytest.raises((BadInput, KeyError)):  # there is nothing to compare
            proof.result()
        assert len(proof.keys) == runs
        assert not {"machine.recompute", "machine.offload"} & proof.keys.pop("layout").keys()
        for keys in proof.keys.values():
            assert (keys["machine.recompute"], keys["machine.offload"]) == ("none", False)


@pytest.mark.slow
def test_a_fault_of_recompute_is_found(proved, monkeypatch):
    """Only the layout recomputes, with other random numbers."""
    task = f"{ROOT / 'tests' / 'machine' / 'test_recompute.py'}:Task"
    words = ["digits", "--task", task, "--task.kinds", "ByNumpy+ByNumpy"]
    words += ["--batch.grain", "2"]
    words += ["--machine.recompute", "full", "--machine.blocks", "[ByNumpy]", *SMALL]
    assert proved(*words, "--config_file", "ddp")["verdict"] == "bit-identical"

    def faulty(typed, output):
        options, training, _ = launch_options(typed)
        given = dict(zip(options[::2], options[1::2], strict=True))
        ranks, config = int(given.get("--num_processes", 1)), Path(given["--config_file"]).stem
        more = ["--mixed_precision", given["--mixed_precision"]]
        output.touch()
        return max(run(without_states, training, ranks=ranks, config=config, options=more).codes)

    assert prove([*words, "--config_file", "ddp", "--json"], start=faulty) == 1


def without_states(words):
    """Train a recorded run, whose recomputation restores no states."""
    from oneloop.machine import recompute

    recompute.set_other_states = lambda _: None
    recorded_run.main(words)


def test_what_cannot_train_in_float64_is_compared_in_float32(proved):
    found = proved("odd.py:Odd", "--config_file", "ddp", *SMALL, "--task.kind", "float32")
    assert (found["verdict"], found["dtype"]) == ("equal", "float32") and found["gradients"] < 1e-6
    assert "expected float32" in found["notes"][-1]


def test_the_config_file_decides_the_layout_and_precision(proved, tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text("distributed_type: MULTI_GPU\nnum_processes: 4\nmixed_precision: bf16\n")
    own = options_of(config_file=str(config))
    parsed = _Proof(["odd.py:Odd"], own, tmp_path, warm)
    assert parsed.about["layout"] == "mine on 4 processes" and "bf16" in parsed.notes[1]
    assert parsed.layout[-2:] == ["--mixed_precision", "no"] and parsed.single[-1] == "no"

    # With a grain, only --double excludes mixed precision.
    for double, kept in ((False, "bf16"), (True, "no")):
        own = options_of(config_file=str(config), double=double)
        parsed = _Proof(["odd.py:Odd", "--batch.grain", "4"], own, tmp_path, warm)
        assert parsed.layout[-1] == parsed.single[-1] == kept
        assert ("bf16" in str(parsed.notes)) == double


@pytest.mark.parametrize(
    ("words", "expected_text"),
    [
        (["digits", "--batch.sise", "3", "--config_file", "ddp"], "unknown key 'batch.sise'"),
        (
            ["digits", "--batch.size", "3", "--config_file", "ddp"],
            "batch.size 3 cannot be split over 2 ranks",
        ),
        (["digits", "--config_file", "none.yaml"], "cannot be read"),
        (
            ["digits", "--config_file", "ddp", "--steps", "0"],
            "--steps: must be a positive integer, got 0",
        ),
        (
            ["digits", "--config_file", "ddp", "--processes", "two"],
            "--processes: must be a positive integer, got two",
        ),
        (["nothing", "--config_file", "ddp"], "nothing"),
    ],
)
def test_bad_input_is_reported_before_any_run(words, expected_text, capsys):
    assert main(["prove", *words]) == 2
    captured = capsys.readouterr()
    assert expected_text in captured.err and "layout …" not in captured.err and not captured.out


@pytest.mark.slow
def test_a_run_that_fails_gives_its_error(proved):
    found = proved("odd.py:Odd", "--config_file", "ddp", *SMALL, "--task.kind", "fails")
    assert found["verdict"] == "failed" and "no such kernel" in found["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp", "fsdp2"])
def test_adapters_are_equal(proved, tmp_path, config):
    words = [
        "--task.model",
        str(a_base(tmp_path / "base")),
        "--task.lora.rank",
        "4",
        "--task.length",
        "96",
    ]
    found = proved("sft", *words, "--task.pack", "padded", "--config_file", config, "--steps", "4")
    assert (found["verdict"], found["dtype"]) == ("equal", "float64")


@pytest.mark.slow
def test_what_the_trainer_rejects_is_rejected(proved):
    with pytest.raises(BadInput, match="power"):
        proved("odd.py:Odd", "--config_file", "ddp", *SMALL, "--ema.power", "[9]")


@pytest.mark.slow
def test_from_the_command_line_with_the_launcher(tmp_path):
    words = ["prove", "digits", "--config_file", "ddp", "--steps", "3", "--batch.size", "16"]
    done = subprocess.run(
        [sys.executable, "-m", "oneloop", *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith(
        "equal: ddp on 2 processes trains like one process"
    )
    assert list(tmp_path.iterdir()) == []


TINY = ["--task.layers", "1", "--task.heads", "2", "--task.width", "32"]
RECIPES: dict[str, list[str]] = {
    "docstrings": [*TINY, "--task.length", "16", "--task.dropout", "0"]
}
RECIPES |= {
    "digits": [],
    "gpt": TINY,
    "llama": TINY,
    "snippets": TINY,
    "sft": [],
    "images": ["--task.data", "images"],
}


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp", "fsdp2"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_packaged_recipe_is_equal(proved, tmp_path, recipe, config):
    if recipe == "images":
        images(tmp_path / "images", "folders", each=12)
    words = [str(tmp_path / word) if word == "images" else word for word in RECIPES[recipe]]
    found = proved(recipe, "--config_file", config, "--steps", "4", "--batch.size", "16", *words)
    assert (found["verdict"], found["dtype"]) == ("equal", "float64")


@pytest.mark.slow
def test_hsdp_on_four_processes_is_equal(proved):
    assert proved("odd.py:Odd", "--config_file", "hsdp", *SMALL)["layout"] == "hsdp on 4 processes"


@pytest.mark.slow
def test_as_typed(tmp_path):
    """Through the launcher, which must not take the number of steps for a recipe."""
    words = [
        sys.executable,
        "-m",
        "oneloop",
        "prove",
        "digits",
        "--config_file",
        "single",
        "--steps",
        "1",
        "--json",
    ]
    environment = {**os.environ, "ONELOOP_CACHE": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0 and json.loads(ended.stdout)["verdict"] == "equal", ended.stderr
