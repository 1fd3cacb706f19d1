"""Losses of pairs of answers, from sums of log-probabilities of their tokens.

Each function takes tensors (pairs,) and returns the loss of each pair. ``chosen`` and ``rejected``
are log-probabilities of the policy. ``apart`` is the difference that the losses with a reference
use: how much more the policy prefers the chosen answer than the reference does,
``(chosen - reference of chosen) - (rejected - reference of rejected)``.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def dpo(
    apart: Tensor,
    *,
    beta: float,
    smoothing: float = 0.0,
) -> Tensor:
    """Return the loss of direct preference optimization (Rafailov et al. 2023, equation 7).

    ``-(1 - e) log s(beta apart) - e log s(-beta apart)``, where s is the logistic function. With a
    smoothing e above 0 it is conservative DPO (Mitchell 2023), for labels of which a share e is
    wrong. (TRL's loss ``sigmoid`` ignores label_smoothing.)
    """
    right = F.logsigmoid(beta * apart)
    wrong = F.logsigmoid(-beta * apart)
    return -(1 - smoothing) * right - smoothing * wrong


def robust(apart: Tensor, *, beta: float, smoothing: float) -> Tensor:
    """Return the unbiased loss for labels of which a share is wrong (Chowdhury et al. 2024).

    ``(-(1 - e) log s(beta apart) + e log s(-beta apart)) / (1 - 2 e)``, e below 0.5.
    """
    right = F.logsigmoid(beta * apart)
    wrong = F.logsigmoid(-beta * apart)
    biased = -(1 - smoothing) * right + smoothing * wrong
    return biased / (1 - 2 * smoothing)


def hinge(apart: Tensor, *, beta: float) -> Tensor:
    """Return the hinge loss of SLiC (Zhao et al. 2023): ``max(0, 1 - beta apart)``."""
    return torch.relu(1 - beta * apart)


def ipo(apart: Tensor, *, beta: float) -> Tensor:
    """Return the loss of identity preference optimization (Azar et al. 2023, equation 17).

    ``(apart - 1 / (2 beta))^2``, where beta is the paper's tau. The paper's formula has sums over
    tokens. TRL uses means (``ipo_mean``), with which the paper's results were found, as its authors
    have said to TRL.
    """
    target = 1 / (2 * beta)
    return (apart - target) ** 2


def simpo(
    apart: Tensor,
    *,
    beta: float,
    margin: float,
    smoothing: float = 0.0,
) -> Tensor:
    """Return the loss of SimPO (Meng et al. 2024, equation 6), which needs no reference.

    ``-log s(beta apart - margin)``, where apart is chosen minus rejected, with means over the
    tokens of each answer; margin is the paper's gamma.
    """
    return dpo(apart - margin / beta, beta=beta, smoothing=smoothing)


def orpo(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return the loss of ORPO (Hong et al. 2024, equations 6 and 7), which needs no reference.

    ``-chosen - beta log s(log odds(chosen) - log odds(rejected))``, where odds(p) = p / (1 - p),
    with means over the tokens of each answer: of one pair, so that the loss is a sum over pairs.
    (TRL's first term also counts the tokens of the prompt, as a mean over all tokens of a batch.)
    """
    odds = chosen - _log_of_rest(chosen)
    other = rejected - _log_of_rest(rejected)
    preference = F.logsigmoid(odds - other)
    return -chosen - beta * preference


def _log_of_rest(logarithm: Tensor) -> Tensor:
    """Return ``log(1 - exp(x))`` for x below 0, without cancellation (Maechler 2012).

    Its gradient stays finite where x is 0.
    """
    below = logarithm.clamp(max=-torch.finfo(logarithm.dtype).tiny)
    near = torch.log(-torch.expm1(below))
    far = torch.log1p(-torch.exp(below.clamp(max=-math.log(2))))
    return torch.where(below > -math.log(2), near, far)


def divergence_of_answer(apart: Tensor) -> Tensor:
    """Return an estimate of KL(reference || policy) from one token: ``exp(d) - 1 - d``.

    d is the log-probability of the policy minus that of the reference (the estimator k3 of Schulman
    2020). It is unbiased if the token was drawn from the reference, which the answers of data were
    not: it shows how far the policy has moved.
    """
    return torch.expm1(apart) - apart
