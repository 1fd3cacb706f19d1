"""Write weights for inference: at the end of a run, and by ``oneloop export`` from a checkpoint."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from oneloop.basics.base_models import BaseModel
from oneloop.basics.exit_codes import BadInput
from oneloop.checkpoint.mirror import complete
from oneloop.checkpoint.named_checkpoint import FILE, FINAL, base_model_of, base_of
from oneloop.checkpoint.state_dict import load_tensors
from oneloop.checkpoint.store import MANIFEST, Store, header, problems, read_manifest, vouch
from oneloop.checkpoint.weights import bare, gathered_weights, load_weights, write_weights
from oneloop.ema import EMA, gamma, post_hoc
from oneloop.machine.frozen_dtype import rounded
from oneloop.show.model_card import model_card
from oneloop.tasks.protocol import Task

TASK = "task"  # name of the task's state in a checkpoint, and of task.json in ``final/``


def write_final(
    folder: Path,
    model: nn.Module,
    task: Task,
    emas: Iterable[EMA] = (),
    *,
    about: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write ``model.safetensors``, a file for each EMA, and the task's files. Collective: call on
    every rank.

    Call ``task.save`` on rank 0, with a model of whole tensors; with an ``origin`` (base model),
    the model as it is. ``about`` goes into MANIFEST.json, which also holds the size and checksum of
    every file."""
    origin: BaseModel | None = getattr(task, "origin", None)
    weights = gathered_weights(model, origin)
    if weights:  # on rank 0
        (folder / MANIFEST).unlink(missing_ok=True)
    write_weights(folder / f"{_file(origin)}.safetensors", weights)
    for ema in emas:
        with ema.swapped():
            write_weights(folder / f"{ema.name}.safetensors", gathered_weights(model, origin))
    if weights:
        if hasattr(task, "state_dict"):
            (folder / f"{TASK}.json").write_text(json.dumps(task.state_dict()))
        if hasattr(task, "save"):
            task.save(_whole(model, task, weights) if origin is None else bare(model), folder)
        vouch(folder, {**about, **({} if origin is None else {"base": origin.description})})


def _file(origin: BaseModel | None) -> str:
    return "model" if origin is None else origin.file


