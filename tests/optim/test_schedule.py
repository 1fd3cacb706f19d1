"""Learning rates follow their formulas, and fall like torch's when a metric stops improving."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
import transformers
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
        best.update(loss, step)
        count.evaluated(best.since, patience=rate.patience)
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
    return [lr for lr, _ in of_loop(make, optimizer, steps)]


def of_loop(make, optimizer, steps: int) -> list[tuple[float, float]]:
    """Return rate and momentum of each step of a plain loop of torch."""
    scheduler = make(optimizer)
    found = []
    for step in range(steps):
        group = optimizer.param_groups[0]
        momentum = group["betas"][0] if "betas" in group else group["momentum"]
        found.append((group["lr"], momentum))
        optimizer.step()
        if step < steps - 1:
            scheduler.step()
    return found


def ours(factor, total=100, **how) -> list[float]:
    how = {"warmup": Duration(0), "scale": SCALE} | how
    rate = learning_rate(factor, 2.0, total=total, **how)
    return [rate(step) for step in range(total)]


TORCH = {
    "OneCycleLR": (lr_scheduler.OneCycleLR, {}, {"max_lr": 2.0, "total_steps": 200}),
    "three phases": (
        lr_scheduler.OneCycleLR,
        {"three_phase": True, "anneal_strategy": "linear", "div_factor": 10.0, "pct_start": 0.4},
        {"max_lr": 2.0, "total_steps": 200},
    ),
    "CyclicLR": (
        lr_scheduler.CyclicLR,
        {"base_lr": 0.1, "step_size_up": Duration("2ep")},
        {"base_lr": 0.1, "max_lr": 2.0, "step_size_up": 20},
    ),
    "StepLR": (lr_scheduler.StepLR, {"step_size": Duration("3ep")}, {"step_size": 30}),
    "MultiStepLR": (
        lr_scheduler.MultiStepLR,
        {"milestones": [Duration("2ep"), Duration("50%")], "gamma": 0.3},
        {"milestones": [20, 100], "gamma": 0.3},
    ),
    "ExponentialLR": (lr_scheduler.ExponentialLR, {"gamma": 0.97}, {"gamma": 0.97}),
    "CosineAnnealingLR": (lr_scheduler.CosineAnnealingLR, {"eta_min": 0.1}, {"T_max": 200}),
    "CosineAnnealingWarmRestarts": (
        lr_scheduler.CosineAnnealingWarmRestarts,
        {"T_0": Duration("2ep"), "T_mult": 2},
        {"T_0": 20, "T_mult": 2},
    ),
    "PolynomialLR": (lr_scheduler.PolynomialLR, {"total_iters": 5}, {"total_iters": 200}),
    "polynomial": (
        "get_polynomial_decay_schedule_with_warmup",
        {"num_warmup_steps": Duration("5%"), "power": 2.0},
        {"num_warmup_steps": 10, "num_training_steps": 200, "power": 2.0},
    ),
    "wsd": (
        "get_wsd_schedule",
        {"num_warmup_steps": 10, "num_decay_steps": 20, "num_stable_steps": 100},
        {"num_warmup_steps": 10, "num_decay_steps": 20, "num_stable_steps": 100},
    ),
}


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_schedulers_of_torch_have_its_bits(name, kind):
    """Rate and momentum of 200 steps, of a run and after a resume, a rewind and a skipped step."""
    factor, options, theirs = TORCH[name]
    if isinstance(factor, str):
        factor = getattr(transformers, factor)
    theirs = options | theirs
    momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind([nn.Parameter(torch.zeros(1))], lr=2.0, **momentum)
    reference = of_loop(lambda o: factor(o, **theirs), optimizer, 200)

    def rate():
        return learning_rate(factor, 2.0, options=options, scale=SCALE, total=200)

    def at(rate, step):
        return rate(step), rate.momentum(step) or 0.9

    alone = rate()
    assert [at(alone, step) for step in range(200)] == reference
    resumed = rate()
    assert [at(resumed, step) for step in range(90, 200)] == reference[90:]
    assert [at(resumed, step) for step in (60, 61, 61, 62, 0)] == [
        reference[step] for step in (60, 61, 61, 62, 0)
    ]
    cycles = factor in (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR)
    assert alone.scheduled == (("lr", "momentum", "betas") if cycles else ("lr",))


def test_groups_keep_their_factors_under_a_scheduler_of_torch():
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr_factor": f} for f in (1.0, 0.1)]
    optimizer = sgd(groups, lr=2.0)
    rate = learning_rate(lr_scheduler.OneCycleLR, 2.0, scale=SCALE, total=100)
    set_lr(optimizer, rate(20), rate.momentum(20))
    assert [group["lr"] for group in optimizer.param_groups] == [rate(20), 0.1 * rate(20)]
    assert {group["momentum"] for group in optimizer.param_groups} == {rate.momentum(20)}


def test_a_warm_up_stands_before_a_scheduler_of_torch():
    rates = ours(lr_scheduler.CosineAnnealingLR, warmup=Duration(10))
    assert rates[:10] == ours(schedule.constant, warmup=Duration(10))[:10]
    assert rates[10:] == of_torch(lambda o: lr_scheduler.CosineAnnealingLR(o, 90), 90)


def test_a_scheduler_of_torch_keeps_its_last_rate():
    rate = learning_rate(lr_scheduler.OneCycleLR, 2.0, length=Duration(50), scale=SCALE, total=100)
    last = of_torch(lambda o: lr_scheduler.OneCycleLR(o, 2.0, 50), 50)[-1]
    assert rate(49) == rate(50) == rate(99) == rate(5000) == last
    rates = ours(lr_scheduler.CosineAnnealingLR, length=Duration(50))
    assert set(rates[50:]) == {0.0}


def test_durations_of_a_scheduler_are_rounded_up():
    # An epoch has 10.4 steps.
    rate = learning_rate(
        lr_scheduler.MultiStepLR,
        2.0,
        options={"milestones": [Duration("1ep"), Duration("5ep")]},
        scale=Scale(batch=10, epoch=104),
        total=100,
    )
    assert rate(10) == 2.0 and rate(11) == pytest.approx(0.2)


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
    with pytest.raises(ValueError, match="decay 60 is 60 steps, and schedule.length 50 has 50"):
        ours(schedule.wsd, length=Duration(50), options={"decay": Duration(60)})


@pytest.mark.parametrize(
    ("factor", "how", "words"),
    [
        (
            lr_scheduler.StepLR,
            {},
            "StepLR cannot be used: .* missing .*'step_size'",
        ),
        (
            lr_scheduler.StepLR,
            {"options": {"step_size": 3, "size": 3}},
            "got an unexpected keyword argument 'size'; its arguments are keys",
        ),
        (lr_scheduler.CyclicLR, {}, "missing .*'base_lr'"),
        (
            lr_scheduler.OneCycleLR,
            {"options": {"pct_start": 1.5}},
            "OneCycleLR cannot be used: Expected float between 0 and 1 pct_start, but got 1.5",
        ),
        (
            lr_scheduler.OneCycleLR,
            {"options": {"max_lr": [0.1, 0.2]}},
            "OneCycleLR cannot be used: max_lr must have the same length as optimizer.param_groups",
        ),
        (
            lr_scheduler.OneCycleLR,
            {"warmup": Duration(3)},
            "schedule.warmup 3 has no effect with OneCycleLR, which begins at 0.08",
        ),
        (
            transformers.get_linear_schedule_with_warmup,
            {"warmup": Duration(3), "options": {"num_warmup_steps": 5}},
            "schedule.warmup 3 has no effect",
        ),
        (lr_scheduler.StepLR, {"final": 0.1}, "schedule.final 0.1 has no effect"),
        (lr_scheduler.ReduceLROnPlateau, {}, "use schedule.name plateau"),
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
        rate = learning_rate(lr_scheduler.OneCycleLR, 0.1, scale=SCALE, total=30)
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


TORCH_PATH = "torch.optim.lr_scheduler"
ONECYCLE = [
    "r.yaml",
    *("--batch.size", "8", "--duration", "200", "--log.every", "1", "--track", "none"),
    *("--optimizer.lr", "0.05", "--machine.workers", "0", "--eval.every", "0"),
    *("--schedule.name", f"{TORCH_PATH}.OneCycleLR", "--optimizer.clip", "0"),
]


def rates_and_weights(folder, name):
    from safetensors.torch import load_file

    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    rates = [json.loads(line)["train/lr"] for line in lines if "train/lr" in line]
    return rates, load_file(folder / name / "final/model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "make"),
    [
        ((), lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=200)),
        (
            (
                *("--schedule.name", "transformers.get_polynomial_decay_schedule_with_warmup"),
                *("--schedule.num_warmup_steps", "10%"),
            ),
            lambda o: transformers.get_polynomial_decay_schedule_with_warmup(o, 20, 200),
        ),
    ],
)
def test_a_run_is_the_same_through_a_resume_on_another_layout(tmp_path, words, make):
    (tmp_path / "r.yaml").write_text("task: tiny.Ragged\n")
    words = [*ONECYCLE, *words, "--batch.grain", "4"]
    run(train, [*words, "--run.dir", "a"], folder=tmp_path).ok()
    saves = ["--run.dir", "b", "--save.every", "90", "--save.keep", "9"]
    run(train, [*words, *saves], folder=tmp_path).ok()
    for late in ("final", "summary.json", "checkpoints/step-00000180", "checkpoints/step-00000200"):
        path = tmp_path / "b" / late
        path.unlink() if path.is_file() else shutil.rmtree(path)
    again = run(train, [*words, *saves], ranks=2, config="fsdp2", folder=tmp_path)
    again.ok()
    assert "resuming from" in again.output and "step-00000090" in again.output

    # The rates are torch's, bit for bit, and the weights do not depend on the resume.
    rates, weights = rates_and_weights(tmp_path, "a")
    rates_again, weights_again = rates_and_weights(tmp_path, "b")
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.05)
    assert rates == rates_again == of_torch(make, 200, optimizer=optimizer)
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)


KEYWORDS = """
import torch

