"""Run folders and mirrors that anyone may have written: no file outside of them is touched, no
traceback, bounded memory, and intact older checkpoints are used."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

import hostile
import stores
from failing_disks import without_root
from oneloop.basics.bucket import Bucket
from oneloop.basics.exit_codes import Unavailable
from oneloop.basics.untrusted import (
    NotDeleted,
    damaged,
    delete,
    is_plain,
    parsed_yaml,
    read_bytes,
    read_json,
)
from oneloop.checkpoint.lease import _newest, _who
from oneloop.checkpoint.manifest import manifest_of
from oneloop.checkpoint.mirror import Fetcher, complete, local_run
from oneloop.checkpoint.named_checkpoint import base_problems, checkpoint_of, chosen_of
from oneloop.checkpoint.ranks import Ranks
from oneloop.checkpoint.store import Keep, Store, problems, read_state, vouch
from oneloop.cli import main
from oneloop.recipe.comparison import training_configuration
from oneloop.run.folder import Folder
from oneloop.run.mirrored_folder import MirroredFolder
from oneloop.tools.after_training.trained_model import recorded_by
from oneloop.tools.compare.compare_runs import view
from oneloop.tools.report.page import report
from oneloop.tools.run_reader import read_record, read_yaml

pytestmark = pytest.mark.covers(
    "oneloop.basics.bucket",
    "oneloop.basics.untrusted",
    "oneloop.checkpoint.ranks",
    "oneloop.checkpoint.lease",
    "oneloop.checkpoint.manifest",
    "oneloop.checkpoint.mirror",
    "oneloop.checkpoint.named_checkpoint",
    "oneloop.checkpoint.store",
    "oneloop.run.folder",
    "oneloop.run.mirrored_folder",
    "oneloop.tools.after_training.trained_model",
    "oneloop.tools.report.page",
    "oneloop.tools.run_reader",
)

MORE = int(os.environ.get("HOSTILE", 1))  # factor of the number of hostile values
MOST_MORE = 200 << 20  # bytes


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Return a folder with a run (``runs/one``, with frozen parameters and an EMA), its mirror
    (``store``), and other folders, which nobody may touch."""
    home = tmp_path_factory.mktemp("hostile")
    words = ["--task.frozen", "true", "--save.mirror", f"file://{home}/store", "--run.dir"]
    stores.trained(home, *words, "runs/one", "--duration", "20", "--save.keep", "3").ok()
    (home / "runs/two").mkdir()
    (home / "runs/two/precious").write_text("other run")
    (home / "precious").write_text("outside")
    return home


def _steps(folder: Path) -> list[Path]:
    return Store(folder / "checkpoints").sealed()


def _read_checkpoints(run: Path) -> None:
    """Read the checkpoints of a run as a start and all commands do, without loading tensors."""
    for path in _steps(run):
        if not problems(path):
            base_problems(path)
            read_state(path)
    problems(run / "final")
    for asked in ("newest", "best"):
        checkpoint_of(run, asked)
    chosen_of(run, None)


def _read_files(run: Path, recipe: dict) -> None:
    """Read the other files of a run folder, as a start does."""
    folder = Folder(run, say=lambda text: None)
    folder.inspect(training_configuration(recipe))
    folder.starts(0.0, 0.0)
    recorded_by(run)


def _read_curves(run: Path) -> None:
    report([run])
    record = read_record(run)
    assert record.done in (True, False)
    view([record], (), width=120)


def _read_mirror(address: str, run: Path, recipe: dict) -> None:
    """Read a mirror as a start and the commands do."""
    bucket = Bucket(address)
    _, owner = _newest(bucket)
    assert _who(owner).isprintable()
    MirroredFolder(run, address, say=lambda text: None).inspect(training_configuration(recipe))
    store = Store(run / "checkpoints")
    found = Fetcher(address, store, Ranks(Accelerator(cpu=True)), lambda text: None).newest(None)
    assert found is not None  # if the newest one is hostile, an older one is intact
    copy = local_run(address)
    complete(copy / "final")
    chosen_of(copy, "newest")


