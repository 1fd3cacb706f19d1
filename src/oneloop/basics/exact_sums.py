"""Sums that are bit-identical in any order.

They do not depend on parallel layout or sharding. Each square is cut at fixed positions into digits
of 30 bits. Digits are added as integers, which does not round (binned summation: Demmel & Nguyen
2015). Three digits are kept: the rest of a square is below 2^-60 of the largest square. The cuts
are at multiples of 30 bits, not relative to the largest value, so that partial sums can be combined
later.

>>> norm = exact_norm(tensors)
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from oneloop.basics.tensors import on_gpu

_HALF = 15  # bits per digit of a value; its square has digits of 30 bits
_DIGITS = 3
_FIRST = -59  # least index of the first digit: of smaller values, too, a power of two is finite
# Elements per piece. On a CPU, a piece fits into the cache. Nowhere may it have more than 2^22
# elements, of which float64 adds the digits without rounding.
_ON_CPU = 1 << 17
_ELSEWHERE = 1 << 21


def tree_sum(parts: Tensor) -> Tensor:
    """Sum a tensor of shape (n, …) over its first dimension in a fixed binary tree.

    Neighbours are added first. Zeros at the end do not change the result.
    """
    while len(parts) > 1:
        if len(parts) % 2:
            parts = torch.cat([parts, torch.zeros_like(parts[:1])])
        parts = parts[0::2] + parts[1::2]
    return parts[0]


def rounded_sum(values: Iterable[float]) -> float:
    """Return the sum, rounded once.

    It is infinite or NaN if a value is not finite, or if the sum overflows.
    """
    known = [*values]
    try:
        return math.fsum(known)
    except (OverflowError, ValueError):  # overflow, or inf - inf
        return sum(known)


@torch.no_grad()
def exact_norm(
    whole: Sequence[Tensor], shards: Sequence[Tensor] = (), group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the L2 norm over all elements, 0-dim, float64. No host sync.

    It is not finite if any element is not.

    Args:
        whole: tensors that are equal on all ranks.
        shards: this rank's shards of other tensors.
        group: process group of the shards. Collective: call on all of its ranks, even without
            shards.
    """
    # Find the largest value.
    tensors = (*whole, *shards)
    held = [tensor for tensor in tensors if tensor.numel()]
    zero = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    norms = torch._foreach_norm(held, math.inf) if held else []
    largest = torch.stack([zero, *(norm.double() for norm in norms)]).max()
    # a maximum over ranks may lose a NaN
    largest = torch.where(torch.isfinite(largest), largest, math.inf)
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)

    # The first digit is the least n with |value| < 2^(15 n) for all values.
    exponent = torch.frexp(largest).exponent.long()
    first = ((exponent + _HALF - 1) // _HALF).clamp(min=_FIRST)

    # Add the digits of all ranks as integers, in any order.
    total = _digits(shards, first)
    if group is not None:
        dist.all_reduce(total, group=group)

    # Join the three digits, and scale the root back.
    top, middle, low = (total + _digits(whole, first)).double()
    unit = 2.0 ** (-2 * _HALF)
    square = ((low * unit + middle) * unit + top) * unit
    norm = square.sqrt() * _power_of_two(_HALF * first)
    return torch.where(torch.isfinite(largest), norm, math.inf)


def _digits(tensors: Sequence[Tensor], first: Tensor) -> Tensor:
    """Sum the first three digits of all squares as integers, shape (3,), int64.

    It is exact for up to 2^33 elements, and undefined if an element is not finite.
    """
    total = torch.zeros(_DIGITS, dtype=torch.int64, device=first.device)
    for parts in _pieces(tensors):
        piece = torch.cat(parts) if len(parts) > 1 else parts[0]
        rest = (piece.double() * _power_of_two(-_HALF * first)).square_()
        sums = []
        for _ in range(_DIGITS):
            # The next digit is before the point.
            rest.mul_(2.0 ** (2 * _HALF))
            digit = rest.floor()
            sums.append(digit.sum())
            rest.sub_(digit)
        total += torch.stack(sums).long()
    return total


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent, built from bits, since ``pow`` may round on some devices."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _pieces(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield all elements as lists of flat tensors: large ones are split, small ones are joined."""
    waiting: list[Tensor] = []
    held = 0  # elements in them
    for tensor in tensors:
        most = _ELSEWHERE
        if tensor.device.type == "cpu" and not on_gpu(tensor):
            most = _ON_CPU
        for part in tensor.detach().reshape(-1).split(most):
            waiting.append(part)
            held += part.numel()
            if held >= most:
                yield waiting
                waiting = []
                held = 0
    if held:
        yield waiting
