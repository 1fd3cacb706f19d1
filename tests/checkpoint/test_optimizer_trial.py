"""A resume continues an optimizer bit by bit, wherever it keeps its state, or it is rejected."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import schedulefree
import torch
from accelerate import Accelerator
from prodigyopt import Prodigy
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

import odd_optimizers as odd
from oneloop.basics.seeds import random_states
from oneloop.checkpoint.optimizer_trial import of_kind, try_optimizer, try_shards
from oneloop.checkpoint.optimizer_values import settings_of
from oneloop.checkpoint.resume import RunState, _restore_generators
from sync_saves import SyncCheckpoints
from worlds import run

pytestmark = pytest.mark.covers(
    "oneloop.basics.optimizer_tensors",
    "oneloop.checkpoint.optimizer_trial",
    "oneloop.checkpoint.optimizer_values",
    "oneloop.checkpoint.resume",
)

CONTINUED = [
    odd.GrowingDefault,
    odd.TensorInGroup,
    odd.HonestAdamW,
    odd.SavedLateCounter,
    odd.Lookahead,
    odd.SGLD,
    partial(Prodigy, lr=1.0),
    partial(schedulefree.AdamWScheduleFree, lr=0.05),
    partial(AdamW, lr=torch.tensor(0.05)),
]
NOT_HELD = {
    odd.CountingAdamW: "CountingAdamW has state that a checkpoint does not hold: in a trial",
    odd.LateCounter: "LateCounter has state that a checkpoint does not hold: in a trial",
    odd.Around: "Around has state that a checkpoint does not hold: in a trial",
    odd.Hidden: "Hidden has state that a checkpoint does not hold: in a trial",
    odd.Global: "Global has state that a checkpoint does not hold: in a trial",
    odd.History: "History keeps old, which a checkpoint cannot store",
}


def name_of(kind: Any) -> str:
    return getattr(kind, "func", kind).__name__


def resumed(folder: Path, kind: Any, accelerator: Any, prepare: Any) -> float:
    """Return how far apart two runs are: one of 14 steps, and one that resumes after 6."""
    ends = []
    for stop in (None, 6):
        net = prepare(odd.model())
        optimizer = kind(net.parameters())
        getattr(optimizer, "train", lambda: None)()
        # An optimizer with two sets of weights is for loops of one's own; others as in a run.
        settings = None
        if not hasattr(optimizer, "train"):
            settings = settings_of(optimizer, ["lr"])
            like = next(net.parameters())
            try_optimizer(partial(of_kind, optimizer), like, ["lr"])
            if isinstance(like, DTensor):
                try_shards(partial(of_kind, optimizer), like, ["lr"])
        checkpoints = SyncCheckpoints(folder / str(stop), accelerator, settings=settings)
        state = RunState(net, optimizer, parts={}, tried=settings is not None)
        torch.manual_seed(1)
        odd.train(net, optimizer, 1, 6)
        if stop:
            state.save(checkpoints, 6)
            torch.manual_seed(2)
            net = prepare(odd.model())
            optimizer = kind(net.parameters())
            state = RunState(net, optimizer, parts={}, tried=True)
            state.resume(checkpoints, "auto", say=lambda line: None)
            getattr(optimizer, "train", lambda: None)()
        torch.manual_seed(3)
        odd.train(net, optimizer, 7, 14)
        ends.append(net)
        checkpoints.close()
    distance = 0.0
    for one, other in zip(ends[0].parameters(), ends[1].parameters(), strict=True):
        distance += float((odd.local(one) - odd.local(other)).detach().abs().sum())
    return distance


@pytest.mark.parametrize("kind", CONTINUED, ids=name_of)
def test_a_resume_continues_it(tmp_path, kind):
    accelerator = Accelerator(cpu=True)
    assert resumed(tmp_path, kind, accelerator, accelerator.prepare) == 0


@pytest.mark.parametrize("kind", NOT_HELD, ids=name_of)
def test_state_that_a_checkpoint_does_not_hold_is_rejected(kind):
    net = odd.model()
    optimizer = kind(net.parameters())
    with pytest.raises(ValueError, match=NOT_HELD[kind]):
        RunState(net, optimizer, parts={})


def test_a_trial_changes_no_generator():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    net = odd.model()
    torch.manual_seed(0)
    try_optimizer(partial(of_kind, odd.SGLD(net.parameters())), net[0].weight)
    assert torch.equal(torch.rand(3), expected)


NOT_TRIED = (
    "an optimizer was not tried on a small model, so whether a resume is exact is not known "
    "(IndexError: index 2 is out of range)"
)


class Wrapping(odd.Simple):
    """Needs the model."""

    def __init__(self, params: Any, model: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        self.head = model[2]


def test_what_cannot_be_tried_is_reported():
    net = odd.model()
    said: list[str] = []
    RunState(net, Wrapping(net.parameters(), model=net), parts={}, say=said.append)
    assert said == [NOT_TRIED]


UNDER_FSDP2 = "under FSDP2 each rank sees its shard only: use elementwise updates, or DTensor's"
ON_SHARDS = {
    odd.LARS: "",
    odd.WithSetting: "",
    odd.GrowingDefault: "",
    odd.HonestAdamW: "",
    odd.SavedLateCounter: "",
    odd.LocalLARS: "LocalLARS depend on the shards of parameters: ten steps on shards end",
    odd.LocalMomentum: "of parameters: its optimizer.0.weight.m differ between the ranks",
    odd.LocalCounter: "LocalCounter depend on the shards of parameters: its groups differ",
    odd.SGLD: "those on whole tensors;",
    partial(Prodigy, lr=1.0): "Prodigy cannot update float64 shards of unequal size",
}


def draws() -> tuple[list[float], float, float]:
    """Return what the generators of torch, Python and numpy draw next."""
    return torch.rand(2).tolist(), random.random(), float(np.random.normal())


def redrawn(folder: Path, accelerator: Any, prepare: Any) -> tuple[Any, Any]:
    """Return the draws after a save, and after the resume of it in other states."""
    net = prepare(odd.model())
    state = RunState(net, odd.LARS(net.parameters()), parts={})
    checkpoints = SyncCheckpoints(folder, accelerator)
    torch.manual_seed(accelerator.process_index)
    np.random.seed(accelerator.process_index)
    np.random.normal()  # keeps a second number
    random.seed(accelerator.process_index)
    state.save(checkpoints, 1)
    expected = draws()
    draws()
    state.resume(checkpoints, "auto", say=lambda line: None)
    found = draws()
    checkpoints.close()
    return expected, found


def test_generators_continue(tmp_path):
    accelerator = Accelerator(cpu=True)
    expected, found = redrawn(tmp_path, accelerator, accelerator.prepare)
    assert found == expected


def test_generators_of_another_device_begin_anew():
    """A checkpoint of a GPU has the states of its generator, too."""
    cpu = torch.device("cpu")
    of_a_gpu = [*random_states(cpu), "00" * 16]
    here = SimpleNamespace(count=1, rank=0, device=cpu)
    said: list[str] = []
    torch.manual_seed(5)
    _restore_generators([of_a_gpu], here, 3, said.append)
    begun = draws()
    torch.manual_seed(5)
    _restore_generators([of_a_gpu], here, 3, said.append)
    assert draws() == begun
    assert "of 1 processes, and there are 1 on cpu: they are seeded by seed" in said[0]


def on_two_ranks(folder: str) -> dict[str, Any]:
    """Return for each optimizer the error of a resume, or how far it is from the whole run."""
    from oneloop.launch.processes import start

    world = start()
    found: dict[str, Any] = {}
    found["draws"] = redrawn(Path(folder) / "draws", world.accelerator, world.prepare)
    for kind in ON_SHARDS:
        place = Path(folder) / name_of(kind)
        try:
            distance = resumed(place, kind, world.accelerator, world.prepare)
        except ValueError as error:
            found[name_of(kind)] = str(error)
        else:
            found[name_of(kind)] = str(distance or "")
    return found


@pytest.mark.parametrize("config", ["fsdp2", pytest.param("ddp", marks=pytest.mark.slow)])
def test_on_two_ranks(tmp_path, config):
    reports = run(on_two_ranks, str(tmp_path), ranks=2, config=config).ok()
    for found in reports:
        for kind, error in ON_SHARDS.items():
            expected = error if config == "fsdp2" else ""
            seen = found[name_of(kind)]
            assert (expected in seen and UNDER_FSDP2 in seen) if expected else seen == "", seen

    # Each rank continues its own generators; another number of ranks begins new ones.
    (expected, drawn), (other, of_other) = (report["draws"] for report in reports)
    assert drawn == expected != other == of_other
    said: list[str] = []
    accelerator = Accelerator(cpu=True)
    net = accelerator.prepare(odd.model())
    state = RunState(net, odd.LARS(net.parameters()), parts={})
    checkpoints = SyncCheckpoints(tmp_path / "draws", accelerator)
    ends = []
    for _ in range(2):
        torch.manual_seed(5)
        state.resume(checkpoints, "auto", say=said.append)
        ends.append(draws())
    assert ends[0] == ends[1] != drawn
    assert said[0].startswith("the checkpoint has the random generators of 2 processes, and there")
