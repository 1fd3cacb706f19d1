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
