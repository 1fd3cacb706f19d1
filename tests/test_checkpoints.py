"""Any parallel layout loads what any other saved; damage is detected; a failed save costs only its
checkpoint."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from oneloop.checkpoint.background_save import SaveError
from oneloop.checkpoint.checkpoints import Checkpoints
from oneloop.checkpoint.store import Keep, Store, problems
from worlds import run


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
    from oneloop.basics.tensors import optimizer_tensors
    from oneloop.checkpoint.state_dict import model_tensors

    found = model_tensors(model) | optimizer_tensors(model, optimizer)
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone()
        for name, t in found.items()
    }


def saved(root: str, make: str, sync: bool) -> dict[str, torch.Tensor]:
    from oneloop.checkpoint.checkpoints import Checkpoints

    world, model, optimizer = build(make)
    checkpoints = Checkpoints(Path(root), world.accelerator, sync=sync)
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


@pytest.mark.parametrize(("ranks", "config"), LAYOUTS[:4])
@pytest.mark.parametrize("sync", [False, True])
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


@pytest.mark.parametrize("make", ["sgd", "muon", "rmsprop"])
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
    from oneloop.checkpoint.store import write_file

    draft = store.draft(step)
    generator = random.Random(step)
    files = {
        f"{n}.bin": write_file(draft / f"{n}.bin", generator.randbytes(1000 + n))
        for n in range(count)
    }
    return store.seal(draft, step, files, {})


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
        walk = list(store.newest_good())
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
    (store.draft(5) / "x").write_text("half")
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
    checkpoints = Checkpoints(Path(root), world.accelerator, sync=sync)
    sweep = checkpoints.store.sweep
    checkpoints.store.sweep = lambda *more: (time.sleep(0.2), sweep(*more))  # slow storage
    reported = []
    for number in range(4):
        step(model, optimizer, number)
        if world.rank == rank and number in (1, 2):
            while checkpoints.saving._pending:  # only the second save may hit the limit
                checkpoints.poll()
                time.sleep(0.01)
            writing = 0 if sync else checkpoints.saving._process._process.pid
            soft = 400 if number == 1 else resource.RLIM_INFINITY
            resource.prlimit(writing, resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))
        reported.append(
            checkpoints.save(number, model, optimizer, {"number": number}, keep=Keep(newest=9))
        )
    reported.append(checkpoints.finish())
    checkpoints.close()
    return [problem is not None for problem in reported]


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("sync", [False, True])
def test_a_full_disk_costs_one_checkpoint_and_all_ranks_know(tmp_path, ranks, rank, sync):
    when = 1 if sync else 2  # reported by the save itself, or by the next save
    for reported in run(with_a_failing_save, str(tmp_path), sync, rank, ranks=ranks).ok():
        assert reported == [number == when for number in range(5)]
    store = Store(tmp_path)
    assert [path.name[-1] for path in store.sealed()] == ["0", "2", "3"]
    assert len(list(tmp_path.iterdir())) == 3  # no draft is left
    assert all(problems(path) == [] for path in store.sealed())


def test_a_writer_ends_with_its_trainer(tmp_path):
    import psutil

    pid = run(_writers, str(tmp_path)).ok()[0]
    began = time.monotonic()
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie":
        assert time.monotonic() - began < 5
        time.sleep(0.05)


def _writers(root: str) -> int:
    from oneloop.checkpoint.checkpoints import Checkpoints

    world, model, optimizer = build("adamw")
    step(model, optimizer, 0)
    checkpoints = Checkpoints(Path(root), world.accelerator)
    checkpoints.save(0, model, optimizer, {})
    checkpoints.finish()
    return checkpoints.saving._process._process.pid


# --- pinned memory: a recorder stands for CUDA, and the tensors are on the host
# --------------------------------------------------------------------------------------------------


class Cudart:
    """Registers host memory by its address, as CUDA does: none twice, and none after its end."""

    def __init__(self, error: int = 0) -> None:
        self.error = error  # of every registration
        self.registered: dict[int, int] = {}  # bytes by address
        self.ended = 0  # registrations
        self.wrong: list[str] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
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
        self.checkpoints = Checkpoints(root, run_on_cuda, max_failures=9, say=self.said.append)
        self.step = 0

    def save(self, pages: int) -> None:
        """Start to save one parameter that fills these pages."""
        model = nn.ParameterDict({"one": nn.Parameter(torch.ones(pages * 1024))})
        self.step += 1
        self.checkpoints.save(self.step, model, torch.optim.SGD(model.parameters()), {})

    @property
    def writer(self) -> int:
        return self.checkpoints.saving._process._process.pid


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
    saves.checkpoints.saving._patience = 1e-3
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