def test_of_hostile_names_none_leads_out():
    assert is_plain("state.json") and is_plain("1_Pooling/config.json", 2)
    assert not is_plain("1_Pooling/config.json") and not is_plain("a/b/c", 2)
    for name in (*hostile.OUTSIDE, "a//b", "./a", "a/.", "\ud800", 7, None):
        assert not is_plain(name, 2), name
    for name in ("Größe\u00a0Einheit.txt", "a b.json", "a\\b", "n" * 255, "a\nb"):
        assert is_plain(name), name


def test_only_what_is_directly_inside_is_deleted(tmp_path):
    """Also if the folder, or what is in it, is a link to another disk."""
    disk = tmp_path / "disk"
    for name in ("checkpoints/step-1", "precious"):
        (disk / name).mkdir(parents=True)
        (disk / name / "file").write_text("content")
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(disk / "checkpoints")
    (run / "base").symlink_to(disk / "precious")
    for name in ("..", "../disk", "checkpoints/step-1", "", "../run", "/"):
        with pytest.raises(ValueError, match="nothing was deleted"):
            delete(run / name, inside=run)
    delete(run / "checkpoints" / "step-1", inside=run / "checkpoints")  # through the link
    delete(run / "base", inside=run)  # the link itself
    delete(run / "missing", inside=run)
    assert [path.name for path in run.iterdir()] == ["checkpoints"]
    assert not (disk / "checkpoints/step-1").exists() and (disk / "precious/file").exists()


ERRORS = {
    "missing": lambda value: value["x"]["y"],
    "another kind": lambda value: value["a"].items(),
    "no number": lambda value: value["a"] + 1,
    "too large": lambda value: float(value["b"]),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_of_code_that_uses_a_file_is_its_damage(kind):
    message = "^state.json is damaged: its values are not as expected"
    with pytest.raises(ValueError, match=message), damaged("state.json"):
        ERRORS[kind]({"a": "text", "b": 10**400})
    with pytest.raises(ValueError, match="^a message$"), damaged("state.json"):
        raise ValueError("a message")


def test_files_that_must_not_be_read_as_a_whole(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is not a regular file"):
        read_bytes(tmp_path / "pipe")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="sparse is longer than"):
        read_json(tmp_path / "sparse")
    for tag in ("!!bool foo", '!!int ""', '!!float ""', "!!timestamp foo"):
        with pytest.raises(ValueError, match=".*"):
            parsed_yaml(f"x: {tag}")


def test_an_address_in_a_run_folder_is_not_followed(made, tmp_path):
    """Only copies of mirrors in the cache have one."""
    shutil.copytree(made / "runs/one", tmp_path / "run")
    (tmp_path / "run/.address").write_text(f"file://{tmp_path}/elsewhere")
    complete(_steps(tmp_path / "run")[-1], again=True)
    assert not problems(_steps(tmp_path / "run")[-1])


def test_final_weights_with_names_that_users_have(tmp_path):
    (tmp_path / "Größe\u00a0Einheit.txt").write_text("content")
    vouch(tmp_path, {})
    assert problems(tmp_path) == []


def _attacks(copies: hostile.Copies, count: int, read, outside: Path) -> int:
    """Read hostile copies; return how many were rejected."""
    before = hostile.listing(outside)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rejected = 0
    for _ in range(count):
        what = copies.next()
        try:
            read()
        except (ValueError, OSError):  # reported in one line, with exit code 2 or 1
            rejected += 1
        except Exception as error:
            raise AssertionError(f"{what} leads to {type(error).__name__}: {error}") from error
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) << 10
    assert more < MOST_MORE, f"{more >> 20} MiB more memory"
    shutil.rmtree(copies.work, ignore_errors=True)
    assert hostile.listing(outside) == before
    return rejected


def some_or_all(some: int, all_of_them: int) -> list[Any]:
    """Return the numbers of hostile values of the default test, and of the slow one."""
    return [some * MORE, pytest.param(all_of_them * MORE, marks=pytest.mark.slow)]


