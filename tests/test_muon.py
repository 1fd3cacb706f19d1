"""Newton-Schulz iterations of Muon."""

from __future__ import annotations

import torch

from oneloop.optim.muon import orthogonalized


def test_newton_schulz_makes_singular_values_about_one():
    torch.manual_seed(0)
    for shape in ((8, 20), (20, 8)):
        values = torch.linalg.svdvals(orthogonalized(torch.randn(shape), iterations=5))
        assert values.min() > 0.6 and values.max() < 1.3
    exact = orthogonalized(torch.randn(6, 9))
    half = orthogonalized(torch.randn(6, 9), dtype=torch.bfloat16)
    assert exact.dtype == half.dtype == torch.float32
