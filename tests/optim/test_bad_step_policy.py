"""Promise R10: a bad step changes nothing. The rest is bit-identical to a run without it, on all
ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from oneloop.checkpoint.store import Store
from oneloop.data.order import Order
from oneloop.optim.bad_step_guard import Guard
from oneloop.optim.bad_step_policy import BadSteps, Fault
from slow_cases import with_slow
from worlds import run, timeless, train

pytestmark = pytest.mark.covers(
    "oneloop.checkpoint.store",
    "oneloop.launch.processes",
    "oneloop.loop.steps",
    "oneloop.loop.upkeep",
    "oneloop.measure.profiling",
    "oneloop.optim.bad_step_guard",
    "oneloop.optim.bad_step_policy",
    "oneloop.run.entry",
    "oneloop.run.end",
)

BATCH, STEPS, SAVE = 8, 24, 5
RMSPROP = ("--optimizer.name", "torch.optim.RMSprop")
RECIPE = f"""
task: {{name: tiny.Ragged}}
batch: {{size: {BATCH}, micro: 2}}
duration: {STEPS}
log: {{every: 4}}
eval: {{every: 8}}
save: {{every: {SAVE}, best: false}}
ema: {{half_life: 30 samples}}
schedule: {{name: cosine, warmup: 3}}
track: []
"""


@pytest.fixture
def recipe(tmp_path) -> str:
    (tmp_path / "tiny_run.yaml").write_text(RECIPE)
    return str(tmp_path / "tiny_run.yaml")


def simulated(bad: int, policy: str) -> tuple[list[int], list[int]]:
    """Return what the policy must do with a bad sample: start positions of accepted steps, numbers
    of bad steps."""
    taken: list[int] = []
    numbers: list[int] = []
    position = 0
    order = Order(37, seed=0)
    while len(taken) < STEPS:
        if bad in order[position : position + BATCH][1]:
            numbers.append(len(taken) + 1)
            if policy == "rewind":
                del taken[len(taken) // SAVE * SAVE :]  # rewind to the checkpoint
        else:
            taken.append(position)
        position += BATCH
    return taken, numbers


def windows(bad: int, policy: str) -> list[int]:
    return simulated(bad, policy)[0]


class Without:
    """Train only on these positions, in order: the reference run, which never sees the bad
    steps."""

    def __init__(self, taken: list[int]) -> None:
        self.taken = taken

    def __call__(self, argv: list[str]) -> None:
        ordinary, taken = Order.at, np.array([*self.taken, *[0] * 4096])
        Order.at = lambda order, positions: ordinary(
            order, taken[positions // BATCH] + positions % BATCH
        )
        train(argv)


def left(folder: Path) -> tuple[dict[str, bytes], list[dict], list[dict]]:
    """Read weights, EMA weights and optimizer state from disk; metrics without times; events."""
    files = {path.name: path.read_bytes() for path in (folder / "final").glob("*.safetensors")}
    files |= {
        path.name: path.read_bytes()
        for path in Store(folder / "checkpoints").sealed()[-1].glob("*.safetensors")
    }
    lines = [
        timeless(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    events = [line for line in lines if line.get("event") in ("skip", "rewind", "stop")]
    return files, [line for line in lines if "event" not in line], events


@pytest.mark.parametrize(
    ("policy", "ranks", "config", "more"),
    [
        pytest.param("skip", 1, "single", (), id="skip-1-single-more0", marks=pytest.mark.slow),
        pytest.param("skip", 2, "ddp", (), id="skip-2-ddp-more1"),
        pytest.param("skip", 2, "fsdp2", (), id="skip-2-fsdp2-more2", marks=pytest.mark.slow),
        pytest.param(
            "skip", 1, "single", RMSPROP, id="skip-1-single-more3", marks=pytest.mark.slow
        ),
        pytest.param("rewind", 1, "single", (), id="rewind-1-single-more0", marks=pytest.mark.slow),
        pytest.param("rewind", 2, "ddp", (), id="rewind-2-ddp-more1", marks=pytest.mark.slow),
        pytest.param("rewind", 2, "fsdp2", (), id="rewind-2-fsdp2-more2", marks=pytest.mark.slow),
        pytest.param("rewind", 1, "single", RMSPROP, id="rewind-1-single-more3"),
    ],
)
def test_a_bad_step_might_as_well_not_have_been(tmp_path, recipe, ranks, config, more, policy):
    words = [recipe, *more, "--guard.nonfinite", policy]
    # an infinite loss with a finite gradient, or a NaN loss
    kind = "--task.infinite" if more else "--task.spoiled"
    world = run(
        train, [*words, kind, "5", "--run.dir", "bad"], ranks=ranks, config=config, folder=tmp_path
    )
    world.ok()
    taken = windows(5, policy)
    run(
        Without(taken), [*words, "--run.dir", "good"], ranks=ranks, config=config, folder=tmp_path
    ).ok()
    (files, metrics, events), (expected, expected_metrics, none) = (
        left(tmp_path / "bad"),
        left(tmp_path / "good"),
    )
    assert files == expected and metrics == expected_metrics and not none
    assert len(events) >= 3 and all(
        event["event"] == policy and 5 in event["ids"] for event in events
    )
    assert all(len(event["ids"]) == BATCH and "not finite" in event["why"] for event in events)
    summary = json.loads((tmp_path / "bad" / "summary.json").read_text())
    assert (
        summary["step"] == STEPS and summary["passed_over"] == taken[-1] + BATCH - STEPS * BATCH > 0
    )


def _in_a_short_window(words: list[str]) -> None:
    """Train, and compare each step with the four before it, not with a hundred."""
    from oneloop.optim import bad_step_guard

    bad_step_guard.WINDOW = 4
    train(words)


@pytest.mark.slow
@pytest.mark.parametrize(
    "bad",
    [
        ("--guard.nonfinite", "skip", "--task.spoiled", "5"),
        ("--guard.sigma", "100", "--task.loud", "5"),
    ],
)
def test_a_killed_run_skips_the_same_steps_again(tmp_path, recipe, bad):
    from worlds import back_to

    words = [recipe, *bad, "--save.keep", "9", "--run.dir", "a"]
    run(_in_a_short_window, words, folder=tmp_path).ok()
    first = left(tmp_path / "a")
    assert len(first[2]) >= 3
    back_to(tmp_path / "a", 5)
    run(_in_a_short_window, words, folder=tmp_path).ok()
    assert left(tmp_path / "a") == first


def test_a_run_that_began_in_another_folder_can_go_back(tmp_path, recipe):
    run(
        train,
        [recipe, "--duration", "5", "--schedule.name", "constant", "--run.dir", "first"],
        folder=tmp_path,
    ).ok()
    start = str(Store(tmp_path / "first" / "checkpoints").sealed()[-1])
    words = [
        recipe,
        "--schedule.name",
        "constant",
        "--guard.nonfinite",
        "rewind",
        "--task.spoiled",
        "9",
        "--save.every",
        "0",
    ]
    world = run(train, [*words, "--run.resume", start, "--run.dir", "second"], folder=tmp_path)
    # Every epoch contains the bad sample, and nothing is saved in between: the run rewinds until it
    # gives up.
    assert world.codes == [3] and [event["event"] for event in left(tmp_path / "second")[2]] == [
        "rewind"
    ] * 10 + ["stop"]


def test_an_evaluation_that_a_rewind_undid_is_made_again(tmp_path, recipe):
    words = [recipe, "--guard.nonfinite", "rewind", "--run.dir", "a"]
    # at step 8, saved without the evaluation
    assert run(_stopped_in_evaluation, words, folder=tmp_path).codes == [75]
    bad = int(Order(37, seed=0)[8 * BATCH : 9 * BATCH][1][0])
    more = ["--task.spoiled", str(bad), "--run.accept_changes", "true", "--duration", "10"]
    run(train, [*words, *more], folder=tmp_path).ok()
    _, metrics, events = left(tmp_path / "a")
    assert [event["step"] for event in events] == [9]
    assert [
        line["step"] for line in metrics if "eval/loss" in line and line["weights"] == "raw"
    ] == [8, 10]


def _stopped_in_evaluation(words: list[str]) -> None:
    """Train until the first evaluation, where a stop is requested."""
    from oneloop.launch.processes import Run

    Run.stop_wanted = lambda self: True
    train(words)


@pytest.mark.parametrize(
    ("step", "policy"),
    [
        (1, "skip"),
        pytest.param(STEPS, "rewind", marks=pytest.mark.slow),
        pytest.param(1, "rewind", marks=pytest.mark.slow),
        pytest.param(STEPS, "skip", marks=pytest.mark.slow),
    ],
)
def test_the_first_or_the_last_step_is_bad(tmp_path, recipe, step, policy):
    bad = next(bad for bad in range(37) if step in simulated(bad, policy)[1])
    words = [recipe, "--guard.nonfinite", policy]
    run(train, [*words, "--task.spoiled", str(bad), "--run.dir", "bad"], folder=tmp_path).ok()
    run(Without(windows(bad, policy)), [*words, "--run.dir", "good"], folder=tmp_path).ok()
    (files, metrics, events), (expected, expected_metrics, none) = (
        left(tmp_path / "bad"),
        left(tmp_path / "good"),
    )
    assert files == expected and metrics == expected_metrics and not none
    assert step in [event["step"] for event in events]


class StoppedAt:
    """Train, and request a stop at these steps, counted from 1, bad steps included."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def __call__(self, words: list[str]) -> None:
        from oneloop.loop.steps import StepBatches

        agreed = StepBatches.__iter__

        def stopping(own: StepBatches):
            for number, group in enumerate(agreed(own), start=1):
                group.stop = number in self.steps
                yield group

        StepBatches.__iter__ = stopping
        train(words)


