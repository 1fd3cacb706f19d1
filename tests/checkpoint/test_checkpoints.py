"""Any parallel layout loads what any other saved; damage is detected; a failed save costs only its
checkpoint."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import re
import resource
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from failing_disks import without_root
from oneloop.basics import side_copies
from oneloop.checkpoint import pieces
from oneloop.checkpoint.background_save import BackgroundSaves, SaveError
from oneloop.checkpoint.checkpoints import Checkpoints
from oneloop.checkpoint.manifest import manifest_of
from oneloop.checkpoint.store import Keep, Store, problems
from oneloop.checkpoint.writing_process import TORN, WritingProcess
from oneloop.ema import EMA, EMASettings
from slow_cases import with_slow
from sync_saves import SyncCheckpoints
from worlds import run

pytestmark = pytest.mark.covers(
    "oneloop.basics.side_copies",
    "oneloop.basics.tensors",
    "oneloop.checkpoint.background_save",
    "oneloop.checkpoint.checkpoints",
    "oneloop.checkpoint.pieces",
    "oneloop.checkpoint.save_request",
    "oneloop.checkpoint.state_dict",
    "oneloop.checkpoint.store",
    "oneloop.checkpoint.writer",
    "oneloop.checkpoint.writing_process",
    "oneloop.ema",
    "oneloop.optim.optimizers",
)


class Odd(nn.Module):
    """Uneven shards, a 0-dim parameter, buffers of several types, an empty tensor, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(5, 7)
        self.two = nn.Linear(7, 3)
        self.embedding = nn.Embedding(7, 5)
        self.one.weight = self.embedding.weight
        self.register_buffer("seen", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("nothing", torch.zeros(0, 4))
        self.register_buffer("brief", torch.arange(3).bfloat16())

    def forward(self, x):
        return self.two(torch.tanh(self.one(x))).sum() + self.embedding.weight.square().sum()


def build(make: str):
    from oneloop.launch.processes import start
    from oneloop.optim.optimizers import adamw, build, muon, sgd

    world = start()
    torch.manual_seed(1)
    model = world.prepare(Odd())
    kinds = {"adamw": adamw, "sgd": sgd, "muon": muon, "rmsprop": torch.optim.RMSprop}
    return world, model, build(kinds[make], model, lr=0.05, weight_decay=0.1)


def step(model, optimizer, number: int) -> float:
    torch.manual_seed(number)
    optimizer.zero_grad()
    loss = model(torch.randn(4, 5))
    loss.backward()
    optimizer.step()
    return loss.item()


def everything(model, optimizer) -> dict[str, torch.Tensor]:
    from oneloop.basics.optimizer_tensors import optimizer_tensors
    from oneloop.checkpoint.state_dict import model_tensors

    found = model_tensors(model) | optimizer_tensors(model, optimizer)
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone()
        for name, t in found.items()
    }


def saved(root: str, make: str, sync: bool) -> dict[str, torch.Tensor]:
    from oneloop.checkpoint.checkpoints import Checkpoints

    world, model, optimizer = build(make)
    checkpoints = (SyncCheckpoints if sync else Checkpoints)(Path(root), world.accelerator)
    for number in range(3):
        step(model, optimizer, number)
        assert checkpoints.save(number, model, optimizer, {"number": number}) is None
    expected = everything(model, optimizer)
    step(model, optimizer, 99)  # while the last checkpoint is being written
    assert checkpoints.finish() is None
    checkpoints.close()
    return expected


def loaded(root: str, make: str):
    from oneloop.checkpoint.checkpoints import Checkpoints

    world, model, optimizer = build(make)
    checkpoints = Checkpoints(Path(root), world.accelerator)
    newest = checkpoints.newest()
    state = checkpoints.load(newest, model, optimizer)
    found = everything(model, optimizer)
    return found, state["number"], step(model, optimizer, 3)


LAYOUTS = [(1, "single"), (2, "ddp"), (2, "fsdp2"), (4, "hsdp"), (3, "fsdp2")]


