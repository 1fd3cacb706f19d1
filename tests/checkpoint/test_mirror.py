"""Checkpoints in a bucket: what a mirror holds, and runs whose disk is lost."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import lab
import stores
from oneloop.basics.bucket import Bucket
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.heartbeats import BEATS
from oneloop.checkpoint.lease import Lease, Taken, take
from oneloop.checkpoint.manifest import manifest_of
from oneloop.checkpoint.mirror import Damaged, fetch, folder_of, steps_in
from oneloop.checkpoint.store import Store, problems
from oneloop.checkpoint.uploads import Uploads
from oneloop.cli import main
from oneloop.recipe.parse import read
from oneloop.run.mirrored_folder import MirroredFolder
from worlds import each_forked, free_port, run

pytestmark = pytest.mark.covers(
    "oneloop.basics.bucket",
    "oneloop.checkpoint.background_save",
    "oneloop.checkpoint.checkpoints",
    "oneloop.checkpoint.lease",
    "oneloop.checkpoint.mirror",
    "oneloop.checkpoint.state_dict",
    "oneloop.checkpoint.store",
    "oneloop.checkpoint.uploads",
    "oneloop.recipe.schema",
    "oneloop.run.folder",
    "oneloop.run.mirrored_folder",
)

LAYOUTS = [("single", 1), ("ddp", 2), ("fsdp2", 2)]
SLOWLY = {"SLOW": "0.04"}  # seconds for each micro-batch
SHORT = ["--duration", "20", "--eval.every", "10"]
"""words of a run that saves four times, which is enough where the number of saves is no claim"""


@pytest.fixture(scope="module")
def s3(monkeymodule):
    """Return the variables of a server of S3, which this process has, too."""
    with stores.s3_server() as variables:
        for name, value in variables.items():
            monkeymodule.setenv(name, value)
        import fsspec

        fsspec.filesystem("s3").mkdir("bucket")
        yield variables


@pytest.fixture(scope="module")
def monkeymodule():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a function that returns the final weights of the undisturbed run of a layout, with
    these words."""
    known = {}

    def weights(config: str, ranks: int, *words: str) -> dict[str, bytes]:
        key = (config, *words)
        if key not in known:
            folder = tmp_path_factory.mktemp(config)
            stores.trained(folder, "--run.dir", "run", *words, config=config, ranks=ranks).ok()
            known[key] = final(folder / "run")
        return known[key]

    return weights


def final(folder: Path) -> dict[str, bytes]:
    files = {file.name: file.read_bytes() for file in (folder / "final").glob("*.safetensors")}
    assert len(files) == 2, files.keys()  # the weights and the EMA weights
    return files


def intact(address: str, scratch: Path, but: int = -1) -> list[int]:
    """Return the steps in a mirror, each of which is whole: every object is fetched, and verified
    by both checksums."""
    bucket, steps = Bucket(address), []
    for step in set(steps_in(bucket)) - {but}:
        path = scratch / f"step-{step:08d}"
        fetch(bucket, folder_of(step), path)
        assert problems(path) == []
        shutil.rmtree(path)
        steps.append(step)
    return sorted(steps)


def lose_disks(
    folder: Path, address: str, s3, times: int, config: str, ranks: int, seed: int
) -> Path:
    """Train until the end, and lose all hosts and their disks at random moments; return the run
    folder."""
    rng, lost = random.Random(seed), 0
    while True:
        kill = rng.uniform(1.0, 4.0) if lost < times else 0.0
        how = {
            "variables": s3 | SLOWLY,
            "config": config,
            "ranks": ranks,
            "hosts": True,
            "kill": kill,
        }
        world = stores.trained(folder, "--run.dir", address, **how)
        if world.codes == [0] * ranks:
            return folder / "host-0/runs" / address.partition("://")[2]
        assert kill and -signal.SIGKILL in world.codes, (seed, world.output)
        lost += 1
        shutil.rmtree(folder)


def kill_the_owner(address: str) -> None:
    """Kill the process that owns a mirror as soon as a checkpoint is in it."""
    bucket = Bucket(address)
    until = time.monotonic() + 100
    while not steps_in(bucket) and time.monotonic() < until:
        time.sleep(0.3)
    owner = json.loads(bucket.get("owner/00000001.json"))
    os.kill(owner["pid"], signal.SIGKILL)


# After its first checkpoint, training waits until the test continues it, or kills it.
WAITS = """
    own_loss = loss
    progress = None

    def loss(self, model, batch):
        saved = self.progress is not None and self.progress.step >= 5
        while saved and not os.path.exists("goes on"):
            time.sleep(0.02)
        return self.own_loss(model, batch)
"""


def waiting(folder: Path) -> Path:
    """Lay the task that waits after the first checkpoint."""
    stores.lay(folder)
    with (folder / "small.py").open("a") as file:
        file.write(WAITS)
    return folder


def test_the_disk_is_lost_after_the_first_checkpoint(tmp_path, s3, whole):
    address, own = "s3://bucket/first", "runs/bucket/first"
    folder = waiting(tmp_path / "lost")
    killer = threading.Thread(target=kill_the_owner, args=[address])
    killer.start()
    lost = stores.trained(folder, "--run.dir", address, *SHORT, variables=s3)
    killer.join()
    assert lost.codes == [-signal.SIGKILL], lost.output
    shutil.rmtree(folder)
    (waiting(folder) / "goes on").touch()
    again = stores.trained(folder, "--run.dir", address, *SHORT, variables=s3)
    again.ok()
    assert "resuming from s3://" in again.output, again.output
    done = folder / own
    assert final(done) == whole("single", 1, *SHORT)
    summary = json.loads((done / "summary.json").read_text())
    assert summary["mirrored"] == 20 and intact(address, tmp_path)[-1] == 20


