"""The equality tests can fail: each break of the loop, made on purpose, is found by them."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

import pytest
import torch

from oneloop.data.order import Order
from test_same_weights import BATCH, distance, expected, trained
from worlds import run, train

# module, what stands there, what is put in its place, strategy that shows it
BREAKS = {
    "weight scaling": ("oneloop.train", "split.accumulate / weight", "split.accumulate / (weight + 1)", "single"),
    "own weight for the global one": ("oneloop.train", "split.accumulate / weight",
                                      "split.accumulate / (group.weight * run.ranks)", "ddp"),
    "a rank's slice": ("oneloop.data.groups", "self.start + self.rank * share", "self.start", "ddp"),
    "the sync of the last micro-batch": ("oneloop.train", "accelerator.accumulate(model)",
                                         "accelerator.no_sync(model)", "ddp"),
    "the clip norm": ("oneloop.optim.clip", "if placement.is_shard()", "if False", "fsdp2"),
}  # fmt: skip


def broken(module: str, here: str, instead: str, argv: list[str]) -> None:
    """Trains with one place of the source changed, in this process only."""
    _change(module, here, instead)
    train(argv)


def _change(module: str, here: str, instead: str) -> None:
    target = importlib.import_module(module)
    source = inspect.getsource(target)
    assert source.count(here) == 1, f"{module} no longer says {here!r} once"
    exec(compile(source.replace(here, instead), target.__file__, "exec"), target.__dict__)
    if module != "oneloop.train":  # the loop imported the old names
        loop = sys.modules["oneloop.train"]
        exec(compile(inspect.getsource(loop), loop.__file__, "exec"), loop.__dict__)


class Broken:
    """``broken`` with its place bound, to be sent to a forked process."""

    def __init__(self, module: str, here: str, instead: str) -> None:
        self.place = (module, here, instead)

    def __call__(self, argv: list[str]) -> None:
        broken(*self.place, argv)


@pytest.mark.parametrize("name", BREAKS)
def test_each_break_is_found(tmp_path, name):
    module, here, instead, strategy = BREAKS[name]
    ranks = 1 if strategy == "single" else 2
    weights, losses, ids = trained(tmp_path / "a", ranks=ranks, accumulate=2, strategy=strategy, steps=20,
                                   optimizer="sgd", function=Broken(module, here, instead),
                                   extra=("--machine.check_every", "0"))  # fmt: skip  # which would find one of them first
    order = Order(37, seed=0)
    the_same = all(sorted(step) == sorted(order[n * BATCH : (n + 1) * BATCH][1].tolist()) for n, step in enumerate(ids))
    if name == "a rank's slice":  # seen by the samples: the reference trains on those that were drawn
        assert not the_same
        return
    assert the_same
    wanted, wanted_losses = expected(ids, dtype=torch.float32, optimizer="sgd")
    assert distance(weights, wanted) > 1e-5


# --- gradients are reduced and accumulated in float32 under FSDP2 and bf16 --------------------------------------------


def bf16_gradients(ids: list[int], ranks: int, accumulate: int) -> dict[str, Any]:
    """One SGD step as FSDP2 should make it: every micro-batch computed in bf16, all of them summed in float32."""
    from oneloop.basics.seeds import key
    from tiny import Ragged, Sequences

    torch.manual_seed(key(0))
    task = Ragged()
    model = task.model()
    half = task.model().bfloat16()
    half.load_state_dict(model.state_dict())
    samples = Sequences(37, seed=1).samples
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    micro = BATCH // ranks // accumulate
    weight = sum(len(samples[i]) - 1 for i in ids)
    for start in range(0, BATCH, micro):
        chosen = ids[start : start + micro]
        half.zero_grad()
        batch = task.collate([samples[i] for i in chosen])
        loss, _ = task.loss(half, batch)
        (loss * (ranks * accumulate / weight) / accumulate).backward()
        for name, p in half.named_parameters():
            total[name] += p.grad.float() / ranks
    return {name: value.tolist() for name, value in total.items()}


@pytest.mark.parametrize("reduce_in", ["float32", "bfloat16"])
def test_fsdp2_reduces_in_float32(tmp_path, reduce_in):
    function = train
    if reduce_in != "float32":
        function = Broken("oneloop.run.processes", "reduce_dtype=torch.float32", "reduce_dtype=torch.bfloat16")
    extra = ("--optimizer.clip", "0", "--schedule.name", "constant", "--schedule.warmup", "0",
             "--optimizer.momentum", "0", "--optimizer.weight_decay", "0", "--optimizer.lr", "1")  # fmt: skip
    weights, _, ids = trained(tmp_path / "a", ranks=2, accumulate=2, strategy="fsdp2", steps=1, optimizer="sgd",
                              function=InBf16(function), extra=extra)  # fmt: skip
    from oneloop.basics.seeds import key
    from tiny import Ragged

    torch.manual_seed(key(0))
    start = Ragged().model().state_dict()
    moved = {name: start[name] - weights[name] for name in start}
    wanted = run(bf16_gradients, ids[0], 2, 2).ok()[0]  # in a process like those of the run
    apart = distance(moved, {name: torch.tensor(value) for name, value in wanted.items()})
    if reduce_in == "float32":
        assert apart < 1e-5
    else:
        assert apart > 1e-4


class InBf16:
    """The function under ``mixed_precision: bf16``."""

    def __init__(self, function) -> None:
        self.function = function

    def __call__(self, argv: list[str]) -> None:
        import os

        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
        self.function(argv)
