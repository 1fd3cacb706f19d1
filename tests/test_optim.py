"""Learning rates, clipping, the finite guard and Muon, each alone."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from oneloop.basics.duration import Duration, Scale
from oneloop.optim import schedule
from oneloop.optim.build import adamw, build, muon, set_lr, sgd
from oneloop.optim.clip import clip_, global_norm
from oneloop.optim.guard import Guard
from oneloop.optim.muon import orthogonalized
from oneloop.optim.policy import Fault
from oneloop.optim.schedule import learning_rate
from oneloop.run.counters import Best, Counters

SCALE = Scale(batch=10, epoch=100)


def rates(factor, total=100, warmup="10", final=0.0, **options):
    rate = learning_rate(factor, 2.0, warmup=Duration(warmup), final=final, options=options, scale=SCALE, total=total)
    return [rate(step) for step in range(total)]


def test_warm_up_rises_in_a_straight_line():
    assert rates(schedule.constant)[:10] == pytest.approx([0.2 * n for n in range(1, 11)])
    assert set(rates(schedule.constant)[10:]) == {2.0}
    assert rates(schedule.constant, warmup="2ep")[:20] == pytest.approx([0.1 * n for n in range(1, 21)])


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
    reference = torch.optim.lr_scheduler.ReduceLROnPlateau(theirs, factor=0.5, patience=1, threshold=0.0)
    count, best = Counters(), Best()
    for step, loss in enumerate([5.0, 4.0, 4.5, 4.4, 4.3, 4.2, 3.0, 3.1, 3.2, 3.3, 3.4]):
        count.evaluated(best.update(loss, step, higher_is_better=False), patience=rate.patience)
        reference.step(loss)
        assert rate(step, reductions=count.reductions) == pytest.approx(theirs.param_groups[0]["lr"])


def test_best_never_takes_nan():
    best = Best()
    assert best.update(1.0, 1, higher_is_better=True)
    assert not best.update(math.nan, 2, higher_is_better=True)
    assert not best.update(0.5, 3, higher_is_better=True)
    assert (best.value, best.step, best.since) == (1.0, 1, 2)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))


def gradients(net: nn.Module, scale: float = 1.0) -> None:
    net.zero_grad()
    (net(torch.ones(4, 5)).square().sum() * scale).backward()


def test_clipping_equals_torchs():
    for largest in (0.0, 0.5, 1e6):
        ours, theirs = model(), model()
        gradients(ours), gradients(theirs)
        norm = global_norm(ours.parameters())
        clip_(ours.parameters(), largest, norm)
        wanted = torch.nn.utils.clip_grad_norm_(theirs.parameters(), largest or float("inf"))
        assert norm == wanted
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(a.grad, b.grad, rtol=1e-6, atol=0)


def test_no_weight_decay_on_vectors():
    optimizer = build(adamw, model(), lr=0.1, weight_decay=0.3)
    assert [(group["weight_decay"], {p.ndim for p in group["params"]}) for group in optimizer.param_groups] == [
        (0.3, {2}),
        (0.0, {1}),
    ]
    assert len(build(adamw, model(), lr=0.1, weight_decay=0.0).param_groups) == 1
    with pytest.raises(ValueError, match="Rprop has no weight decay"):
        build(torch.optim.Rprop, model(), lr=0.1, weight_decay=0.3)


@pytest.mark.parametrize("make", [adamw, sgd, muon, torch.optim.RMSprop, torch.optim.Adafactor])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_step_changes_nothing(make, bad):
    net = model()
    optimizer = build(make, net, lr=0.1, weight_decay=0.1)
    guard = Guard(optimizer, device=torch.device("cpu"))
    gradients(net)
    guard.step(global_norm(net.parameters()))
    assert guard.resolve().fault is Fault.NONE
    weights = [p.detach().clone() for p in net.parameters()]
    state = [value.clone() for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    gradients(net, bad)
    guard.step(global_norm(net.parameters()))
    with pytest.raises(RuntimeError, match="resolve"):  # what became of it has to be asked for before the next
        guard.step(global_norm(net.parameters()))
    assert guard.resolve().fault is Fault.NONFINITE and guard.resolve() is None  # told once
    after = [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    assert all(torch.equal(a, b) for a, b in zip(weights, net.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(state, after, strict=True))


@pytest.mark.parametrize("make", [adamw, sgd, muon])
def test_fp16_loss_scaling_skips_and_shrinks(make):
    net, plain = model(), model()
    optimizer, reference = (build(make, one, lr=0.1, weight_decay=0.1) for one in (net, plain))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    guard = Guard(optimizer, device=torch.device("cpu"), scaler=scaler)
    taken = []
    for scale in (1.0, math.inf, 1.0):
        net.zero_grad()
        scaler.scale(net(torch.ones(4, 5)).square().sum() * scale).backward()
        guard.unscale()
        guard.step(global_norm(net.parameters()))
        taken.append(guard.resolve().fault)
        if math.isfinite(scale):
            gradients(plain)
            reference.step()
    assert taken == [Fault.NONE, Fault.RESCALED, Fault.NONE]
    assert scaler.get_scale() == 512.0
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6)


def test_newton_schulz_makes_singular_values_about_one():
    torch.manual_seed(0)
    for shape in ((8, 20), (20, 8)):
        values = torch.linalg.svdvals(orthogonalized(torch.randn(shape), iterations=5))
        assert values.min() > 0.6 and values.max() < 1.3
    exact = orthogonalized(torch.randn(6, 9))
    half = orthogonalized(torch.randn(6, 9), dtype=torch.bfloat16)
    assert exact.dtype == half.dtype == torch.float32


def test_set_lr_reaches_every_group():
    optimizer = build(sgd, model(), lr=0.1, weight_decay=0.1)
    set_lr(optimizer, 0.7)
    assert [group["lr"] for group in optimizer.param_groups] == [0.7, 0.7]


def test_the_learning_rate_follows_the_batch():
    from oneloop.recipe.mathematics import OptimizerConfig
    from oneloop.run.build import peak

    def rate(rule: str, at: int = 64) -> float:
        return peak(OptimizerConfig(lr=0.1, lr_at_batch=at, lr_rule=rule), 256)

    assert [rate("linear"), rate("sqrt"), rate("none"), rate("linear", 0)] == pytest.approx([0.4, 0.2, 0.1, 0.1])


# --- AdamW, whose lists are kept --------------------------------------------------------------------------------------


def pair(dtype=torch.float32) -> list[tuple[torch.nn.Module, torch.optim.Optimizer]]:
    """The same model twice, with the kept lists and with torch's own AdamW."""
    from oneloop.optim.adamw import AdamW
    from oneloop.optim.groups import parameter_groups

    made = []
    for kind in (AdamW, lambda groups, **options: torch.optim.AdamW(groups, fused=True, **options)):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).to(dtype)
        made.append((net, kind(parameter_groups(net.named_parameters(), 0.1), lr=0.01, betas=(0.8, 0.95), eps=1e-6)))
    return made