@pytest.mark.parametrize(
    ("sync", "ranks", "config"),
    [
        pytest.param(False, 1, "single", marks=pytest.mark.slow),
        (False, 2, "fsdp2"),
        pytest.param(False, 2, "ddp", marks=pytest.mark.slow),
        pytest.param(False, 4, "hsdp", marks=pytest.mark.slow),
        *(pytest.param(True, *layout, marks=pytest.mark.slow) for layout in LAYOUTS[:4]),
    ],
)
def test_any_world_loads_what_any_other_wrote(tmp_path, ranks, config, sync):
    expected = run(saved, str(tmp_path), "adamw", sync, ranks=ranks, config=config).ok()[0]
    # the newest two
    assert [path.name for path in Store(tmp_path).sealed()] == ["step-00000001", "step-00000002"]
    losses = []
    for other_ranks, other in LAYOUTS if sync else LAYOUTS[:3]:
        for found, number, loss in run(
            loaded, str(tmp_path), "adamw", ranks=other_ranks, config=other
        ).ok():
            assert number == 2 and found.keys() == expected.keys()
            for name in expected:
                assert found[name].dtype == expected[name].dtype and torch.equal(
                    found[name], expected[name]
                ), name
            losses.append(loss)
    assert max(losses) - min(losses) < 1e-5  # the next step is the same, too


@pytest.mark.parametrize("make", with_slow(["sgd", "muon", "rmsprop"], ["sgd", "rmsprop"]))
def test_every_optimizers_state_comes_back(tmp_path, make):
    expected = run(saved, str(tmp_path), make, False, ranks=2, config="fsdp2").ok()[0]
    found, _, _ = run(loaded, str(tmp_path), make).ok()[0]
    assert found.keys() == expected.keys() and any(name.startswith("optimizer.") for name in found)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_files_are_plain_safetensors(tmp_path):
    from safetensors.torch import load_file

    expected = run(saved, str(tmp_path), "adamw", False).ok()[0]
    newest = Store(tmp_path).sealed()[-1]
    assert {path.name for path in newest.iterdir()} == {
        "MANIFEST.json",
        "rank-00000.safetensors",
        "state.json",
    }
    weights = load_file(newest / "rank-00000.safetensors")
    assert all(
        torch.equal(weights[name], expected[name]) for name in expected if expected[name].numel()
    )


# --- the store
# --------------------------------------------------------------------------------------------------


def fill(store: Store, step: int, count: int = 3) -> Path:
    draft = store.draft(step)
    generator = random.Random(step)
    files = {f"{n}.bin": draft.put(f"{n}.bin", generator.randbytes(1000 + n)) for n in range(count)}
    draft.seal(manifest_of(step, files, {}))
    return store.sealed()[-1]


