"""The gradient norm and clipping equal torch's."""

from __future__ import annotations

import pytest
import torch

from oneloop.optim.clip import clip_, global_norm
from tiny import backward, three_layers

pytestmark = pytest.mark.covers("oneloop.optim.clip")


def test_clipping_equals_torchs():
    for largest in (0.0, 0.5, 1e6):
        ours, theirs = three_layers(), three_layers()
        backward(ours), backward(theirs)
        norm = global_norm(ours.parameters())
        clip_(ours.parameters(), largest, norm)
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), largest or float("inf"))
        assert norm == expected
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(a.grad, b.grad, rtol=1e-6, atol=0)


def test_the_norm_is_torchs_to_the_bit():
    torch.manual_seed(0)
    several = [torch.nn.Parameter(torch.randn(size)) for size in (3, 40, 500)]
    for parameter in several:
        parameter.grad = torch.randn_like(parameter)
    assert torch.equal(
        global_norm(several), torch.nn.utils.get_total_norm([p.grad for p in several])
    )
    mixed = [*several, torch.nn.Parameter(torch.randn(7, dtype=torch.float64))]
    mixed[-1].grad = torch.randn_like(mixed[-1])
    assert torch.equal(global_norm(mixed), torch.nn.utils.get_total_norm([p.grad for p in mixed]))
