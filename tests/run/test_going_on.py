"""A resume rejects changes and repairs damaged files next to the checkpoints. Also: the results of
a run."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lab
import stores
from endings import RECIPE, faulty, summary
from oneloop.basics.files import dumps, vouched
from oneloop.checkpoint.manifest import MANIFEST, read_manifest, signed
from oneloop.checkpoint.store import Store, problems
from oneloop.cli import main
from oneloop.recipe.comparison import training_configuration
from oneloop.run.folder import Folder
from oneloop.show.metrics_file import Lines
from oneloop.tools.run_reader import read_record
from silent_cases import BASE, CHANGES, DAMAGE, WORDS, lay, unfinished
from slow_cases import with_slow
from sync_saves import write_in_the_trainer
from worlds import each_forked, here, run, train

pytestmark = pytest.mark.covers(
    "oneloop.checkpoint.manifest",
    "oneloop.checkpoint.store",
    "oneloop.checkpoint.writer",
    "oneloop.loop.upkeep",
    "oneloop.loop.training_state",
    "oneloop.recipe.comparison",
    "oneloop.run.compatibility",
    "oneloop.run.final_weights",
    "oneloop.run.folder",
    "oneloop.show.metrics_file",
    "oneloop.tools.report.starts",
    "oneloop.tools.run_reader",
)


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    """Return a folder with the small task, and its finished run with WORDS (whole)."""
    folder = tmp_path_factory.mktemp("own")
    lay(folder)
    run(here, WORDS, folder=folder).ok()
    (folder / "run").rename(folder / "whole")
    return folder


@pytest.fixture
def killed(own) -> Path:
    """Return the folder of the small task, with its run as it was when killed after step 8.

    It is the same folder in each test, since a run belongs to the file of its task.
    """
    for path in own.iterdir():
        if path.name != "whole" and path.is_dir():
            shutil.rmtree(path)
    lay(own)
    shutil.copytree(own / "whole", own / "run")
    unfinished(own / "run")
    return own


@pytest.mark.parametrize("name", CHANGES)
def test_a_resume_rejects_what_has_changed(killed, name):
    members, options, expected_text = CHANGES[name]
    before = {path: path.read_bytes() for path in (killed / "run").rglob("*") if path.is_file()}
    lay(killed, members)
    rejected = run(here, WORDS, options=options, folder=killed)
    assert rejected.codes == [2] and expected_text in rejected.output, rejected.output
    after = {path: path.read_bytes() for path in (killed / "run").rglob("*") if path.is_file()}
    assert {path.name for path in before.keys() ^ after.keys()} <= {".lock"}
    assert all(after[path] == content for path, content in before.items())
    # One change shows that it can be accepted: the accepted changes are those that were rejected.
    if name == "other data":
        accepted = run(
            here, [*WORDS, "--run.accept_changes", "true"], options=options, folder=killed
        )
        assert accepted.codes == [0] and f"accepted: {expected_text}" in accepted.output, (
            accepted.output
        )


def test_a_checkpoint_of_another_run_is_rejected(killed):
    """A checkpoint of another seed in the folder, and one from before an accepted change."""
    other = [*WORDS, "--seed", "5", "--run.dir", "other"]
    run(here, other, folder=killed).ok()
    unfinished(killed / "other")
    own = Store(killed / "run/checkpoints").sealed()[-1]
    shutil.rmtree(own)
    shutil.copytree(Store(killed / "other/checkpoints").sealed()[-1], own)
    rejected = run(here, WORDS, folder=killed)
    assert rejected.codes == [2] and "seed: 5 -> 0" in rejected.output, rejected.output
    changed = [*WORDS, "--run.accept_changes", "true"]
    accepted = run(here, changed, folder=killed)
    assert accepted.codes == [0] and "accepted: seed: 5 -> 0" in accepted.output, accepted.output

    # The newest checkpoint is of the changed recipe, and is damaged; the one before is not.
    longer = [*changed, "--duration", "16"]
    run(here, longer, folder=killed).ok()
    unfinished(killed / "run", step=16)
    newest = Store(killed / "run/checkpoints").sealed()[-1]
    (newest / "state.json").write_text("{}")
    without = [*WORDS, "--duration", "16"]
    rejected = run(here, without, folder=killed)
    assert rejected.codes == [2] and "duration: 12 -> 16" in rejected.output, rejected.output
    again = run(here, longer, folder=killed)
    assert again.codes == [0] and "accepted: " in again.output, again.output


@pytest.mark.parametrize(("ranks", "replaced"), [(1, False), (1, True), (2, True)])
def test_a_run_folder_that_is_moved_while_it_is_written(tmp_path, ranks, replaced):
    """The run ends with 1 at the next line, and does not continue in a second folder."""
    worlds, variables = [], {"SLOW": "0.05"}
    words = ["--run.dir", "run", "--log.every", "1", "--duration", "200"]

    def train() -> None:
        worlds.append(stores.trained(tmp_path, *words, ranks=ranks, variables=variables))

    thread = threading.Thread(target=train)
    thread.start()
    lab.until_true(lambda: Store(tmp_path / "run/checkpoints").sealed())
    (tmp_path / "run").rename(tmp_path / "moved")
    if replaced:
        (tmp_path / "run").mkdir()
        (tmp_path / "run/precious").write_text("another run")
    thread.join()
    (world,) = worlds
    assert 1 in world.codes and 0 not in world.codes, world.output
    assert "was renamed or replaced while the run wrote to it" in world.output, world.output
    found = {path.name for path in (tmp_path / "run").glob("*")}
    assert found == ({"precious"} if replaced else set()), found
    assert (tmp_path / "moved/checkpoints").is_dir()


def test_another_type_of_weights_is_rejected_and_changed_source_is_reported(killed):
    wide = [*WORDS, "--machine.dtype", "float64"]
    commands = [(killed, wide), (killed, [*wide, "--run.accept_changes", "true"])]
    (found,) = run(each_forked, commands, folder=killed).ok()
    for ended in found:
        assert ended.code == 2 and "Traceback" not in ended.output and "float64" in ended.output
    (killed / "mine.py").write_text(BASE + "    # a bug is mended here\n    pass\n")
    edited = run(here, WORDS, folder=killed)
    assert edited.codes == [0] and "the run continues with the new source" in edited.output
    assert "resuming from run/checkpoints/step-00000008" in edited.output


def test_samples_that_are_others_each_time_have_no_checksum(tmp_path):
    lay(
        tmp_path,
        "    def train_set(self):\n        import numpy\n        own = numpy.random.default_rng()\n"
        "        return [(self.x[i], torch.tensor([own.random()])) for i in range(64)]",
    )
    # drawn at each start: the samples differ at the next one
    run(here, WORDS, folder=tmp_path).ok()
    unfinished(tmp_path / "run")
    assert "hash of 16 samples: " in run(here, WORDS, folder=tmp_path).output


# --- files next to the checkpoints
# ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Return a folder with a digits run of twelve steps (run), and the same run killed after step 8
    (cut)."""
    folder = tmp_path_factory.mktemp("whole")
    words = [*WORDS[:1], *WORDS[3:], "--task.width", "8"]
    run(train, words, folder=folder).ok()
    shutil.copytree(folder / "run", folder / "cut")
    unfinished(folder / "cut")
    return folder


