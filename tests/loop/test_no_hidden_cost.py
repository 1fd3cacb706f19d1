"""Promise 7: between two log steps, no step reads the device or adds a collective to those of the
strategy."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from splits import words
from worlds import run

pytestmark = pytest.mark.covers(
    "oneloop.basics.device_flag",
    "oneloop.checks.repeats",
    "oneloop.loop.steps",
    "oneloop.train",
)

READS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::masked_select")


FIRST, STEPS = 3, 3
"""the first step whose events are counted (DDP orders its buckets in the second), and their
number; none of them logs"""


def counted(argv: list[str]) -> dict[str, int]:
    """Return the device reads and collectives of STEPS steps of a run, counted by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    from oneloop import train
    from oneloop.measure.profiling import Profiling

    # The loop calls this function at the start of each step: what it counts is one step and the
    # preparation of the next, as many times as there are steps.
    profiled = profile(activities=[ProfilerActivity.CPU])
    begun, ended = [], []

    def step(self, number: int) -> None:
        if number == FIRST:
            begun.append(number)
            profiled.start()
        if number == FIRST + STEPS:
            profiled.stop()
            ended.append(number)

    code = 0
    try:
        original, train.entry.leave = train.entry.leave, lambda code, *, main: sys.exit(code)
        Profiling.advance = step
        train.main(argv)
    except SystemExit as end:
        code = end.code
    train.entry.leave = original
    assert not code
    assert begun == [FIRST] and ended == [FIRST + STEPS]
    return Counter(
        event.name
        for event in profiled.events()
        if event.name.startswith("c10d::") or (event.name in READS and not _inside_kernel(event))
    )


def _inside_kernel(event) -> bool:
    """Return whether the event is in the CPU kernel of fused AdamW, which reads its step counters;
    CUDA's does not."""
    while event is not None and event.name != "aten::_fused_adamw_":
        event = event.cpu_parent
    return event is not None


EXTRAS = ("--ema.half_life", "100 samples", "--ema.power", "[0.1]", "--guard.nonfinite", "skip")
"""features that must cost no read and no collective either"""


def per_step(
    folder, *, ranks: int, strategy: str, optimizer: str, accumulate: int = 2, more=EXTRAS
) -> Counter[str]:
    """Return the events of STEPS steps without a log, in the middle of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    argv = [
        *words(
            folder,
            ranks=ranks,
            accumulate=accumulate,
            steps=FIRST + STEPS + 1,
            dtype="float32",
            optimizer=optimizer,
        ),
        "--log.every",
        "1000",
        "--schedule.warmup",
        "0",
        # By default, a run saves ten times, if it has ten steps.
        "--save.every",
        "0",
        *more,
    ]
    return Counter(run(counted, argv, ranks=ranks, config=strategy).ok()[0])


def test_the_count_sees_a_read_and_a_collective(tmp_path):
    assert run(_reads_and_reduces, ranks=2).ok()[0] == {"read": True, "collective": True}


def _reads_and_reduces() -> dict[str, bool]:
    import torch
    import torch.distributed as dist
    from torch.profiler import profile

    dist.init_process_group("gloo")
    with profile() as profiled:
        one = torch.ones(3)
        dist.all_reduce(one)
        float(one.sum())
    names = {event.key for event in profiled.key_averages()}
    return {
        "read": bool(names & set(READS)),
        "collective": any(name.startswith("c10d::allreduce") for name in names),
    }


OPTIMIZERS = [
    "adamw",
    pytest.param("sgd", marks=pytest.mark.slow),
    pytest.param("muon", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_process_reads_and_sends_nothing(tmp_path, optimizer):
    assert per_step(tmp_path, ranks=1, strategy="single", optimizer=optimizer) == {}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ddp_sends_its_bucket_and_one_small_sum(tmp_path, optimizer):
    # One bucket per step, for any accumulation, and the sum of weight and stop flag.
    own = {"c10d::allreduce_": 2 * STEPS}
    if optimizer == "muon":
        own["c10d::broadcast_"] = STEPS  # its one matrix
    assert per_step(tmp_path, ranks=2, strategy="ddp", optimizer=optimizer) == own


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fsdp2_sends_its_own_and_one_small_sum(tmp_path, optimizer):
    found = per_step(tmp_path, ranks=2, strategy="fsdp2", optimizer=optimizer)
    own = {
        # this model is one unit: both micro-batches gather it
        "c10d::_allgather_base_": 2 * STEPS,
        "c10d::_reduce_scatter_base_": STEPS,  # scattered once per step
        "c10d::allreduce_": 2 * STEPS,  # the gradient norm; weight and stop flag
    }
    if optimizer == "muon":
        own["c10d::alltoall_base_"] = 2 * STEPS  # Muon's matrix goes to its rank and back
    assert found == own


@pytest.mark.slow
def test_a_spike_policy_costs_one_small_sum_more(tmp_path):
    more = ("--guard.sigma", "1000")
    found = per_step(tmp_path, ranks=2, strategy="ddp", optimizer="adamw", more=more)
    assert found == {"c10d::allreduce_": 3 * STEPS}  # the bucket; weight and stop flag; the loss
    assert (
        per_step(tmp_path / "one", ranks=1, strategy="single", optimizer="adamw", more=more) == {}
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "strategy", "sent"),
    [
        (1, "single", {}),
        # A bucket is exchanged in pieces and gathered, with the traffic of a ring; weight and stop
        # flag.
        (
            2,
            "ddp",
            {
                "c10d::alltoall_base_": STEPS,
                "c10d::_allgather_base_": STEPS,
                "c10d::allreduce_": STEPS,
            },
        ),
        # One unit, exchanged in both micro-batches; the norm's maximum and its digits; weight and
        # stop flag.
        (
            2,
            "fsdp2",
            {
                "c10d::_allgather_base_": 2 * STEPS,
                "c10d::alltoall_base_": 2 * STEPS,
                "c10d::allreduce_": 3 * STEPS,
            },
        ),
    ],
)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_same_bits_read_nothing(tmp_path, ranks, strategy, sent, optimizer):
    more = (*EXTRAS, "--batch.grain", str(16 // ranks // 2))
    assert (
        per_step(tmp_path, ranks=ranks, strategy=strategy, optimizer=optimizer, more=more) == sent
    )