@pytest.mark.parametrize(
    ("policy", "stops", "step"),
    [("skip", (3,), 2), pytest.param("rewind", (4, 5), 3, marks=pytest.mark.slow)],
)
def test_a_stop_at_a_bad_step_saves_what_is_good(tmp_path, recipe, policy, stops, step):
    """A stop at a skipped step saves the steps before it. After a rewind, it takes effect at the
    next step."""
    bad = int(Order(37, seed=0)[(stops[0] - 1) * BATCH : stops[0] * BATCH][1][0])
    words = [recipe, "--guard.nonfinite", policy, "--task.spoiled", str(bad), "--save.every", "2"]
    words += ["--duration", "10"]
    run(train, [*words, "--run.dir", "alone"], folder=tmp_path).ok()
    world = run(StoppedAt(*stops), [*words, "--run.dir", "a"], folder=tmp_path)
    ended = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert world.codes == [75] and ended["step"] == step, world.output
    assert [event["event"] for event in left(tmp_path / "a")[2]] == [policy]
    run(train, [*words, "--run.dir", "a"], folder=tmp_path).ok()
    (files, metrics, events), alone = left(tmp_path / "a"), left(tmp_path / "alone")
    assert files == alone[0] and metrics == alone[1] and events == alone[2]


def test_a_skipped_step_does_not_end_a_run_that_stops_early(tmp_path, recipe):
    # in step 4, when the second evaluation is due
    bad = int(Order(37, seed=0)[3 * BATCH : 4 * BATCH][1][0])
    words = [recipe, "--guard.nonfinite", "skip", "--task.spoiled", str(bad), "--optimizer.lr", "0"]
    run(
        train,
        [*words, "--eval.every", "2", "--stop.patience", "1", "--run.dir", "a"],
        folder=tmp_path,
    ).ok()
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert (
        summary["step"] == 4
        and summary["passed_over"] == BATCH
        and "early stop" in summary["exit_reason"]
    )
    evaluations = [
        line["step"]
        for line in left(tmp_path / "a")[1]
        if "eval/loss" in line and line["weights"] == "raw"
    ]
    assert evaluations == [2, 4]


