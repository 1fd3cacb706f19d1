"""Frozen parameters are stored once, in ``base/``; every checkpoint records their checksum."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from oneloop.cli import main
from silent_cases import unfinished
from slow_cases import with_slow
from tiny import Normed
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.basics.base_models",
    "oneloop.checkpoint.frozen_weights",
    "oneloop.checkpoint.weights",
    "oneloop.job.model",
)

LAYOUTS = [("single", 1), ("ddp", 2), ("fsdp2", 2)]
FROZEN = ["embedding.weight", "inner.bias", "inner.weight", "norm.norm.bias", "norm.norm.weight"]
RULES = {"norm": {"freeze": True}, "inner": {"freeze": True}, "embedding": {"freeze": True}}
WORDS = [
    "r.yaml",
    "--duration",
    "16",
    "--batch.size",
    "16",
    "--track",
    "none",
    "--run.dir",
    "run",
    "--eval.every",
    "0",
]
WORDS += ["--save.every", "8", "--ema.half_life", "16"]


def trained(folder: Path, *more: str, config: str = "single", ranks: int = 1, rules: dict = RULES):
    (folder / "r.yaml").write_text("task: tiny.Normed\n")
    words = [*WORDS, "--optimizer.groups", json.dumps(rules), *more]
    return run(train, words, ranks=ranks, config=config, folder=folder)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a finished run on one process; tests copy it."""
    folder = tmp_path_factory.mktemp("finished")
    trained(folder).ok()
    return folder / "run"


def base(run: Path) -> Path:
    """Return the folder of a run's frozen parameters, of which there is one."""
    (folder,) = (run / "base").iterdir()
    return folder


def names(folder: Path) -> set[str]:
    found = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as held:
            found |= set(held.keys())
    return found


def test_they_are_in_base_once_whatever_the_split(tmp_path, finished):
    world = trained(tmp_path, config="fsdp2", ranks=2)
    world.ok()
    bases = {}
    for config, here in (("single", finished), ("fsdp2", tmp_path / "run")):
        sizes = {
            name: tensor.numel()
            for name, tensor in load_file(here / "final" / "model.safetensors").items()
        }
        count = sum(sizes[name] for name in FROZEN)
        assert config == "single" or f"frozen: {count:,} of " in world.output
        assert names(base(here)) == {f"model.{name}" for name in FROZEN}
        assert (base(here) / "frozen.safetensors").stat().st_size < 4 * count + 1024
        for path in (here / "checkpoints").glob("step-*"):
            held = names(path)
            assert not any(name.split(".", 1)[1].startswith(tuple(FROZEN)) for name in held), held
            assert {
                "model.norm.norm.running_mean",
                "model.head.weight",
                "ema.ema.head.weight",
            } <= held
        bases[config] = (base(here) / "frozen.safetensors").read_bytes()
        assert main(["verify", str(here)]) == 0
    assert bases["single"] == bases["fsdp2"]


