"""Learning rates follow their formulas, and fall like torch's when a metric stops improving."""

from __future__ import annotations

import json
import math
import shutil
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from oneloop.basics.duration import Duration, Scale
from oneloop.loop.counters import Best, Counters
from oneloop.optim import schedule
from oneloop.optim.optimizers import adamw, muon, set_lr, sgd
from oneloop.optim.schedule import learning_rate
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.job.learning_rate",
    "oneloop.loop.counters",
    "oneloop.optim.schedule",
)

SCALE = Scale(batch=10, epoch=100)


def rates(factor, total=100, warmup="10", final=0.0, **options):
    rate = learning_rate(
        factor, 2.0, warmup=Duration(warmup), final=final, options=options, scale=SCALE, total=total
    )
    return [rate(step) for step in range(total)]


def test_warm_up_rises_in_a_straight_line():
    assert rates(schedule.constant)[:10] == pytest.approx([0.2 * n for n in range(1, 11)])
    assert set(rates(schedule.constant)[10:]) == {2.0}
    assert rates(schedule.constant, warmup="2ep")[:20] == pytest.approx(
        [0.1 * n for n in range(1, 21)]
    )


def test_schedules_follow_their_formulas():
    assert rates(schedule.linear, final=0.1)[55] == pytest.approx(2 * (1 - 0.9 * 45 / 90))
    assert rates(schedule.cosine)[55] == pytest.approx(1 + math.cos(math.pi * 45 / 90))
    stable = rates(schedule.wsd, decay=Duration("20%"), final=0.5)
    assert stable[10:80] == [2.0] * 70
    assert stable[90] == pytest.approx(2 * (1 - 0.5 * 10 / 20))


def test_a_function_of_ones_own():
    assert rates(lambda step, total: step / total, warmup="0")[25] == 0.5
    with pytest.raises(ValueError, match="warmup 200 is 200 steps"):
        rates(schedule.constant, warmup="200")


def test_plateau_steps_down_like_torchs():
    rate = learning_rate(
        schedule.plateau,
        1.0,
        warmup=Duration(0),
        final=0.0,
        options={"factor": 0.5, "patience": 2},
        scale=SCALE,
        total=100,
    )
    parameter = nn.Parameter(torch.zeros(1))
    theirs = torch.optim.SGD([parameter], lr=1.0)
    reference = torch.optim.lr_scheduler.ReduceLROnPlateau(
        theirs, factor=0.5, patience=1, threshold=0.0
    )
    count, best = Counters(), Best()
    for step, loss in enumerate([5.0, 4.0, 4.5, 4.4, 4.3, 4.2, 3.0, 3.1, 3.2, 3.3, 3.4]):
        count.evaluated(best.update(loss, step), patience=rate.patience)
        reference.step(loss)
        assert rate(step, reductions=count.reductions) == pytest.approx(
            theirs.param_groups[0]["lr"]
        )


def test_best_never_takes_nan():
    best = Best(upward=True)
    assert best.update(1.0, 1)
    assert not best.update(math.nan, 2)
    assert not best.update(0.5, 3)
    assert (best.value, best.step, best.since) == (1.0, 1, 2)


def close(ours: list[float], theirs: list[float]) -> bool:
    return len(ours) == len(theirs) and ours == pytest.approx(theirs, rel=1e-12, abs=1e-15)


