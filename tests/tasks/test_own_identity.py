"""Data are compared by content: a run resumes after a touch, copy or move, and rejects other
changes with a message."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hub_server import Hub
from oneloop.basics.differences import differences, texts
from oneloop.tasks.rows.find_files import found
from oneloop.tasks.rows.parquet import parquets
from oneloop.tasks.rows.parquet_files import LocalFile
from oneloop.tasks.rows.remote.remote_parquet import RemoteParquet
from own_files import again, images, rows, started, write
from silent_cases import unfinished
from slow_cases import with_slow
from worlds import ROOT, each_message, run, train

pytestmark = pytest.mark.covers(
    "oneloop.basics.differences",
    "oneloop.data.fingerprint",
    "oneloop.run.compatibility",
    "oneloop.tasks.rows.cache",
)

SMALL = ["--task.layers", "1", "--task.heads", "2", "--task.width", "16"]
COMMON = [
    "--duration",
    "16",
    "--batch.size",
    "8",
    "--save.every",
    "8",
    "--eval.every",
    "0",
    "--track",
    "none",
]
TEXTS = ["digits", "--task", "text_classification", *SMALL, "--task.length", "16", *COMMON]
LANGUAGE = ["digits", "--task", "causal_lm", *SMALL, "--task.block", "8", *COMMON]


def touch(folder: Path) -> Path:
    for file in folder.rglob("*.*"):
        os.utime(file, (1, 1))
    return folder


def copy(folder: Path) -> Path:
    shutil.copytree(folder, folder.with_name("copied"))
    return folder.with_name("copied")


def move(folder: Path) -> Path:
    return Path(folder.rename(folder.with_name("moved")))


KINDS = ["parquet", "jsonl", "arrow", "pictures", "language"]
CHANGES = [touch, copy, move]
MOVES = [(change, kind) for change in CHANGES for kind in KINDS]
# By default one of them. Below, a finished run is moved, and the checksum of a file is compared
# after a touch.
QUICK = [(copy, "language")]


@pytest.mark.parametrize(
    ("change", "kind"), with_slow(MOVES, [case for case in MOVES if case not in QUICK])
)
def test_what_is_only_elsewhere_continues(tmp_path, kind, change):
    words = LANGUAGE if kind == "language" else TEXTS
    if kind == "pictures":
        words = ["digits", "--task.width", "8", "--task.image_size", "8", *COMMON]
        images(tmp_path / "data", "folders", each=12)
    else:
        write(tmp_path / "data", "text" if kind == "language" else kind, rows(60))
    started(tmp_path, words, tmp_path / "data")
    world = again(tmp_path, words, change(tmp_path / "data"))
    assert world.codes == [0] and "resuming from run/checkpoints/step-00000008" in world.output, (
        world.output
    )


def a_file_more(folder: Path) -> str:
    shutil.copy(folder / "part-0.parquet", folder / "part-3.parquet")
    return "files, part-3.parquet: missing -> "


def a_file_less(folder: Path) -> str:
    (folder / "part-2.parquet").unlink()
    return "files, part-2.parquet: "


def another_of_the_same_size(folder: Path) -> str:
    file = folder / "part-1.parquet"
    before = file.stat()
    content = file.read_bytes()
    at = content.index(b"alpha ")
    file.write_bytes(content[:at] + b"alphA " + content[at + 6 :])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    return "content of the files: "


def another_name(folder: Path) -> str:
    (folder / "part-0.parquet").rename(folder / "part-9.parquet")
    return "files, part-0.parquet: "


QUICK_NOT = [a_file_more, a_file_less, another_name]
OTHER_DATA = [a_file_more, a_file_less, another_of_the_same_size, another_name]


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.name != ".lock")


def rejected_and_accepted(words: list[str]) -> tuple[tuple[Any, str], list[Path], tuple[Any, str]]:
    """Run these words without and with run.accept_changes; between them, list the run's files."""
    (rejected,) = each_message([words])
    files = files_of(Path.cwd() / "run")
    (accepted,) = each_message([[*words, "--run.accept_changes", "true"]])
    return rejected, files, accepted


@pytest.mark.parametrize("change", with_slow(OTHER_DATA, QUICK_NOT))
def test_what_is_other_data_is_rejected_with_what_changed(tmp_path, change):
    write(tmp_path / "data", "parquet", rows(90))
    started(tmp_path, TEXTS, tmp_path / "data")
    expected_text = change(tmp_path / "data")
    before = files_of(tmp_path / "run")
    words = [*TEXTS, "--task.data", str(tmp_path / "data"), "--run.dir", "run"]
    (found,) = run(rejected_and_accepted, words, folder=tmp_path).ok()
    (code, output), after, (accepted, said) = found
    assert code == 2 and f"train set, {expected_text}" in output, output
    assert before == after
    assert accepted == 0 and "accepted: train set, " in said, said