BOOKS = ["recipe.yaml", "metrics.jsonl"]
# The random damage below goes through the readers of the first two files.
DAMAGED_BY_DEFAULT = {
    ("recipe.yaml", "empty"),
    ("metrics.jsonl", "cut"),
}
DAMAGED = [(name, kind) for name in BOOKS for kind in DAMAGE]


@pytest.mark.parametrize(
    ("name", "kind"), with_slow(DAMAGED, slow=set(DAMAGED) - DAMAGED_BY_DEFAULT)
)
def test_damaged_books_are_reported_and_the_run_continues(tmp_path, whole, name, kind):
    shutil.copytree(whole / "cut", tmp_path / "run")
    file = tmp_path / "run" / name
    file.write_bytes(DAMAGE[kind](file.read_bytes()))
    world = run(train, [*WORDS[:1], *WORDS[3:], "--task.width", "8"], folder=tmp_path)
    world.ok()
    # The recipe that a resume compares is in environment.json.
    assert name == "recipe.yaml" or f"run/{name} " in world.output, world.output
    for end in ("model.safetensors",):
        assert (tmp_path / "run" / "final" / end).read_bytes() == (
            whole / "run" / "final" / end
        ).read_bytes()
    assert b"\0" not in (tmp_path / "run" / "metrics.jsonl").read_bytes()
    steps = [
        line["step"]
        for line in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    ]
    assert steps == sorted(steps) and steps[-1] == 12
    if name == "recipe.yaml":
        assert (tmp_path / "run" / name).read_text() == (whole / "run" / name).read_text()