CHECKPOINT = [hostile.of_manifest, hostile.of_state, hostile.of_header]
FOLDER = [hostile.of_manifest, hostile.of_header]


def _beside(tmp_path: Path) -> Path:
    """Return a folder for a hostile run, with other files that nobody may touch."""
    outside = tmp_path / "outside"
    (outside / "runs/two").mkdir(parents=True)
    (outside / "runs/two/precious").write_text("other run")
    (outside / "precious").write_text("outside")
    return outside


@pytest.mark.parametrize("count", some_or_all(60, 300))
def test_hostile_values_in_checkpoints(made, tmp_path, count):
    """Manifests, states and headers: readers reject them in one line, or read on without them."""
    outside = _beside(tmp_path)
    right = made / "runs/one"
    newest = _steps(right)[-1].name
    changes = {f"checkpoints/{newest}": CHECKPOINT, "final": FOLDER}
    (base,) = (right / "base").iterdir()
    changes[f"base/{base.name}"] = FOLDER
    copies = hostile.Copies(right, outside / "runs/one", changes, seed=1)
    rejected = _attacks(copies, count, lambda: _read_checkpoints(copies.work), outside)
    assert count / 3 < rejected < count  # some values change nothing that is read


@pytest.mark.parametrize("count", some_or_all(20, 60))
def test_hostile_values_in_small_files(made, tmp_path, count):
    outside = _beside(tmp_path)
    right = made / "runs/one"
    recipe = read_yaml(right / "recipe.yaml")
    names = ("environment.json", "summary.json")
    changes = {name: [hostile.of_json] for name in names} | {"recipe.yaml": [hostile.of_yaml]}
    copies = hostile.Copies(right, outside / "runs/one", changes, seed=2)
    _attacks(copies, count, lambda: _read_files(copies.work, recipe), outside)


@pytest.mark.parametrize("count", some_or_all(14, 40))
def test_hostile_values_in_curves(made, tmp_path, count):
    """The files beside the log that report, watch and compare read: the page is written whatever
    they hold. A damaged line of the log is rejected."""
    outside = _beside(tmp_path)
    right = made / "runs/one"
    names = ("environment.json", "summary.json", "examples.json")
    changes = {name: [hostile.of_json] for name in names if (right / name).exists()}
    changes |= {"recipe.yaml": [hostile.of_yaml]}
    copies = hostile.Copies(right, outside / "runs/one", changes, seed=3)
    assert _attacks(copies, count, lambda: _read_curves(copies.work), outside) == 0
    lines = {"metrics.jsonl": [hostile.of_lines]}
    copies = hostile.Copies(right, outside / "runs/one", lines, seed=4)
    assert 0 < _attacks(copies, count, lambda: _read_curves(copies.work), outside) < count


