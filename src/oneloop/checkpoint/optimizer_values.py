"""The state of optimizers that is not tensors: by parameter, and by parameter group."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from xxhash import xxh3_64_hexdigest

from oneloop.basics.tensors import Optimizers, groups_of, kinds_of, optimized, optimizers_of
from oneloop.basics.untrusted import check_kind

_COMPUTED = ("fused", "foreach", "capturable", "differentiable")
"""settings of a group that only say how an update is computed; they may change with the machine"""


def optimizer_values(
    model: nn.Module, optimizer: Optimizers, *, complete: bool = True
) -> dict[str, Any]:
    """Return the state of optimizers that is not tensors.

    It has entries by parameter, and those of groups.

    Args:
        model: bare or wrapped, or several as one (:func:`oneloop.basics.tensors.together`).
        optimizer: of its parameters, or several by name.
        complete: with the settings of the groups, such as the learning rate; False: only with
            entries that the constructor did not get.

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
    for one, group in groups_of(optimizer):
        without = {"params", *(_COMPUTED if complete else one.defaults)}
        own = {key: _plain(value) for key, value in group.items() if key not in without}
        for key, value in own.items():
            _check_plain(value, key, one)
        groups.append(own)
    values = {"parameters": parameters, "groups": groups}
    if complete:
        values |= {"kinds": kinds_of(optimizer), "members": members_of(model, optimizer)}
    return values


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
            "a checkpoint can store only tensors of a parameter, numbers and texts: use another "
            "optimizer"
        )
    for one in inside:
        _check_plain(one, key, optimizer)


def _plain(value: Any) -> Any:
    """Return the number of a learning rate that is a tensor; any other value unchanged."""
    return value.item() if isinstance(value, Tensor) else value


def load_values(
    values: Mapping[str, Any], model: nn.Module, optimizer: Optimizers, *, complete: bool = True
) -> None:
    """Restore the result of :func:`optimizer_values`.

    Args:
        values: the result.
        model: as there.
        optimizer: as there.
        complete: also restore the settings of the groups, if they were saved.
    """
    for name, parameter, _, one in optimized(model, optimizer):
        one.state[parameter].update(values["parameters"].get(name, {}))
        if not one.state[parameter]:
            del one.state[parameter]
    for (one, group), given in zip(groups_of(optimizer), values["groups"], strict=True):
        for name, value in given.items():
            if name in one.defaults and not complete:
                continue
            known = group.get(name)
            check_kind(value, known, f"the optimizer's {name}")
            if isinstance(known, Tensor):
                known.fill_(value)
            else:
                group[name] = tuple(value) if isinstance(known, tuple) else value