def _whole(model: nn.Module, task: Task, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return the model without DTensors; under FSDP2, this is a new model with the gathered
    weights."""
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return bare(model)
    made = task.model()
    for name, tensor in made.state_dict(keep_vars=True).items():
        if name in weights:
            tensor.data = weights[name]  # tied weights share this tensor
    return made.train(model.training)


def export_checkpoint(
    checkpoint: Path,
    folder: Path,
    task: Task,
    *,
    weights: str = "raw",
    merge: bool = False,
    base_dtype: str | None = None,
) -> None:
    """Write the weights of a checkpoint, or of ``final/``, as :func:`write_final` writes those of a
    run.

    ``weights`` is ``raw``, the name of an EMA, or ``power:SIGMA``: the power-function EMA of that
    width, combined from the EMAs in this checkpoint and in earlier ones of the run. ``merge`` adds
    adapters to their base model, whose matrices had ``base_dtype`` in the run. Raise ValueError if
    the checkpoint is of another model or base model, if the EMA does not exist, or if there is
    nothing to merge."""
    load_task_state(task, checkpoint)
    model = task.model()
    origin: BaseModel | None = getattr(task, "origin", None)
    _reject_both(folder, adapters=origin is not None and not merge)
    there = [
        name
        for name in ("README.md", "config.json", "preprocessor_config.json")
        if (folder / name).exists()
    ]
    if there and not (folder / MANIFEST).exists():  # files of the user
        raise ValueError(
            f"--to {folder} holds {there[0]}, which an export would replace; use another folder"
        )
    reject_other_origin(checkpoint, origin)
    about = {"weights": weights, "checkpoint": checkpoint.name}
    if checkpoint.name == FINAL:
        _in_types(model, _types_of(checkpoint / f"{_file(origin)}.safetensors"), origin)
        load_weights(model, str(checkpoint), weights, origin=origin)
        about = read_manifest(checkpoint)["about"] | {"weights": weights}
        about.pop("base", None)
    else:
        _as_saved(model, checkpoint)
        if weights.startswith("power:"):
            _mix(checkpoint, model, weights)
        else:
            load_tensors(checkpoint, model, weights=weights)
    if merge:
        if not hasattr(task, "merge"):
            raise ValueError(
                "--merged: the run trained no adapters; its weights are whole as they are"
            )
        rounded(model, base_dtype)
        model = task.merge(model)
    write_final(folder, model, task, about=about)


def _reject_both(folder: Path, *, adapters: bool) -> None:
    """Raise ValueError if the folder would hold both adapters and a whole model."""
    other = "config.json" if adapters else "adapter_config.json"
    if (folder / other).exists():
        one, there = ("adapters", "a whole model") if adapters else ("a whole model", "adapters")
        raise ValueError(
            f"--to {folder} holds {there}, and {one} would be read together with it; use "
            "another folder"
        )


def reject_other_origin(folder: Path, origin: BaseModel | None) -> None:
    """Raise ValueError if a checkpoint, or ``final/``, was trained on another base model than
    ``origin``."""
    there = (
        read_manifest(folder)["about"].get("base")
        if folder.name == FINAL
        else base_model_of(folder)
    )
    if (origin is None) != (there is None):
        raise ValueError(
            f"{folder} is of another model: only one of the two has a separate base model"
        )
    if origin is not None and (other := origin.difference(there or {})):
        raise ValueError(
            f"{folder} needs the base model {other}; restore it at the path in task.model"
        )


def load_task_state(task: Task, folder: Path) -> None:
    """Restore the task's state from a checkpoint, or from ``final/``, if it was saved."""
    if not hasattr(task, "load_state_dict"):
        return
    file = folder / f"{TASK}.json"
    if file.is_file():
        task.load_state_dict(json.loads(file.read_text()))
    elif (folder / "state.json").is_file() and TASK in (
        state := json.loads((folder / "state.json").read_text())
    ):
        task.load_state_dict(state[TASK])


def _as_saved(model: nn.Module, checkpoint: Path) -> None:
    """Convert floating-point tensors to the dtypes in the checkpoint (machine.dtype,
    machine.base_dtype)."""
    saved = {name: kind for name, (kind, _) in read_manifest(checkpoint).get("tensors", {}).items()}
    if (base := base_of(checkpoint)) and base_model_of(checkpoint) is None:
        saved |= _types_of(base[0] / FILE)
    _in_types(
        model,
        {
            name.removeprefix("model."): kind
            for name, kind in saved.items()
            if name.startswith("model.")
        },
    )


def _types_of(file: Path) -> dict[str, str]:
    return {name: about["dtype"] for name, about in header(file).items() if name != "__metadata__"}


def _in_types(model: nn.Module, saved: Mapping[str, str], origin: BaseModel | None = None) -> None:
    if origin is not None:
        saved = {
            name: saved.get(origin.outside(name), "")
            for name in model.state_dict()
            if name not in origin.names
        }
    kinds = {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
    }
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and saved.get(name) in kinds:
            tensor.data = tensor.data.to(kinds[saved[name]])


@torch.no_grad()
def _mix(checkpoint: Path, model: nn.Module, wanted: str) -> None:
    try:
        sigma_rel = float(wanted.removeprefix("power:"))
        gamma(sigma_rel)
    except ValueError as error:
        raise ValueError(f"--weights {wanted}: {error}") from error
    saved: list[tuple[Path, str, float, float]] = []
    for folder in (
        other for other in Store(checkpoint.parent).sealed() if other.name <= checkpoint.name
    ):
        complete(folder)
        if problems(folder):
            continue
        state = json.loads((folder / "state.json").read_text())
        for name, part in state.items():
            if name.startswith("ema-power-") and part["seen"] > 0:
                saved.append((folder, name, part["seen"], float(name.removeprefix("ema-power-"))))
    if not saved:
        raise ValueError(
            f"--weights {wanted}: no power-function EMA is saved; train with --ema.power [0.05,0.1]"
        )
    last = max(seen for *_, seen, _ in saved)
    factors = post_hoc([(seen, sigma) for *_, seen, sigma in saved], (last, sigma_rel))
    wide = {False: torch.float64, True: torch.complex128}
    available = set.intersection(*({*read_manifest(folder)["tensors"]} for folder, *_ in saved))
    held = {
        name: parameter
        for name, parameter in model.named_parameters()
        if all(f"ema.{average}.{name}" in available for _, average, *_ in saved)
    }
    total = {
        name: torch.zeros_like(held[name], dtype=wide[held[name].is_complex()]) for name in held
    }
    for (folder, average, _, _), factor in zip(saved, factors, strict=True):
        load_tensors(folder, model, weights=average)
        for name, parameter in held.items():
            total[name] += factor * parameter
    load_tensors(checkpoint, model)  # buffers and frozen parameters
    for name, parameter in held.items():
        parameter.copy_(total[name])


_REPLACED = (".safetensors", ".json", ".jinja", "recipe.yaml")
"""suffixes of files from an earlier push, which a push replaces"""


def write_card(run: Path, folder: Path, name: str, *, licence: str | None = None) -> str:
    """Write the model card of an export to its README.md; return it."""
    config, adapters = folder / "config.json", folder / "adapter_config.json"
    loadable = adapters.is_file() or (config.is_file() and b'"model_type"' in config.read_bytes())
    card = model_card(
        run, name, read_manifest(folder)["about"], licence=licence, language_model=loadable
    )
    (folder / "README.md").write_text(card)
    return card


def check_push(name: str) -> None:
    """Raise BadInput if there is no token for the hub, or if ``name`` cannot be the name of a
    repository."""
    from huggingface_hub import get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise BadInput(f"--push {name!r} is not a repository name (ORG/NAME): {error}") from error
    if not get_token():
        raise BadInput(
            f"--push {name} needs a token that may write to the hub: hf auth login, or HF_TOKEN=…"
        )


def push(run: Path, folder: Path, name: str, *, licence: str | None, public: bool) -> str:
    """Commit what ``oneloop export`` wrote to ``folder`` to the repository ORG/NAME, which is
    created if it is missing.

    Return a line with the commit's address. Raise BadInput if the hub rejects the push, or cannot
    be reached."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    manifest = read_manifest(folder)
    card = write_card(run, folder, name, licence=licence)
    files: dict[str, Any] = {file: folder / file for file in (*manifest["files"], MANIFEST)}
    files |= {"README.md": card.encode(), "recipe.yaml": run / "recipe.yaml"}
    api = HfApi()
    with _hub_errors(name):
        api.create_repo(name, private=not public, exist_ok=True)
        there = api.list_repo_files(name)
        stale = [
            file
            for file in there
            if file.endswith(_REPLACED) and "/" not in file and file not in files
        ]
        operations: list[Any] = [CommitOperationDelete(file) for file in stale]
        operations += [CommitOperationAdd(file, content) for file, content in files.items()]
        about = manifest["about"]
        what = about.get("checkpoint") or f"step {about.get('step')}"
        what += "" if about.get("weights") in ("raw", None) else f", {about['weights']}"
        done = api.create_commit(name, operations, commit_message=f"oneloop: {run.name}, {what}")
    return f"{name}: {done.commit_url}"


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError

    # the HTTP library's error class, which differs between versions
    base_error: Any = HfHubHTTPError.__bases__[0]

    try:
        yield
    except HfHubHTTPError as error:
        raise BadInput(f"--push {name}: the hub rejects it: {_first(error)}") from error
    except (base_error, OSError) as error:
        raise BadInput(f"--push {name}: the hub cannot be reached: {_first(error)}") from error


def _first(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