# A line, and the words of the error; empty: it can be read.
LINES = {
    "deep": (b'{"step": 90, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "nested too deeply"),
    "bytes": (b"\xff\xfe\x00 damaged\n", "Expecting value"),
    "cut": (b'{"step": 90, "train/lo\n', "Invalid control character"),
    "no step": (b'{"x": 1}\n', "(KeyError: 'step')"),
    "step as text": (b'{"step": "90"}\n', "its step is '90'"),
    "incomplete": (b'{"step": 90, "train/lo', ""),
}


@pytest.mark.parametrize("kind", LINES)
def test_a_damaged_line_of_a_log_is_one_message(made, tmp_path, capsys, kind):
    """Also a deep one, which is a RecursionError of Python's parser. A run is still writing an
    incomplete last line."""
    line, expected = LINES[kind]
    shutil.copytree(made / "runs/one", tmp_path / "run")
    shutil.copytree(made / "runs/one", tmp_path / "good")
    with (tmp_path / "run/metrics.jsonl").open("ab") as file:
        file.write(line)
    _check_readers(tmp_path, capsys, expected)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_log_that_is_no_file_is_one_message(made, tmp_path, capsys, kind):
    """Reading a pipe would wait for ever, and reading some devices never end."""
    for name in ("run", "good"):
        shutil.copytree(made / "runs/one", tmp_path / name)
    log = tmp_path / "run/metrics.jsonl"
    log.unlink()
    if kind == "pipe":
        os.mkfifo(log)
    elif kind == "device":
        log.symlink_to("/dev/null")
    else:
        log.mkdir()
    _check_readers(tmp_path, capsys, "metrics.jsonl is not a regular file")


def _check_readers(folder: Path, capsys, expected: str) -> None:
    """Read a run with every command that reads a log."""
    run, good = str(folder / "run"), str(folder / "good")
    commands = [
        ["report", run, "--to", str(folder / "page.html")],
        ["compare", good, run],
        ["watch", run, "--once"],
        ["watch", good, run],
        ["verify", good, "--same", run],
    ]
    for words in commands:
        code = main(words)
        error = capsys.readouterr().err
        if expected:
            assert code == 2 and error.count("\n") == 1, (words, error)
            assert expected in error and "run/metrics.jsonl" in error, (words, error)
        else:
            # The run has no hashes: it has no grain.
            assert code == (2 if words[0] == "verify" else 0), (words, error)
            assert "has a damaged line" not in error


@pytest.mark.parametrize("name", ["recipe.yaml", "environment.json", "summary.json"])
def test_other_files_that_are_pipes_do_not_hang(made, tmp_path, capsys, name):
    shutil.copytree(made / "runs/one", tmp_path / "run")
    (tmp_path / "run" / name).unlink()
    os.mkfifo(tmp_path / "run" / name)
    run = str(tmp_path / "run")
    assert main(["report", run]) == main(["watch", run, "--once"]) == main(["verify", run]) == 0
    if name == "recipe.yaml":
        for words in (["evaluate", run], ["predict", run, "--to", "x.csv"]):
            assert main(words) == 2 and "no recipe.yaml" in capsys.readouterr().err
        assert main(["export", run, "--to", str(tmp_path / "out")]) == 2
        assert "recipe.yaml" in capsys.readouterr().err and not (tmp_path / "out").exists()
    inputs = json.loads((made / "runs/one/environment.json").read_text())["inputs"]
    Folder(tmp_path / "run", say=lambda text: None).inspect(inputs, accept_changes=True)


def test_a_deletion_that_fails_is_an_error():
    with without_root() as folder:
        store = Store(folder)
        for step in (1, 2, 3):
            store.draft(step).seal(manifest_of(step, {}, {}))
        (folder / "step-00000001").chmod(0o500)
        # Here nothing can be deleted, but the folder can be renamed.
        with pytest.raises(NotDeleted, match=r"1\.removed cannot be deleted \(Permission"):
            store.prune(Keep(newest=1))
        with pytest.raises(Unavailable, match="delete it, or make it writable"):
            store.sweep()
        for path in folder.glob(".*"):
            path.chmod(0o700)
        store.sweep()
        assert [path.name for path in folder.iterdir()] == ["step-00000003"]

        # A damaged checkpoint that cannot be renamed is not reported as renamed.
        folder.chmod(0o500)
        with pytest.raises(Unavailable, match="the damaged .*step-00000003 cannot be renamed"):
            store.set_aside(store.sealed()[0])


def test_two_threads_may_delete_the_same_folder(tmp_path):
    for number in range(300):
        (tmp_path / "folder" / str(number)).mkdir(parents=True)
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(delete, tmp_path / "folder", inside=tmp_path) for _ in "ab"]:
            done.result()
    assert not (tmp_path / "folder").exists()


def test_a_file_in_place_of_a_checkpoint_is_set_aside(made, tmp_path):
    shutil.copytree(made / "runs/one", tmp_path / "run")
    newest = _steps(tmp_path / "run")[-1]
    shutil.rmtree(newest)
    newest.write_text("not a folder")
    said = []
    chosen, error = Store(newest.parent).newest_intact(said.append)
    assert error is None and chosen == _steps(tmp_path / "run")[-1] and len(said) == 1
    assert (newest.parent / f"bad-{newest.name}").is_file()