@pytest.mark.slow
@pytest.mark.parametrize(("config", "ranks"), [("single", 1), ("fsdp2", 2)])
def test_the_disk_is_lost_and_the_result_is_bit_identical(tmp_path, s3, whole, config, ranks):
    done = lose_disks(tmp_path / "lost", f"s3://bucket/{config}", s3, 1, config, ranks, seed=ranks)
    assert final(done) == whole(config, ranks)
    summary = json.loads((done / "summary.json").read_text())
    assert summary["mirrored"] == 60 and intact(f"s3://bucket/{config}", tmp_path)[-1] == 60


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("config", "ranks"), LAYOUTS)
def test_the_disk_is_lost_a_hundred_times(tmp_path, s3, whole, config, ranks):
    for number in range(17):
        address = f"s3://bucket/often-{config}-{number}"
        done = lose_disks(tmp_path / "lost", address, s3, 2, config, ranks, seed=number)
        assert final(done) == whole(config, ranks)
        shutil.rmtree(tmp_path / "lost")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
def test_a_store_that_fails_and_loses_uploads(tmp_path, s3, whole, number):
    """One request in five fails; the last five uploads are lost, as with a mount that uploads
    later."""
    proxy, address = stores.Proxy(s3["AWS_ENDPOINT_URL"]), f"s3://bucket/lossy-{number}"
    variables, proxy.fail = s3 | {"AWS_ENDPOINT_URL": proxy.address}, 0.2
    words = ["--run.dir", address, "--save.every", "20"]
    first = stores.trained(
        tmp_path / "a", *words, "--stop.after", "2s", variables=variables | SLOWLY
    )
    assert first.codes == [75], first.output
    bucket = Bucket("s3://bucket")
    for name in proxy.written[-5 - number :]:
        bucket.remove(name.partition("?")[0].removeprefix("/bucket/"))
    again = stores.trained(tmp_path / "b", *words, variables=variables)
    if "the same command tries again" in again.output:  # all tries of a request have failed
        assert again.codes == [1], again.output
        again = stores.trained(tmp_path / "b", *words, variables=variables)
    again.ok()
    assert final(tmp_path / f"b/runs/bucket/lossy-{number}") == whole("single", 1)
    assert intact(address, tmp_path)[-1] == 60


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("times", "scratch"), [(50, True), (50, False)])
def test_the_uploading_process_is_killed(tmp_path, s3, whole, times, scratch):
    """Whatever is in the mirror is whole, after each run; and the run is, in the end."""
    rng, kills, number = random.Random(times), 0, 0
    while kills < times:
        address, folder = f"s3://bucket/killed-{times}-{scratch}-{number}", tmp_path / str(number)
        words = (
            ["--run.dir", address] if scratch else ["--save.mirror", address, "--run.dir", "run"]
        )
        while True:
            faults = {"writers": rng.uniform(0.3, 1.0)} if rng.random() < 0.8 else {}
            world = stores.trained(folder, *words, hosts=True, variables=s3 | SLOWLY, **faults)
            kills += world.output.count("writer killed")
            assert world.codes in ([0], [1]), world.output
            intact(address, tmp_path)
            if world.codes == [0]:
                break
        ended = folder / "host-0" / (f"runs/{address.partition('://')[2]}" if scratch else "run")
        assert final(ended) == whole("single", 1) and intact(address, tmp_path)[-1] == 60
        number += 1


def test_a_copy_of_a_run_folder(tmp_path, whole):
    """Two processes on one disk: steps kept, files and final weights are those of the run folder;
    another machine resumes from the copy."""
    address, folder = f"file://{tmp_path}/store", tmp_path / "one"
    words = ["--save.mirror", address, "--run.dir", "run", "--save.forever", "10", *SHORT]
    slowly = {"SLOW": "0.12"}  # the run would take 2.4 seconds
    stopped = stores.trained(
        folder, *words, "--stop.after", "1.2s", config="ddp", ranks=2, variables=slowly
    )
    assert stopped.codes == [75, 75], stopped.output
    own = [int(path.name[5:]) for path in Store(folder / "run/checkpoints").sealed()]
    assert steps_in(Bucket(address)) == own and "copies of run.dir" in stopped.output
    shutil.rmtree(folder)
    done = stores.trained(folder, *words, config="ddp", ranks=2)
    done.ok()
    assert "resuming from" in done.output and final(folder / "run") == whole("ddp", 2, *SHORT)
    bucket = Bucket(address)
    assert {10, 20} <= set(steps_in(bucket))
    for name in ("recipe.yaml", "environment.json", "metrics.jsonl", "summary.json", "report.html"):
        assert bucket.get(name) == (folder / "run" / name).read_bytes(), name


