"""Sums are independent of order, updates of sharding, and fingerprints depend on every element."""

from __future__ import annotations

import math

import pytest
import torch

from oneloop.basics.exact_sums import exact_norm, tree_sum
from oneloop.basics.tensor_hash import fingerprint
from oneloop.optim.adamw import AdamW
from oneloop.optim.muon import Muon
from oneloop.optim.sgd import SGD
from slow_cases import with_slow

pytestmark = pytest.mark.covers(
    "oneloop.basics.exact_sums",
    "oneloop.basics.tensor_hash",
    "oneloop.optim.adamw",
    "oneloop.optim.muon",
    "oneloop.optim.sgd",
)


def drawn(*sizes: int, spread: float = 4.0, seed: int = 0) -> list[torch.Tensor]:
    """Return tensors whose values differ by many powers of two."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(size, generator=generator)
        * torch.exp(spread * torch.randn(size, generator=generator))
        for size in sizes
    ]


def exactly(tensors: list[torch.Tensor]) -> float:
    """Return the exact sum of squares, rounded once: the square of a float32 is a float64."""
    values = [value for tensor in tensors for value in tensor.flatten().tolist()]
    assert all(value == 0 or 1e-140 < abs(value) < 1e140 for value in values)
    return math.fsum(value * value for value in values)


@pytest.mark.parametrize("scale", with_slow([1e-30, 1e-3, 1.0, 1e15], slow=[1e-3, 1.0]))
def test_the_norm_is_the_exact_one_rounded_and_of_no_order(scale):
    parts = [part * scale for part in drawn(1, 17, 4000, 300_000)]
    found = float(exact_norm(parts))
    # squares are cut at 2^-60 of the largest
    assert math.isclose(found, math.sqrt(exactly(parts)), rel_tol=1e-12)
    whole = torch.cat(parts)
    for seed in range(5):
        shuffled = whole[torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))]
        cuts = sorted(
            torch.randint(
                1, len(whole), (3,), generator=torch.Generator().manual_seed(seed)
            ).tolist()
        )
        assert float(exact_norm([*shuffled.tensor_split(cuts)])) == found
    plain = whole / scale
    # plain sums do depend on the order
    assert len({float(plain.roll(by).square().sum()) for by in range(9)}) > 1


def test_a_norm_of_nothing_and_of_what_is_not_finite():
    zero, (some,) = torch.zeros(5), drawn(5)
    assert float(exact_norm([zero, torch.empty(0)])) == 0.0
    assert float(exact_norm([some, zero])) == float(exact_norm([some]))
    for bad in (torch.nan, torch.inf, -torch.inf):
        assert not torch.isfinite(exact_norm([some, torch.tensor([bad])]))
    for smallest in (1.4e-45, 3.4e38):
        assert float(exact_norm([torch.tensor([smallest])])) == float(torch.tensor(smallest))


def test_the_tree_adds_neighbours_first():
    a, b, c, d = drawn(9, 9, 9, 9)
    assert torch.equal(tree_sum(torch.stack([a, b, c, d])), (a + b) + (c + d))
    assert torch.equal(tree_sum(a[None]), a) and torch.equal(
        tree_sum(torch.stack([a, b, c])), (a + b) + c
    )


LENGTHS = [*range(1, 40), 63, 64, 65, 127, 1000]
OURS = {
    "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.1),
    "sgd": lambda p: SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda p: SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "plain sgd": lambda p: SGD(p, lr=0.01, momentum=0.0),
    "muon's rest": lambda p: Muon(
        [{"params": p, "muon": False}], lr=0.01, betas=(0.9, 0.999), weight_decay=0.1
    ),
}
TORCHS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1, foreach=True),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, foreach=True),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.01, foreach=True),
    "muon's rest": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
}


def stepped(
    make, values: list[torch.Tensor], *, bad: tuple[int, ...] = (), steps: int = 6
) -> list[torch.Tensor]:
    """Return parameters and state after some steps; in ``bad`` steps gradients are NaN and
    ``found_inf`` is 1."""
    parameters = [torch.nn.Parameter(value.clone()) for value in values]
    optimizer = make(parameters)
    if hasattr(optimizer, "elementwise"):
        optimizer.elementwise = True
    for step in range(steps):
        for parameter, gradient in zip(
            parameters, drawn(*map(len, values), seed=step + 1), strict=True
        ):
            parameter.grad = gradient * torch.nan if step in bad else gradient
        if bad:
            optimizer.found_inf = torch.tensor(float(step in bad))
        optimizer.step()
    state = [
        value
        for p in parameters
        for _, value in sorted(optimizer.state[p].items())
        if torch.is_tensor(value)
    ]
    return [*map(torch.Tensor.detach, parameters), *state]


@pytest.mark.parametrize("kind", OURS)
def test_an_update_has_the_bits_of_torchs_foreach(kind):
    values = drawn(*LENGTHS)
    for mine, theirs in zip(
        stepped(OURS[kind], values), stepped(TORCHS[kind], values), strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", OURS)
def test_an_update_depends_on_the_element_alone(kind):
    (whole,) = drawn(1000)
    results = stepped(OURS[kind], [whole])
    gradients = drawn  # a part of the parameter gets the same part of the gradient
    for cut in (1, 7, 63, 500, 993):
        pieces = []
        for part in (slice(0, cut), slice(cut, None)):
            parameter = torch.nn.Parameter(whole[part].clone())
            optimizer = OURS[kind]([parameter])
            optimizer.elementwise = True
            for step in range(6):
                parameter.grad = gradients(1000, seed=step + 1)[0][part].clone()
                optimizer.step()
            pieces.append(parameter.detach())
        assert torch.equal(torch.cat(pieces), results[0])


@pytest.mark.parametrize("kind", OURS)
def test_a_bad_step_changes_no_bit(kind):
    values = [*drawn(5, 70), torch.tensor([-0.0, 0.0])]
    whole = stepped(OURS[kind], values, bad=(6,), steps=7)
    for mine, theirs in zip(whole, stepped(OURS[kind], values), strict=True):
        assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32))
    first = stepped(OURS[kind], values, bad=(0,), steps=1)
    assert all(
        torch.equal(a.view(torch.int32), b.view(torch.int32))
        for a, b in zip(first, values, strict=False)
    )
    assert all(not state.any() for state in first[len(values) :])


def test_a_fingerprint_sees_each_bit_and_each_place():
    tensors = {
        "b": drawn(70_000)[0],
        "a": drawn(3)[0].double(),
        "c": torch.arange(5),
        "d": torch.zeros(0),
    }
    tensors |= {
        "e": torch.randn(9).to(torch.bfloat16),
        "f": torch.tensor([True, False]),
        "g": torch.zeros(4),
    }
    found = fingerprint(tensors)
    assert found == fingerprint(dict(reversed(tensors.items()))) and len(found["bits"]) == 16
    for name in "abcefg":
        for place in (0, tensors[name].numel() - 1):
            changed = tensors[name].clone()
            view = changed.view(
                {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
                    changed.element_size()
                ]
            )
            view[place] ^= 1
            assert fingerprint({**tensors, name: changed})["bits"] != found["bits"]
    swapped = tensors["b"].clone()
    swapped[[0, 9]] = swapped[[9, 0]]
    assert fingerprint({**tensors, "b": swapped})["bits"] != found["bits"]
    assert fingerprint({**tensors, "a": tensors["g"], "g": tensors["a"]})["bits"] != found["bits"]