def damage(folder: Path, chance: random.Random) -> str:
    files = sorted(path for path in folder.iterdir())
    file = chance.choice(files)
    kind = chance.choice(["flip", "truncate", "remove", "swap", "empty the manifest"])
    content = file.read_bytes()
    if kind == "flip":
        at = chance.randrange(len(content) * 8)
        file.write_bytes(
            content[: at // 8] + bytes([content[at // 8] ^ (1 << at % 8)]) + content[at // 8 + 1 :]
        )
    elif kind == "truncate":
        file.write_bytes(content[: chance.randrange(len(content))])
    elif kind == "remove":
        file.unlink()
    elif kind == "swap":
        other = chance.choice([one for one in files if one != file])
        file.write_bytes(other.read_bytes())
        other.write_bytes(content)
    else:
        (folder / "MANIFEST.json").write_text("")
    return kind


def corruptions(tmp_path: Path, number: int) -> int:
    store = Store(tmp_path / "checkpoints")
    fill(store, 1)
    good = fill(store, 2)
    assert problems(good) == []
    chance, detected = random.Random(0), 0
    shutil.copytree(good, tmp_path / "whole")
    for _ in range(number):
        kind = damage(good, chance)
        walk = [(path, problems(path)) for path in reversed(store.sealed())]
        assert walk[0][0] == good and walk[0][1], f"{kind} was not seen"
        assert walk[1] == (store.root / "step-00000001", [])  # falls back to the checkpoint before
        detected += 1
        shutil.rmtree(good)
        shutil.copytree(tmp_path / "whole", good)
    return detected


def test_damage_is_detected(tmp_path):
    assert corruptions(tmp_path, 300) == 300


@pytest.mark.slow
def test_two_thousand_corruptions_are_detected(tmp_path):
    assert corruptions(tmp_path, 2000) == 2000


def test_a_flip_in_the_manifest_alone_is_detected(tmp_path):
    folder = fill(Store(tmp_path), 1)
    manifest = folder / "MANIFEST.json"
    content = manifest.read_bytes()
    missed = 0
    for at in range(len(content)):
        manifest.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        missed += not problems(folder)
    # Changed white space between JSON's tokens does no harm.
    assert missed <= content.count(b" ") + content.count(b"\n")


def test_retention_keeps_the_newest_every_mth_and_the_best(tmp_path):
    store = Store(tmp_path)
    for number in range(1, 11):
        fill(store, number)
    store.prune(Keep(newest=2, every=4, best=3))
    assert [int(path.name[5:]) for path in store.sealed()] == [3, 4, 8, 9, 10]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_draft_is_never_read_and_a_second_seal_replaces_the_first(tmp_path):
    store = Store(tmp_path)
    (store.draft(5).path / "x").write_text("half")
    assert store.sealed() == []
    fill(store, 5)
    first = hashlib.sha256((tmp_path / "step-00000005" / "0.bin").read_bytes()).hexdigest()
    fill(store, 5)
    assert hashlib.sha256((tmp_path / "step-00000005" / "0.bin").read_bytes()).hexdigest() == first
    store.sweep(".draft")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


# --- failed saves
# --------------------------------------------------------------------------------------------------


def with_a_failing_save(root: str, sync: bool, rank: int):
    """Limit the size of files on rank ``rank`` during the second save; return which calls reported
    an error."""
    world, model, optimizer = build("adamw")
    checkpoints = (SyncCheckpoints if sync else Checkpoints)(Path(root), world.accelerator)
    sweep = checkpoints.store.sweep
    checkpoints.store.sweep = lambda *more: (time.sleep(0.2), sweep(*more))  # slow storage
    reported = []
    for number in range(4):
        step(model, optimizer, number)
        if world.rank == rank and number in (1, 2):
            while checkpoints._pending:  # only the second save may hit the limit
                checkpoints.poll()
                time.sleep(0.01)
            writing = 0 if sync else checkpoints._process._process.pid
            soft = 400 if number == 1 else resource.RLIM_INFINITY
            resource.prlimit(writing, resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))
        reported.append(
            checkpoints.save(number, model, optimizer, {"number": number}, keep=Keep(newest=9))
        )
    reported.append(checkpoints.finish())
    checkpoints.close()
    return [problem is not None for problem in reported]


@pytest.mark.parametrize(("ranks", "rank"), with_slow([(1, 0), (2, 0), (2, 1)], [(2, 0)]))
@pytest.mark.parametrize("sync", [False, True])
def test_a_full_disk_costs_one_checkpoint_and_all_ranks_know(tmp_path, ranks, rank, sync):
    when = 1 if sync else 2  # reported by the save itself, or by the next save
    for reported in run(with_a_failing_save, str(tmp_path), sync, rank, ranks=ranks).ok():
        assert reported == [number == when for number in range(5)]
    store = Store(tmp_path)
    assert [path.name[-1] for path in store.sealed()] == ["0", "2", "3"]
    assert len(list(tmp_path.iterdir())) == 3  # no draft is left
    assert all(problems(path) == [] for path in store.sealed())