def test_a_copy_elsewhere_is_equal(tmp_path):
    folder = write(tmp_path / "data", "parquet", rows(90))
    there = found(folder)
    here = parquets(there, ["text"], window=4)[""]
    files = [LocalFile(file, there.root) for file in there.files]
    versions = {"files": {"part-0.parquet": [1, "version 1"]}}
    away = RemoteParquet(files, "address", ["text"], window=4, content=versions)

    # A bucket has no checksums, and its caches depend on versions.
    now = here.fingerprint()
    assert differences(texts(now), texts(away.fingerprint())) == {}
    assert differences(texts(away.fingerprint()), texts(now)) == {}
    assert away.fingerprint()["content of the files"] is None
    assert now["files"]["part-0.parquet"] == [files[0].size, files[0].digest]
    assert away.cache_key()["files"] == versions["files"] != here.cache_key()["files"]

    # Another set of files is named, also within a mixture.
    other = {"length": 90, "files": {"a.jsonl": [10, "0123"]}}
    assert "files, a.jsonl" in differences(texts(other), texts(now))
    several = differences(texts({"sets": {"a": other}}), texts({"sets": {"a": now}}))
    assert several["sets, a, files, a.jsonl"].endswith("[10, '0123'] -> missing")
    more = {**other, "files": {**other["files"], "b.jsonl": [10, "4567"]}}
    assert [*differences(texts(other), texts(more))] == ["files, b.jsonl"]


def test_a_checksum_is_read_once_and_again_after_a_touch(tmp_path, monkeypatch):
    from oneloop.tasks.rows import cache

    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    data = write(tmp_path / "data", "parquet", rows(30))
    files, read = sorted(data.iterdir()), []
    checksum = cache.checksum_of
    monkeypatch.setattr(cache, "checksum_of", lambda file: read.append(file) or checksum(file))
    first = cache.content_of(files, data)
    assert read == files and cache.content_of(files, data) == first and len(read) == 3
    os.utime(files[1], (1, 1))
    assert cache.content_of(files, data) == first and read == [*files, files[1]]
    (tmp_path / "cache" / "checksums").joinpath(
        os.listdir(tmp_path / "cache" / "checksums")[0]
    ).write_text("{broken")
    assert cache.content_of(files, data) == first


def test_a_finished_run_with_data_that_moved_is_finished_and_with_other_data_rejected(tmp_path):
    data = write(tmp_path / "data", "parquet", rows(60))
    words = [*TEXTS, "--run.dir", "run", "--task.data"]
    first = [*words, str(data)]
    ((code, _), (again_code, same)) = run(each_message, [first, first], folder=tmp_path).ok()[0]
    assert code == again_code == 0 and "nothing to do" in same, same
    moved = move(data)
    other = write(tmp_path / "other", "parquet", rows(60, first=1))
    several = [[*words, str(moved)], [*words, str(other)]]
    ((code, output), (rejected, said)) = run(each_message, several, folder=tmp_path).ok()[0]
    assert code == 0 and "resuming from run/checkpoints/step-00000016" in output, output
    assert rejected == 2 and "files, " in said, said


def test_a_set_of_the_users_own_states_what_it_is(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    words = ["digits", "--task", "mine.Own", *COMMON, "--run.dir", "run"]
    run(here, words, folder=tmp_path).ok()
    unfinished(tmp_path / "run")
    (tmp_path / "mine.py").write_text(OWN.replace("version 1", "version 2"))
    world = run(here, words, folder=tmp_path)
    assert (
        world.codes == [2] and "train set, fingerprint: version 1 -> version 2" in world.output
    ), world.output


def here(words: list[str]) -> None:

    sys.path.insert(0, "")
    train(words)


OWN = """
from tiny import Ragged, Sequences

class Told(Sequences):
    def fingerprint(self):
        return "version 1"

class Own(Ragged):
    def train_set(self):
        return Told(37, seed=1)
"""


# --- the hub
# --------------------------------------------------------------------------------------------------


def typed(words: list[str], where: Path, hub: Hub) -> tuple[int, str]:
    """Run a command line in a separate process: an import decides which hub is used."""
    variables = {**os.environ, **hub.variables(where / "hf"), "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "oneloop.train", *words]
    ended = subprocess.run(
        command, cwd=where, env=variables, capture_output=True, text=True, timeout=200, check=False
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.slow
def test_a_set_of_the_hub_is_its_commit(tmp_path):
    made = {"train.parquet": rows(60), "validation.parquet": rows(9, first=60)}
    with Hub(tmp_path / "hub", "someone/texts") as hub:
        first = hub.commit(made)
        words = [*TEXTS, "--task.data", "hf:someone/texts", "--run.dir", "run"]
        code, output = typed(words, tmp_path, hub)
        assert code == 0, output
        recorded = json.loads((tmp_path / "run" / "environment.json").read_text())["inputs"]
        for part in ("train", "validation"):
            assert recorded[f"{part} set, commit"] == first
        [path] = (tmp_path / "run" / "checkpoints").glob("step-*16")
        assert first in (path / "state.json").read_text()
        unfinished(tmp_path / "run")
        second = hub.commit({**made, "train.parquet": rows(63)})
        code, output = typed(words, tmp_path, hub)
        assert code == 2 and f"commit: {first} -> {second}" in output, output
        pinned = [*words[:-4], "--task.data", f"hf:someone/texts@{first}", "--run.dir", "run"]
        code, output = typed(pinned, tmp_path, hub)
        assert code == 0 and "resuming from run/checkpoints/step-00000008" in output, output


@pytest.mark.slow
def test_a_set_that_the_hub_has_not_is_reported(tmp_path):
    with Hub(tmp_path / "hub", "someone/texts") as hub:
        hub.commit({"train.parquet": rows(60)})
        code, output = typed(
            [*TEXTS, "--task.data", "hf:someone/nothing", "--run.dir", "none"], tmp_path, hub
        )
    assert code == 2 and "data set 'someone/nothing' cannot be loaded" in output, output
    assert not (tmp_path / "none").exists()