def test_a_run_of_a_version_with_another_key_is_rejected(tmp_path, whole):
    """Nothing reads the run folders of other versions: neither a finished nor a killed run."""
    commands = []
    for state in ("run", "cut"):
        shutil.copytree(whole / state, tmp_path / state / "run")
        file = tmp_path / state / "run" / "environment.json"
        environment = json.loads(file.read_text())
        del environment["checksum"]
        environment["inputs"]["ema.gone"] = "None"
        file.write_text(dumps(vouched(environment)))
        commands.append((tmp_path / state, [*WORDS[:1], *WORDS[3:], "--task.width", "8"]))
    (outcomes,) = run(each_forked, commands, folder=tmp_path).ok()
    for ended in outcomes:
        assert ended.code == 2, ended.output
        (line,) = [line for line in ended.output.splitlines() if line.startswith("oneloop:")]
        assert "holds a run of another recipe (ema.gone: None -> missing)" in line, line


def test_a_damaged_end_is_written_again(tmp_path, whole):
    ends = [
        ("summary.json", DAMAGE["cut"]),
        ("summary.json", lambda c: c.replace(b"0.", b"1.")),
        ("final/model.safetensors", DAMAGE["cut"]),
    ]
    commands = []
    for number, (name, change) in enumerate(ends):
        folder = tmp_path / str(number)
        folder.mkdir()
        shutil.copytree(whole / "run", folder / "run")
        file = folder / "run" / name
        file.write_bytes(change(file.read_bytes()))
        if name.startswith("final"):
            assert main(["verify", str(folder / "run")]) == 1
        commands.append((folder, [*WORDS[:1], *WORDS[3:], "--task.width", "8"]))
    (found,) = run(each_forked, commands, folder=tmp_path).ok()
    for (folder, _), ended in zip(commands, found, strict=True):
        assert ended.code == 0, ended.output
        assert "damaged" in ended.output and "rewriting it" in ended.output
        assert main(["verify", str(folder / "run")]) == 0
        weights = "final/model.safetensors"
        assert (folder / "run" / weights).read_bytes() == (whole / "run" / weights).read_bytes()


def test_a_folder_in_place_of_a_file_is_put_aside(tmp_path, whole):
    shutil.copytree(whole / "cut", tmp_path / "run")
    for name in ("metrics.jsonl", "recipe.yaml"):
        (tmp_path / "run" / name).unlink()
        (tmp_path / "run" / name / "inside").mkdir(parents=True)
    world = run(train, [*WORDS[:1], *WORDS[3:], "--task.width", "8"], folder=tmp_path)
    world.ok()
    assert (tmp_path / "run" / "metrics.jsonl").is_file() and (
        tmp_path / "run" / "recipe.yaml"
    ).is_file()
    assert list((tmp_path / "run").glob("bad-*"))


def hurt(content: bytes, draw: random.Random) -> bytes:
    """Return the content with random damage of a random kind."""
    kind = draw.choice(["flip", "cut", "noise", "zeros", "grown", "lines", "other"])
    at = draw.randrange(max(1, len(content)))
    if kind == "flip":
        return (
            content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :]
            if content
            else b"x"
        )
    if kind == "cut":
        return content[:at]
    if kind == "noise":
        return content[:at] + draw.randbytes(min(64, len(content) - at)) + content[at + 64 :]
    if kind == "zeros":
        return content[:at] + bytes(len(content) - at)
    if kind == "other":  # well-formed, but not what the file should hold
        return b"[1, 2]\n"
    if kind == "grown":
        return content + content[at:]
    lines = content.splitlines(keepends=True)
    draw.shuffle(lines)
    return b"".join(lines)