def with_a_checkpoint_that_cannot_be_deleted():
    """Save three checkpoints, of which one is kept; the second save cannot delete the first one."""
    world, model, optimizer = build("adamw")
    said: list[str] = []
    found = []
    with without_root() as root:
        checkpoints = SyncCheckpoints(root, world.accelerator, say=said.append)
        for number in range(3):
            step(model, optimizer, number)
            problem = checkpoints.save(number, model, optimizer, {}, keep=Keep(newest=1))
            kept = [path.name[-1] for path in checkpoints.store.sealed()]
            found.append((problem, kept, len([*root.glob(".*")]), [*said]))
            said.clear()
            for path in root.iterdir():
                path.chmod(0o500 if number == 0 else 0o700)
        checkpoints.close()
    return found


def test_a_checkpoint_that_cannot_be_deleted_is_reported_and_costs_none():
    first, second, third = run(with_a_checkpoint_that_cannot_be_deleted).ok()[0]
    assert first == (None, ["0"], 0, [])
    problem, kept, left, said = second
    assert problem is None and kept == ["1"] and left == 1 and len(said) == 1
    assert re.match(
        r"the checkpoint is saved, but /\S*/\.step-0+\.removed cannot be deleted \(Permi", said[0]
    )
    assert third == (None, ["2"], 0, [])


def test_a_writer_ends_with_its_trainer(tmp_path):
    import psutil

    pid = run(_writers, str(tmp_path)).ok()[0]
    began = time.monotonic()
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie":
        assert time.monotonic() - began < 120
        time.sleep(0.05)


def _writers(root: str) -> int:
    from oneloop.checkpoint.checkpoints import Checkpoints

    world, model, optimizer = build("adamw")
    step(model, optimizer, 0)
    checkpoints = Checkpoints(Path(root), world.accelerator)
    checkpoints.save(0, model, optimizer, {})
    checkpoints.finish()
    return checkpoints._process._process.pid


# --- pinned memory: a recorder stands for CUDA, and the tensors are on the host
# --------------------------------------------------------------------------------------------------


