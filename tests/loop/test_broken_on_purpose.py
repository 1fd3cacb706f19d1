"""The equality tests can fail: they detect each of these deliberate bugs in the loop."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import silent_values
from oneloop.data.order import Order
from silent_runs import differing, final, metrics
from silent_runs import trained as trained_plainly
from slow_cases import with_slow
from splits import BATCH, distance, expected, trained
from worlds import back_to, fresh, run, train
from zoo_outcomes import Runs

pytestmark = pytest.mark.covers(
    "oneloop.basics.tensors",
    "oneloop.checks.passes",
    "oneloop.checks.repeats",
    "oneloop.checks.state",
    "oneloop.checks.dry_run",
    "oneloop.checks.modes",
    "oneloop.checks.preflight",
    "oneloop.checks.sums",
    "oneloop.checkpoint.rank_buffers",
    "oneloop.data.sample_reader",
    "oneloop.data.step_batches",
    "oneloop.job.unfit_models",
    "oneloop.launch.processes",
    "oneloop.loop.gradients",
    "oneloop.loop.steps",
    "oneloop.machine.recompute",
    "oneloop.run.compatibility",
    "oneloop.task_protocol.evaluation_sums",
    "oneloop.task_protocol.metric_states",
    "oneloop.train",
)

# --- the bugs: each replaces one component by a wrong one, in this process only
# ---------------------------------------


def weight_scaling() -> None:
    """Divide by the total weight plus one."""
    _change_totals(lambda group, total, ranks: total + 1)


def own_weight() -> None:
    """Divide by the rank's own weight instead of the global weight."""
    _change_totals(lambda group, total, ranks: group.weight * ranks)


def _change_totals(changed: Any) -> None:
    from oneloop.loop.steps import StepBatches

    agreed = StepBatches.__iter__

    def wrong(self: StepBatches) -> Iterator[Any]:
        for group in agreed(self):
            group.total = changed(group, group.total, self._run.ranks)
            yield group

    StepBatches.__iter__ = wrong


def a_ranks_slice() -> None:
    """Give the samples of rank 0 to all ranks."""
    from oneloop.data import step_batches

    of_rank = step_batches._rank_batches

    def wrong(order: Any, layout: Any, *, rank: int, start: int) -> Any:
        return of_rank(order, layout, rank=0, start=start)

    step_batches._rank_batches = wrong


def no_sync() -> None:
    """Do not reduce the gradients of the last micro-batch."""
    from accelerate import Accelerator

    Accelerator.accumulate = Accelerator.no_sync


def norm_of_a_shard() -> None:
    """Clip by the norm of each rank's own shard."""
    from oneloop.basics.tensors import local
    from oneloop.loop import gradients

    gradients.global_norm = lambda parameters, exact: torch.nn.utils.get_total_norm(
        [local(p.grad) for p in parameters]
    )


def reduced_in_bf16() -> None:
    """Reduce and accumulate in bf16 under FSDP2, as accelerate would configure it."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from oneloop.launch import processes

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    processes.sharded_precision = lambda precision: policy


BREAKS = {  # name: (bug, strategy that shows it)
    "weight scaling": (weight_scaling, "single"),
    "own weight for the global one": (own_weight, "ddp"),
    "a rank's slice": (a_ranks_slice, "ddp"),
    "the sync of the last micro-batch": (no_sync, "ddp"),
    "the clip norm": (norm_of_a_shard, "fsdp2"),
    "reduced in bf16": (reduced_in_bf16, "fsdp2"),
}


class Broken:
    """Train with one of the bugs, in a forked process."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, argv: list[str]) -> None:
        BREAKS[self.name][0]()
        train(argv)


# The default cases are the weights on one process, and the drawn samples on two.
SLOW = ("own weight for the global one", "the sync of the last micro-batch", "the clip norm")


@pytest.mark.parametrize(
    "name", with_slow([name for name in BREAKS if name != "reduced in bf16"], SLOW)
)
def test_each_break_is_found(tmp_path, name):
    strategy = BREAKS[name][1]
    weights, _, ids = trained(
        tmp_path / "a",
        ranks=1 if strategy == "single" else 2,
        accumulate=2,
        strategy=strategy,
        steps=20,
        optimizer="sgd",
        function=Broken(name),
        extra=("--machine.check_every", "0"),  # the replica check would find one bug first
    )
    order = Order(37, seed=0)
    the_same = all(
        sorted(step) == sorted(order[n * BATCH : (n + 1) * BATCH][1].tolist())
        for n, step in enumerate(ids)
    )
    # the drawn samples show it; the reference would train on the same ones
    if name == "a rank's slice":
        assert not the_same
        return
    assert the_same
    reference, _ = expected(ids, dtype=torch.float32, optimizer="sgd")
    assert distance(weights, reference) > 1e-5


# --- each check against silent differences is needed
# -------------------------------------------------------------------------------------------------


def no_hashes_around_passes() -> None:
    """Compare no tensors before and after the passes of a repeat."""
    from oneloop.checks.repeats import Checks

    judge = Checks._judge

    def judge_others(checks, reports, start):
        kept = []
        for report in reports:
            kept.append({name: when for name, when in report.items() if when != "in a forward"})
        return judge(checks, kept, start)

    Checks._judge = judge_others


