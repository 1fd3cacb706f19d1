"""The pass over a frozen model: every document once, on any layout, through kills and damage."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from failing_disks import full_disk, without_root
from frozen_task import RECORD, Frozen, Next, documents, listed, log_probabilities
from oneloop import Loader
from oneloop.basics.exit_codes import BadInput
from oneloop.cli import main
from oneloop.frozen.listing import stores
from oneloop.frozen.outputs import FrozenOutputs, placeholder_outputs
from oneloop.frozen.store import RangeFiles, key_of
from oneloop.run.source_code import sources_of_model
from remote_data import counted_s3
from slow_cases import with_slow
from worlds import apply, back_to, here, run

pytestmark = pytest.mark.covers(
    "oneloop.frozen.listing",
    "oneloop.frozen.outputs",
    "oneloop.frozen.store",
    "oneloop.loop.begin_folder",
    "oneloop.run.frozen_pass",
    "oneloop.run.source_code",
    "oneloop.tools.after_training.initial_model",
    "oneloop.tools.frozen.command",
)

LAYOUTS = {"single": 1, "ddp": 2, "fsdp2": 2}


def words(store: Path | str, *more: str) -> list[str]:
    return [
        "recipe.yaml",
        *("--task.store", str(store)),
        *("--run.dir", "run"),
        *("--batch.size", "16"),
        *("--duration", "6"),
        *("--optimizer.name", "sgd"),
        *("--optimizer.lr", "0.02"),
        *("--log.every", "1"),
        *("--eval.every", "3"),
        *("--save.every", "3"),
        *("--track", "none"),
        *("--machine.workers", "0"),
        *("--machine.dtype", "float64"),
        *more,
    ]


def trained(
    folder: Path, given: list[str], layout: str = "single", more: dict[str, str] | None = None
):
    (folder / "recipe.yaml").write_text("task: frozen_task.Frozen\n")
    variables = {"OMP_NUM_THREADS": "1", "FROZEN_LOG": str(folder / "log"), **(more or {})}
    (folder / "log").mkdir(exist_ok=True)
    return run(
        here, given, ranks=LAYOUTS[layout], config=layout, folder=folder, variables=variables
    )


def applied(folder: Path, layout: str, *given: str):
    (folder / "log").mkdir(exist_ok=True)
    return run(
        apply,
        [*given, "--task", "frozen_task.Frozen"],
        ranks=LAYOUTS[layout],
        config=layout,
        folder=folder,
        variables={"OMP_NUM_THREADS": "1", "FROZEN_LOG": str(folder / "log")},
    )


def bins(store: Path) -> dict[str, bytes]:
    return {str(file.relative_to(store)): file.read_bytes() for file in store.glob("*/*.bin")}


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first")
    trained(folder, words(folder / "store")).ok()
    shutil.copytree(folder / "store", folder / "good")
    return folder


def test_each_document_is_computed_once_by_the_initial_weights(first):
    counted = Counter(listed(first / "log"))
    assert counted == Counter(
        {("train", at): 1 for at in range(2000)} | {("validation", at): 1 for at in range(300)}
    )
    # The store holds what the model before step 1 gives for each document alone.
    torch.manual_seed(0)
    task = Frozen(str(first / "store"))
    model = Next().double()
    start = next((first / "run" / "checkpoints").glob("step-*"))
    assert start.name > "step-00000000"
    (large,) = [one for one in (first / "store").iterdir() if len([*one.glob("*.bin")]) > 1]
    outputs = task.frozen_model().outputs["train"]
    outputs.attach(large)
    assert outputs.ranges == 2
    key = json.loads((large / "about.json").read_text())["parts"]
    assert key["precision"]["weights"] == ["torch.float64"] and key["role"] == "the reference"

    # Those are the weights that the run's seed draws.
    from oneloop.basics.seeds import key as seed_key

    torch.manual_seed(seed_key(0))
    model = Next().double()
    values = documents(2000)
    for at in (0, 7, 1200, 1999):
        expected = log_probabilities(model, torch.from_numpy(values[at])[None])[0]
        assert np.allclose(outputs[at]["logp"], expected.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_another_layout_computes_nothing_and_trains_the_same(first, tmp_path, layout):
    written = {file: file.stat().st_mtime_ns for file in (first / "store").rglob("*")}
    trained(tmp_path, words(first / "store"), layout).ok()
    assert not listed(tmp_path / "log")
    assert written == {file: file.stat().st_mtime_ns for file in written}
    found = losses(tmp_path / "run")
    assert np.allclose(found, losses(first / "run"), rtol=1e-12, atol=0)


@pytest.mark.parametrize("layout", with_slow(["ddp", "fsdp2"], ["fsdp2"]))
def test_the_outputs_are_the_same_on_several_processes(first, tmp_path, layout):
    """Bit-identical under DDP; FSDP2 repeats forwards, and writes each document once."""
    trained(tmp_path, words(tmp_path / "store"), layout).ok()
    assert bins(tmp_path / "store") == bins(first / "good")
    counted = Counter(listed(tmp_path / "log"))
    assert set(counted) == set(listed(first / "log"))
    if layout == "ddp":
        assert set(counted.values()) == {1}
    assert np.allclose(losses(tmp_path / "run"), losses(first / "run"), rtol=1e-12, atol=0)


def test_a_kill_in_the_pass_repeats_at_most_one_range(first, tmp_path):
    given = words(tmp_path / "store")
    world = trained(tmp_path, [*given, "--task.stop", "8"])
    assert world.codes == [-9]
    assert len(bins(tmp_path / "store")) == 1
    assert not (tmp_path / "run" / "recipe.yaml").exists()
    before = Counter(listed(tmp_path / "log"))
    trained(tmp_path, given).ok()
    twice = [one for one, count in Counter(listed(tmp_path / "log")).items() if count > 1]
    outputs = Frozen("").frozen_model().outputs["train"]
    assert 0 < len(twice) <= len(outputs.documents(1)) and before
    assert {at for _, at in twice} <= set(outputs.documents(1))
    assert bins(tmp_path / "store") == bins(first / "good")


@pytest.mark.parametrize(
    "kind",
    [
        "bit",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("length", "missing", "swapped")),
    ],
)
def test_damage_is_found_and_computed_again(first, tmp_path, kind):
    store = tmp_path / "store"
    shutil.copytree(first / "good", store)
    one, other = sorted(store.glob("*/*.bin"), key=lambda file: file.stat().st_size)[-2:]
    content = bytearray(one.read_bytes())
    if kind == "bit":
        content[100] ^= 4
        one.write_bytes(content)
    elif kind == "length":
        one.write_bytes(content[:-8])
    elif kind == "missing":
        one.unlink()
    else:
        one.write_bytes(other.read_bytes())
    world = trained(tmp_path, words(store))
    world.ok()
    assert bins(store) == bins(first / "good")
    lines = [line for line in world.output.splitlines() if "is computed again" in line]
    assert len(lines) == (kind != "missing"), world.output
    number = int(one.stem)
    outputs = Frozen("").frozen_model().outputs["train"]
    assert sorted(at for _, at in listed(tmp_path / "log")) == [*outputs.documents(number)]


def range_files(root: Path) -> RangeFiles:
    """Return the files of a store of 40 short documents, in two ranges."""
    lengths = np.full(40, 1000)
    outputs = FrozenOutputs(RECORD, counts=lengths, lengths=lengths, content="x")
    files = RangeFiles(root, {"role": "the reference"}, outputs)
    files.begin()
    return files


def filled(files: RangeFiles) -> None:
    """Write what is missing or damaged, as the pass does; check that all ranges are good then."""
    for number in range(files.outputs.ranges):
        if files.fault(number) is not None:
            files.drop(number)
            files.write(number, np.zeros(files.outputs.records_of(number), RECORD))
    assert [files.fault(number) for number in range(files.outputs.ranges)] == [None, None]
    assert files.present() and [listed.about["ranges"] for listed in stores(str(files.root))] == [2]


def test_a_folder_in_place_of_a_file_is_repaired(tmp_path):
    """So is a file in place of the store's folder."""
    filled(range_files(tmp_path))
    (folder,) = tmp_path.iterdir()
    for name in ("00000000.bin", "00000001.bin", "about.json"):
        (folder / name).unlink()
        (folder / name / "inside").mkdir(parents=True)
        files = range_files(tmp_path)
        assert ("expected" in (files.fault(0) or files.fault(1) or "")) == name.endswith(".bin")
        filled(files)
    shutil.rmtree(folder)
    folder.write_text("not a folder")
    filled(range_files(tmp_path))