@pytest.mark.parametrize("policy", ["skip", "rewind"])
def test_after_so_many_in_a_row_it_stops(tmp_path, recipe, policy):
    words = [
        recipe,
        "--debug.overfit",
        "8",
        "--task.spoiled",
        "5",
        "--guard.nonfinite",
        policy,
        "--guard.patience",
        "2",
    ]
    world = run(train, words, folder=tmp_path)
    assert world.codes == [3]
    folder = tmp_path / "runs" / "tiny_run"
    assert (
        "3 bad steps in a row" in json.loads((folder / "summary.json").read_text())["exit_reason"]
    )
    events = [
        json.loads(line)["event"]
        for line in (folder / "metrics.jsonl").read_text().splitlines()
        if "event" in line
    ]
    assert [event for event in events if event != "save"] == [policy, policy, "stop"]


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (1, "single"),
        pytest.param(2, "ddp", marks=pytest.mark.slow),
        pytest.param(2, "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_a_spike_is_left_out(tmp_path, recipe, ranks, config):
    words = [recipe, "--task.loud", "5", "--guard.sigma", "100", "--run.dir", "a"]
    run(_in_a_short_window, words, ranks=ranks, config=config, folder=tmp_path).ok()
    _, _, events = left(tmp_path / "a")
    assert [event["event"] for event in events] == ["skip"] * len(events) and len(events) >= 4
    assert all(5 in event["ids"] and "guard.sigma deviations" in event["why"] for event in events)
    # the first spike comes when the window has just filled
    assert windows(5, "skip")[4] == 5 * BATCH == 40


def test_a_rewind_under_loss_scaling_undoes_what_was_unscaled(tmp_path, recipe):
    """A pending step is found bad after the next backward, whose gradients must be dropped before
    unscaling."""
    words = [recipe, "--task.spoiled", "5", "--guard.nonfinite", "rewind"]
    run(_with_a_scaler, [*words, "--run.dir", "scaled"], folder=tmp_path).ok()
    run(train, [*words, "--run.dir", "plain"], folder=tmp_path).ok()
    (_, scaled, events), (_, plain, expected) = left(tmp_path / "scaled"), left(tmp_path / "plain")
    assert [event["step"] for event in events] == [event["step"] for event in expected] and len(
        events
    ) >= 3
    assert [line["step"] for line in scaled] == [line["step"] for line in plain]
    losses = [
        [line["train/loss"] for line in lines if "train/loss" in line] for lines in (scaled, plain)
    ]
    assert np.allclose(*losses, rtol=1e-5)


def _with_a_scaler(words: list[str]) -> None:
    """Train in float32 with loss scaling: accelerate has no scaler on a CPU, but torch has."""
    from oneloop.run import entry

    start = entry.start

    def scaling(**options):
        run = start(**options)
        # below this scale, a gradient that is not finite makes a step bad
        run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-10)
        return run

    entry.start = scaling
    train(words)