def of_torch(make, steps: int = 100, peak: float = 2.0, optimizer=None) -> list[float]:
    """Return the rates of a scheduler of torch or transformers at each step."""
    optimizer = optimizer or torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = make(optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # onecycle warns of a step after its end
            scheduler.step() if len(found) < steps else None
    return found


def ours(factor, total=100, **how) -> list[float]:
    how = {"warmup": Duration(0), "scale": SCALE} | how
    rate = learning_rate(factor, 2.0, total=total, **how)
    return [rate(step) for step in range(total)]


def test_step_and_exponential_are_those_of_torch():
    options = {"every": Duration(30), "factor": 0.5}
    theirs = of_torch(lambda o: lr_scheduler.StepLR(o, 30, gamma=0.5))
    assert close(ours(schedule.step, options=options), theirs)
    options = {"milestones": (Duration(20), Duration("50")), "factor": 0.3}
    theirs = of_torch(lambda o: lr_scheduler.MultiStepLR(o, [20, 50], gamma=0.3))
    assert close(ours(schedule.step, options=options), theirs)
    options = {"every": Duration(1), "factor": 0.97}
    theirs = of_torch(lambda o: lr_scheduler.ExponentialLR(o, 0.97))
    assert close(ours(schedule.exponential, options=options), theirs)


def test_an_interval_of_epochs_does_not_drift():
    # An epoch has 10.4 steps; the fifth one ends after 52 steps, not 55.
    options = {"every": Duration("1ep"), "factor": 0.1}
    rates = ours(schedule.step, scale=Scale(batch=10, epoch=104), options=options)
    assert rates[51] == pytest.approx(2e-4) and rates[52] == pytest.approx(2e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"anneal_strategy": "linear", "pct_start": 0.25},
        {"three_phase": True},
        {"three_phase": True, "anneal_strategy": "linear", "div_factor": 10.0, "pct_start": 0.4},
        {"pct_start": 0.0, "final_div_factor": 100.0},
        {"pct_start": 1.0},
    ],
)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_onecycle_is_that_of_torch_with_its_momentum(kind, options):
    momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    theirs = kind([nn.Parameter(torch.zeros(1))], lr=0.1, **momentum)
    scheduler = lr_scheduler.OneCycleLR(theirs, max_lr=2.0, total_steps=100, **options)
    rate = learning_rate(schedule.onecycle, 2.0, scale=SCALE, total=100, options=options)
    for step in range(100):
        group = theirs.param_groups[0]
        assert rate(step) == pytest.approx(group["lr"], abs=1e-12)
        now = group["betas"][0] if "betas" in group else group["momentum"]
        assert rate.momentum(step) == pytest.approx(now, rel=1e-12)
        theirs.step()
        if step < 99:
            scheduler.step()
    if options.get("pct_start") != 1.0:  # which ends at the peak
        assert rate(100) == rate(5000) == pytest.approx(rate(99))


def test_warm_ups_of_transformers_and_nanogpt():
    from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

    warmup = {"warmup": Duration(10), "warmup_start": 0.0}
    theirs = of_torch(lambda o: get_linear_schedule_with_warmup(o, 10, 100))
    assert close(ours(schedule.linear, **warmup), theirs)
    theirs = of_torch(lambda o: get_cosine_schedule_with_warmup(o, 10, 100))
    assert close(ours(schedule.cosine, **warmup), theirs)
    theirs = of_torch(
        lambda o: lr_scheduler.SequentialLR(
            o,
            [
                lr_scheduler.LinearLR(o, 0.1, total_iters=10),
                lr_scheduler.CosineAnnealingLR(o, 90, eta_min=0.2),
            ],
            [10],
        )
    )
    torchs = ours(schedule.cosine, warmup=Duration(10), warmup_start=0.1, final=0.1)
    assert close(torchs, theirs)

    def nanogpt(step: int) -> float:  # its get_lr: warm-up of 10, decay until 80, then the minimum
        if step < 10:
            return 2.0 * (step + 1) / 11
        if step > 80:
            return 0.2
        ratio = (step - 10) / 70
        return 0.2 + 0.5 * (1.0 + math.cos(math.pi * ratio)) * 1.8

    own = ours(
        schedule.cosine,
        warmup=Duration(10),
        warmup_offset=1,
        length=Duration(80),
        final=0.1,
    )
    assert close(own, [nanogpt(step) for step in range(100)])