def test_a_mirror_that_fails_never_stops_training_and_is_an_error_at_the_end(tmp_path, s3, whole):
    """Also: no file of the run folder and of the mirror, and no output, holds a secret."""
    proxy, folder = stores.Proxy(s3["AWS_ENDPOINT_URL"]), waiting(tmp_path / "one")
    variables = s3 | {"AWS_ENDPOINT_URL": proxy.address, "AWS_MAX_ATTEMPTS": "1"}
    words = ["--save.mirror", "s3://bucket/down", "--run.dir", "run", *SHORT]
    words += ["--watch.output", "progress"]
    worlds = []
    thread = threading.Thread(
        target=lambda: worlds.append(stores.trained(folder, *words, variables=variables))
    )
    thread.start()
    while not steps_in(Bucket("s3://bucket/down")) and thread.is_alive():
        time.sleep(0.3)
    proxy.fail = 1.0
    (folder / "goes on").touch()
    thread.join()
    (world,) = worlds
    summary = json.loads((folder / "run/summary.json").read_text())
    assert world.codes == [1] and summary["exit_code"] == 1 and summary["step"] == 20, world.output
    assert "the mirror is incomplete" in summary["exit_reason"] and summary["mirrored"] < 20
    assert world.output.count("MIRROR FAILED") == 1
    proxy.fail = 0.0
    done = stores.trained(folder, *words, variables=variables)
    done.ok()
    assert final(folder / "run") == whole("single", 1, *SHORT)
    bucket = Bucket("s3://bucket/down")
    assert json.loads(bucket.get("summary.json"))["mirrored"] == 20
    assert intact(bucket.address, tmp_path)[-1] == 20
    texts = [file.read_bytes() for file in (folder / "run").rglob("*") if file.is_file()]
    texts += [bucket.get(name) for name in bucket.sizes("")]
    texts += [world.output.encode(), done.output.encode()]
    assert len(texts) > 30 and not any(
        value.encode() in text for text in texts for value in list(stores.KEYS.values())[:2]
    )


def test_an_unreachable_mirror_or_a_wrong_address_is_rejected_before_the_run(tmp_path, s3):
    nowhere = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}
    wrong = {
        "s3://me:SeCrEt-KeY@bucket/run": "contains a user, a password or a query",
        "s3://bucket/run?X-Amz-Signature=SeCrEt-KeY": "contains a user, a password or a query",
        "s3://bucket": "must name a folder",
        "hf://me/run": "hf:// cannot be used here",
        "memory://run": "memory:// cannot be used here",
        "file://runs/copy": "must name a folder",
        "file:///runs/../copy": "must name a folder",
        "s3://nowhere/run": "cannot be read now",
    }
    stores.lay(tmp_path)
    asked = {"": [], "nowhere": []}
    for number, address in enumerate(wrong):
        keys = ["--save.mirror", "--run.dir"]
        if 0 < number < len(wrong) - 1:  # between the first and the last address, in turn
            keys = [keys[number % 2]]
        asked["nowhere" if "nowhere" in address else ""] += [[key, address] for key in keys]
    asked[""] += [
        ["--run.dir", "s3://bucket/a", "--save.mirror", "s3://bucket/b"],
    ]
    messages = {
        **wrong,
        "s3://bucket/a": "cannot be combined with run.dir",
    }

    # All commands with the same variables share a world.
    for name, commands in asked.items():
        given = [(tmp_path, [*stores.WORDS.split(), *words]) for words in commands]
        variables = stores.LEASE | s3 | (nowhere if name else {})
        (found,) = run(each_forked, given, folder=tmp_path, variables=variables).ok()
        for words, ended in zip(commands, found, strict=True):
            # a store that does not answer may do so later
            code = 1 if name else 2
            assert (ended.code, "Traceback" in ended.output) == (code, False), ended.output
            assert messages[words[1]] in ended.output, ended.output
            assert "SeCrEt" not in ended.output
            # on a slow machine, a store that does not answer is waited for
            lines = re.sub("waiting for the mirror .*\n", "", ended.output).splitlines()
            assert len(lines) == 1, ended.output
            assert ended.changed == set(), ended.changed
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"small.py"}


@pytest.mark.slow
def test_a_start_is_repeated_while_the_store_fails(tmp_path, s3):
    """The first start finds a store that fails, and exits with 1, after which oneloop launch (and
    Slurm's and Kubernetes' rules) start again; bad input would end there."""
    proxy = stores.Proxy(s3["AWS_ENDPOINT_URL"])
    proxy.fail = 1.0
    stores.lay(tmp_path)
    variables = s3 | {"AWS_ENDPOINT_URL": proxy.address, "AWS_MAX_ATTEMPTS": "1"} | stores.LEASE
    words = ["--config_file", "single", "--max_restarts", "3", *stores.WORDS.split()]
    node = lab.Node([*words, "--run.dir", "s3://bucket/again"], tmp_path, variables=variables)
    lab.when([node], "cannot be read now")
    proxy.fail = 0.0
    assert node.ended(180) == 0 and "done" in node.output, node.output