@pytest.mark.parametrize("policy", with_slow(["stop", "skip", "rewind"], ["stop", "rewind"]))
def test_a_weightless_batch_is_named_by_its_step(tmp_path, recipe, policy):
    step = Order(37, seed=0)[0:37][1].tolist().index(5) + 1
    words = [
        recipe,
        "--task.weightless",
        "5",
        "--batch.size",
        "1",
        "--batch.micro",
        "1",
        "--guard.nonfinite",
        policy,
    ]
    world = run(train, [*words, "--duration", "40"], folder=tmp_path)
    assert (
        world.codes == [1]
        and f"step {step}: the total weight of the global batch is 0" in world.output
    )


@pytest.mark.parametrize("policy", with_slow(["stop", "skip", "rewind"], ["stop", "skip"]))
def test_the_profiler_is_reported_the_steps_own_number(tmp_path, recipe, policy):
    words = [recipe, "--guard.nonfinite", policy, "--duration", "12", "--save.every", "5"]
    assert run(_numbers, words, folder=tmp_path).ok() == [list(range(1, 13))]


def _numbers(words: list[str]) -> list[int]:
    """Return the step numbers that the profiler received during a run."""
    from oneloop.measure.profiling import Profiling

    numbers, step = [], Profiling.advance
    Profiling.advance = lambda self, number: (numbers.append(number), step(self, number))
    with pytest.raises(SystemExit):
        train(words)
    return numbers


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("scaled", [False, True])
def test_what_is_not_finite_is_no_spike(bad, scaled, monkeypatch):
    monkeypatch.setattr("oneloop.optim.bad_step_guard.WINDOW", 3)
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
    guard = Guard(
        optimizer,
        device=torch.device("cpu"),
        scaler=scaler,
        sigma=6,
    )
    for loss in (1.0, 1.1, 0.9, bad, 1.0, 50.0):
        value = net(torch.ones(1, 2)).sum() * loss
        (scaler.scale(value) if scaler else value).backward()
        guard.unscale()
        norm = (
            torch.tensor(loss)
            if not scaled
            else torch.stack([p.grad.norm() for p in net.parameters()]).norm()
        )
        guard.step(norm, loss=torch.tensor(loss))
        fault = guard.resolve().fault
        optimizer.zero_grad()
        if not np.isfinite(loss):
            assert fault is (Fault.RESCALED if scaled else Fault.NONFINITE)
        else:
            assert fault is (Fault.SPIKE if loss == 50.0 else Fault.NONE)