def test_a_schedule_that_is_longer_than_the_run_is_cut():
    rates = ours(schedule.linear, length=Duration(200))
    assert rates == ours(schedule.linear, total=200)[:100]
    rates = ours(schedule.wsd, length=Duration(50), options={"decay": Duration(10)})
    assert rates[39] == 2.0 and rates[45] == pytest.approx(1.0) and set(rates[50:]) == {0.0}


@pytest.mark.parametrize(
    ("factor", "how", "words"),
    [
        (
            schedule.step,
            {"options": {"factor": 0.0, "every": Duration(3)}},
            "schedule.factor must be above 0",
        ),
        (schedule.step, {}, "needs schedule.every"),
        (
            schedule.step,
            {"options": {"every": Duration(3), "milestones": (Duration(3),)}},
            "set one of them",
        ),
        (
            schedule.step,
            {"options": {"every": Duration(1), "factor": 1e300}},
            "rate of step 99 would be inf",
        ),
        (
            schedule.onecycle,
            {"options": {"cycle_momentum": False, "base_momentum": 0.5}},
            "no effect with schedule.cycle_momentum false",
        ),
        (schedule.onecycle, {"warmup": Duration(3)}, "schedule.warmup 3 has no effect"),
        (schedule.step, {"options": {"every": Duration(0)}}, "schedule.every must be above 0"),
        (
            schedule.onecycle,
            {"options": {"pct_start": 1.5}},
            "pct_start must be from 0 to 1 with schedule.three_phase false",
        ),
        (
            schedule.onecycle,
            {"options": {"pct_start": 0.6, "three_phase": True}},
            "from 0 to 0.5 with schedule.three_phase true",
        ),
        (schedule.onecycle, {"options": {"max_momentum": 1.0}}, "base_momentum <="),
        (schedule.linear, {"length": Duration(0)}, "schedule.length 0 must be at least one step"),
        (schedule.cosine, {"length": Duration(5), "warmup": Duration(6)}, "schedule.length 5 has"),
        (lambda step, total: 1.0, {"final": 0.1}, "schedule.final 0.1 has no effect"),
        (schedule.plateau, {"final": 0.1}, "the schedule plateau takes no argument final"),
        (lambda step, total: math.nan, {}, "rate of step 0 would be nan"),
        (lambda step, total: 1.0 - step, {}, "rate of step 99 would be -196"),
        (lambda step, total: 1 / 0, {}, "failed at step 0: ZeroDivisionError"),
    ],
)
def test_wrong_schedules_are_rejected(factor, how, words):
    with pytest.raises(ValueError, match=words):
        ours(factor, **how)


def test_every_update_reads_the_momentum_of_its_step():
    """The fused update, with cached lists, equals torch's under OneCycleLR."""

    def gradients(parameters, step):
        torch.manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)

    for make, theirs_of in (
        (adamw, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0)),
        (sgd, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    ):
        torch.manual_seed(0)
        own, reference = nn.Linear(5, 3).double(), nn.Linear(5, 3).double()
        reference.load_state_dict(own.state_dict())
        optimizer = make([{"params": list(own.parameters()), "weight_decay": 0.0}], lr=0.1)
        theirs = theirs_of(reference.parameters())
        scheduler = lr_scheduler.OneCycleLR(theirs, max_lr=0.1, total_steps=30)
        rate = learning_rate(schedule.onecycle, 0.1, scale=SCALE, total=30)
        for step in range(30):
            gradients(own.parameters(), step)
            gradients(reference.parameters(), step)
            set_lr(optimizer, rate(step), rate.momentum(step))
            optimizer.step()
            theirs.step()
            if step < 29:
                scheduler.step()
            for a, b in zip(own.parameters(), reference.parameters(), strict=True):
                assert torch.allclose(a, b, rtol=0, atol=1e-12), (make, step)


def test_muon_and_its_adamw_follow_the_momentum():
    model = nn.Linear(5, 3)
    optimizer = muon([{"params": list(model.parameters())}], model=model, lr=0.1, adamw_for=())
    set_lr(optimizer, 0.2, 0.7)
    for group in optimizer.param_groups:
        assert (group["momentum"], group["betas"], group["lr"]) == (0.7, (0.7, 0.95), 0.2)