def kw(params, lr, **others):
    return torch.optim.Adam(params, lr=lr, **others)

def none(params, lr, betas: tuple[float, float] | None = None):
    return torch.optim.Adam(params, lr=lr)
"""


def test_a_changed_momentum_takes_an_optimizer_whose_arguments_are_not_known(tmp_path):
    (tmp_path / "kw.py").write_text(KEYWORDS)
    (tmp_path / "r.yaml").write_text("task: tiny.Ragged\n")
    words = [*ONECYCLE, "--optimizer.name", "kw.py:kw", "--duration", "12", "--run.dir", "a"]
    run(train, [*words, "--optimizer.betas", "[0.95,0.99]"], folder=tmp_path).ok()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optimizer.name", "torch.optim.Adagrad"], "Adagrad has none"),
        (["--optimizer.name", "sgd", "--optimizer.momentum", "0"], "sgd has none"),
        (["--optimizer.name", "torch.optim.SGD"], "torch.optim.SGD has none"),
        (["--optimizer.name", "kw.py:none"], "kw.py:none has none"),
        (["--schedule.warmup", "3"], "schedule.warmup 3 has no effect"),
        (["--schedule.final", "0.1"], "schedule.final 0.1 has no effect"),
        (
            ["--schedule.name", f"{TORCH_PATH}.StepLR"],
            "'step_size'; its arguments are keys (schedule.NAME)",
        ),
    ],
)
def test_what_a_schedule_of_torch_would_ignore_is_rejected(tmp_path, words, message):
    (tmp_path / "kw.py").write_text(KEYWORDS)
    (tmp_path / "r.yaml").write_text("task: tiny.Ragged\n")
    world = run(train, [*ONECYCLE, *words, "--run.dir", "a"], folder=tmp_path)
    assert world.codes == [2] and message in world.output
    assert not (tmp_path / "a").exists()