@pytest.mark.parametrize("times", [70, pytest.param(2000, marks=pytest.mark.slow)])
def test_corruptions_of_a_run_folder(tmp_path, whole, times):
    """Random damage to files next to the checkpoints: inspect() never rejects the run's own recipe,
    metrics.jsonl keeps only lines that the run wrote, and damaged results are detected."""
    import yaml

    draw = random.Random(0)
    resolved = yaml.safe_load((whole / "run" / "recipe.yaml").read_text())
    recipe = training_configuration(resolved)
    (state_file,) = (whole / "cut" / "checkpoints").glob("step-00000008/state.json")
    state = json.loads(state_file.read_text())["tracking"]
    right = (whole / "cut" / "metrics.jsonl").read_bytes()
    good_lines = set(right[: state["bytes"]].splitlines())
    names = ["recipe.yaml", "summary.json", "metrics.jsonl", "examples.json", "environment.json"]
    names += ["final/model.safetensors", f"final/{MANIFEST}"]
    detected = dict.fromkeys(names, 0)
    for number in range(times):
        name = names[number % len(names)]
        source = whole / ("cut" if name == "metrics.jsonl" else "run")
        content = (source / name).read_bytes()
        bad = hurt(content, draw)
        if bad == content:
            continue
        messages: list[str] = []
        if name == "metrics.jsonl":
            (tmp_path / name).write_bytes(bad)
            lines = Lines(tmp_path / name, say=messages.append)
            lines.back_to(state, kept=b'"event": "resume"')
            lines.close()
            left = (tmp_path / name).read_bytes()
            assert b"\0" not in left
            if bad[: state["bytes"]] != right[: state["bytes"]]:
                assert messages, bad
                assert all(json.loads(line)["step"] <= 8 for line in left.splitlines())
                detected[name] += 1
            else:
                assert left[: state["bytes"]] == right[: state["bytes"]]
                assert set(left.splitlines()) == good_lines
            continue
        (source / name).write_bytes(bad)
        try:
            # must not reject the run's own recipe
            finished = Folder(source, say=messages.append).inspect(recipe)
            read_record(source)
            if name in ("summary.json", "final/model.safetensors", f"final/{MANIFEST}"):
                same = (
                    name == "summary.json"
                    and messages == []
                    and json.loads(bad) == json.loads(content)
                )
                assert (finished is None and messages) or same, (name, bad[:200])
            else:
                # What the run trains is read from environment.json, else from the checkpoint.
                assert finished is not None or name == "environment.json", (name, messages)
            detected[name] += bool(messages)
        finally:
            (source / name).write_bytes(content)
    print(detected)
    share = times / 2000
    assert (
        detected["final/model.safetensors"] > 280 * share and detected["summary.json"] > 250 * share
    )
    assert detected["metrics.jsonl"] > 130 * share and detected["environment.json"] > 50 * share


# --- checkpoints
# --------------------------------------------------------------------------------------------------


def test_another_steps_name_is_rejected(tmp_path, whole):
    shutil.copytree(whole / "cut", tmp_path / "run")
    store = Store(tmp_path / "run" / "checkpoints")
    newest = store.sealed()[-1]
    newest.rename(newest.with_name("step-00000099"))
    assert problems(store.sealed()[-1]) == ["its manifest belongs to step 8"]


# --- the end
# --------------------------------------------------------------------------------------------------