class Cudart:
    """Registers host memory by its address, as CUDA does: none twice, and none after its end."""

    def __init__(self, error: int = 0) -> None:
        self.error = error  # of every registration
        self.seconds = 0.0  # that one takes
        self.registered: dict[int, int] = {}  # bytes by address
        self.ended = 0  # registrations
        self.wrong: list[str] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        time.sleep(self.seconds)
        if self.error:
            return self.error
        if any(at < address + size and address < at + n for at, n in self.registered.items()):
            self.wrong.append(f"{address:x} is already registered")
            return 712
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.ended += 1
        del self.registered[address]
        if f"{address:x}-" not in Path("/proc/self/maps").read_text():
            self.wrong.append(f"{address:x} is not mapped any more")
        return 0

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return f"CUDA error {error}"

    def pages(self) -> int:
        return sum(-(-size // 4096) for size in self.registered.values())


class OnCuda:
    """Saves of a small model, as in a run of one process on a GPU."""

    def __init__(self, root: Path) -> None:
        self.said: list[str] = []
        run_on_cuda = SimpleNamespace(
            process_index=0, num_processes=1, local_process_index=0, device=torch.device("cuda")
        )
        self.checkpoints = Checkpoints(root, run_on_cuda, say=self.said.append)
        self.step = 0

    def save(self, pages: int) -> None:
        """Start to save one parameter that fills these pages."""
        model = nn.ParameterDict({"one": nn.Parameter(torch.ones(pages * 1024))})
        self.step += 1
        self.checkpoints.save(self.step, model, torch.optim.SGD(model.parameters()), {})

    @property
    def writer(self) -> int:
        return self.checkpoints._process._process.pid


def test_pinned_memory_is_registered_once_and_until_it_is_unmapped(tmp_path, monkeypatch):
    cuda = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    saves = OnCuda(tmp_path)
    for pages in (2, 2, 7):  # the last save needs more memory
        saves.save(pages)
        assert saves.checkpoints.finish() is None
        assert cuda.pages() == pages
    assert cuda.ended == 1

    # A failed save keeps the memory.
    resource.prlimit(saves.writer, resource.RLIMIT_FSIZE, (400, resource.RLIM_INFINITY))
    saves.save(7)
    assert "File too large" in saves.checkpoints.finish()
    assert (cuda.pages(), cuda.ended) == (7, 1)

    # The writer is killed between two saves, and then during one.
    for during in (False, True):
        os.kill(saves.writer, signal.SIGSTOP)
        if during:
            saves.save(7)
        os.kill(saves.writer, signal.SIGKILL)
        os.waitid(os.P_PID, saves.writer, os.WEXITED | os.WNOWAIT)
        assert bool(saves.checkpoints.finish()) is during
        saves.save(7)
        assert saves.checkpoints.finish() is None
        assert cuda.pages() == 7
    assert cuda.ended == 3

    # The storage hangs, which ends the run.
    os.kill(saves.writer, signal.SIGSTOP)
    saves.checkpoints._patience = 1e-3
    saves.save(7)
    with pytest.raises(SaveError, match="did not finish"):
        saves.checkpoints.finish()
    assert (cuda.pages(), cuda.ended) == (0, 4)

    # Another run ends as it should.
    saves = OnCuda(tmp_path)
    saves.save(3)
    saves.checkpoints.finish()
    saves.checkpoints.close()
    assert (cuda.pages(), cuda.ended, cuda.wrong) == (0, 5, [])


def test_a_run_that_raises_leaves_no_page_registered(tmp_path, monkeypatch):
    cuda = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    saves = OnCuda(tmp_path)
    saves.save(3)
    saves.checkpoints.finish()
    assert cuda.pages() == 3
    del saves  # nobody closes it
    gc.collect()
    assert (cuda.pages(), cuda.wrong) == (0, [])


def test_memory_that_cannot_be_pinned_is_used_as_it_is(tmp_path, monkeypatch):
    cuda = Cudart(error=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    saves = OnCuda(tmp_path)
    for pages in (1, 5):
        saves.save(pages)
        assert saves.checkpoints.finish() is None
    saves.checkpoints.close()
    assert len(saves.said) == 1
    assert "cannot be pinned on rank 0 (CUDA error 2)" in saves.said[0]
    assert [problems(path) for path in Store(tmp_path).sealed()] == [[], []]


def test_the_memory_of_saves_is_made_ahead_of_the_first_one(tmp_path, monkeypatch):
    cuda = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    saves = OnCuda(tmp_path)
    saving = saves.checkpoints
    saving.ahead = lambda: 0  # before the first step
    saving.poll()
    assert saving._process is None
    saving.ahead = lambda: 7 * 4096
    saving.poll()
    assert saving.ahead is None  # once is enough
    saves.save(7)
    assert saves.checkpoints.finish() is None
    assert (cuda.pages(), cuda.ended, cuda.wrong) == (7, 0, [])  # it was registered once
    saves.checkpoints.close()

    # While a save is in progress, its memory stays as it is.
    saves = OnCuda(tmp_path)
    saves.step = 1
    saving = saves.checkpoints
    saves.save(2)
    saving.ahead = lambda: 5 * 4096
    saving.poll()
    assert cuda.pages() == 2
    assert saves.checkpoints.finish() is None
    cuda.seconds = 0.4
    saving.poll()
    saves.checkpoints.close()
    time.sleep(0.5)
    assert (cuda.pages(), cuda.wrong) == (0, [])
    assert [problems(path) for path in Store(tmp_path).sealed()] == [[], []]


# --- copies that overlap with training: on the host, each is made as late as it may be
# --------------------------------------------------------------------------------------------------


class Late(side_copies.SideCopy):
    """A copy that happens just before its sources may change, or when the host waits for it."""

    def __init__(self, device, sources, targets, *, after=None, watched=()) -> None:
        self._torn = False
        self._sources = sources
        self._targets = targets
        self._watched = watched
        self._versions = [tensor._version for tensor in watched]
        self.copied = self  # stands for the event
        self._done = False
        side_copies._UNGUARDED.add(self)

    def hold(self) -> None:
        self.is_torn()
        side_copies._UNGUARDED.discard(self)
        self.synchronize()

    def query(self) -> bool:
        return self._done

    @torch.no_grad()
    def synchronize(self) -> None:
        if not self._done:
            for source, target in zip(self._sources, self._targets, strict=True):
                target.copy_(source)
        self._done = True


def copy_late(patch) -> None:
    """Let saves that may overlap with training do so, on the host."""
    patch(pieces, "SideCopy", Late)
    patch(BackgroundSaves, "_overlapping", lambda self, process: "late" if self.overlaps else None)


class Normed(nn.Module):
    """A linear layer and BatchNorm, whose statistics each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.one(x)).square().sum()


class Noise:
    """A task with dropout and BatchNorm.

    Args:
        clamped: the number of the first loss that changes a parameter; 0: none does.
    """

    def __init__(self, clamped: int = 0) -> None:
        self.clamped = clamped
        self.calls = 0

    def model(self):
        return nn.Sequential(nn.BatchNorm1d(3), Normed(), nn.Dropout(0.2))

    def train_set(self):
        return torch.utils.data.TensorDataset(torch.arange(192.0).sin().view(64, 3))

    def eval_sets(self):
        return {"validation": self.train_set()}

    def collate(self, samples):
        return {"x": torch.stack([one for (one,) in samples])}

    def weight(self, batch):
        return torch.tensor(float(len(batch["x"])))

    def loss(self, model, batch):
        self.calls += model.training
        if 0 < self.clamped <= self.calls:
            with torch.no_grad():
                dict(model.named_parameters())["1.one.weight"].clamp_(-0.1, 0.1)
        return model(batch["x"]).sum(), {}


def shards(root: Path) -> dict[str, str]:
    """Return a hash of the tensors of each checkpoint."""
    files = sorted(root.glob("checkpoints/step-*/*.safetensors"))
    return {
        f"{file.parent.name}/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }


def trained(root: Path, **task) -> dict[str, str]:
    from oneloop import fit

    fit(
        Noise,
        task=task,
        duration=20,
        batch={"size": 8},
        ema={"half_life": 20},
        eval={"every": 7, "samples": 0},
        run={"dir": str(root)},
        save={"every": 3, "keep": 99},
        track=[],
        watch={"output": "quiet"},
    )
    return shards(root)


def test_all_checkpoints_of_a_run_are_those_of_a_run_that_waits_for_its_copies(
    tmp_path, monkeypatch
):
    expected = trained(tmp_path / "waits")
    copy_late(monkeypatch.setattr)
    assert trained(tmp_path / "overlaps") == expected
    assert len(expected) >= 7


def test_a_run_whose_forward_changes_parameters_waits_for_its_copies(tmp_path, monkeypatch):
    copy_late(monkeypatch.setattr)
    made = []
    init = Late.__init__
    monkeypatch.setattr(Late, "__init__", lambda *a, **k: made.append(1) or init(*a, **k))
    assert len(trained(tmp_path, clamped=1)) >= 7
    assert not made


def test_a_forward_that_changes_parameters_late_costs_one_checkpoint(tmp_path, monkeypatch, capsys):
    expected = trained(tmp_path / "waits", clamped=10)
    copy_late(monkeypatch.setattr)
    found = trained(tmp_path / "overlaps", clamped=10)
    [lost] = expected.keys() - found.keys()
    assert found == {name: one for name, one in expected.items() if name != lost}
    assert capsys.readouterr().out.count(f"SAVE FAILED; the next save tries again: {TORN}") == 1


class Overlapping:
    """Saves of one process, whose copies are made late."""

    def __init__(self, root: Path, monkeypatch, **options) -> None:
        copy_late(monkeypatch.setattr)
        self.said: list[str] = []
        alone = SimpleNamespace(
            process_index=0, num_processes=1, local_process_index=0, device=torch.device("cpu")
        )
        self.checkpoints = Checkpoints(root, alone, say=self.said.append, **options)
        torch.manual_seed(0)
        self.model = Normed()
        self.checkpoints.overlaps = True
        self.checkpoints.watched = lambda: [*self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.optimizer.register_step_pre_hook(lambda *_: side_copies.before_change())
        self.ema = EMA(self.model, EMASettings(decay=0.5))
        self.backward()
        self.optimizer.step()
        self.ema.update(1)

    def tensors(self) -> dict[str, torch.Tensor]:
        found = everything(self.model, self.optimizer)
        return found | {name: one.clone() for name, one in self.ema.tensors().items()}

    def save(self, number: int) -> dict[str, torch.Tensor]:
        """Start to save, and return what the checkpoint must hold."""
        expected = self.tensors()
        extra = self.ema.tensors()
        self.problem = self.checkpoints.save(
            number, self.model, self.optimizer, {}, extra=extra, keep=Keep(newest=99)
        )
        return expected

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(5, 3)).backward()

    def is_sent(self) -> bool:
        self.checkpoints.poll()
        return self.checkpoints._process._request is None


def check_saved(root: Path, number: int, expected: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import load_file

    found = load_file(root / f"step-{number:08d}" / "rank-00000.safetensors")
    assert found.keys() == expected.keys()
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not wrong


def test_a_copy_overlaps_with_training_until_the_next_update(tmp_path, monkeypatch):
    one = Overlapping(tmp_path, monkeypatch)
    expected = one.save(1)
    one.backward()  # changes the statistics of BatchNorm
    assert not one.is_sent()  # the copy is not complete
    one.optimizer.step()
    assert one.is_sent()
    one.ema.update(1)
    assert one.checkpoints.finish() is None
    check_saved(tmp_path, 1, expected)

    # EMA weights change, are swapped into the model, or a checkpoint is loaded before the next
    # step; or the host waits: for the next save, for this one, or at the end.
    def swap() -> None:
        with one.ema.swapped():
            pass

    def load() -> None:
        one.checkpoints.load(tmp_path / "step-00000001", one.model, one.optimizer)

    def save_again() -> None:
        check_again.append(one.save(100))

    changes = [lambda: one.ema.update(1), one.ema.restart, swap, load, save_again]
    changes += [one.checkpoints.finish]
    check_again: list[dict[str, torch.Tensor]] = []
    for number, change in enumerate(changes, 2):
        expected = one.save(number)
        one.backward()
        change()
        one.optimizer.step()
        assert one.checkpoints.finish() is None
        check_saved(tmp_path, number, expected)
    assert len(check_again) == 1
    assert one.problem is None and one.said == []

    expected = one.save(9)
    one.backward()
    one.checkpoints.close()
    check_saved(tmp_path, 9, expected)


def test_a_writer_that_is_killed_before_a_copy_is_complete(tmp_path, monkeypatch):
    one = Overlapping(tmp_path, monkeypatch)
    one.save(1)
    writer = one.checkpoints._process._process
    writer.kill()
    writer.wait()
    one.backward()
    one.optimizer.step()
    assert "ended with -9" in one.checkpoints.finish()
    expected = one.save(2)
    one.optimizer.step()
    assert one.checkpoints.finish() is None
    check_saved(tmp_path, 2, expected)
    one.checkpoints.close()
    assert [path.name for path in Store(tmp_path).sealed()] == ["step-00000002"]


def test_a_short_request_to_a_writer_that_has_gone_is_no_error_at_its_end():
    process = WritingProcess("oneloop.checkpoint.writer", device=torch.device("cpu"))
    process._process.kill()
    process._process.wait()
    process.send({})
    assert "ended with -9" in process.answer(0.0).error
    process.close()


def test_a_forward_that_changes_a_parameter_fails_the_save_and_ends_the_overlap(
    tmp_path, monkeypatch
):
    one = Overlapping(tmp_path, monkeypatch)
    one.save(1)
    one.backward()
    with torch.no_grad():
        one.model.one.weight.clamp_(-0.1, 0.1)
    one.optimizer.step()
    assert one.checkpoints.finish() == TORN
    assert f"SAVE FAILED; the next save tries again: {TORN}" in one.said[0]

    expected = one.save(2)
    assert one.is_sent()
    with torch.no_grad():
        one.model.one.weight.clamp_(-0.01, 0.01)
    assert one.checkpoints.finish() is None
    check_saved(tmp_path, 2, expected)
    one.checkpoints.close()


class TwoLayers(nn.Module):
    """A second layer that is large enough for FSDP2 to divide."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 4)
        self.two = nn.Linear(4, 64)

    def forward(self, x):
        return self.two(self.one(x)).square().sum()


class Scaled(Noise):
    """The same task; one loss scales a parameter in place."""

    def model(self):
        return TwoLayers()

    def loss(self, model, batch):
        self.calls += model.training
        if self.clamped == self.calls:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith("two.weight"):
                        parameter.mul_(0.9)
        return model(batch["x"]), {}


def scaled_after_a_save(root: str, late: bool) -> dict[str, str]:
    """Train; a parameter changes in the step after a save."""
    from oneloop import fit

    if late:
        copy_late(setattr)
    run = {"dir": root}
    save = {"every": 3, "keep": 99}
    fit(
        Scaled,
        task={"clamped": 10},
        duration=14,
        batch={"size": 8},
        run=run,
        save=save,
        track=[],
        watch={"output": "quiet"},
        machine={"check_every": 0},
    )
    return shards(Path(root))


@pytest.mark.parametrize("config", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_a_shard_that_changes_while_it_is_copied_reaches_no_checkpoint(tmp_path, config):
    found = []
    for late in (False, True):
        root = str(tmp_path / str(late))
        found.append(run(scaled_after_a_save, root, late, ranks=2, config=config).ok()[0])
    waits, overlaps = found
    # The save before the change is lost.
    assert len(waits) > len(overlaps) >= 4
    assert {name: waits[name] for name in overlaps} == overlaps


def test_a_save_that_is_dropped_at_the_end_is_reported(tmp_path, monkeypatch):
    one = Overlapping(tmp_path / "torn", monkeypatch)
    one.save(1)
    with torch.no_grad():
        one.model.one.weight.clamp_(-0.1, 0.1)
    one.checkpoints.close()
    assert one.said == [f"SAVE FAILED: {TORN} (the previous checkpoint is intact)"]

    def broken(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    one = Overlapping(tmp_path / "broken", monkeypatch)
    one.save(1)
    monkeypatch.setattr(Late, "synchronize", broken)
    one.checkpoints.close()
    assert len(one.said) == 1 and "an illegal memory access" in one.said[0]
    assert not Store(tmp_path / "broken").sealed()
    side_copies._UNGUARDED.clear()


def saved_late(root: str, make: str) -> dict[str, torch.Tensor]:
    copy_late(setattr)
    register_optimizer_step_pre_hook(lambda *_: side_copies.before_change())
    BackgroundSaves.poll = lambda self: None  # so that only the next save, or the end, sends it
    init = BackgroundSaves.__init__

    def overlapping(self, *given, **options) -> None:
        init(self, *given, **options)
        self.overlaps = True

    BackgroundSaves.__init__ = overlapping
    return saved(root, make, False)


@pytest.mark.parametrize(("ranks", "config"), with_slow(LAYOUTS[1:4], LAYOUTS[1:4]))
def test_copies_overlap_on_several_ranks(tmp_path, ranks, config):
    expected = run(saved_late, str(tmp_path), "adamw", ranks=ranks, config=config).ok()[0]
    found, number, _ = run(loaded, str(tmp_path), "adamw").ok()[0]
    assert number == 2 and found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