def test_each_flipped_bit_and_a_missing_file_are_found(tmp_path, finished, capsys):
    shutil.copytree(finished, tmp_path / "run")
    draw = torch.Generator().manual_seed(0)
    for file in sorted(base(tmp_path / "run").iterdir()):
        whole = file.read_bytes()
        for place in torch.randint(8 * len(whole), (20,), generator=draw).tolist():
            spoiled = bytearray(whole)
            spoiled[place // 8] ^= 1 << place % 8
            file.write_bytes(spoiled)
            assert main(["verify", str(tmp_path / "run")]) == 1, (file, place)
            assert "base/" in capsys.readouterr().out
        file.unlink()
        assert main(["verify", str(tmp_path / "run")]) == 1 and "base/" in capsys.readouterr().out
        newest = ["--checkpoint", "newest"]  # final/ holds all weights
        assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out"), *newest]) == 2
        file.write_bytes(whole)
    assert main(["verify", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize(("config", "ranks"), with_slow(LAYOUTS, LAYOUTS[1:]))
def test_what_is_damaged_ends_the_start_and_nothing_is_written(tmp_path, config, ranks):
    trained(tmp_path, config=config, ranks=ranks).ok()
    here = tmp_path / "run"
    unfinished(here)
    for damage in ("a flipped bit", "no folder"):
        if damage == "no folder":
            shutil.rmtree(here / "base")
        else:
            spoiled = bytearray((base(here) / "frozen.safetensors").read_bytes())
            spoiled[-1] ^= 1
            (base(here) / "frozen.safetensors").write_bytes(spoiled)
        before = _times(here)
        world = trained(tmp_path, config=config, ranks=ranks)
        assert set(world.codes) == {2}, world.output
        assert "Traceback" not in world.output
        assert ", with the frozen parameters of step-" in world.output
        assert "is damaged (base/" in world.output
        assert _times(here) == before


def _times(run: Path) -> dict[Path, int]:
    """Return the times of all files of a run but those of its lock."""
    names = (".lock", "owner.json")
    return {
        path: path.stat().st_mtime_ns
        for path in run.rglob("*")
        if path.is_file() and path.name not in names
    }


def test_others_get_a_folder_of_their_own(tmp_path, finished):
    here = tmp_path / "run"
    shutil.copytree(finished, here)
    unfinished(here)
    rules = {"norm": {"freeze": True}, "inner": {"freeze": True}}
    trained(tmp_path, "--run.accept_changes", "true", rules=rules).ok()
    folders = {
        path.name: json.loads((path / "MANIFEST.json").read_text())["about"]["base"]["xxh3"]
        for path in (here / "checkpoints").glob("step-*")
    }
    assert folders["step-00000008"] == base(finished).name != folders["step-00000016"]
    assert names(here / "base" / folders["step-00000016"]) == {
        f"model.{name}" for name in FROZEN[1:]
    }
    assert main(["verify", str(here)]) == 0


@pytest.mark.parametrize(("config", "ranks"), with_slow(LAYOUTS, LAYOUTS[1:]))
def test_their_type_may_be_another(tmp_path, config, ranks):
    (tmp_path / "r.yaml").write_text("task: tiny.Ragged\n")
    rules = {"embedding": {"freeze": True}, "inner": {"freeze": True}}
    words = [*WORDS, "--optimizer.groups", json.dumps(rules), "--machine.base_dtype", "bfloat16"]
    how = {
        "ranks": ranks,
        "config": config,
        "folder": tmp_path,
        "options": ("--mixed_precision", "bf16"),
    }
    words += ["--duration", "4", "--save.every", "2"]
    run(train, words, **how).ok()
    here = tmp_path / "run"
    last = load_file(here / "final" / "model.safetensors")
    halves = {name for name, tensor in last.items() if tensor.dtype is torch.bfloat16}
    assert halves == {"embedding.weight", "inner.weight"}
    unfinished(here, step=2)
    run(train, words, **how).ok()
    again = load_file(here / "final" / "model.safetensors")
    assert all(torch.equal(last[name], again[name]) for name in last)
    assert main(["verify", str(here)]) == 0
    assert main(["export", str(here), "--to", str(tmp_path / "out")]) == 0
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert all(
        torch.equal(last[name], out[name]) and last[name].dtype is out[name].dtype for name in last
    )


def test_another_type_needs_mixed_precision(tmp_path):
    world = trained(tmp_path, "--machine.base_dtype", "bfloat16")
    assert world.codes == [2] and "set --mixed_precision bf16" in world.output
    world = trained(tmp_path, "--machine.base_dtype", "bfloat16", rules={"head": {"lr_factor": 2}})
    assert world.codes == [2] and "but none is; see" in world.output


def test_parts_of_other_weights_are_left_out(tmp_path):
    other = {name: tensor + 1 for name, tensor in Normed().model().state_dict().items()}
    other["head.weight"] = torch.zeros(3, 3)
    save_file(
        {name: tensor for name, tensor in other.items() if name != "head.bias"},
        tmp_path / "other.safetensors",
    )
    words = ["--init.from", str(tmp_path / "other.safetensors"), "--init.leave_out"]
    world = trained(tmp_path, *words, '["head"]')
    world.ok()
    assert "init.leave_out: 2 tensors keep the task's initial values" in world.output
    last = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert all(torch.equal(last[name], other[name]) for name in FROZEN)
    for given, expected_text in (
        ('["heads"]', "'heads' matches no parameter of the model"),
        ("[]", "is of another model"),
    ):
        world = trained(tmp_path, *words, given, "--run.dir", "none")
        assert world.codes == [2] and expected_text in world.output
    world = trained(tmp_path, "--init.leave_out", '["head"]', "--run.dir", "none")
    assert world.codes == [2] and "has no effect with init.from null" in world.output


def test_a_mixed_average_leaves_frozen_parameters_alone(tmp_path):
    trained(tmp_path, "--ema.half_life", "[]", "--ema.power", "[0.1]", "--save.keep", "10").ok()
    words = [
        "export",
        str(tmp_path / "run"),
        "--to",
        str(tmp_path / "out"),
        "--weights",
        "power:0.15",
    ]
    assert main(words) == 0
    mixed, last = (
        load_file(tmp_path / place / "model.safetensors") for place in ("out", "run/final")
    )
    assert all(torch.equal(mixed[name], last[name]) for name in FROZEN)
    assert not torch.equal(mixed["head.weight"], last["head.weight"])


@pytest.mark.parametrize(("config", "ranks"), with_slow(LAYOUTS, LAYOUTS[1:]))
def test_the_average_of_what_was_frozen_begins_with_its_weights(tmp_path, config, ranks):
    slow = ["--ema.half_life", "0", "--ema.decay", "0.999999", "--optimizer.lr", "1e-6"]
    one = torch.ones(())
    moved = {
        name: tensor + one.to(tensor.dtype)
        for name, tensor in Normed().model().state_dict().items()
    }
    save_file(moved, tmp_path / "mine.safetensors")
    trained(
        tmp_path,
        *slow,
        "--init.from",
        str(tmp_path / "mine.safetensors"),
        config=config,
        ranks=ranks,
    ).ok()
    unfinished(tmp_path / "run")
    rules = {"norm": {"freeze": True}}
    more = [*slow, "--run.accept_changes", "true"]
    trained(tmp_path, *more, rules=rules, config=config, ranks=ranks).ok()
    last, average = (
        load_file(tmp_path / "run" / "final" / name)
        for name in ("model.safetensors", "ema.safetensors")
    )
    assert all(
        (last[name] - average[name]).abs().max() < 1e-3
        for name in ("embedding.weight", "inner.weight")
    )
