"""Small buffers are saved for each rank: a resumed run is the run left alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from oneloop.checkpoint import rank_buffers
from oneloop.checkpoint.checkpoints import Checkpoints
from oneloop.checkpoint.manifest import read_manifest
from oneloop.checkpoint.resume import RunState
from oneloop.checkpoint.store import Store, problems
from sync_saves import SyncCheckpoints
from worlds import back_to, run, train

pytestmark = pytest.mark.covers(
    "oneloop.checkpoint.manifest",
    "oneloop.checkpoint.rank_buffers",
    "oneloop.checkpoint.store",
    "oneloop.loop.upkeep",
)

TASK = '''
import torch
from torch import nn


class Rows(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        self.x = torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i]}


class Renorm(nn.Module):
    """Normalizes by running statistics in training, too."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.norm.forward = self.own

    def own(self, x):
        if self.training:
            with torch.no_grad():
                self.norm.running_mean.lerp_(x.mean(0), 0.3)
        return x - self.norm.running_mean

    def forward(self, x):
        return self.norm(x)


class Carried(nn.Module):
    """Carries its state between batches in a non-persistent buffer, which it replaces."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(6, 6)
        self.register_buffer("state", torch.zeros(1, 6), persistent=False)

    def forward(self, x):
        state = self.state if len(self.state) == len(x) else x.new_zeros(len(x), 6)
        hidden, cell = self.cell(x, (state, state))
        if self.training:
            self.state = cell.detach()
        return hidden


class Turning(nn.Module):
    """A complex buffer, an integer one, and one that two modules share."""

    def __init__(self):
        super().__init__()
        self.register_buffer("phase", torch.ones(6, dtype=torch.complex64), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int16))
        self.tied = nn.Module()
        self.tied.register_buffer("again", self.count, persistent=False)

    def forward(self, x):
        if self.training:
            self.phase *= torch.polar(torch.ones(6), x.detach().mean(0))
            self.count += 1 + int(x.sum() > 0)
        return x + self.phase.real + 0.1 * self.tied.again


class Growing(nn.Module):
    """A persistent buffer that grows, and one that is registered late."""

    def __init__(self):
        super().__init__()
        self.register_buffer("means", torch.zeros(0, 6))
        self.register_buffer("none", None)

    def forward(self, x):
        if self.training:
            self.means = torch.cat([self.means, x.detach().mean(0)[None]])
            self.none = self.means.mean(0)
            if len(self.means) == 3:
                self.register_buffer("late", x.detach().mean(0), persistent=False)
        if hasattr(self, "late"):
            x = x + self.late
        return x if self.none is None else x + self.none


class Plain(nn.Module):
    """Torch's own statistics, and a buffer that never changes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("fixed", torch.ones(6))

    def forward(self, x):
        return self.norm(x) * self.fixed


class Lost(nn.Module):
    """A buffer of a dtype that a file cannot hold."""

    def __init__(self):
        super().__init__()
        self.register_buffer("odd", torch.zeros(6, dtype=torch.uint16), persistent=False)

    def forward(self, x):
        if self.training:
            self.odd = (self.odd.int() + 1).to(torch.uint16)
        return x * (1 + 0.01 * self.odd.float())


KINDS = {
    "all": [Renorm, Carried, Turning, Growing],
    "renorm": [Renorm],
    "carried": [Carried],
    "others": [Plain, Lost],
    "nan": [Carried, Growing],
}


class Task:
    additive = False

    def __init__(self, kind: str = "all"):
        self.kind = kind

    def model(self):
        layers = [kind() for kind in KINDS[self.kind]]
        return nn.Sequential(nn.Linear(6, 6), *layers, nn.Linear(6, 1))

    def train_set(self):
        rows = Rows(480, 1)
        if self.kind == "nan":
            rows.x[77] = float("nan")
        return rows

    def eval_sets(self):
        return {"validation": Rows(8, 2)}

    def collate(self, samples):
        return {"x": torch.stack([one["x"] for one in samples])}

    def weight(self, batch):
        return torch.tensor(float(len(batch["x"])))

    def loss(self, model, batch):
        return (model(batch["x"]) - batch["x"].sum(1, keepdim=True)).square().sum(), {}