ONECYCLE = [
    "r.yaml",
    *("--batch.size", "8", "--duration", "12", "--log.every", "1", "--track", "none"),
    *("--optimizer.lr", "0.05", "--machine.workers", "0", "--eval.every", "0"),
    *("--schedule.name", "onecycle", "--optimizer.clip", "0"),
]


def rates_and_weights(folder, name):
    from safetensors.torch import load_file

    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    rates = [json.loads(line)["train/lr"] for line in lines if "train/lr" in line]
    return rates, load_file(folder / name / "final/model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "config"), [(1, "single"), (2, "fsdp2")])
def test_a_run_with_onecycle_is_the_same_through_a_resume(tmp_path, ranks, config):
    (tmp_path / "r.yaml").write_text("task: tiny.Ragged\n")
    layout = {"ranks": ranks, "config": config, "folder": tmp_path}
    run(train, [*ONECYCLE, "--run.dir", "a"], **layout).ok()
    run(
        train, [*ONECYCLE, "--run.dir", "b", "--save.every", "5", "--save.keep", "9"], **layout
    ).ok()
    for late in ("final", "summary.json", "checkpoints/step-00000010", "checkpoints/step-00000012"):
        path = tmp_path / "b" / late
        path.unlink() if path.is_file() else shutil.rmtree(path)
    again = run(train, [*ONECYCLE, "--run.dir", "b", "--save.every", "5"], **layout)
    again.ok()
    assert "resuming from" in again.output and "step-00000005" in again.output

    # The rates are torch's, and the weights do not depend on the resume.
    rates, weights = rates_and_weights(tmp_path, "a")
    rates_again, weights_again = rates_and_weights(tmp_path, "b")
    theirs = of_torch(
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=12),
        12,
        optimizer=torch.optim.AdamW([nn.Parameter(torch.zeros(1))]),
    )
    assert close(rates, theirs) and close(rates_again, theirs)
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)


KEYWORDS = """
import torch

def kw(params, lr, **others):
    return torch.optim.Adam(params, lr=lr, **others)

def none(params, lr, betas: tuple[float, float] | None = None):
    return torch.optim.Adam(params, lr=lr)
"""


def test_onecycle_takes_an_optimizer_whose_arguments_are_not_known(tmp_path):
    (tmp_path / "kw.py").write_text(KEYWORDS)
    (tmp_path / "r.yaml").write_text("task: tiny.Ragged\n")
    words = [*ONECYCLE, "--optimizer.name", "kw.py:kw", "--run.dir", "a"]
    run(train, [*words, "--optimizer.betas", "[0.95,0.99]"], folder=tmp_path).ok()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optimizer.name", "adafactor"], "adafactor has none"),
        (["--optimizer.name", "sgd", "--optimizer.momentum", "0"], "sgd has none"),
        (["--optimizer.name", "torch.optim.SGD"], "torch.optim.SGD has none"),
        (
            ["--optimizer.name", "torch.optim.SGD", "--optimizer.momentum", "0.5"],
            "optimizer.momentum 0.5 has no effect with schedule.name onecycle",
        ),
        (["--optimizer.name", "kw.py:none"], "kw.py:none has none"),
        (["--optimizer.betas", "[0.8,0.99]"], "has no effect with schedule.name onecycle"),
        (["--schedule.warmup", "3"], "schedule.warmup 3 has no effect"),
    ],
)
def test_onecycle_rejects_what_it_would_ignore(tmp_path, words, message):
    (tmp_path / "kw.py").write_text(KEYWORDS)
    (tmp_path / "r.yaml").write_text("task: tiny.Ragged\n")
    world = run(train, [*ONECYCLE, *words, "--run.dir", "a"], folder=tmp_path)
    assert world.codes == [2] and message in world.output
    assert not (tmp_path / "a").exists()
