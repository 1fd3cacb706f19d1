"""AdamW without the work that torch does in every step; its bits and state are torch's."""

from __future__ import annotations

import copy

import pytest
import torch

pytestmark = pytest.mark.covers(
    "oneloop.optim.adamw",
    "oneloop.optim.elementwise",
    "oneloop.optim.parameter_groups",
)


def pair(dtype=torch.float32) -> list[tuple[torch.nn.Module, torch.optim.Optimizer]]:
    """Build the same model twice: with oneloop's AdamW and with torch's AdamW."""
    from oneloop.optim.adamw import AdamW
    from oneloop.optim.parameter_groups import parameter_groups

    made = []
    for kind in (AdamW, lambda groups, **options: torch.optim.AdamW(groups, fused=True, **options)):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).to(dtype)
        made.append(
            (
                net,
                kind(
                    parameter_groups(net.named_parameters(), 0.1),
                    lr=0.01,
                    betas=(0.8, 0.95),
                    eps=1e-6,
                ),
            )
        )
    return made


def test_a_group_may_have_several_dtypes():
    from oneloop.optim.adamw import AdamW

    made = []
    for make in (AdamW, lambda parameters: torch.optim.AdamW(parameters, fused=True)):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3).double())
        made.append((net, make(net.parameters())))
    for seed in range(1, 4):
        step_both(made, seed=seed)
    assert alike(made)


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
        same += [
            mine.keys() == theirs.keys(),
            *(torch.equal(mine[name], theirs[name]) for name in theirs),
        ]
    return all(same)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_has_torchs_bits(dtype):
    made = pair(dtype)
    for seed in range(1, 6):
        step_both(made, seed=seed)
    step_both(made, seed=6, bad=True)  # changes nothing
    step_both(made, seed=7, without=2)  # a parameter without a gradient stays as it is
    step_both(made, seed=8)
    assert alike(made)


def test_replaced_weights_state_and_groups_have_an_effect():
    made = pair()
    step_both(made, seed=1), step_both(made, seed=2)
    saved = [
        (copy.deepcopy(optimizer.state_dict()), copy.deepcopy(net.state_dict()))
        for net, optimizer in made
    ]
    step_both(made, seed=3)
    for (net, optimizer), (state, weights) in zip(made, saved, strict=True):
        optimizer.load_state_dict(state), net.load_state_dict(weights)
    step_both(made, seed=4)
    for net, optimizer in made:  # loading a checkpoint replaces state tensors, too
        for p in net.parameters():
            optimizer.state[p]["exp_avg"] = torch.full_like(p, 0.5)
    step_both(made, seed=5)
    for net, optimizer in made:  # replace the state and weights of one parameter in the middle
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


def test_hooks_and_closures_are_called():
    made, seen = pair(), []
    step_both(made, seed=1), step_both(made, seed=2)
    for _, optimizer in made:
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    step_both(made, seed=3)
    assert seen == ["before", "after"] * 2 and alike(made)
    assert made[0][1].step(lambda: torch.tensor(3.0)) == 3.0