'''


def trained(folder: Path, name: str, *words: str, ranks: int, config: str, kind: str = "all"):
    (folder / "task.py").write_text(TASK)
    given = [f"{folder / 'task.py'}:Task", "--task.kind", kind, "--batch.size", "16"]
    given += [
        "--batch.micro",
        "4",
        "--duration",
        "10" if kind != "nan" else "30",
        "--save.every",
        "1",
        "--save.keep",
        "99",
    ]
    given += ["--eval.every", "0", "--track", "none", "--machine.workers", "0"]
    given += ["--run.dir", name, *words]
    return run(train, given, ranks=ranks, config=config, folder=folder)


def same(one: Path, other: Path) -> None:
    for file in ("final/model.safetensors", *_files(one)):
        assert (one / file).read_bytes() == (other / file).read_bytes(), file


def _files(folder: Path) -> list[str]:
    """The tensors of the last checkpoint: optimizer state and buffers, too."""
    last = Store(folder / "checkpoints").sealed()[-1]
    assert problems(last) == []
    return [str(file.relative_to(folder)) for file in last.glob("*.safetensors")]


def entries(folder: Path) -> set[str]:
    """The names of single ranks' buffers in the last checkpoint."""
    last = Store(folder / "checkpoints").sealed()[-1]
    return {name for name in read_manifest(last)["tensors"] if name.startswith("rank.")}


def test_a_resumed_run_has_the_buffers_of_the_run_left_alone(tmp_path):
    rarely = ["--save.every", "2"]
    trained(tmp_path, "alone", *rarely, ranks=2, config="ddp").ok()
    for name in ("again", "one"):
        shutil.copytree(tmp_path / "alone", tmp_path / name)
        back_to(tmp_path / name, 6)
    trained(tmp_path, "again", *rarely, ranks=2, config="ddp").ok()
    same(tmp_path / "alone", tmp_path / "again")
    names = {name.split(".", 3)[3] for name in entries(tmp_path / "alone")}
    names -= {"tied.again"}  # DDP unties it
    statistics = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    others = {"state", "phase (complex)", "count", "means", "none", "late"}
    assert names == statistics | others

    # On another number of ranks all use the buffers of rank 0.
    world = trained(tmp_path, "one", *rarely, ranks=1, config="single")
    world.ok()
    line = "the run had 2 processes and continues on 1, each with the buffers of rank 0"
    assert world.output.count(line) == 1
    assert {name[:7] for name in entries(tmp_path / "one")} == {"rank.0."}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all", "renorm", "carried"])
@pytest.mark.parametrize(("ranks", "config"), [(1, "single"), (2, "ddp"), (2, "fsdp2")])
def test_the_same_on_other_layouts(tmp_path, ranks, config, kind):
    trained(tmp_path, "alone", ranks=ranks, config=config, kind=kind).ok()
    for step in (1, 6):
        shutil.copytree(tmp_path / "alone", tmp_path / str(step))
        back_to(tmp_path / str(step), step)
        trained(tmp_path, str(step), ranks=ranks, config=config, kind=kind).ok()
        same(tmp_path / "alone", tmp_path / str(step))


def test_statistics_of_batch_norm_are_not_saved_for_each_rank_nor_what_no_file_can_hold(tmp_path):
    world = trained(tmp_path, "run", ranks=1, config="single", kind="others")
    world.ok()
    assert entries(tmp_path / "run") == {"rank.0.1.fixed"}
    line = "a checkpoint does not hold 2.odd of each process"
    assert world.output.count(line) == 1


@pytest.mark.slow
@pytest.mark.parametrize("every", ["99", "1"])
def test_a_rewind_removes_what_a_bad_step_left_in_a_buffer(tmp_path, every):
    words = ["--save.every", every, "--guard.nonfinite", "rewind"]
    world = trained(tmp_path, "run", *words, ranks=1, config="single", kind="nan")
    world.ok()
    # Without a good state, all steps after the bad sample would be bad.
    assert 1 <= world.output.count("rewind; the samples are in metrics.jsonl") <= 3


# --- one process: what a load does with each kind of buffer
# --------------------------------------------------------------------------------------------------


def held(model: nn.Module) -> RunState:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return RunState(model, optimizer, parts={}, tried=True)


def net() -> nn.Module:
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    made[0].register_buffer("carried", torch.ones(2), persistent=False)
    made[0].register_buffer("queue", torch.zeros(2, 2))
    made[1].register_buffer("tied", made[0].queue)
    made[0].register_buffer("empty", None)
    return made


def saved(state: RunState, folder: Path, step: int = 1, say=print) -> Checkpoints:
    checkpoints = SyncCheckpoints(folder, Accelerator(), say=say)
    state.save(checkpoints, step)
    return checkpoints


def resumed(state: RunState, checkpoints: Checkpoints) -> None:
    state.resume(checkpoints, "auto", say=lambda line: None)


def test_none_and_tied_and_late_buffers_come_back_in_a_new_model_and_after_a_rewind(tmp_path):
    model = net()
    state = held(model)
    checkpoints = saved(state, tmp_path)

    # A rewind undoes all changes, also registrations, and keeps tensors and ties.
    queue = model[0].queue
    queue += 1
    model[0].carried = None
    model[0].empty = torch.ones(3)
    model[1].register_buffer("late", torch.ones(3))
    resumed(state, checkpoints)
    assert model[0].queue is queue is model[1].tied and not queue.any()
    assert torch.equal(model[0].carried, torch.ones(2)) and model[0].empty is None
    assert not hasattr(model[1], "late")

    # A new model gets what training has replaced, tied, registered, or set to None.
    model[0].queue = model[1].tied = torch.full((3, 2), 7.0)
    model[0].carried = None
    model[0].empty = torch.tensor([float("nan"), -0.0])
    model[1].register_buffer("late", torch.ones(3))
    model[1].register_buffer("phase", torch.ones(2, dtype=torch.complex64), persistent=False)
    checkpoints = saved(state, tmp_path, 2)
    new = net()
    resumed(held(new), checkpoints)
    assert new[0].queue is new[1].tied and new[0].carried is None
    for name, buffer in model.named_buffers():
        other = new.get_buffer(name)
        assert other.dtype == buffer.dtype and other.numpy().tobytes() == buffer.numpy().tobytes()
    assert new.state_dict().keys() == model.state_dict().keys()  # persistent ones stay persistent


def test_a_buffer_above_the_limit_is_that_of_rank_0_and_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_buffers, "_MOST", 8)
    lines: list[str] = []
    model = net()
    state = held(model)
    model[0].queue += 1
    checkpoints = saved(state, tmp_path, say=lines.append)
    saved(state, tmp_path, 2, say=lines.append)
    assert len(lines) == 1 and "does not hold 0.queue, 1.tied of" in lines[0]
    listed = read_manifest(checkpoints.newest())["tensors"]
    assert [name for name in listed if "queue" in name] == ["model.0.queue"]
    new = net()
    resumed(held(new), checkpoints)
    assert torch.equal(new[0].queue, torch.ones(2, 2))  # the persistent one is complete


def test_a_buffer_of_a_module_that_the_model_lacks_is_rejected(tmp_path):
    model = net()
    state = held(model)
    model[1].inside = nn.Module()
    model[1].inside.register_buffer("late", torch.ones(2), persistent=False)
    checkpoints = saved(state, tmp_path)
    with pytest.raises(ValueError, match="is damaged: its values are not .*has no attribute"):
        resumed(held(net()), checkpoints)


def test_a_model_without_buffers_adds_nothing(tmp_path):
    checkpoints = saved(held(nn.Linear(2, 2)), tmp_path)
    assert [*read_manifest(checkpoints.newest())["tensors"]] == ["model.weight", "model.bias"]
