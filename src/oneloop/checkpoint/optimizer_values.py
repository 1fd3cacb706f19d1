"""The state of optimizers that is not tensors of a parameter: by parameter, by parameter group, and
what an optimizer adds to its ``state_dict()``."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from xxhash import xxh3_64_hexdigest

from oneloop.basics.tensors import (
    Optimizers,
    groups_of,
    kinds_of,
    optimized,
    optimizers_of,
    plain_optimizer,
)
from oneloop.basics.untrusted import as_expected, check_kind
from oneloop.checkpoint.pieces import NAMES
from oneloop.checkpoint.saved_state import decoded, encoded

_COMPUTED = ("fused", "foreach", "capturable", "differentiable")
"""settings of a group that only say how an update is computed; they may change with the machine"""
_MOST_ELEMENTS = 1 << 16  # of a tensor in a JSON file
_TENSOR = {"dtype", "shape", "on_host", "values"}  # entries of a tensor in a JSON file
Settings = Sequence[Mapping[str, Any]]
"""the entries of each parameter group that come from a recipe, which a checkpoint leaves out"""


def settings_of(optimizer: Optimizers, scheduled: Collection[str]) -> Settings:
    """Return what the parameter groups contain after construction, without their parameters.

    Args:
        optimizer: one, or several by name.
        scheduled: names of entries that a loop sets before each step: their value does not matter.
    """
    settings = []
    for _, group in groups_of(optimizer):
        own = tree_map(_as_plain, {**group, "params": None})
        settings.append(own | dict.fromkeys(scheduled, ...))
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
    known = set()
    for name, parameter, _, one in optimized(model, optimizer):
        known.add(parameter)
        state = one.state.get(parameter, {})
        if state and not complete and not parameter.requires_grad:
            raise ValueError(
                f"an optimizer has updated {name}, which now has requires_grad False; a checkpoint "
                "stores such parameters only once, so set requires_grad to True before each save"
            )
        values = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        for key, value in values.items():
            _check_plain(value, key, one)
        if values:
            parameters[name] = values
    for _, one in optimizers_of(optimizer):
        for key in one.state:
            if key not in known:
                raise ValueError(
                    f"the state of {type(one).__name__} has the entry {key!r:.40}, which is not a "
                    "parameter, so a checkpoint cannot store it; use another optimizer"
                )

    groups = []
    for number, (one, group) in enumerate(groups_of(optimizer)):
        known_settings = settings[number] if settings is not None else {}
        own = tree_map(_as_plain, {**group, "params": None})
        for key, value in [*own.items()]:
            is_setting = key in known_settings and known_settings[key] in (..., value)
            if key == "params" or key in _COMPUTED or is_setting:
                del own[key]
            else:
                _check_plain(value, key, one)
        groups.append(own)
    values = {"parameters": parameters, "groups": groups, "own": own_values(optimizer)}
    if settings is None:
        values |= {"kinds": kinds_of(optimizer), "members": members_of(model, optimizer)}
    return values


def own_values(optimizer: Optimizers) -> dict[str, Any]:
    """Return what each optimizer adds to torch's entries of ``state_dict()``, as plain values.

    Raise ValueError if it contains anything but numbers, texts, lists, dicts and tensors.
    """
    found = {}
    for name, one in optimizers_of(optimizer):
        state = one.state_dict()
        own = {key: state[key] for key in state.keys() - {"state", "param_groups"}}
        plain = tree_map(_as_plain, own)
        for key, value in plain.items():
            _check_plain(value, key, one)
        if plain:
            found[name] = encoded(plain)
    return found


def load_own(values: Mapping[str, Any], model: nn.Module, optimizer: Optimizers) -> None:
    """Restore what :func:`optimizer_values` got from ``state_dict()``, by ``load_state_dict()``.

    This deletes the state of the parameters, which must be restored afterwards.
    """
    for name, one in optimizers_of(optimizer):
        own = values["own"].get(name)
        if own:
            restored = _with_tensors(decoded(own), next(model.parameters()).device)
            plain_optimizer(one).load_state_dict({**one.state_dict(), "state": {}, **restored})


def _as_plain(value: Any) -> Any:
    """Return a small tensor as numbers with what restores it; any other value unchanged."""
    is_small = isinstance(value, Tensor) and value.numel() <= _MOST_ELEMENTS
    if not is_small or isinstance(value, DTensor):
        return value
    return {
        "dtype": NAMES[value.dtype],
        "shape": list(value.shape),
        "on_host": value.device.type == "cpu",
        "values": value.flatten().tolist(),
    }


def _with_tensors(value: Any, device: torch.device) -> Any:
    """Return what :func:`_as_plain` got; its tensors are on the host, or on this device."""
    if isinstance(value, list):
        return [_with_tensors(inside, device) for inside in value]
    if not isinstance(value, Mapping):
        return value
    if value.keys() != _TENSOR:
        return {key: _with_tensors(inside, device) for key, inside in value.items()}
    kinds = {name: kind for kind, name in NAMES.items()}
    with as_expected("a tensor of an optimizer's own state"):
        flat = torch.tensor(
            value["values"],
            dtype=kinds[value["dtype"]],
            device="cpu" if value["on_host"] else device,
        )
        return flat.reshape(value["shape"])


def members_of(model: nn.Module, optimizer: Optimizers) -> list[str]:
    """Return for each parameter group a hash of its parameters' names, in any order."""
    names: dict[int, list[str]] = {}
    for name, _, group, _ in optimized(model, optimizer):
        names.setdefault(id(group), []).append(name)
    hashes = []
    for _, group in groups_of(optimizer):
        own = sorted(names.get(id(group), []))
        hashes.append(xxh3_64_hexdigest("\n".join(own).encode()))
    return hashes


def _check_plain(value: Any, key: str, optimizer: Optimizer) -> None:
    """Raise ValueError unless this consists of numbers and texts, which a JSON file holds."""
    inside: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inside = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple):
        inside = value
    elif value is not None and not isinstance(value, int | float | str):
        raise ValueError(
            f"{type(optimizer).__name__} keeps {key}, which contains a {type(value).__name__}; "
            "a checkpoint can store only tensors of a parameter, numbers, texts and tensors of at "
            f"most {_MOST_ELEMENTS:,} elements: use another optimizer"
        )
    for one in inside:
        _check_plain(one, key, optimizer)


def load_values(values: Mapping[str, Any], model: nn.Module, optimizer: Optimizers) -> None:
    """Restore the values by parameter and by group of :func:`optimizer_values`.

    Args:
        values: the result.
        model: as there.
        optimizer: as there.
    """
    for name, parameter, _, one in optimized(model, optimizer):
        one.state[parameter].update(values["parameters"].get(name, {}))
        if not one.state[parameter]:
            del one.state[parameter]
    device = next(model.parameters()).device
    for (_, group), given in zip(groups_of(optimizer), values["groups"], strict=True):
        for name, value in _with_tensors(given, device).items():
            known = group.get(name)
            check_kind(value, known, f"the optimizer's {name}")
            if isinstance(known, Tensor):
                known.copy_(value)
            else:
                group[name] = tuple(value) if isinstance(known, tuple) else value