def no_hashes_around_evaluations() -> None:
    """Compare no tensors around evaluations."""
    from oneloop.checks.repeats import Checks

    Checks.unchanged = lambda checks, what: nullcontext()


def no_hashes_since_the_last_repeat() -> None:
    """Compare no tensors with those of the last repeat."""
    from oneloop.checks.repeats import Checks

    changed = Checks._changed_since
    Checks._changed_since = lambda checks: changed(checks) and []


def no_whole_parameters() -> None:
    """Compare no whole parameters of FSDP2."""
    from oneloop.checks.passes import _Unit

    _Unit.compare = lambda unit, *given: None


def no_repeats() -> None:
    """Repeat no micro-batch."""
    from oneloop.job.build import Intervals

    Intervals.is_repeated = lambda intervals, step, seed: False


def dropout_left_on() -> None:
    """Compare the sums over samples in training mode."""
    from oneloop.checks import sums

    sums.without_draws = lambda model, root, compute, known: nullcontext((compute(), "in training"))


def models_not_compared() -> None:
    """Compare no values of the models that the ranks have built."""
    from oneloop.run import compatibility

    compatibility._values_of = lambda model: {}


def metrics_of_a_rank() -> None:
    """Let each rank compute the metrics of its own micro-batches."""
    from oneloop.task_protocol import metric_states

    metric_states.gather_object = lambda own: own * 2


def rows_not_compared() -> None:
    """Compare no widths of the rows of a loss over the whole batch in an evaluation."""
    from oneloop.task_protocol import evaluation_sums

    evaluation_sums.check_alike = lambda *given, **named: None


NEEDED = {  # name: (without it, zoo model that shows it, ranks, config, batch.grain)
    "hashes around passes": (no_hashes_around_passes, "ShrinkingWeight", 2, "ddp", False),
    "hashes around evaluations": (
        no_hashes_around_evaluations,
        "EvalWeight",
        2,
        "ddp",
        False,
    ),
    "hashes since the last repeat": (
        no_hashes_since_the_last_repeat,
        "RevivedCodes",
        1,
        "single",
        True,
    ),
    "whole parameters of FSDP2": (no_whole_parameters, "ShrinkingWeight", 2, "fsdp2", False),
    "repeats": (no_repeats, "MomentumQueue", 2, "ddp", True),
    "dropout in eval mode": (dropout_left_on, "FaintFocal", 1, "single", False),
    "the same model on all ranks": (models_not_compared, "EntropyFrozen", 2, "fsdp2", False),
    "widths in evaluations": (rows_not_compared, "RaggedEvaluation", 2, "ddp", False),
}


def nothing_restored() -> None:
    """Restore buffers and generators only after the check before the run."""
    from oneloop.checks.state import Values

    Values.restore = lambda values: None


def read_here() -> None:
    """Read the samples of checks and examples in the process that forks the data workers."""
    from contextlib import nullcontext

    from oneloop import evaluation
    from oneloop.checks import dry_run

    for module in (dry_run, evaluation):
        module.sample_reader = lambda function, workers: nullcontext(function)


def torch_only() -> None:
    """Seed only torch's generator before a forward."""
    from oneloop.loop import gradients

    reseed = gradients.reseed
    gradients.reseed = lambda *numbers, others: reseed(*numbers, others=False)


def recomputed_otherwise() -> None:
    """Restore only torch's generator for a recomputation."""
    from oneloop.machine import recompute

    recompute.others_seeded = lambda: False


def buffers_of_rank_0() -> None:
    """Save and restore no buffers of each rank."""
    from oneloop.checkpoint.rank_buffers import RankBuffers

    RankBuffers.tensors = lambda *given: {}
    RankBuffers.targets = lambda *given: {}


WITHOUT = {name: case[0] for name, case in NEEDED.items()} | {
    "restoring": nothing_restored,
    "reading in a worker": read_here,
    "seeding numpy and Python": torch_only,
    "generators of recomputations": recomputed_otherwise,
    "buffers of each rank": buffers_of_rank_0,
    "metrics of all ranks": metrics_of_a_rank,
}