def test_a_full_disk_names_the_store_its_key_and_the_remedy(tmp_path):
    remedy = "make room, name another folder with task.store"
    with pytest.raises(BadInput, match=remedy) as caught, full_disk(4096):
        filled(range_files(tmp_path))
    assert f"{tmp_path}/{key_of({'role': 'the reference'})} cannot be written (" in str(
        caught.value
    )
    assert not [*tmp_path.rglob("*.bin")] and not [*tmp_path.rglob("*draft*")]
    with pytest.raises(BadInput, match="task.store"), full_disk(0):
        range_files(tmp_path / "other")


def test_a_store_that_cannot_be_deleted_is_an_error(capsys):
    with without_root() as root:
        filled(range_files(root))
        (folder,) = root.iterdir()
        folder.chmod(0o500)
        assert main(["frozen", str(root), "--delete", "all"]) == 1
        error = capsys.readouterr().err
        assert f"{folder} cannot be deleted (Permission denied" in error and error.count("\n") == 1
        folder.chmod(0o700)
        assert main(["frozen", str(root), "--delete", "all"]) == 0 and not folder.exists()


def test_a_resume_continues_with_the_reference_of_its_start(first, tmp_path):
    shutil.copytree(first / "run", tmp_path / "run")
    back_to(tmp_path / "run", 3)
    # The store is gone: it is computed again from the initial weights, not from the trained ones.
    trained(tmp_path, words(tmp_path / "store")).ok()
    assert bins(tmp_path / "store") == bins(first / "good")
    assert losses(tmp_path / "run") == losses(first / "run")
    for name in ("model.safetensors",):
        found = load_file(tmp_path / "run" / "final" / name)
        for key, value in load_file(first / "run" / "final" / name).items():
            assert torch.equal(found[key], value)


