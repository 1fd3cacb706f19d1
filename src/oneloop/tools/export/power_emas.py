"""Load a power-function EMA of any width from the EMAs in the checkpoints of a run."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.untrusted import damaged
from oneloop.checkpoint.manifest import read_manifest
from oneloop.checkpoint.mirror import complete
from oneloop.checkpoint.state_dict import load_tensors
from oneloop.checkpoint.store import Store, problems, read_state
from oneloop.ema import gamma


class _PowerEma(NamedTuple):
    """A power-function EMA in a checkpoint."""

    folder: Path
    name: str
    samples: float  # trained on until this checkpoint
    sigma_rel: float  # its width, relative to that time


def _power_emas(checkpoint: Path) -> list[_PowerEma]:
    """Return the power-function EMAs in this checkpoint and in earlier intact ones of the run."""
    saved: list[_PowerEma] = []
    for folder in Store(checkpoint.parent).sealed():
        if folder.name > checkpoint.name:
            continue
        try:
            complete(folder)  # fetches what is only in the mirror
        except BadInput:
            continue  # it is damaged there
        if problems(folder):
            continue
        for name, part in read_state(folder).items():
            if not name.startswith("ema-power-"):
                continue
            with damaged(f"{folder}: {name}"):
                if part["seen"] > 0:
                    sigma_rel = float(name.removeprefix("ema-power-"))
                    saved.append(_PowerEma(folder, name, float(part["seen"]), sigma_rel))
    return saved


@torch.no_grad()
def load_power_ema(checkpoint: Path, model: nn.Module, wanted: str) -> None:
    """Load a power-function EMA of any width, combined from those that were saved.

    Args:
        checkpoint: the EMA is that of this step; earlier checkpoints of the run are read, too.
        model: loaded in place, not wrapped for training.
        wanted: ``power:SIGMA``, with the width that is wanted.

    Raises:
        ValueError: the width is too large, or no power-function EMA was saved.
    """
    try:
        sigma_rel = float(wanted.removeprefix("power:"))
        gamma(sigma_rel)
    except ValueError as error:
        raise ValueError(f"--weights {wanted}: {error}") from error
    saved = _power_emas(checkpoint)
    if not saved:
        raise ValueError(
            f"--weights {wanted}: no power-function EMA is saved; train with --ema.power [0.05,0.1]"
        )

    # Find the factor of each saved EMA by least squares (Karras et al. 2024).
    last = max(saved, key=lambda ema: ema.samples).samples
    factors = post_hoc([(ema.samples, ema.sigma_rel) for ema in saved], (last, sigma_rel))

    # Average the parameters, and the buffers, that every saved EMA has. The sums are in double
    # precision: factors are large and of both signs.
    averaged: dict[str, Tensor] = dict(model.named_parameters())
    averaged |= dict(model.named_buffers())
    for ema in saved:
        tensors = read_manifest(ema.folder)["tensors"]
        for name in list(averaged):
            if f"ema.{ema.name}.{name}" not in tensors:
                del averaged[name]
    total: dict[str, Tensor] = {}
    for name, parameter in averaged.items():
        wide = torch.promote_types(parameter.dtype, torch.float64)  # complex128 if it is complex
        total[name] = torch.zeros_like(parameter, dtype=wide)

    # Load one EMA after the other into the model, and add it.
    for ema, factor in zip(saved, factors, strict=True):
        load_tensors(ema.folder, model, weights=ema.name)
        for name, parameter in averaged.items():
            total[name] += factor * parameter

    # Load buffers and frozen parameters from the checkpoint, then set the averaged parameters.
    load_tensors(checkpoint, model)
    for name, parameter in averaged.items():
        parameter.copy_(total[name])


def post_hoc(saved: list[tuple[float, float]], wanted: tuple[float, float]) -> list[float]:
    """Return the factors that combine saved power-function averages into one that was not kept.

    They are a least-squares fit (Karras et al. 2024, algorithm 3). An average is a pair: samples
    seen, sigma_rel."""
    import numpy as np

    def inner(t_a: Any, gamma_a: Any, t_b: Any, gamma_b: Any) -> Any:
        # The inner product of two averages' weight functions.
        ratio = (t_a / t_b) ** np.where(t_a < t_b, gamma_b, -gamma_a)
        scale = (gamma_a + gamma_b + 1) * np.maximum(t_a, t_b)
        return (gamma_a + 1) * (gamma_b + 1) * ratio / scale

    t = np.array([seen for seen, _ in saved])[:, None]
    g = np.array([gamma(sigma_rel) for _, sigma_rel in saved])[:, None]
    seen, sigma_rel = wanted
    among = inner(t, g, t.T, g.T)
    factors = np.linalg.solve(among, inner(t, g, seen, gamma(sigma_rel)))
    return [float(factor) for factor in factors[:, 0]]
