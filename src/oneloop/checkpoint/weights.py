"""Write weights as plain safetensors under the model's own names, and load them."""

from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from oneloop.basics.base_models import HUB, BaseModel, fetched
from oneloop.basics.bucket import is_address
from oneloop.basics.files import replacing
from oneloop.basics.parameter_names import aliases, bare_name, matches, tied_to
from oneloop.basics.tensors import scalar_names
from oneloop.basics.untrusted import read_json
from oneloop.checkpoint.manifest import MANIFEST, read_manifest
from oneloop.checkpoint.mirror import FINAL, complete, local_run
from oneloop.checkpoint.pieces import Tensors

_ADAPTERS = "adapter_model"  # peft's file name for adapters
_CONFIG = "adapter_config.json"


def gathered_weights(model: nn.Module, origin: BaseModel | None = None) -> dict[str, Tensor]:
    """Return the full weights in host memory on rank 0, nothing on other ranks.

    Collective: call on every rank.

    Names are those of the unwrapped model: no ``module.``, no ``_orig_mod.``. Tied weights occur
    once.

    Args:
        model: bare or wrapped.
        origin: a base model: return only the other weights, under the names in peft's files.
    """
    main = not dist.is_initialized() or dist.get_rank() == 0
    # parameters and buffers that are tied to an earlier one
    tied = {name for names in aliases(bare(model)) for name in names[1:]}
    scalars = scalar_names(bare(model))
    seen = set[int]()
    weights = {}
    for full_name, tensor in model.state_dict().items():
        name = bare_name(full_name)
        if name in tied or (origin is not None and name in origin.names):
            continue
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if not main:
            continue
        whole = whole.reshape(()) if name in scalars else whole.contiguous()
        # Copy a tensor that shares memory with another, which safetensors rejects.
        data = whole.untyped_storage().data_ptr()
        if data in seen:
            whole = whole.clone()
        seen.add(data)
        weights[name if origin is None else origin.outside(name)] = whole.cpu()
    return weights


def write_weights(file: Path, weights: dict[str, Tensor]) -> None:
    """Write one safetensors file atomically; write none if there are no weights."""
    if weights:
        file.parent.mkdir(exist_ok=True, parents=True)
        with replacing(file) as draft:
            try:
                save_file(weights, draft, metadata={"format": "pt"})
            except SafetensorError as error:  # of the file system
                raise OSError(f"{file}: {error}") from error


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
    """Load weights into a model that is not yet wrapped; return the names left out.

    Args:
        model: the bare model.
        source: a run folder, another folder, a hub repository, or a .safetensors file.
        weights: ``raw``, or the name of an EMA.
        leave_out: patterns (:func:`oneloop.basics.parameter_names.matches`) of names that stay
            unchanged.
        origin: the base model, whose parameters stay unchanged, too.

    Raises:
        ValueError: if there are no weights, if they are of another model, or if a pattern matches
            no name.
    """
    # Read the file.
    if is_address(source):
        complete(local_run(source) / FINAL)
        source = str(local_run(source))
    file = _file_of(source, weights, origin)
    try:
        loaded = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"init.from {source!r}: {file} cannot be read: {error}") from error

    # Rename the tensors of adapters: the file has peft's names.
    own = model.state_dict()
    about: dict[str, Any] = {}
    if origin is not None:
        about = _reject_other_origin(file, source, origin)
        own = {name: tensor for name, tensor in own.items() if name not in origin.names}
        inside = {origin.outside(name): name for name in own}
        loaded = {inside.get(name, name): tensor for name, tensor in loaded.items()}
    for name in scalar_names(model):
        if name in loaded:
            loaded[name] = loaded[name].reshape(1)

    # Find what to load: the model's own names, without those left out.
    for pattern in leave_out:
        if not any(matches(pattern, name) for name in own):
            some = ", ".join([*own][:8])
            raise ValueError(
                f"init.leave_out {pattern!r} matches no parameter of the model; it has {some}, …"
            )

    def stays(name: str) -> bool:
        return any(matches(pattern, name) for pattern in leave_out)

    left = [name for name in own if stays(name)]
    loaded = {name: tensor for name, tensor in loaded.items() if not stays(name)}

    # Check that they fit, then load them.
    # A file may have any one of the names of a tied tensor.
    _reject_others(own, loaded, tied_to(model, loaded.keys()) | set(left), source, file)
    _reject_untied(model, loaded, source)
    if origin is not None and (other := origin.other_settings(about)):
        raise ValueError(
            f"init.from {source!r}: its adapters have another scale ({other}); set task.lora.* "
            "to match"
        )
    with torch.no_grad():
        model.load_state_dict(loaded, strict=False)
    return left


