"""Weights as plain safetensors, under the names that the model itself gives them, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from oneloop.checkpoint.state import load_tensors
from oneloop.checkpoint.store import Store, problems
from oneloop.ema import EMA, gamma, post_hoc


def tied_names(model: nn.Module) -> set[str]:
    """Names of parameters and buffers that are another name of an earlier one (tied weights)."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name for name, tensor in state.items() if first.setdefault(id(tensor), name) != name}


def gathered_weights(model: nn.Module) -> dict[str, Tensor]:
    """The whole model's weights in host memory, on rank 0; empty elsewhere. Every rank must get here.

    Names are those of the bare model: no ``module.``, no ``_orig_mod.``. Tied weights stand there once.
    """
    state: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    tied = tied_names(bare(model))
    return {name: tensor.contiguous() for name, tensor in state.items() if name not in tied}


def write_final(folder: Path, model: nn.Module, task: Any, averages: Iterable[EMA] = ()) -> None:
    """``model.safetensors``, one file for each average, and what the task adds (config, tokenizer). Every rank must get
    here."""
    _write(folder / "model.safetensors", gathered_weights(model))
    for ema in averages:
        with ema.swapped():
            _write(folder / f"{ema.name}.safetensors", gathered_weights(model))
    if hasattr(task, "save") and folder.exists():
        task.save(bare(model), folder)


def _write(file: Path, weights: dict[str, Tensor]) -> None:
    if weights:
        file.parent.mkdir(exist_ok=True, parents=True)
        draft = file.with_name(f".{file.stem}.draft")
        save_file(weights, draft, metadata={"format": "pt"})
        draft.replace(file)


def export_checkpoint(checkpoint: Path, folder: Path, task: Any, *, weights: str = "raw") -> None:
    """Writes the weights of a checkpoint as :func:`write_final` writes those of a run.

    Args:
        checkpoint: its folder.
        folder: to write to.
        task: makes the model.
        weights: ``raw``; the name of an average; or ``power:SIGMA``, the power-function average of that width, mixed
            from those that this checkpoint and the others beside it hold.

    Raises:
        ValueError: it is of another model, or there is no such average.
    """
    model = task.model()
    if weights.startswith("power:"):
        _mix(checkpoint, model, weights)
    else:
        load_tensors(checkpoint, model, weights=weights)
    write_final(folder, model, task)


@torch.no_grad()
def _mix(checkpoint: Path, model: nn.Module, wanted: str) -> None:
    """Post-hoc EMA (Karras et al. 2024): the mix of all saved averages up to this checkpoint."""
    try:
        sigma_rel = float(wanted.removeprefix("power:"))
        gamma(sigma_rel)
    except ValueError as error:
        raise ValueError(f"--weights {wanted}: {error}") from error
    saved: list[tuple[Path, str, float, float]] = []
    for folder in (one for one in Store(checkpoint.parent).sealed() if one.name <= checkpoint.name):
        if problems(folder):
            continue
        state = json.loads((folder / "state.json").read_text())
        for name, part in state.items():
            if name.startswith("ema-power-") and part["seen"] > 0:
                saved.append((folder, name, part["seen"], float(name.removeprefix("ema-power-"))))
    if not saved:
        raise ValueError(
            f"--weights {wanted}: no power-function average is saved there; train with --ema.power [0.05,0.1]"
        )
    last = max(seen for *_, seen, _ in saved)
    factors = post_hoc([(seen, sigma) for *_, seen, sigma in saved], (last, sigma_rel))
    total = {name: torch.zeros_like(parameter, dtype=torch.float64) for name, parameter in model.named_parameters()}
    for (folder, average, _, _), factor in zip(saved, factors, strict=True):
        load_tensors(folder, model, weights=average)
        for name, parameter in model.named_parameters():
            total[name] += factor * parameter
    load_tensors(checkpoint, model)  # buffers, and what was not trained
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(total[name])


def bare(model: nn.Module) -> nn.Module:
    """The model without its DDP wrapper."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def load_weights(model: nn.Module, source: str, weights: str = "raw") -> None:
    """Loads weights into a model that is not yet wrapped: from a run folder, a folder, or a .safetensors file.

    Args:
        model: to load into.
        source: where from.
        weights: ``raw``, or the name of an average (``ema``).

    Raises:
        ValueError: there are none, or they are not this model's.
    """
    path, name = Path(source), "model.safetensors" if weights == "raw" else f"{weights}.safetensors"
    tried = [path] if path.suffix == ".safetensors" else [path / "final" / name, path / name]
    file = next((one for one in tried if one.is_file()), None)
    if file is None:
        raise ValueError(f"init.from {source!r}: no weights there (looked for {' and '.join(map(str, tried))})")
    try:
        found = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"init.from {source!r}: {file} cannot be read: {error}") from error
    own = model.state_dict()
    missing = sorted(own.keys() - found.keys() - tied_names(model))
    unexpected = sorted(found.keys() - own.keys())
    shapes = [f"{name} {tuple(found[name].shape)} for {tuple(own[name].shape)}"
              for name in sorted(own.keys() & found.keys()) if own[name].shape != found[name].shape]  # fmt: skip
    if missing or unexpected or shapes:
        wrong = [f"{what}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
                 for what, names in (("missing", missing), ("unexpected", unexpected), ("other shape", shapes)) if names]  # fmt: skip
        raise ValueError(f"init.from {source!r}: {file.name} is not of this model ({'; '.join(wrong)});"
                         " choose weights of the same task.* settings")  # fmt: skip
    with torch.no_grad():
        model.load_state_dict(found, strict=False)