def step_both(made, *, seed: int, without: int | None = None, bad: bool = False) -> None:
    for net, optimizer in made:
        torch.manual_seed(seed)
        for number, parameter in enumerate(net.parameters()):
            gradient = torch.randn_like(parameter)
            parameter.grad = None if number == without else gradient
        optimizer.found_inf = torch.tensor(float(bad))
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / seed
        optimizer.step()


def alike(made) -> bool:
    (net, optimizer), (other, torchs) = made
    same = [torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True)]
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        mine, theirs = optimizer.state[p], torchs.state[q]
        same += [mine.keys() == theirs.keys(), *(torch.equal(mine[name], theirs[name]) for name in theirs)]
    return all(same)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kept_lists_give_torchs_bits(dtype):
    made = pair(dtype)
    for seed in range(1, 6):
        step_both(made, seed=seed)
    step_both(made, seed=6, bad=True)  # changes nothing
    step_both(made, seed=7, without=2)  # a parameter without a gradient stays as it is
    step_both(made, seed=8)
    assert alike(made)


def test_lists_are_not_kept_beyond_their_state():
    made = pair()
    step_both(made, seed=1), step_both(made, seed=2)
    saved = [(copy.deepcopy(optimizer.state_dict()), copy.deepcopy(net.state_dict())) for net, optimizer in made]
    step_both(made, seed=3)
    for (net, optimizer), (state, weights) in zip(made, saved, strict=True):
        optimizer.load_state_dict(state), net.load_state_dict(weights)
    step_both(made, seed=4)
    for net, optimizer in made:  # as a checkpoint puts other tensors in
        for p in net.parameters():
            optimizer.state[p]["exp_avg"] = torch.full_like(p, 0.5)
    step_both(made, seed=5)
    for net, optimizer in made:  # of one parameter in the middle only, and its weights too
        middle = list(net.parameters())[1]
        optimizer.state[middle]["exp_avg_sq"] = torch.full_like(middle, 0.25)
        middle.data = middle.data.clone() + 1
    step_both(made, seed=10)
    for _, optimizer in made:
        optimizer.state.clear()
    step_both(made, seed=6), step_both(made, seed=7)
    for net, optimizer in made:
        torch.manual_seed(9)
        net.append(torch.nn.Linear(3, 3))
        optimizer.add_param_group({"params": list(net[-1].parameters()), "weight_decay": 0.3})
    step_both(made, seed=8), step_both(made, seed=9)
    assert alike(made)


def test_hooks_and_closures_go_torchs_own_way():
    made, seen = pair(), []
    step_both(made, seed=1), step_both(made, seed=2)
    for _, optimizer in made:
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    step_both(made, seed=3)
    assert seen == ["before", "after"] * 2 and alike(made)
    assert made[0][1].step(lambda: torch.tensor(3.0)) == 3.0


def test_the_norm_is_torchs_to_the_bit():
    torch.manual_seed(0)
    several = [torch.nn.Parameter(torch.randn(size)) for size in (3, 40, 500)]
    for parameter in several:
        parameter.grad = torch.randn_like(parameter)
    assert torch.equal(global_norm(several), torch.nn.utils.get_total_norm([p.grad for p in several]))
    mixed = [*several, torch.nn.Parameter(torch.randn(7, dtype=torch.float64))]
    mixed[-1].grad = torch.randn_like(mixed[-1])
    assert torch.equal(global_norm(mixed), torch.nn.utils.get_total_norm([p.grad for p in mixed]))