OVER_FITTED = """    def eval_sets(self):  # the fit to the sine is best early on: this set wants none of it
        return {"validation": torch.utils.data.TensorDataset(self.x, 0 * self.x), "test": self.train_set()}

    def save(self, model, folder):
        from torch.distributed.tensor import DTensor

        tensors = [*model.parameters()]
        assert not any(isinstance(one, DTensor) for one in tensors)
        (folder / "own.txt").write_text(str([tuple(one.shape) for one in tensors]))
        torch.save(model.state_dict(), folder / "own.pt")
"""  # noqa: E501


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (1, "single"),
        pytest.param(2, "ddp", marks=pytest.mark.slow),
        pytest.param(2, "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_final_holds_what_it_states(tmp_path, ranks, config):
    os.umask(0o022)
    lay(tmp_path, OVER_FITTED)
    words = [*WORDS, "--eval.every", "2", "--optimizer.lr", "0.05", "--ema.half_life", "16"]
    run(here, words, ranks=ranks, config=config, folder=tmp_path).ok()
    run(
        here,
        [*words, "--run.dir", "best", "--save.final", "best"],
        ranks=ranks,
        config=config,
        folder=tmp_path,
    ).ok()
    last, best = (
        json.loads((tmp_path / name / "final" / MANIFEST).read_text())["about"]
        for name in ("run", "best")
    )
    assert last == {"weights": "last", "step": 12, "end": 12}
    assert (
        best["weights"] == "best"
        and best["step"] < 12 == best["end"]
        and best["metric"] == "eval/loss"
    )
    ended = json.loads((tmp_path / "best" / "summary.json").read_text())
    assert ended["final"] == best and ended["best"]["step"] == best["step"] and ended["step"] == 12
    out = str(tmp_path / "out")
    os.chdir(tmp_path)
    assert main(["export", "best", "--to", out, "--checkpoint", "best"]) == 0
    for name, average in (("model.safetensors", "raw"), ("ema.safetensors", "ema")):
        assert (
            main(["export", "best", "--to", out, "--checkpoint", "best", "--weights", average]) == 0
        )
        exported, final = (
            load_file(f"{out}/model.safetensors"),
            load_file(tmp_path / "best" / "final" / name),
        )
        assert all(torch.equal(exported[key], final[key]) for key in final)
    assert (tmp_path / "run" / "final" / "own.txt").read_text() == "[(8, 1), (8,), (1, 8), (1,)]"
    own = torch.load(tmp_path / "run" / "final" / "own.pt")
    final = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert all(torch.equal(own[name], final[name]) for name in final)
    modes = {
        stat.S_IMODE(path.stat().st_mode)
        for path in (tmp_path / "run").rglob("*")
        if path.is_file()
    }
    assert modes <= {0o644}, modes


def in_order(words: list[str]) -> None:
    """Train, and print the names of flushed files in order; the save must run in this process."""
    from oneloop.checkpoint import store

    flush = store.flush

    def noted(path: Path) -> None:
        print("LASTS", path.name)
        flush(path)

    store.flush = noted
    write_in_the_trainer()
    here(words)


def test_metrics_are_on_the_disk_before_a_checkpoint_that_refers_to_them(tmp_path):
    lay(tmp_path)
    world = run(in_order, WORDS, folder=tmp_path)
    world.ok()
    lasts = [line.split()[1] for line in world.output.splitlines() if line.startswith("LASTS")]
    lasts = lasts[lasts.index("metrics.jsonl") :]  # after the trial of the optimizer
    saves = len(list((tmp_path / "run" / "checkpoints").iterdir()))
    assert lasts[:3] == ["metrics.jsonl", lasts[1], "checkpoints"] and lasts[1].endswith(".draft")
    assert lasts.count("metrics.jsonl") == lasts.count("checkpoints") >= saves


def test_a_home_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    lay(tmp_path)
    run(
        here, [*WORDS, "--run.dir", "~/there"], folder=tmp_path, variables={"HOME": str(tmp_path)}
    ).ok()
    assert (tmp_path / "there" / "final").is_dir() and not (tmp_path / "~").exists()


def test_what_is_the_users_own_is_never_overwritten(tmp_path):
    lay(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("# by hand\nseed: 1\n")
    rejected = run(here, WORDS, folder=tmp_path)
    assert rejected.codes == [2] and "do not belong to a oneloop run" in rejected.output
    assert (tmp_path / "run" / "recipe.yaml").read_text() == "# by hand\nseed: 1\n"


def test_a_link_is_put_aside_and_not_followed(tmp_path, whole):
    shutil.copytree(whole / "cut", tmp_path / "run")
    (tmp_path / "precious.txt").write_text("mine")
    for name in ("metrics.jsonl", ".summary.json.draft"):
        (tmp_path / "run" / name).unlink(missing_ok=True)
        (tmp_path / "run" / name).symlink_to(tmp_path / "precious.txt")
    run(train, [*WORDS[:1], *WORDS[3:], "--task.width", "8"], folder=tmp_path).ok()
    assert (tmp_path / "precious.txt").read_text() == "mine"
    assert not (tmp_path / "run" / "metrics.jsonl").is_symlink()


ODD = [
    ("recipe.yaml", "[" * 100_000),
    ("summary.json", "[" * 100_000),
    ("metrics.jsonl", "[" * 100_000 + "\n"),
    (
        "metrics.jsonl",
        '{"step": ' + "9" * 400 + ', "train/loss": 1.0}\n{"step": 1, "train/loss": 1e999}\n',
    ),
    ("examples.json", "[" * 100_000),
]


# The hostile values of tests/checkpoint/test_hostile_files.py go through the readers of the others.
@pytest.mark.parametrize(
    ("name", "content"), with_slow(ODD, [one for one in ODD if one[0] != "metrics.jsonl"])
)
def test_odd_files_end_in_no_traceback(tmp_path, whole, name, content, capsys):
    folder = tmp_path / "run"
    shutil.copytree(whole / "cut", folder)
    (folder / name).write_text(content)
    # A damaged log is rejected by what reads it; a resume repairs it.
    code = 2 if name == "metrics.jsonl" else 0
    assert main(["watch", str(folder), "--once"]) == main(["report", str(folder)]) == code
    assert main(["verify", str(folder)]) == 0
    world = run(train, [*WORDS[:1], *WORDS[3:], "--task.width", "8"], folder=tmp_path)
    assert world.codes == [0] and "Traceback" not in world.output, world.output
    assert main(["report", str(folder)]) == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.pop("format"),
        lambda manifest: manifest.update(format=1),
        lambda manifest: manifest.pop("step"),
        lambda manifest: manifest["files"].update(x=3),
        lambda manifest: manifest["files"].update(x={}),
        lambda manifest: manifest["files"].update({"..": {"size": 4096, "xxh3": ""}}),
    ],
)
def test_odd_manifests_are_problems(tmp_path, whole, change):
    shutil.copytree(whole / "cut", tmp_path / "run")
    newest = Store(tmp_path / "run" / "checkpoints").sealed()[-1]
    manifest = read_manifest(newest)
    change(manifest)
    (newest / MANIFEST).write_bytes(signed(manifest))
    assert problems(newest)
    (newest / MANIFEST).write_text("[" * 100_000)
    assert problems(newest)