class Without:
    """Train without one of the mechanisms, in a forked process."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, argv: list[str]) -> None:
        WITHOUT[self.name]()
        fresh(argv)


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDED)
def test_without_a_check_a_difference_is_silent(tmp_path, name):
    _, animal, ranks, config, grain = NEEDED[name]
    right, line = Runs(animal, tmp_path / "with").line(ranks, config, grain=grain)
    assert right, line
    runs = Runs(animal, tmp_path / "without", function=Without(name))
    right, line = runs.line(ranks, config, grain=grain)
    assert not right, line


@pytest.mark.slow
def test_without_restoring_the_dry_run_leaves_a_trace(tmp_path):
    words = ("--duration", "3", "--task.change")
    task = "silent_values.ChangesOnce"
    for change in ("nothing", "by_data"):
        place = tmp_path / change
        trained_plainly(place, task, *words, change, function=Without("restoring")).ok()
    assert differing(final(tmp_path / "nothing"), final(tmp_path / "by_data"))


@pytest.mark.slow
def test_a_file_that_the_training_process_has_opened_is_shared(tmp_path):
    # The data set raises if a process uses the file of another one.
    silent_values.write_records(tmp_path / "records", 1024)
    world = trained_plainly(
        tmp_path / "a",
        "silent_values.Lazy",
        *("--duration", "8", "--machine.workers", "2"),
        variables={"RECORDS": str(tmp_path / "records")},
        function=Without("reading in a worker"),
    )
    assert 0 not in world.codes


@pytest.mark.slow
def test_generators_that_are_not_seeded_repeat_their_numbers(tmp_path):
    record = tmp_path / "record"
    words = ("--duration", "4", "--batch.micro", "4", "--machine.check_every", "0")
    trained_plainly(
        tmp_path / "a",
        "silent_values.Draws",
        *(*words, "--machine.workers", "0"),
        variables={"RECORD": str(record)},
        function=Without("seeding numpy and Python"),
    ).ok()
    lines = Path(f"{record}-0").read_text().splitlines()[-16:]
    assert len({line.split()[1] for line in lines}) < 16


@pytest.mark.slow
def test_a_recomputation_with_other_numbers_trains_other_weights(tmp_path):
    words = ("--task.block", "numpy", "--duration", "5", "--batch.micro", "4")
    more = ("--machine.recompute", "full", "--machine.check_every", "0")
    function = Without("generators of recomputations")
    task = "silent_values.Recomputed"
    trained_plainly(tmp_path / "a", task, *words).ok()
    trained_plainly(tmp_path / "b", task, *words, *more, function=function).ok()
    assert differing(final(tmp_path / "a"), final(tmp_path / "b"))


@pytest.mark.slow
def test_metrics_of_one_rank_are_others(tmp_path):
    words = ("--eval.every", "5", "--eval.micro", "2", "--duration", "5")
    task = "zoo_silent_sums.UnevenRetrieval"
    found = []
    for ranks, function in ((1, fresh), (2, fresh), (2, Without("metrics of all ranks"))):
        place = tmp_path / str(len(found))
        config = "single" if ranks == 1 else "ddp"
        at: dict[str, Any] = {"ranks": ranks, "config": config, "function": function}
        trained_plainly(place, task, *words, **at).ok()
        found.append([line["eval/mrr"] for line in metrics(place) if "eval/mrr" in line])
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[2] != pytest.approx(found[0], rel=1e-6)


@pytest.mark.slow
def test_a_resume_with_the_buffers_of_rank_0_trains_other_weights(tmp_path):
    task = "silent_values.Carried"
    words = ("--task.state", "LSTM", "--batch.micro", "4")
    words = ("--duration", "6", "--save.every", "1", "--save.keep", "99", *words)
    at: dict[str, Any] = {"ranks": 2, "config": "ddp"}
    at["function"] = Without("buffers of each rank")
    trained_plainly(tmp_path / "alone", task, *words, **at).ok()
    shutil.copytree(tmp_path / "alone", tmp_path / "resumed")
    back_to(tmp_path / "resumed" / "run", 3)
    trained_plainly(tmp_path / "resumed", task, *words, **at).ok()
    assert differing(final(tmp_path / "alone"), final(tmp_path / "resumed"))


# --- gradients are reduced and accumulated in float32 under FSDP2 and bf16
# --------------------------------------------


def bf16_gradients(ids: list[int], ranks: int, accumulate: int) -> dict[str, Any]:
    """Return the expected gradients of one FSDP2 step: each micro-batch in bf16, their sum in
    float32."""
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


@pytest.mark.parametrize("reduce_in", with_slow(["float32", "bfloat16"], ["bfloat16"]))
def test_fsdp2_reduces_in_float32(tmp_path, reduce_in):
    function = train
    if reduce_in != "float32":
        function = Broken("reduced in bf16")
    extra = (
        "--optimizer.clip",
        "0",
        "--schedule.name",
        "constant",
        "--schedule.warmup",
        "0",
        "--optimizer.momentum",
        "0",
        "--optimizer.weight_decay",
        "0",
        "--optimizer.lr",
        "1",
    )
    weights, _, ids = trained(
        tmp_path / "a",
        ranks=2,
        accumulate=2,
        strategy="fsdp2",
        steps=1,
        optimizer="sgd",
        function=InBf16(function),
        extra=extra,
    )
    from oneloop.basics.seeds import key
    from tiny import Ragged

    torch.manual_seed(key(0))
    start = Ragged().model().state_dict()
    moved = {name: start[name] - weights[name] for name in start}
    reference = run(bf16_gradients, ids[0], 2, 2).ok()[0]  # in a process set up like the run's
    apart = distance(moved, {name: torch.tensor(value) for name, value in reference.items()})
    if reduce_in == "float32":
        assert apart < 1e-5
    else:
        assert apart > 1e-4


class InBf16:
    """Run the function with ``mixed_precision: bf16``."""

    def __init__(self, function) -> None:
        self.function = function

    def __call__(self, argv: list[str]) -> None:
        import os

        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
        self.function(argv)