def test_other_initial_weights_are_rejected_at_a_resume(first, tmp_path):
    """``init.from`` names a folder whose weights have changed since the start."""
    init = tmp_path / "init"
    shutil.copytree(first / "run" / "final", init)
    given = words(first / "store", "--init.from", str(init))
    trained(tmp_path, given).ok()
    back_to(tmp_path / "run", 3)
    from safetensors.torch import save_file

    weights = load_file(init / "model.safetensors")
    weights["head.bias"] += 0.5
    save_file(weights, init / "model.safetensors")
    for manifest in init.glob("MANIFEST.json"):
        manifest.unlink()
    world = trained(tmp_path, given)
    assert world.codes == [2], world.output
    assert "had other weights" in world.output and "init.from" in world.output


def test_another_precision_is_another_store(first, tmp_path):
    given = words(first / "store")
    given[given.index("float64")] = "float32"
    trained(tmp_path, given).ok()
    assert len(set(listed(tmp_path / "log"))) == 2300


@pytest.mark.parametrize("layout", with_slow(LAYOUTS, ["ddp", "fsdp2"]))
def test_a_teacher_is_built_only_if_outputs_are_missing(tmp_path, layout):
    given = words(tmp_path / "store", "--task.teacher", "5")
    trained(tmp_path, given, layout).ok()
    assert len([*(tmp_path / "log").glob("built-*")]) == LAYOUTS[layout]
    torch.manual_seed(5)
    model = Next(12).double()
    (large,) = [one for one in (tmp_path / "store").iterdir() if len([*one.glob("*.bin")]) > 1]
    outputs = Frozen("").frozen_model().outputs["train"]
    outputs.attach(large)
    expected = log_probabilities(model, torch.from_numpy(documents(2000)[3])[None])[0]
    assert np.allclose(outputs[3]["logp"], expected.detach(), rtol=0, atol=1e-12)

    shutil.rmtree(tmp_path / "run")
    shutil.rmtree(tmp_path / "log")
    trained(tmp_path, given, layout).ok()
    assert not [*(tmp_path / "log").iterdir()]