@pytest.mark.slow
def test_an_unchanged_run_continues_whatever_its_repr_and_its_samples(tmp_path):
    lay(
        tmp_path,
        "    def model(self):\n        model = super().model()\n"
        "        model.extra_repr = lambda: f'{torch.sin} {self.collate}'\n        return model\n"
        "    def train_set(self):\n        words = {'cat', 'dog', 'bird', 'fish'}\n"
        "        return [(self.x[i], self.x[i].sin(), words) for i in range(64)]\n"
        "    def eval_sets(self):\n        return {}\n"
        "    def collate(self, samples):\n        return super().collate([one[:2] for one in "
        "samples])",
    )
    for seed, folder in (("1", None), ("2", "run")):
        if folder:
            unfinished(tmp_path / folder)
        ended = subprocess.run(
            [sys.executable, "-m", "oneloop.train", *WORDS],
            cwd=tmp_path,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert ended.returncode == 0, ended.stderr
    assert "resuming from run/checkpoints/step-00000008" in ended.stdout


def test_a_run_in_float64_is_exported_as_it_is(tmp_path):
    lay(tmp_path)
    run(
        here, [*WORDS, "--machine.dtype", "float64", "--ema.power", "[0.05,0.1]"], folder=tmp_path
    ).ok()
    os.chdir(tmp_path)
    sys.modules.pop("mine", None)
    for weights in ("raw", "ema-power-0.05", "power:0.07"):
        assert main(["export", "run", "--to", "out", "--weights", weights]) == 0
        assert {one.dtype for one in load_file("out/model.safetensors").values()} == {torch.float64}


def test_a_run_that_saved_nothing_binds_nobody(tmp_path):
    lay(
        tmp_path,
        "    def loss(self, model, batch):\n        return (model(batch['x']) * "
        "float('nan')).sum(), {}",
    )
    diverged = run(here, [*WORDS, "--save.best", "false"], folder=tmp_path)
    assert diverged.codes == [3] and not Store(tmp_path / "run" / "checkpoints").sealed()
    lay(tmp_path)
    corrected = run(here, [*WORDS, "--optimizer.lr", "0.5"], folder=tmp_path)
    assert corrected.codes == [0], corrected.output


# --- disk space
# --------------------------------------------------------------------------------------------------


def on_a_disk(folder: Path, options: str, fill: str = "true") -> subprocess.CompletedProcess[str]:
    """Start a run on a separate disk; the output ends with the exit code and the files on that
    disk."""
    lay(folder)
    disk = folder / "disk"
    disk.mkdir()
    train_it = " ".join([sys.executable, "-m", "oneloop.train", *WORDS[:-1], "disk/run"])
    script = (
        f"mount -t tmpfs -o {options} none {disk} && {fill} && ({train_it}; echo code $?; ls -A "
        f"{disk})"
    )
    words = ["unshare", "-Urm", "sh", "-c", script]
    ended = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    if "code" not in ended.stdout:
        pytest.skip(f"no disk can be mounted here: {ended.stderr[-200:]}")
    return ended


@pytest.mark.slow
def test_a_disk_that_is_too_small_is_reported_before_anything_is_written(tmp_path):
    ended = on_a_disk(
        tmp_path, "size=256k", "dd if=/dev/zero of=disk/full bs=1k count=240 2>/dev/null"
    )
    assert ended.stdout.split()[-3:] == ["code", "2", "full"], ended.stdout + ended.stderr
    assert "the run needs about" in ended.stderr and "are free on its disk" in ended.stderr


@pytest.mark.slow
def test_a_disk_that_cannot_be_written_is_reported(tmp_path):
    ended = on_a_disk(tmp_path, "ro,size=64m")
    assert ended.stdout.split()[-2:] == ["code", "2"] and "Read-only file system" in ended.stderr


# --- untrusted run folders
# --------------------------------------------------------------------------------------------


def test_a_run_folder_runs_no_program(tmp_path, whole, capsys):
    os.chdir(tmp_path)
    for number, (name, options) in enumerate(
        [("subprocess.Popen", {"args": ["touch", "ran"]}), ("os.system", {})]
    ):
        folder = tmp_path / str(number)
        shutil.copytree(whole / "run", folder)
        (folder / "recipe.yaml").write_text(json.dumps({"task": {"name": name, **options}}))
        for words in (["verify"], ["report"], ["watch", "--once"]):
            assert main([words[0], str(folder), *words[1:]]) == 0
        assert main(["export", str(folder), "--to", "out"]) == 2
        assert "cannot be used as the task of a run" in capsys.readouterr().err
        assert main(["export", str(folder), "--to", "out", "--weights", "ema"]) == 2
        assert run(
            train, [str(folder / "recipe.yaml"), "--run.dir", "again"], folder=tmp_path
        ).codes == [2]
        assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_only_export_imports_what_a_recipe_names_and_reports_it(tmp_path):
    lay(tmp_path)
    run(here, WORDS, folder=tmp_path).ok()
    with (tmp_path / "mine.py").open("a") as file:
        file.write("\nfrom pathlib import Path\nPath('imported').touch()\n")
    tool = str(Path(sys.executable).with_name("oneloop"))
    for words in (["verify", "run"], ["report", "run"], ["watch", "run", "--once"]):
        subprocess.run([tool, *words], cwd=tmp_path, check=True, capture_output=True)
    assert not (tmp_path / "imported").exists()
    ended = subprocess.run(
        [tool, "export", "run", "--to", "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert (
        f"task.name mine.Mine of run/recipe.yaml is imported from {tmp_path / 'mine.py'}"
        in ended.stderr
    )
    assert (tmp_path / "imported").exists() and (tmp_path / "out" / "model.safetensors").exists()


def test_control_characters_never_reach_a_terminal(tmp_path, whole):
    evil = "\x1b]0;owned\x07\x1b[2J\u202e"
    folder = tmp_path / f"run{evil}"
    shutil.copytree(whole / "run", folder)
    lines = [
        {"step": 1, f"train/{evil}": 1.0, "train/loss": 1.0},
        {"step": 2, "event": evil, f"eval/{evil}": 2.0},
    ]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    )
    newest = Store(folder / "checkpoints").sealed()[-1]
    (newest / evil).touch()
    tool = str(Path(sys.executable).with_name("oneloop"))
    for words in (
        ["watch", str(folder), "--once", "--metrics", f"train/{evil}"],
        ["verify", str(folder)],
        ["report", str(folder)],
    ):
        ended = subprocess.run([tool, *words], capture_output=True, text=True, check=False)
        assert not any(
            bad in ended.stdout + ended.stderr for bad in ("\x1b]", "\x1b[2J", "\x07", "\u202e")
        ), words
    typed = run(
        train, ["digits", "--task.data", evil, "--run.dir", str(tmp_path / "new")], folder=tmp_path
    )
    assert typed.codes == [2] and "\x1b" not in typed.output and "\\x1b[2J" in typed.output


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_goodput_counts_a_kill_its_repeated_steps_and_the_time_until_the_next_start(
    ranks, tmp_path
):
    (tmp_path / "f.yaml").write_text(RECIPE)
    words = [
        "--task.fault",
        "kill:SIGKILL",
        "--task.at",
        "35",
        "--task.once",
        str(tmp_path / "once"),
    ]
    words += ["--save.every", "10", "--log.every", "1", "--task.rank", str(ranks - 1)]
    words += ["--duration", "60"]
    began = time.time()
    faulty(tmp_path, *words, ranks=ranks, config="single" if ranks == 1 else "ddp")
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    newest = Store(tmp_path / "run" / "checkpoints").sealed()[-1]
    kept = json.loads((newest / "state.json").read_text())["counters"]["seconds"]
    last = [line["time"] for line in lines if "time" in line][-1]
    assert last > kept
    time.sleep(2)
    faulty(tmp_path, *words, ranks=ranks, config="single" if ranks == 1 else "ddp").ok()
    found = summary(tmp_path)
    goodput, lost = found["goodput"], found["goodput"]["lost"]
    assert lost["repeated"] == last - kept
    assert (
        lost["start"] > 2
        and lost.keys() == {"start", "repeated", "data", "save"}
        and min(lost.values()) >= 0
    )
    assert goodput["seconds"] <= time.time() - began
    assert goodput["seconds"] == pytest.approx(
        found["seconds"] + lost["start"] + lost["repeated"], abs=0.5
    )
    assert (
        goodput["share"] == pytest.approx(1 - sum(lost.values()) / goodput["seconds"])
        and 0 < goodput["share"] < 1
    )
    assert "of 2 starts" in goodput["about"] in (tmp_path / "run" / "report.html").read_text()


def test_goodput_is_not_shown_after_a_stop_that_the_user_asked_for(tmp_path):
    (tmp_path / "f.yaml").write_text(RECIPE)
    words = ["--duration", "40"]
    stopped = faulty(tmp_path, *words, "--stop.after", "0s")
    assert stopped.codes == [75], stopped.output
    assert summary(tmp_path)["goodput"]["stops"] == 0  # this stop is in exit_code
    ended = faulty(tmp_path, *words)
    ended.ok()
    found = summary(tmp_path)["goodput"]
    assert found["stops"] == 1 and "of 2 starts" in found["about"]
    for text in (ended.output, (tmp_path / "run" / "report.html").read_text(), stopped.output):
        assert "goodput" not in text


STARTS = ['{"starts": {"first": null, "number": "a"}}', "{", '{"starts": {"before": 1e9}}', "5"]


@pytest.mark.parametrize(
    "damage", ["[1]", *(pytest.param(one, marks=pytest.mark.slow) for one in STARTS)]
)
def test_goodput_survives_a_damaged_environment_and_another_folders_checkpoint(damage, tmp_path):
    (tmp_path / "f.yaml").write_text(RECIPE)
    more = ["--run.accept_changes", "true", "--duration", "60", "--run.dir", "next"]
    faulty(tmp_path, "--duration", "30").ok()
    other = Store(tmp_path / "run" / "checkpoints").sealed()[-1]
    killed = faulty(
        tmp_path,
        *more,
        "--run.resume",
        str(other),
        "--task.fault",
        "kill:SIGKILL",
        "--task.at",
        "8",
    )
    assert killed.codes == [1], killed.output
    (tmp_path / "next" / "environment.json").write_text(damage)
    faulty(tmp_path, *more).ok()
    goodput = json.loads((tmp_path / "next" / "summary.json").read_text())["goodput"]
    assert 0 <= goodput["share"] <= 1 and all(
        0 <= lost <= goodput["seconds"] for lost in goodput["lost"].values()
    )
