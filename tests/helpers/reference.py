"""The reference: one big batch per step, in plain PyTorch, without code of oneloop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def sequence_loss(model: nn.Module, samples: list[Tensor]) -> tuple[Tensor, int]:
    """Return the summed next-token loss of sequences, one by one, and their number of targets."""
    total, targets = torch.zeros((), dtype=next(model.parameters()).dtype), 0
    for sample in samples:
        total = total + F.cross_entropy(model(sample[None, :-1])[0], sample[1:], reduction="sum")
        targets += len(sample) - 1
    return total, targets


def cosine_with_warmup(step: int, steps: int, warmup: int, peak: float) -> float:
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def plain_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[list[Tensor]],
    *,
    rate: Callable[[int], float],
    clip: float,
) -> list[float]:
    """Train ``model`` on the samples of each step as one batch; return the mean loss of each
    step."""
    losses = []
    for step, samples in enumerate(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.zero_grad()
        total, weight = sequence_loss(model, samples)
        (total / weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append((total / weight).item())
    return losses


class PlainMuon(torch.optim.Optimizer):
    """Muon on the given matrices, after Jordan 2024 and Liu et al. 2025, in the matrices'
    precision."""

    def __init__(self, params: list[Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                buffer.mul_(0.95).add_(p.grad, alpha=0.05)
                x = p.grad * 0.05 + buffer * 0.95
                flip = x.shape[0] > x.shape[1]
                x = x.T if flip else x
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                x = x.T if flip else x
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(x, alpha=-group["lr"] * 0.2 * max(p.shape) ** 0.5)