@pytest.mark.parametrize("layout", with_slow(["single", "fsdp2"], ["fsdp2"]))
def test_evaluation_of_other_data_makes_its_own_pass(first, tmp_path, layout):
    """The reference is rebuilt from the initial weights; the trained ones are evaluated."""
    shutil.copytree(first / "run", tmp_path / "run")
    shutil.copytree(first / "good", tmp_path / "store")
    recipe = (tmp_path / "run" / "recipe.yaml").read_text()
    recipe = recipe.replace(str(first), str(tmp_path))
    (tmp_path / "run" / "recipe.yaml").write_text(recipe)
    found = []
    for expected in (50, 0):
        shutil.rmtree(tmp_path / "log", ignore_errors=True)
        world = applied(tmp_path, layout, "evaluate", "run", "--data", "3", "--json")
        world.ok()
        (line,) = [line for line in world.output.splitlines() if line.startswith("{")]
        found.append(json.loads(line))
        assert len(set(listed(tmp_path / "log"))) == expected
    assert found[0] == found[1]

    # A plain loop with both models.
    from oneloop.basics.seeds import key as seed_key

    torch.manual_seed(seed_key(0))
    start = Next().double()
    trained_model = Next().double()
    trained_model.load_state_dict(load_file(tmp_path / "run" / "final" / "model.safetensors"))
    total = weight = 0.0
    with torch.no_grad():
        for value in documents(50, seed=3):
            tokens = torch.from_numpy(value)[None]
            logp = log_probabilities(trained_model, tokens)
            apart = (logp - log_probabilities(start, tokens)) ** 2
            total += float((apart - 0.1 * logp).sum())
            weight += len(value) - 1
    assert found[0]["data/loss"] == pytest.approx(total / weight, rel=1e-10)


def test_wrong_outputs_and_stores_are_rejected(tmp_path):
    world = trained(tmp_path, words(tmp_path / "store", "--task.nan", "true"))
    assert world.codes != [0] and "computes NaN for document" in world.output
    world = trained(tmp_path, words("ftp://host/store"))
    assert world.codes == [2] and "task.store" in world.output
    (tmp_path / "file").write_text("")
    world = trained(tmp_path, words(tmp_path / "file"))
    assert world.codes == [2] and "task.store" in world.output
    assert not (tmp_path / "run").exists() and os.listdir(tmp_path / "store")


def test_a_bucket_serves_another_host_which_computes_nothing(first, tmp_path):
    """Another host has another cache. A damaged object is computed again, and replaced."""
    address = "s3://bucket/frozen"
    with counted_s3() as s3:
        s3.copy(first / "run" / "recipe.yaml", "s3://bucket/other")
        hosts = []
        for host in range(3):
            folder = tmp_path / str(host)
            folder.mkdir()
            if host == 2:
                s3.write(f"{address}/{hosts_key(tmp_path)}/00000000.bin", b"damaged")
            more = {**s3.variables, "ONELOOP_CACHE": str(folder / "cache")}
            trained(folder, words(address), ("single", "ddp", "single")[host], more).ok()
            hosts.append(set(listed(folder / "log")))
            cache = folder / "cache" / "frozen"
            assert bins(cache) == bins(first / "good")
        large = hosts_key(tmp_path)
        assert [len(documents) for documents in hosts[:2]] == [2300, 0]
        task = Frozen("").frozen_model().outputs["train"]
        assert hosts[2] == {("train", at) for at in task.documents(0)}
        fetched = s3.fetch(address, tmp_path / "fetched")
        assert bins(fetched) == bins(first / "good")

        # The command lists and deletes what is in the bucket.
        done = command(tmp_path, address, variables=s3.variables)
        assert f"2 stores in {address}" in done.stdout and large[:12] in done.stdout
        done = command(tmp_path, address, "--delete", large[:8], variables=s3.variables)
        assert done.stdout.startswith("deleted: ") and done.returncode == 0
        done = command(tmp_path, address, variables=s3.variables)
        assert f"1 stores in {address}" in done.stdout
        folder = tmp_path / "denied"
        folder.mkdir()
        more = {**s3.variables, "ONELOOP_CACHE": str(folder / "cache")}
        s3.proxy.denied = "AccessDenied"
        world = trained(folder, words(address), more=more)
        assert world.codes == [2] and address in world.output, world.output