def test_the_window_is_mean_and_deviation_of_what_was_taken(monkeypatch):
    monkeypatch.setattr("oneloop.optim.bad_step_guard.WINDOW", 4)

    def fault_of(guard: Guard, value: float) -> Fault:
        guard.step(torch.tensor(value))
        return guard.resolve().fault

    def make() -> Guard:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        return Guard(optimizer, device=torch.device("cpu"), sigma=3.0)

    guard = make()
    values = [1.0, 2.0, 3.0, 2.0]
    assert [fault_of(guard, value) for value in values] == [Fault.NONE] * 4
    bound = np.mean(values) + 3 * np.std(values, ddof=1)
    # is not added to the window
    assert fault_of(guard, bound + 0.01) is Fault.SPIKE
    # is added in place of the oldest
    assert fault_of(guard, bound - 0.01) is Fault.NONE
    again = make()
    again.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    window = [bound - 0.01, 2.0, 3.0, 2.0]
    for one in (guard, again):
        limit = np.float32(np.mean(window) + 3 * np.std(window, ddof=1))
        assert fault_of(one, limit + 0.01) is Fault.SPIKE


def test_what_ends_a_row():
    mixed = BadSteps("rewind", 2)
    for _ in range(9):  # spikes far apart, under a policy that rewinds for non-finite losses
        assert mixed.answer(Fault.SPIKE)[0] == "skip"
        mixed.accepted()
    skipping, rewinding = BadSteps("skip", 2), BadSteps("rewind", 2)
    for bad in (skipping, rewinding):
        assert [bad.answer(Fault.NONFINITE)[0] for _ in range(2)] == [bad.nonfinite] * 2
        bad.accepted()
    assert (
        skipping.answer(Fault.NONFINITE)[0] == "skip"
        and rewinding.answer(Fault.NONFINITE)[0] == "stop"
    )
    rewinding.saved()
    assert rewinding.answer(Fault.NONFINITE)[0] == "rewind"