@pytest.mark.parametrize("count", some_or_all(33, 100))
def test_hostile_values_in_a_mirror(made, tmp_path, count, monkeypatch):
    outside = _beside(tmp_path)
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    recipe = read_yaml(made / "runs/one" / "recipe.yaml")
    newest = sorted((made / "store/checkpoints").glob("step-*"))[-1].name
    (owner,) = (made / "store/owner").iterdir()
    changes = {
        f"checkpoints/{newest}": CHECKPOINT,
        "final": FOLDER,
        f"owner/{owner.name}": [hostile.of_json],
        "summary.json": [hostile.of_json],
    }
    copies = hostile.Copies(made / "store", outside / "store", changes, seed=4)

    def read() -> None:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        _read_mirror(f"file://{copies.work}", tmp_path / "run", recipe)

    _attacks(copies, count, read, outside)
    assert {path.name for path in tmp_path.iterdir()} <= {"outside", "cache", "run"}


def test_a_run_on_linked_disks_is_written_and_pruned(tmp_path):
    """The user has moved the run folder, and its checkpoints, to other disks."""
    words = ["--task.frozen", "true", "--run.dir", "run", "--save.keep", "1", "--save.best"]
    stores.trained(tmp_path, *words, "false", "--duration", "5").ok()
    for disk, path in (("disk-1", "run"), ("disk-2", "disk-1/run/checkpoints")):
        (tmp_path / disk).mkdir()
        shutil.move(tmp_path / path, tmp_path / disk)
        (tmp_path / path).symlink_to(tmp_path / disk / Path(path).name)
    longer = ["--duration", "15", "--run.accept_changes", "true"]
    stores.trained(tmp_path, *words, "false", *longer).ok()
    (kept,) = Store(tmp_path / "run/checkpoints").sealed()
    assert not problems(kept) and not base_problems(kept)
    assert [path.name for path in (tmp_path / "disk-2/checkpoints").iterdir()] == [kept.name]
    assert (tmp_path / "run/checkpoints").is_symlink() and (tmp_path / "disk-1/run/base").is_dir()


COMMANDS = [
    "verify RUN",
    "export RUN --to OUT",
    "report RUN",
    "compare RUN RUN",
    "evaluate RUN",
    "predict RUN --to OUT/rows.jsonl",
    "train",
]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_given_hostile_files(made, tmp_path, command, mirrored):
    """Thirty hostile values through each command, as a user starts it: no traceback, and no file
    outside of the run folder and the output is touched."""
    outside = _beside(tmp_path)
    right = made / ("store" if mirrored else "runs/one")
    newest = sorted((right / "checkpoints").glob("step-*"))[-1].name
    names = ("environment.json", "summary.json")
    changes = {name: [hostile.of_json] for name in names} | {"recipe.yaml": [hostile.of_yaml]}
    changes |= {f"checkpoints/{newest}": CHECKPOINT, "final": FOLDER}
    changes |= {"metrics.jsonl": [hostile.of_lines]}
    copies = hostile.Copies(right, outside / "runs/one", changes, seed=len(command))
    shutil.copy(made / "small.py", tmp_path)
    run = f"file://{copies.work}" if mirrored else str(copies.work)
    before = hostile.listing(outside)
    for _ in range(30):
        what = copies.next()
        out = tmp_path / "out"
        words = command.replace("RUN", run).replace("OUT", str(out)).split()
        module = ["-m", "oneloop", *words]
        if command == "train":
            keys = [
                "--task.frozen",
                "true",
                "--duration",
                "25",
                "--run.accept_changes",
                "true",
                "--run.dir",
            ]
            module = ["-m", "oneloop.train", *stores.WORDS.split(), *keys, run]
        done = subprocess.run(
            [sys.executable, *module],
            cwd=tmp_path,
            env=os.environ | stores.LEASE | {"ONELOOP_CACHE": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode in (0, 1, 2), (what, done)
        assert "Traceback" not in done.stderr, (what, done.stderr)
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(copies.work)
        assert hostile.listing(outside) == {
            name: entry for name, entry in before.items() if name != "runs/one"
        }
