"""Weights as plain safetensors, under the names that the model itself gives them, and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from oneloop.basics.files import replacing
from oneloop.basics.names import matches


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
    tied, memory = tied_names(bare(model)), set[int]()
    weights = {}
    for name, tensor in state.items():
        if name in tied:
            continue
        whole = tensor.contiguous()
        if (place := whole.untyped_storage().data_ptr()) in memory:  # a view of another's, which a file does not hold
            whole = whole.clone()
        memory.add(place)
        weights[name] = whole
    return weights


def write_weights(file: Path, weights: dict[str, Tensor]) -> None:
    """One safetensors file, whole or not at all; none where there are no weights."""
    if weights:
        file.parent.mkdir(exist_ok=True, parents=True)
        with replacing(file) as draft:
            save_file(weights, draft, metadata={"format": "pt"})


def bare(model: nn.Module) -> nn.Module:
    """The model without its DDP wrapper."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def load_weights(model: nn.Module, source: str, weights: str = "raw", *, leave_out: Sequence[str] = ()) -> list[str]:
    """Loads weights into a model that is not yet wrapped: from a run folder, a folder, or a .safetensors file.

    Args:
        model: to load into.
        source: where from.
        weights: ``raw``, or the name of an average (``ema``).
        leave_out: patterns of names that stay as they are, as of :func:`oneloop.basics.names.matches`.

    Returns:
        The names that were left out.

    Raises:
        ValueError: there are none, they are not this model's, or a pattern takes none of its names.
    """
    path, name = Path(source), "model.safetensors" if weights == "raw" else f"{weights}.safetensors"
    tried = [path] if path.suffix == ".safetensors" else [path / "final" / name, path / name]
    file = next((candidate for candidate in tried if candidate.is_file()), None)
    if file is None:
        raise ValueError(f"init.from {source!r}: no weights there (looked for {' and '.join(map(str, tried))})")
    try:
        loaded = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"init.from {source!r}: {file} cannot be read: {error}") from error
    own = model.state_dict()
    for pattern in leave_out:
        if not any(matches(pattern, name) for name in own):
            some = ", ".join([*own][:8])
            raise ValueError(f"init.leave_out {pattern!r} takes no parameter of the model; it has {some}, …")
    left = [name for name in own if any(matches(pattern, name) for pattern in leave_out)]
    loaded = {name: tensor for name, tensor in loaded.items() if not any(matches(p, name) for p in leave_out)}
    missing = sorted(own.keys() - loaded.keys() - tied_names(model) - set(left))
    unexpected = sorted(loaded.keys() - own.keys())
    shapes = [
        f"{name} {tuple(loaded[name].shape)} for {tuple(own[name].shape)}"
        for name in sorted(own.keys() & loaded.keys())
        if own[name].shape != loaded[name].shape
    ]
    if missing or unexpected or shapes:
        wrong = [
            f"{what}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
            for what, names in (("missing", missing), ("unexpected", unexpected), ("other shape", shapes))
            if names
        ]
        raise ValueError(
            f"init.from {source!r}: {file.name} is not of this model ({'; '.join(wrong)});"
            " choose weights of the same task.* settings"
        )
    with torch.no_grad():
        model.load_state_dict(loaded, strict=False)
    return left
