"""Write weights as plain safetensors under the model's own names, and load them."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from oneloop.basics.base_models import HUB, BaseModel, fetched
from oneloop.basics.bucket import is_address
from oneloop.basics.files import replacing
from oneloop.basics.parameter_names import matches
from oneloop.basics.tensors import scalar_names
from oneloop.checkpoint.mirror import FINAL, complete, local_run
from oneloop.checkpoint.state_dict import Tensors, model_tensors
from oneloop.checkpoint.store import MANIFEST, read_manifest

_ADAPTERS = "adapter_model"  # peft's file name for adapters
_CONFIG = "adapter_config.json"


def tied_names(model: nn.Module) -> set[str]:
    """Return the names of parameters and buffers that are tied to an earlier one."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name for name, tensor in state.items() if first.setdefault(id(tensor), name) != name}


def gathered_weights(model: nn.Module, origin: BaseModel | None = None) -> dict[str, Tensor]:
    """Return the full weights in host memory on rank 0, nothing on other ranks. Collective: call on
    every rank.

    Names are those of the unwrapped model: no ``module.``, no ``_orig_mod.``. Tied weights occur
    once. With a base model (``origin``), return only the other weights, under the names in peft's
    files."""
    if origin is not None:
        return _trained_weights(model, origin)
    state: Any = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    tied, seen, scalars = tied_names(bare(model)), set[int](), scalar_names(bare(model))
    weights = {}
    for name, tensor in state.items():
        if name in tied:
            continue
        whole = tensor.reshape(()) if name in scalars else tensor.contiguous()
        # shared memory, which safetensors rejects
        if (data := whole.untyped_storage().data_ptr()) in seen:
            whole = whole.clone()
        seen.add(data)
        weights[name] = whole
    return weights


def _trained_weights(model: nn.Module, origin: BaseModel) -> dict[str, Tensor]:
    weights, scalars = {}, scalar_names(bare(model))
    for name, tensor in model_tensors(model).items():
        if (name := name.removeprefix("model.")) not in origin.names:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            whole = whole.reshape(()) if name in scalars else whole
            weights[origin.outside(name)] = whole.cpu().clone()
    return weights if not dist.is_initialized() or dist.get_rank() == 0 else {}


def write_weights(file: Path, weights: dict[str, Tensor]) -> None:
    """Write one safetensors file atomically; write none if there are no weights."""
    if weights:
        file.parent.mkdir(exist_ok=True, parents=True)
        with replacing(file) as draft:
            save_file(weights, draft, metadata={"format": "pt"})


def bare(model: nn.Module) -> nn.Module:
    """Return the model without its DDP wrapper."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def load_weights(
    model: nn.Module,
    source: str,
    weights: str = "raw",
    *,
    leave_out: Sequence[str] = (),
    origin: BaseModel | None = None,
) -> list[str]:
    """Load weights (``raw``, or the name of an EMA) into a model that is not yet wrapped; return
    the names left out.

    ``source`` is a run folder, another folder, a hub repository, or a .safetensors file. Names that
    a pattern in ``leave_out`` matches (:func:`oneloop.basics.parameter_names.matches`), and frozen
    parameters of the base model ``origin``, stay unchanged. Raise ValueError if there are no
    weights, if they are of another model, or if a pattern matches no name."""
    if is_address(source):
        complete(local_run(source) / FINAL)
        source = str(local_run(source))
    file = _file_of(source, weights, origin)
    try:
        loaded = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"init.from {source!r}: {file} cannot be read: {error}") from error
    if origin is not None:
        about = _config_next_to(file, source)
        _reject_other_origin(file.parent, source, origin, about)
        inside = {
            origin.outside(name): name for name in model.state_dict() if name not in origin.names
        }
        loaded = {inside.get(name, name): tensor for name, tensor in loaded.items()}
    loaded |= {name: loaded[name].reshape(1) for name in scalar_names(model) if name in loaded}
    own = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if origin is None or name not in origin.names
    }
    for pattern in leave_out:
        if not any(matches(pattern, name) for name in own):
            some = ", ".join([*own][:8])
            raise ValueError(
                f"init.leave_out {pattern!r} matches no parameter of the model; it has {some}, …"
            )
    left = [name for name in own if any(matches(pattern, name) for pattern in leave_out)]
    loaded = {
        name: tensor
        for name, tensor in loaded.items()
        if not any(matches(p, name) for p in leave_out)
    }
    _reject_others(own, loaded, tied_names(model) | set(left), source, file)
    if origin is not None and (other := origin.other_settings(about)):
        raise ValueError(
            f"init.from {source!r}: its adapters have another scale ({other}); set task.lora.* "
            "to match"
        )
    with torch.no_grad():
        model.load_state_dict(loaded, strict=False)
    return left


def _file_of(source: str, weights: str, origin: BaseModel | None) -> Path:
    hub = source.startswith(HUB)
    own, other = ("model", _ADAPTERS) if origin is None else (origin.file, "model")
    if Path(source).suffix == ".safetensors" and not hub:
        candidates = [source]
        found = Path(source) if Path(source).is_file() else None
    else:
        folders = [""] if hub else ["final/", ""]
        names = [
            f"{folder}{own if weights == 'raw' else weights}.safetensors" for folder in folders
        ]
        candidates = [f"{source}/{name}" for name in names]
        found = next((file for name in names if (file := fetched(source, name)) is not None), None)
        if found is None and any(
            fetched(source, f"{folder}{other}.safetensors") for folder in folders
        ):
            one, other = (
                ("adapters", "none")
                if origin is None
                else ("a whole model", "only adapters to train")
            )
            raise ValueError(
                f"init.from {source!r} contains {one}, but the model has {other}; set it as "
                "task.model"
            )
    if found is None:
        raise ValueError(
            f"init.from {source!r}: no weights found (looked for {' and '.join(candidates)})"
        )
    return found


def _config_next_to(weights: Path, source: str) -> dict[str, Any]:
    if source.startswith(HUB):
        for name in (_CONFIG, MANIFEST):  # downloads them next to the weights
            fetched(source, name)
    file = weights.parent / _CONFIG
    return dict(json.loads(file.read_text())) if file.is_file() else {}


def _reject_other_origin(
    folder: Path, source: str, origin: BaseModel, about: Mapping[str, Any]
) -> None:
    try:
        there = read_manifest(folder)["about"].get("base")
    except ValueError:
        there = None
    if other := origin.of_another(about, there):
        raise ValueError(
            f"init.from {source!r}: its adapters are for {other}; set task.model to it"
        )


def _reject_others(
    own: Tensors, loaded: Tensors, known: Collection[str], source: str, file: Path
) -> None:
    """Reject weights whose names or shapes differ from the model's; names in ``known`` may be
    missing."""
    missing = sorted(own.keys() - loaded.keys() - set(known))
    unexpected = sorted(loaded.keys() - own.keys())
    shapes = [
        f"{name} {tuple(loaded[name].shape)} for {tuple(own[name].shape)}"
        for name in sorted(own.keys() & loaded.keys())
        if own[name].shape != loaded[name].shape
    ]
    if missing or unexpected or shapes:
        wrong = [
            f"{what}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
            for what, names in (
                ("missing", missing),
                ("unexpected", unexpected),
                ("other shape", shapes),
            )
            if names
        ]
        why = f"is of another model ({'; '.join(wrong)})"
        raise ValueError(
            f"init.from {source!r}: {file.name} {why}; choose weights of the same task.* settings"
        )
