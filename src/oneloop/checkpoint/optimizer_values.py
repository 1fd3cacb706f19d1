"""The state of optimizers that is not tensors of a parameter: by parameter, by parameter group, and
what an optimizer adds to its ``state_dict()``."""

import json
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map, tree_map_with_path
from xxhash import xxh3_64_hexdigest

from oneloop.basics.content_hash import content_hash
from oneloop.basics.optimizer_tensors import OWN, is_plain_tensor, own_name, own_state
from oneloop.basics.tensors import (
    Optimizers,
    as_real,
    groups_of,
    kinds_of,
    of_shape,
    optimized,
    optimizers_of,
    plain_optimizer,
)
from oneloop.basics.untrusted import damaged

_COMPUTED = ("fused", "foreach", "capturable", "differentiable")
"""settings of a group that only say how an update is computed; they may change with the machine"""
_PAIRS = "keys that are not texts"
_TENSOR = {"tensor", "on_host"}  # entries in place of a tensor: its name in the checkpoint
Settings = Sequence[Mapping[str, Any]]
"""hashes of the entries of each parameter group that come from a recipe, which a checkpoint leaves
out"""


def settings_of(optimizer: Optimizers, scheduled: Collection[str]) -> Settings:
    """Return hashes of what the parameter groups contain after construction, but for parameters.

    Args:
        optimizer: one, or several by name.
        scheduled: names of entries that a loop sets before each step: their value does not matter.
    """
    settings = []
    for _, group in groups_of(optimizer):
        hashes = {key: content_hash(value) for key, value in group.items() if key != "params"}
        settings.append(hashes | dict.fromkeys(scheduled, ...))
    return settings


def optimizer_values(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    complete: bool = True,
    settings: Settings | None = None,
) -> dict[str, Any]:
    """Return the state of optimizers that is not tensors of a parameter.

    It has entries by parameter, those of groups, and what ``state_dict()`` contains in addition.

    Args:
        model: bare or wrapped, or several as one (:func:`oneloop.basics.tensors.together`).
        optimizer: of its parameters, or several by name.
        complete: whether frozen parameters are saved each time.
        settings: only entries of groups that differ from these (:func:`settings_of`) are state;
            None: all entries, such as the learning rate.

    Raises:
        ValueError: an optimizer has state that cannot be saved. Or without ``complete``, it has
            updated a parameter that is frozen now: a checkpoint would refer to earlier values.
    """
    parameters = {}
    for name, parameter, _, one in optimized(model, optimizer):
        state = one.state.get(parameter, {})
        if state and not complete and not parameter.requires_grad:
            raise ValueError(
                f"an optimizer has updated {name}, which now has requires_grad False; a checkpoint "
                "stores such parameters only once, so set requires_grad to True before each save"
            )
        values = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        if values:
            _check_plain(values, one)
            parameters[name] = values

    # Replace tensors that belong to no parameter by their names.
    groups: list[dict[str, Any]] = []
    own = {}
    for owner, one in optimizers_of(optimizer):
        plain = tree_map_with_path(partial(_named, owner), own_state(one))
        for group, named in zip(one.param_groups, plain["groups"], strict=True):
            known_settings = settings[len(groups)] if settings is not None else {}
            entries = {}
            for key, value in named.items():
                is_known = key == "params" or key in _COMPUTED
                if not is_known and key in known_settings:
                    is_known = known_settings[key] in (..., content_hash(group[key]))
                if not is_known:
                    entries[key] = value
            _check_plain(entries, one)
            groups.append(entries)
        if plain["own"]:
            _check_plain(plain["own"], one)
            own[owner] = encoded(plain["own"])
    lines = kinds_of(optimizer)
    if settings is None or any(groups):
        lines = groups_in(model, optimizer)
    return {"parameters": parameters, "groups": groups, "own": own, "optimizers": lines}


def _named(owner: str, path: Any, value: Any) -> Any:
    """Return what stands in a JSON file for a value of an optimizer's own state."""
    if not is_plain_tensor(value):
        return value
    return {"tensor": own_name(owner, path), "on_host": value.device.type == "cpu"}


def groups_in(model: nn.Module, optimizer: Optimizers) -> list[str]:
    """Return for each parameter group its optimizer, and a hash of its parameters' names."""
    names: dict[int, list[str]] = {}
    for name, _, group, _ in optimized(model, optimizer):
        names.setdefault(id(group), []).append(name)
    lines = []
    for one, group in groups_of(optimizer):
        own = "\n".join(sorted(names.get(id(group), [])))
        lines.append(f"{type(plain_optimizer(one)).__name__} {xxh3_64_hexdigest(own.encode())}")
    return lines