def _file_of(source: str, weights: str, origin: BaseModel | None) -> Path:
    """Return the file with the weights. Raises ValueError if there is none."""
    hub = source.startswith(HUB)
    own = origin.file if origin is not None else "model"
    name = f"{own if weights == 'raw' else weights}.safetensors"
    folders = [""] if hub else ["final/", ""]

    # A file, or a file in a folder or repository.
    if Path(source).suffix == ".safetensors" and not hub:
        candidates = [source]
        if Path(source).is_file():
            return Path(source)
    else:
        candidates = [f"{source}/{folder}{name}" for folder in folders]
        for folder in folders:
            file = fetched(source, f"{folder}{name}")
            if file is not None:
                return file

        # A whole model in place of adapters, or adapters in place of a whole model.
        other = "model" if origin is not None else _ADAPTERS
        if any(fetched(source, f"{folder}{other}.safetensors") for folder in folders):
            found = "adapters, but the model has none"
            if origin is not None:
                found = "a whole model, but the model has only adapters to train"
            raise ValueError(f"init.from {source!r} contains {found}; set it as task.model")
    raise ValueError(
        f"init.from {source!r}: no weights found (looked for {' and '.join(candidates)})"
    )


def _reject_other_origin(weights: Path, source: str, origin: BaseModel) -> dict[str, Any]:
    """Reject adapters of another base model; return the content of their config."""
    if source.startswith(HUB):
        # Download it next to the weights.
        fetched(source, _CONFIG)
        fetched(source, MANIFEST)
    file = weights.parent / _CONFIG
    about = dict(read_json(file)) if file.is_file() else {}
    base = None
    with suppress(ValueError):
        base = read_manifest(weights.parent)["about"].get("base")
    other = origin.of_another(about, base)
    if other:
        raise ValueError(
            f"init.from {source!r}: its adapters are for {other}; set task.model to it"
        )
    return about


def _reject_others(
    own: Tensors, loaded: Tensors, known: Collection[str], source: str, file: Path
) -> None:
    """Reject weights whose names or shapes differ from the model's.

    Names in ``known`` may be missing.
    """
    missing = sorted(own.keys() - loaded.keys() - set(known))
    unexpected = sorted(loaded.keys() - own.keys())
    shapes = []
    for name in sorted(own.keys() & loaded.keys()):
        if own[name].shape != loaded[name].shape:
            shapes.append(f"{name} {tuple(loaded[name].shape)} for {tuple(own[name].shape)}")

    wrong = []
    lists = {"missing": missing, "unexpected": unexpected, "other shape": shapes}
    for kind, names in lists.items():
        if names:
            wrong.append(f"{kind}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}")
    if wrong:
        raise ValueError(
            f"init.from {source!r}: {file.name} is of another model ({'; '.join(wrong)}); choose "
            "weights of the same task.* settings"
        )


def _reject_untied(model: nn.Module, loaded: Tensors, source: str) -> None:
    """Reject weights in which tensors differ that the model has tied."""
    for names in aliases(model):
        there = [name for name in names if name in loaded]
        for name in there[1:]:
            if not torch.equal(loaded[name], loaded[there[0]]):
                raise ValueError(
                    f"init.from {source!r}: {there[0]} and {name} are tied in the model, and "
                    "differ in the file; choose weights of the same task.* settings"
                )
