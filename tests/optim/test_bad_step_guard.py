"""A non-finite step changes nothing, with any optimizer and with loss scaling."""

from __future__ import annotations

import math

import pytest
import torch

from oneloop.optim.bad_step_guard import Guard
from oneloop.optim.bad_step_policy import Fault
from oneloop.optim.clip import global_norm
from oneloop.optim.optimizers import adamw, build, muon, sgd
from tiny import backward, three_layers

pytestmark = pytest.mark.covers(
    "oneloop.basics.device_flag",
    "oneloop.optim.bad_step_guard",
    "oneloop.optim.bad_step_policy",
    "oneloop.optim.clip",
    "oneloop.optim.optimizers",
)


@pytest.mark.parametrize("make", [adamw, sgd, muon, torch.optim.RMSprop, torch.optim.Adafactor])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_step_changes_nothing(make, bad):
    net = three_layers()
    optimizer = build(make, net, lr=0.1, weight_decay=0.1)
    guard = Guard(optimizer, device=torch.device("cpu"))
    backward(net)
    guard.step(global_norm(net.parameters()))
    assert guard.resolve().fault is Fault.NONE
    weights = [p.detach().clone() for p in net.parameters()]
    state = [
        value.clone()
        for entry in optimizer.state.values()
        for value in entry.values()
        if torch.is_tensor(value)
    ]
    backward(net, bad)
    guard.step(global_norm(net.parameters()))
    with pytest.raises(RuntimeError, match="resolve"):  # each step must be resolved before the next
        guard.step(global_norm(net.parameters()))
    assert guard.resolve().fault is Fault.NONFINITE and guard.resolve() is None  # reported once
    after = [
        value
        for entry in optimizer.state.values()
        for value in entry.values()
        if torch.is_tensor(value)
    ]
    assert all(torch.equal(a, b) for a, b in zip(weights, net.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(state, after, strict=True))

    # A later step without the guard is not skipped.
    net.zero_grad()
    backward(net)
    optimizer.step()
    assert not torch.equal(weights[0], next(net.parameters()))


@pytest.mark.parametrize("make", [adamw, sgd, muon])
def test_fp16_loss_scaling_skips_and_shrinks(make):
    net, plain = three_layers(), three_layers()
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
            backward(plain)
            reference.step()
    assert taken == [Fault.NONE, Fault.RESCALED, Fault.NONE]
    assert scaler.get_scale() == 512.0
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6)


def test_a_step_with_a_loss_scale_needs_unscale():
    net = three_layers()
    scaler = torch.amp.GradScaler("cpu")
    guard = Guard(
        build(adamw, net, lr=0.1, weight_decay=0.0), device=torch.device("cpu"), scaler=scaler
    )
    scaler.scale(net(torch.ones(4, 5)).sum()).backward()
    with pytest.raises(RuntimeError, match="call unscale"):
        guard.step(global_norm(net.parameters()))


def scaled_steps(optimizer, net, factors, **options):
    """Return the fault and the loss scale after each step; the loss is multiplied by a factor."""
    scaler = torch.amp.GradScaler("cpu", growth_interval=3, **options)
    guard = Guard(optimizer, device=torch.device("cpu"), scaler=scaler, sigma=6.0)
    found = []
    for factor in factors:
        net.zero_grad()
        loss = net(torch.ones(4, 5)).square().sum() * factor
        scaler.scale(loss).backward()
        guard.unscale()
        before = [parameter.detach().clone() for parameter in net.parameters()]
        guard.step(global_norm(net.parameters()), loss=loss)
        fault = guard.resolve().fault
        same = all(map(torch.equal, before, net.parameters()))
        assert same == (fault is not Fault.NONE)
        found.append((fault.name, scaler.get_scale()))
    return found


@pytest.mark.parametrize("make", [adamw, sgd, muon, torch.optim.RMSprop])
def test_fp16_is_bad_only_if_the_loss_scale_is_small_and_a_spike_keeps_the_scale(make, monkeypatch):
    monkeypatch.setattr("oneloop.optim.bad_step_guard.WINDOW", 3)
    net = three_layers()
    optimizer = build(make, net, lr=1e-3, weight_decay=0.0)
    bad = (math.inf, math.nan)
    factors = (1.0, bad[0], 1.0, 1.0, 1e4, bad[1], bad[0], 1.0)
    assert scaled_steps(optimizer, net, factors, init_scale=2.0**-8) == [
        ("NONE", 2.0**-8),
        ("RESCALED", 2.0**-9),
        ("NONE", 2.0**-9),
        ("NONE", 2.0**-9),
        ("SPIKE", 2.0**-8),  # the third gradient in a row without an infinity
        ("RESCALED", 2.0**-9),
        ("RESCALED", 2.0**-10),
        ("NONE", 2.0**-10),
    ]
    assert scaled_steps(optimizer, net, (bad[1], 1.0), init_scale=2.0**-10) == [
        ("NONFINITE", 2.0**-11),
        ("NONE", 2.0**-11),
    ]