def _check_plain(values: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Raise ValueError unless these consist of numbers and texts, which a JSON file holds."""
    for key, value in values.items():
        try:
            json.dumps(encoded(value))
        except TypeError as error:
            raise ValueError(
                f"{type(optimizer).__name__} keeps {key}, which a checkpoint cannot store "
                f"({error}); it can store only tensors of a parameter, numbers and texts: use "
                "another optimizer"
            ) from None


def load_values(
    values: Mapping[str, Any],
    model: nn.Module,
    optimizer: Optimizers,
    tensors: Mapping[str, Tensor],
) -> None:
    """Restore the result of :func:`optimizer_values`.

    Args:
        values: the result.
        model: as there.
        optimizer: as there, with its tensors by parameter.
        tensors: the result of :func:`optimizer_targets`.
    """
    # Let each optimizer take what it has added to its state_dict(), and keep its tensors: torch
    # would change their dtypes.
    device = next(model.parameters()).device
    for owner, one in optimizers_of(optimizer):
        own = values["own"].get(owner)
        if own:
            inner = plain_optimizer(one)
            state = dict(inner.state)
            restored = _filled(decoded(own), tensors, device)
            inner.load_state_dict({**inner.state_dict(), "state": {}, **restored})
            inner.state.update(state)

    # Restore the other state of parameters, and that of groups.
    for name, parameter, _, one in optimized(model, optimizer):
        one.state[parameter].update(values["parameters"].get(name, {}))
        if not one.state[parameter]:
            del one.state[parameter]
    for (_, group), given in zip(groups_of(optimizer), values["groups"], strict=False):
        for name, value in _filled(given, tensors, device).items():
            known = group.get(name)
            if isinstance(known, Tensor):
                known.copy_(value)
            elif isinstance(known, tuple | float) and value is not None:
                group[name] = type(known)(value)
            else:
                group[name] = value


def _filled(value: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    """Return a value with tensors in place of their names."""

    def is_name(inside: Any) -> bool:
        return isinstance(inside, Mapping) and inside.keys() == _TENSOR

    def fill(inside: Any) -> Any:
        if not is_name(inside):
            return inside
        tensor = tensors[inside["tensor"]]
        return tensor if inside["on_host"] else tensor.to(device)

    return tree_map(fill, value, is_leaf=is_name)


def optimizer_targets(
    model: nn.Module, optimizer: Optimizers, saved: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the tensors of the state of optimizers by their saved names.

    Create those that only the checkpoint has; delete those that it does not have. Those that belong
    to no parameter are new, and on the host.
    """
    targets = {}
    states: dict[str, list[str]] = {}  # keys of the saved state by parameter
    for name, about in saved.items():
        if name.startswith(OWN):
            targets[name] = torch.empty(about.size, dtype=about.properties.dtype)
        prefix, _, key = name.rpartition(".")
        states.setdefault(prefix, []).append(key)
    for name, parameter, group, one in optimized(model, optimizer):
        prefix = f"optimizer.{name}"
        keys = states.get(prefix, [])
        known = one.state[parameter]
        for key, value in list(known.items()):
            if isinstance(value, Tensor) and key not in keys:
                del known[key]
        for key in keys:
            entry = f"{prefix}.{key}"
            if key not in known:
                known[key] = _empty_entry(saved[entry], parameter, key, group)
            targets[entry] = of_shape(as_real(known[key]), saved[entry].size)
    return targets


def _empty_entry(saved: Any, parameter: Tensor, key: str, group: Mapping[str, Any]) -> Tensor:
    """Return zeros for an entry of the optimizer state, on the device that it would choose."""
    kind = saved.properties.dtype
    size = tuple(saved.size)
    if key != "step" and size == tuple(of_shape(as_real(parameter.detach()), size).shape):
        return torch.zeros_like(parameter, dtype=None if parameter.is_complex() else kind)
    # Most optimizers keep the step on the host, so that they need no host sync.
    on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
    return torch.zeros(size, dtype=kind, device="cpu" if on_host else parameter.device)


def encoded(value: Any) -> Any:
    """Return plain values in a form that keeps keys that are not texts in a JSON file."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: encoded(inside) for key, inside in value.items()}
        return {_PAIRS: [[key, encoded(inside)] for key, inside in value.items()]}
    if isinstance(value, list | tuple):
        return [encoded(inside) for inside in value]
    return value


@damaged("the saved state")
def decoded(value: Any) -> Any:
    """Return the values that :func:`encoded` got; tuples are lists."""
    if isinstance(value, Mapping):
        if value.keys() == {_PAIRS}:
            return {key: decoded(inside) for key, inside in value[_PAIRS]}
        return {key: decoded(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [decoded(inside) for inside in value]
    return value