def hosts_key(folder: Path) -> str:
    """Return the key of the store of the training set."""
    stores = (folder / "0" / "cache" / "frozen").iterdir()
    (large,) = [one.name for one in stores if len([*one.glob("*.bin")]) > 1]
    return large


def command(folder: Path, *given: str, variables: dict[str, str] | None = None):
    return subprocess.run(
        [sys.executable, "-m", "oneloop", "frozen", *given],
        cwd=folder,
        env={**os.environ, **(variables or {})},
        capture_output=True,
        text=True,
    )


def test_the_command_lists_and_deletes(first, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(first / "good", store)
    (store / "0123").mkdir()
    (store / ("a" * 32)).mkdir()
    one, other = sorted(file.parent.name for file in first.glob("good/*/about.json"))
    (store / one / "about.json").write_text("[1]")
    next((store / other).glob("*.bin")).unlink()
    done = command(tmp_path, str(store))
    lines = done.stdout.splitlines()
    assert lines[-1].startswith(f"3 stores in {store}") and len(lines) == 4
    assert sum("missing or damaged" in line for line in lines) == 2
    assert any("ranges" in line and "the reference" in line for line in lines)

    assert command(tmp_path, str(store), "--delete", "b").returncode == 2
    done = command(tmp_path, str(store), "--delete", f"{one[:8]},ff")
    assert done.returncode == 2 and "matches 0 of" in done.stderr and (store / one).exists()
    done = command(tmp_path, str(store), "--delete", one[:8])
    assert done.returncode == 0 and not (store / one).exists() and (store / other).exists()
    command(tmp_path, str(store), "--delete", "all")
    assert sorted(file.name for file in store.iterdir()) == ["0123"]


@pytest.mark.parametrize("keys", ["all", "0123", ""])
def test_a_deletion_of_nothing_is_reported(tmp_path, capsys, keys):
    assert main(["frozen", str(tmp_path / "stores"), "--delete", keys]) == 2
    message = f"--delete {keys} matches 0 of 0 stores in {tmp_path}/stores, and nothing was deleted"
    assert (message if keys else "--delete names no store") in capsys.readouterr().err


# --- before there is a store


def test_samples_without_a_store_raise_in_every_loader():
    """Also in a data worker that has loaded placeholders before."""
    task = Frozen("", count=40)
    samples = task.train_set()
    message = "Start a run (oneloop launch --config_file single preference"
    expected = pytest.raises(ValueError, match=message.replace("(", r"\("))
    with expected:
        samples[0]
    for workers in (0, 2):
        plain = DataLoader(
            samples,
            2,
            collate_fn=task.collate,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        with expected:
            next(iter(plain))
        with expected:
            own = Loader(
                samples,
                4,
                collate=task.collate,
                weight=task.weight,
                accelerator=Accelerator(cpu=True),
                workers=workers,
            )
            [*next(iter(own))]

    tried = DataLoader(Tried(samples), None, num_workers=1, persistent_workers=True)
    for _ in range(2):
        assert [*tried] == ["zeros", "raises"]
    with expected:
        samples[0]


class Tried:
    """Tries a set, and then reads it."""

    def __init__(self, samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> str:
        if index == 0:
            with placeholder_outputs():
                return "values" if self.samples[0][1].any() else "zeros"
        try:
            self.samples[0]
        except ValueError:
            return "raises"
        return "values"


def checked_and_planned(words: list[str]) -> tuple[int, list[str], str]:
    from oneloop.tools.check.check_data import check_data
    from oneloop.tools.plan.command import Asked
    from oneloop.tools.plan.planned import planned

    sys.path.insert(0, "")
    found = check_data(words[0], words[1:])
    (plan,) = planned([Asked(tuple(words), "single", 1)])
    return found.rows, found.unusable, type(plan).__name__


def test_check_and_plan_need_no_store(tmp_path):
    (tmp_path / "recipe.yaml").write_text("task: frozen_task.Frozen\n")
    given = words(tmp_path / "store", "--task.count", "40")
    (found,) = run(checked_and_planned, given, folder=tmp_path).ok()
    assert found == (340, [], "Plan")
    assert not (tmp_path / "store").exists()


# --- other code


NET = """
from torch import nn
from settings_of_net import FACTOR
class Scaled(nn.Module):
    def forward(self, x):
        return x * FACTOR
"""
TASK = """
from frozen_task import Frozen, Next
from net_of_test import Scaled
from torch import nn
class Mine(Frozen):
    def model(self):
        model = Next()
        model.head = nn.Sequential(Scaled(), model.head)
        return model
"""


def lay_code(folder: Path, factor: float) -> None:
    (folder / "settings_of_net.py").write_text(f"FACTOR = {factor}\n")
    (folder / "net_of_test.py").write_text(NET)
    (folder / "task_of_test.py").write_text(TASK)
    (folder / "unrelated_of_test.py").write_text("FACTOR = 1\n")
    (folder / "recipe.yaml").write_text("task: task_of_test.py:Mine\n")


@pytest.mark.parametrize("layout", with_slow(LAYOUTS, ["ddp", "fsdp2"]))
def test_an_edit_of_the_model_makes_the_outputs_new_at_a_resume(tmp_path, layout):
    """The number is in a module that the model's module imports."""
    lay_code(tmp_path, 0.5)
    given = words(tmp_path / "store", "--task.count", "40")
    world = run(here, given, ranks=LAYOUTS[layout], config=layout, folder=tmp_path)
    world.ok()
    assert "of other code" not in world.output
    before = bins(tmp_path / "store")

    lay_code(tmp_path, 3.0)
    back_to(tmp_path / "run", 3)
    world = run(here, given, ranks=LAYOUTS[layout], config=layout, folder=tmp_path)
    world.ok()
    why = "the reference: its outputs are computed again, because the stored ones are of other code"
    assert world.output.count(f"{why} (settings_of_net.py: ") == 1
    after = bins(tmp_path / "store")
    assert before.items() < after.items() and len(after) == 2 * len(before)

    # The new ones are those of the new code, with the weights before the first step.
    from oneloop.basics.seeds import key as seed_key

    torch.manual_seed(seed_key(0))
    model = Next().double()
    model.head = torch.nn.Sequential(Times(3.0), model.head)
    expected = log_probabilities(model, torch.from_numpy(documents(40)[7])[None])[0]
    outputs = Frozen("", count=40).frozen_model().outputs["train"]
    found = []
    for about in (tmp_path / "store").glob("*/about.json"):
        if json.loads(about.read_text())["documents"] == 40:
            outputs.attach(about.parent)
            found.append(np.allclose(outputs[7]["logp"], expected.detach(), rtol=0, atol=1e-12))
    assert sorted(found) == [False, True]


class Times(torch.nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


def test_the_code_of_a_model_is_its_sources_and_versions(tmp_path, monkeypatch):
    lay_code(tmp_path, 0.5)
    monkeypatch.syspath_prepend(tmp_path)
    names = ["unrelated_of_test", "settings_of_net", "net_of_test", "task_of_test"]
    modules = [importlib.import_module(name) for name in names]
    task = modules[-1].Mine("", count=4)

    def code(parts: Iterable[object]) -> dict[str, str]:
        return sources_of_model(task, parts)

    first = code(task.model().modules())
    own = {"settings_of_net.py", "net_of_test.py", "task_of_test.py", "frozen_task.py"}
    assert own < first.keys() and "unrelated_of_test.py" not in first
    assert first["torch"] == version("torch")
    # A teacher's classes are not known before it is built.
    assert own < code(()).keys() and code(())["transformers"] == version("transformers")

    lay_code(tmp_path, 0.7)
    changed = code(task.model().modules())
    assert {name for name in first if first[name] != changed[name]} == {"settings_of_net.py"}

    for name in names:
        del sys.modules[name]