@pytest.mark.slow
def test_a_store_that_never_answers(tmp_path):
    """The start says what it waits for, and does not wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        variables = stores.KEYS | {"AWS_ENDPOINT_URL": address, "AWS_MAX_ATTEMPTS": "1"}
        words = ["--run.dir", "s3://bucket/silent", "--watch.output", "progress"]
        world = stores.trained(tmp_path, *words, variables=variables)
    assert world.codes == [1] and "Traceback" not in world.output, world.output
    assert "waiting for the mirror to answer (s3://bucket/silent)" in world.output, world.output
    assert "cannot be read now" in world.output and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("run", "mirror"), [("run", "run"), ("run", "run/copy"), ("copy/run", "copy"), ("link", "run")]
)
def test_a_mirror_and_a_run_folder_inside_each_other_are_rejected(tmp_path, run, mirror):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    with pytest.raises(BadInput, match="are inside each other"):
        read(
            [
                "digits",
                "--run.dir",
                f"{tmp_path}/{run}",
                "--save.mirror",
                f"file://{tmp_path}/{mirror}",
            ]
        )


def test_a_copied_run_folder_waits_for_the_owner_of_the_mirror(tmp_path, monkeypatch):
    """Two containers of a machine have the same boot id and paths: only the start that wrote the
    word into this folder is an earlier one."""
    monkeypatch.setenv("ONELOOP_LEASE", "1")
    address, said = f"file://{tmp_path}/store", list[str]()

    def start(container: str) -> MirroredFolder:
        """Start in the folder that this container has at the common path."""
        if (tmp_path / "run").is_symlink():
            (tmp_path / "run").unlink()
        (tmp_path / container).mkdir(exist_ok=True)
        (tmp_path / "run").symlink_to(container)
        folder = MirroredFolder(tmp_path / "run", address, say=said.append)
        monkeypatch.setattr(Path, "resolve", lambda path, strict=False: path.absolute())
        try:
            folder.hold()
        finally:
            monkeypatch.undo()
            monkeypatch.setenv("ONELOOP_LEASE", "1")
        folder._lock.release()
        return folder

    first = start("one")
    start("one")  # the first one was killed: its successor does not wait
    assert said == []
    shutil.copytree(tmp_path / "one", tmp_path / "two", symlinks=True)
    start("two")
    assert len(said) == 1 and "is held by" in said[0], said
    start("three")  # without a word
    assert len(said) == 2 and first.lease.number == 1


def test_a_checkpoint_that_is_deleted_while_it_is_uploaded(tmp_path, monkeypatch):
    """It is left out without an error, also if only its manifest is gone."""
    news, store = [], Store(tmp_path / "run/checkpoints")
    for step in (1, 2):
        draft = store.draft(step)
        draft.seal(manifest_of(step, {"state.json": draft.put("state.json", b"{}")}, {}))
    bucket = Bucket(f"file://{tmp_path}/store")
    lease = take(bucket, {"pid": 1, "host": "h", "since": "now", "token": "t"})
    uploads = Uploads(
        bucket.address,
        str(tmp_path / "run"),
        counts=False,
        lease=(lease.number, lease.about),
        owns=False,
        news=news.append,
    )
    sealed = store.sealed

    def then_pruned():
        paths = sealed()
        shutil.rmtree(paths[-1])
        return paths

    monkeypatch.setattr(Store, "sealed", lambda self: then_pruned())
    uploads._copy_checkpoints()
    assert steps_in(bucket) == [1] and [one.error for one in news] == [None]


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path, capsys, monkeypatch):
    """It was taken for a fault of the network."""
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    address = f"file://{tmp_path}/store"
    Bucket(address).put("checkpoints/step-00000001/MANIFEST.json", b"{}", create=True)
    assert main(["verify", address]) == 2
    error = capsys.readouterr().err
    assert f"the copy of {address} in {tmp_path}/cache/mirrors" in error, error
    assert (
        "cannot be written (Not a directory); make room, or set ONELOOP_CACHE to another folder"
        in error
    ), error


def test_files_in_folders_of_the_final_weights(tmp_path, capsys, monkeypatch):
    """As of models of sentence-transformers: the commands read them from the mirror."""
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    address = f"file://{tmp_path}/store"
    words = ["--run.dir", address, "--duration", "5"]
    stores.lay(tmp_path)
    with (tmp_path / "small.py").open("a") as file:
        file.write(stores.NESTED)
    stores.trained(tmp_path, *words).ok()
    shutil.rmtree(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["verify", address]) == 0, capsys.readouterr().out
    assert main(["export", address, "--to", "out"]) == 0
    del sys.modules["small"]  # another test imports its own
    assert (tmp_path / "out/1_Pooling/config.json").read_text() == "{}"


def test_another_run_in_the_mirror_is_rejected(tmp_path):
    address = f"file://{tmp_path}/store"
    stores.trained(tmp_path / "one", "--save.mirror", address, "--duration", "5").ok()
    before = {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()}
    for more, expected in (
        (["--optimizer.lr", "0.02"], "holds a run of another recipe"),
        (["--run.resume", "never"], "holds a run"),
    ):
        world = stores.trained(tmp_path / "two", "--save.mirror", address, "--duration", "5", *more)
        assert world.codes == [2] and f"the mirror {address} {expected}" in world.output, (
            world.output
        )
    same = stores.trained(tmp_path / "two", "--save.mirror", address, "--duration", "5")
    assert same.codes == [0] and "finished at step 5: nothing to do" in same.output
    assert before == {
        path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()
    }
    assert not (tmp_path / "two/runs").exists()


def test_the_commands_take_the_address(tmp_path, capsys, monkeypatch, whole):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    address = f"file://{tmp_path}/store"
    stores.trained(tmp_path, "--run.dir", address, "--task.frozen", "true").ok()
    shutil.rmtree(tmp_path / "runs")
    assert main(["verify", address]) == 0 and capsys.readouterr().out.count("good") == 4
    sys.path.insert(0, str(tmp_path))
    assert main(["export", address, "--to", "out", "--checkpoint", "best"]) == 0
    assert (tmp_path / "out/model.safetensors").exists()
    assert main(["report", address]) == 0 and (tmp_path / "report.html").exists()
    shutil.rmtree(tmp_path / "cache")
    resumed = stores.trained(
        tmp_path, "--run.resume", f"{address}/checkpoints/step-00000060", "--task.frozen", "true", "--duration", "70",  # noqa: E501
        "--run.accept_changes", "true", variables={"ONELOOP_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    assert "resuming from" in resumed.ok() or "step-00000060" in resumed.output
    begun = stores.trained(
        tmp_path,
        "--init.from",
        address,
        "--duration",
        "5",
        "--run.dir",
        "begun",
        "--task.frozen",
        "true",
    )
    begun.ok()
    name = next((tmp_path / "store/checkpoints/step-00000060").glob("*.safetensors"))
    name.write_bytes(name.read_bytes()[:-1] + b"x")
    assert main(["verify", address]) == 1 and "step-00000060: " in capsys.readouterr().out


def test_a_damaged_newest_checkpoint_is_skipped_reported_and_written_again(tmp_path, whole):
    address, store = f"file://{tmp_path}/store", tmp_path / "store"
    # It has finished here, and is extended there: no moment depends on the speed of the machine.
    stores.trained(tmp_path / "a", "--run.dir", address, *SHORT, "--duration", "10").ok()
    older, newest = steps_in(Bucket(address))[-2:]
    name = next((store / folder_of(newest)).glob("*.safetensors"))
    name.write_bytes(name.read_bytes()[:-1] + b"x")  # of the same size: only its checksum differs
    again = stores.trained(tmp_path / "b", "--run.dir", address, *SHORT)
    again.ok()
    assert f"step-{newest:08d} cannot be used, and was skipped" in again.output, again.output
    assert f"resuming from {address}/checkpoints/step-{older:08d}" in again.output
    assert final(tmp_path / "b/runs" / str(store).strip("/")) == whole("single", 1, *SHORT)
    assert intact(address, tmp_path, but=newest)[-1] == 20


KEPT: list[tuple[Lease, threading.Thread]] = []


def keep(lease: Lease, taken=lambda error: None) -> None:
    thread = threading.Thread(target=lease.keep, args=[taken], daemon=True)
    KEPT.append((lease, thread))
    thread.start()


@pytest.fixture(autouse=True)
def leases_end() -> Iterator[None]:
    """End the threads that keep leases: their retries would draw from Python's generator, which
    later tests of this process compare."""
    yield

    def ended() -> None:
        raise Taken("the test has ended")

    while KEPT:
        lease, thread = KEPT.pop()
        lease.renew = ended
        thread.join(60)
        assert not thread.is_alive()


def owner(bucket: Bucket, seconds: float, **more) -> Lease:
    about = {
        "pid": 1,
        "host": "gone",
        "since": "then",
        "token": "other",
        "seconds": seconds,
        "beat": 0,
        **more,
    }
    bucket.put("owner/00000001.json", json.dumps(about).encode(), create=True)
    return Lease(bucket, 1, about)


@pytest.mark.parametrize("scheme", ["file", "memory", "s3"])
def test_the_lease(tmp_path, scheme, monkeypatch, request):
    if scheme == "s3":
        request.getfixturevalue("s3")
    monkeypatch.setenv("ONELOOP_LEASE", "1")
    bucket = Bucket(
        f"{scheme}://{tmp_path}/store"
        if scheme == "file"
        else f"{scheme}://bucket/lease-{tmp_path.name}"
    )
    gone = owner(bucket, 1.0)  # fewer seconds would not count
    gone.renew()
    time.sleep(0.6)  # it does not look soon after a renewal
    began = time.monotonic()
    about = {"pid": 2, "host": "new", "since": "now", "token": "mine"}
    lease = take(bucket, about, say=lambda text: None)
    assert lease.number == 2 and time.monotonic() - began >= 1.0
    with pytest.raises(Taken, match="taken over by process 2 on new"):
        gone.check()
    with pytest.raises(Taken, match="taken over by process 2 on new"):
        gone.renew()
    keep(lease)
    about = {"pid": 3, "host": "third", "since": "now", "token": "third"}
    with pytest.raises(Taken, match="in use by process 2 on new"):
        take(bucket, about, say=lambda text: None)
    # a later start in the same folder: at once
    about = {"pid": 4, "host": "new", "since": "now", "token": "again"}
    again = take(bucket, about, earlier="mine")
    again.renew(released=True)
    assert take(bucket, {"pid": 5, "host": "last", "since": "now", "token": "third"}).number == 4
    time.sleep(0.6)
    with pytest.raises(Taken, match="taken over by process 5"):
        lease.check()
    with pytest.raises(Taken, match="taken over by process 5"):
        gone.renew()  # after several successors, whose objects are gone


@pytest.mark.parametrize(
    "content",
    [
        b'{"seconds": 1e9, "pid": 1, "host": "h", "since": "s", "token": "t"}',
        b'{"seconds": NaN}',
        b'{"seconds": "x", "host": "\\u001b[2J"}',
        b"[]",
        b"[" * 100_000,
        b"",
    ],
)
def test_a_lease_of_another_form_blocks_no_start_for_ever(tmp_path, monkeypatch, content):
    """It counts as one of the usual seconds; a name that is not of a lease counts for nothing."""
    monkeypatch.setattr("oneloop.checkpoint.lease._USUAL", 0.3)
    bucket, said = Bucket(f"file://{tmp_path}/store"), list[str]()
    for name in ("00000001.json", "abc.json", "00000002"):
        bucket.put(f"owner/{name}", content, create=True)
    about = {"pid": 2, "host": "new", "since": "now", "token": "mine"}
    monkeypatch.setenv("ONELOOP_LEASE", "1")
    heartbeats = BEATS.count
    assert take(bucket, about, say=said.append).number == 2
    assert BEATS.count > heartbeats  # the wait is no hang
    assert all(line.isprintable() for line in said) and len(said) == 1, said
    monkeypatch.setenv("ONELOOP_LEASE", "1e9")
    with pytest.raises(BadInput, match="must be a number of seconds from 1 to 3600"):
        take(bucket, about)


def test_a_mirror_below_a_file_is_bad_input(tmp_path):
    (tmp_path / "file").write_text("")
    world = stores.trained(tmp_path, "--save.mirror", f"file://{tmp_path}/file/store")
    assert world.codes == [2] and "check address and credentials" in world.output, world.output


def test_of_many_starters_at_once_one_becomes_the_owner(tmp_path, s3):
    bucket, taken = Bucket("s3://bucket/many"), []

    def start(number: int) -> None:
        try:
            lease = take(
                Bucket(bucket.address),
                {"pid": number, "host": "h", "since": "s", "token": str(number)},
            )
        except Taken:
            return
        keep(lease, taken.append)
        taken.append(lease)

    threads = [threading.Thread(target=start, args=[number]) for number in range(6)]
    os.environ["ONELOOP_LEASE"] = "1.5"
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        del os.environ["ONELOOP_LEASE"]
    assert len(taken) == 1 and taken[0].number == 1


def kill_the_writer_between_two_saves(root: str, address: str) -> tuple[bytes, bytes, list[int]]:
    """Return the lease after the kill, the lease before the next save, and the steps that are in
    the mirror at the end."""
    from oneloop.checkpoint import background_save
    from oneloop.checkpoint.checkpoints import Checkpoints
    from oneloop.launch.processes import start

    background_save._RESTART = 0.5
    bucket = Bucket(address)
    lease = take(bucket, {"pid": os.getpid(), "host": "h", "since": "now", "token": "mine"})
    world = start()
    model = world.prepare(torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = Checkpoints(Path(root) / "checkpoints", world.accelerator)
    checkpoints.mirror(address, lease=(lease.number, lease.about), counts=False)

    def steps_until(over) -> None:
        """Poll like a training run, in steps of 10 ms."""
        until = time.monotonic() + 4
        while not over() and time.monotonic() < until:
            assert checkpoints.poll() is None
            time.sleep(0.01)

    def owner_file() -> bytes:
        return bucket.get(f"owner/{lease.number:08d}.json")

    taken = owner_file()
    checkpoints.save(1, model, optimizer, {})
    checkpoints.finish()
    steps_until(lambda: steps_in(bucket) == [1] and owner_file() != taken)
    (writer,) = stores.writers_of(os.getpid())
    os.kill(writer, signal.SIGKILL)
    while stores.writers_of(os.getpid()):
        time.sleep(0.01)
    killed = owner_file()
    steps_until(lambda: owner_file() != killed)
    renewed = owner_file()

    checkpoints.save(2, model, optimizer, {})
    checkpoints.finish()
    checkpoints.end_uploads(final=False)
    checkpoints.close()
    return killed, renewed, steps_in(bucket)


def test_the_lease_is_renewed_between_two_saves_after_the_writer_was_killed(tmp_path):
    address = f"file://{tmp_path}/store"
    world = run(
        kill_the_writer_between_two_saves, str(tmp_path / "run"), address, variables=stores.LEASE
    )
    ((killed, renewed, steps),) = world.ok()
    assert killed != renewed and json.loads(renewed)["token"] == "mine"
    assert steps == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("repeat", range(50))
def test_of_two_runs_one_trains_and_the_other_is_rejected(tmp_path, s3, repeat):
    worlds, address = {}, f"s3://bucket/two-{repeat}"
    # On a busy machine, the writing process, which renews the lease, starts after seconds.
    variables = s3 | SLOWLY | {"ONELOOP_LEASE": "10"}

    def start(name: str) -> None:
        worlds[name] = stores.trained(
            tmp_path / name, "--save.mirror", address, variables=variables
        )

    threads = [threading.Thread(target=start, args=[name]) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(world.codes[0] for world in worlds.values()) == [0, 2], [
        world.output for world in worlds.values()
    ]
    rejected = next(world for world in worlds.values() if world.codes == [2])
    assert (
        f"{address} is in use by process " in rejected.output
        and intact(address, tmp_path)[-1] == 60
    )


def test_only_own_objects_are_deleted_and_foreign_folders_are_rejected(tmp_path):
    """Objects of others below the address stay, also if their names are similar; an address that
    has only others is not used; and ``final/`` alone is a run."""
    address, foreign = f"file://{tmp_path}/store", tmp_path / "store"
    names = [
        "nested/checkpoints/step-00000060/MANIFEST.json",
        "final-2/recipe.yaml",
        "checkpoints/mine.pt",
        "base/x/model",
    ]
    words = ["--save.mirror", address, "--run.dir", "run", "--duration", "10"]
    stores.trained(tmp_path, *words).ok()
    for name in names:
        (foreign / name).parent.mkdir(parents=True, exist_ok=True)
        (foreign / name).write_text("another's")
    longer = stores.trained(tmp_path, *words, "--duration", "20", "--run.accept_changes", "true")
    longer.ok()
    assert all((foreign / name).exists() for name in names) and steps_in(Bucket(address))[-1] == 20
    shutil.rmtree(foreign / "checkpoints")
    shutil.rmtree(tmp_path / "run")
    other = stores.trained(tmp_path, *words, "--optimizer.lr", "0.5")
    assert other.codes == [2] and "holds a run of another recipe" in other.output
    for name in ("final", "owner", "base"):
        shutil.rmtree(foreign / name)
    used = stores.trained(tmp_path, *words)
    assert used.codes == [2] and "which is not of oneloop; choose another address" in used.output, (
        used.output
    )


@pytest.mark.slow
def test_a_store_that_fails_for_a_while_damages_nothing(tmp_path, s3):
    """An unreadable checkpoint is not a damaged one: the start fails, and the next one resumes from
    it."""
    proxy, address = stores.Proxy(s3["AWS_ENDPOINT_URL"]), "s3://bucket/for-a-while"
    variables = s3 | {"AWS_ENDPOINT_URL": proxy.address}
    stores.trained(
        tmp_path / "a", "--run.dir", address, "--duration", "10", variables=variables
    ).ok()
    before = Bucket(address).get("checkpoints/step-00000010/MANIFEST.json")
    proxy.broken, variables["AWS_MAX_ATTEMPTS"] = "rank-00000.safetensors", "1"
    words = ["--run.dir", address, "--duration", "15", "--run.accept_changes", "true"]
    failed = stores.trained(tmp_path / "b", *words, variables=variables)
    assert (
        failed.codes == [1] and "skipped" not in failed.output and "Traceback" not in failed.output
    ), failed.output
    assert not (tmp_path / "b/runs").exists()  # nothing stays of what was fetched
    proxy.broken = ""
    done = stores.trained(tmp_path / "b", *words, variables=variables)
    done.ok()
    assert f"resuming from {address}/checkpoints/step-00000010" in done.output
    assert Bucket(address).get("checkpoints/step-00000010/MANIFEST.json") == before


@pytest.mark.slow
def test_an_older_folder_and_a_path_into_a_used_mirror(tmp_path):
    address, words = f"file://{tmp_path}/store", ["--run.dir", "run", "--duration", "40"]
    mirrored = [*words, "--save.mirror", address, "--save.keep", "9"]
    first = stores.trained(tmp_path / "a", *mirrored, "--stop.after", "0.8s", variables=SLOWLY)
    assert first.codes == [75], first.output
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    stores.trained(tmp_path / "b", *mirrored).ok()
    back = stores.trained(
        tmp_path / "a", *mirrored, "--duration", "45", "--run.accept_changes", "true"
    )
    # the folder is older than the mirror
    assert back.codes == [0] and "step-00000040" in back.output, back.output
    path = f"{address}/{folder_of(steps_in(Bucket(address))[0])}"
    wrong = stores.trained(
        tmp_path / "c",
        *mirrored,
        "--duration",
        "50",
        "--run.resume",
        path,
        "--run.accept_changes",
        "true",
    )
    assert wrong.codes == [2] and "which would be lost" in wrong.output, wrong.output


def test_hosts_with_another_source_of_the_task_are_rejected(tmp_path):
    """Another loss on one host would be trained to exit code 0."""
    words = ["--run.dir", f"file://{tmp_path}/store", "--duration", "5"]
    variables = {"CHANGED_ON": "1"}
    world = stores.trained(tmp_path, *words, ranks=2, hosts=True, variables=variables)
    assert world.codes == [2, 2], world.output
    assert "the ranks differ (" in world.output and "source of the task: " in world.output, (
        world.output
    )
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_frozen_parameters_on_hosts_without_a_shared_disk(tmp_path):
    words = ["--run.dir", f"file://{tmp_path}/store", "--task.frozen", "true", "--duration", "20"]
    first = stores.trained(
        tmp_path / "a", *words, "--stop.after", "0.6s", ranks=2, hosts=True, variables=SLOWLY
    )
    assert first.codes == [75, 75], first.output
    again = stores.trained(tmp_path / "b", *words, ranks=2, hosts=True)
    again.ok()
    assert (
        len(intact(f"file://{tmp_path}/store", tmp_path)) >= 2 and "resuming from" in again.output
    )


@pytest.mark.slow
def test_a_paused_owner_writes_nothing_afterwards(tmp_path):
    """All its processes are stopped for longer than the lease, while another machine trains to the
    end."""
    address, folder = f"file://{tmp_path}/store", stores.lay(tmp_path / "a")
    words = [*stores.WORDS.split(), "--save.mirror", address]
    environment = {
        **os.environ,
        **stores.LEASE,
        "SLOW": "0.1",
        "PYTHONPATH": f"{tmp_path}/a:{os.environ['PYTHONPATH']}",
    }
    command = [sys.executable, "-m", "oneloop.train", *words]
    how = {
        "cwd": folder,
        "env": environment,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }
    paused = subprocess.Popen(command, start_new_session=True, **how)
    try:
        while not steps_in(Bucket(address)):
            assert paused.poll() is None, paused.stdout.read()
            time.sleep(0.1)
        # The writing process has a session of its own.
        top = psutil.Process(paused.pid)
        family = [top, *top.children(recursive=True)]
        for process in family:
            process.suspend()
        done = stores.trained(tmp_path / "b", "--save.mirror", address)
        done.ok()
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")}
        for process in family:
            process.resume()
        output, _ = paused.communicate(timeout=120)
    finally:
        paused.kill()
    assert paused.returncode == 1 and "was taken over by process" in output, output
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")} == before


def test_each_file_is_verified_and_the_processes_of_a_host_share_them(tmp_path, monkeypatch):
    """Files of many blocks, of which a few are read at the same time."""
    from oneloop.basics import bucket as module
    from oneloop.checkpoint import uploads

    monkeypatch.setattr(module, "BLOCK", 100)
    monkeypatch.setattr(uploads, "BLOCK", 100)
    content = random.Random(0).randbytes(2050)
    store = Store(tmp_path / "run/checkpoints")
    draft = store.draft(7)
    files = {
        name: draft.put(name, data) for name, data in (("a", content), ("b", b""), ("c", b"c"))
    }
    draft.seal(manifest_of(7, files, {}))
    address = f"file://{tmp_path}/store"
    uploads = uploads.Uploads(
        address,
        str(tmp_path / "run"),
        counts=False,
        lease=(1, {"seconds": 60.0, "beat": 0, "token": "t"}),
        owns=False,
        news=lambda news: None,
    )
    done = uploads.end(final=False)
    assert done.mirrored == 7 and done.error is None
    bucket, path = Bucket(address), tmp_path / "step-00000007"
    for part in range(2):
        fetch(bucket, folder_of(7), path, part=part, parts=2)
        assert (path / "b").exists() == (part == 1)
    assert problems(path) == [] and (path / "a").read_bytes() == content

    stored = next((tmp_path / "store" / folder_of(7)).glob("*-a"))
    stored.write_bytes(content[:720] + b"?" + content[721:])
    with pytest.raises(Damaged, match="a: expected checksum "):
        fetch(bucket, folder_of(7), path)
    stored.write_bytes(content[:720])
    with pytest.raises(Damaged, match="a: expected 2050 bytes, found 720"):
        fetch(bucket, folder_of(7), path)
    stored.unlink()
    with pytest.raises(Damaged, match="a: expected 2050 bytes, found none"):
        fetch(bucket, folder_of(7), path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("config", ["ddp", "fsdp2"])
def test_two_launchers_without_a_shared_disk(tmp_path, s3, whole, config):
    """Two nodes in two folders: twice, all processes are killed and both folders are deleted."""
    address, rng = f"s3://bucket/launchers-{config}", random.Random(config)
    # seconds after the first new checkpoint
    for kill in (rng.uniform(0.1, 1.0), rng.uniform(0.1, 1.0), 0.0):
        keys = f"--processes_per_node 1 --config_file {config} {stores.WORDS} --run.dir {address}"
        words = f"--nodes 2 --rendezvous 127.0.0.1:{free_port()} {keys}".split()
        hosts = [stores.lay(tmp_path / f"host-{number}") for number in range(2)]
        variables = s3 | stores.LEASE | (SLOWLY if kill else {})
        nodes = [lab.Node(words, folder, variables=variables) for folder in hosts]
        try:
            if kill:
                before, until = max(steps_in(Bucket(address)), default=0), time.monotonic() + 120
                while (
                    max(steps_in(Bucket(address)), default=0) <= before and time.monotonic() < until
                ):
                    time.sleep(0.1)
                time.sleep(kill)
                assert all(node.process.poll() is None for node in nodes), [
                    node.output for node in nodes
                ]
            else:
                assert [node.ended(200) for node in nodes] == [0, 0], [
                    node.output for node in nodes
                ]
        finally:
            for node in nodes:
                node.kill()
        if kill:
            for folder in hosts:
                shutil.rmtree(folder)
    runs = [folder / "runs" / address.partition("://")[2] for folder in hosts]
    (ended,) = [folder for folder in runs if (folder / "final").exists()]
    assert final(ended) == whole(config, 2) and intact(address, tmp_path)[-1] == 60
    assert any("resuming from s3://" in node.output for node in nodes)


@pytest.mark.slow
@pytest.mark.parametrize("scratch", [True, False])
def test_the_best_checkpoint_is_fetched_for_the_final_weights(tmp_path, scratch):
    """The best step is only in the mirror when the run, whose disk was lost, ends."""
    address, store = f"file://{tmp_path}/store", tmp_path / "store"
    words = ["--run.dir", address] if scratch else ["--save.mirror", address, "--run.dir", "run"]
    words += ["--optimizer.lr", "0.3", "--eval.every", "10", "--save.final", "best"]
    run_folder = f"runs/{address.partition('://')[2].strip('/')}" if scratch else "run"
    stores.trained(tmp_path / "a", *words).ok()
    summary = json.loads((tmp_path / "a" / run_folder / "summary.json").read_text())
    # else the test shows nothing
    assert summary["final"]["step"] < 55 and summary["final"]["weights"] == "best"
    for name in ("final", folder_of(60)):
        shutil.rmtree(store / name)
    (store / "summary.json").unlink()
    again = stores.trained(tmp_path / "b", *words)
    again.ok()
    assert f"resuming from {address}/{folder_of(55)}" in again.output
    assert final(tmp_path / "b" / run_folder) == final(tmp_path / "a" / run_folder)
