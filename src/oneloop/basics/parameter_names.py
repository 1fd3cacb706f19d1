"""Names of parameters without wrapper prefixes, and patterns that match them."""

from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase

from torch import nn

_INSERTED = ("_orig_mod.", "_checkpoint_wrapped_module.")


def bare_name(name: str) -> str:
    """Return a parameter's name without the prefixes of wrappers.

    These are DDP, torch.compile and activation checkpointing.
    """
    name = name.removeprefix("module.")
    for inserted in _INSERTED:
        name = name.replace(inserted, "")
    return name


def aliases(model: nn.Module) -> Iterator[list[str]]:
    """Yield the names of each parameter or buffer in the model's state; tied ones have several."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    yield from names.values()


def tied_to(model: nn.Module, known: Collection[str]) -> set[str]:
    """Return the names of parameters and buffers that have one of these names, too."""
    tied = set[str]()
    for names in aliases(model):
        if any(name in known for name in names):
            tied.update(names)
    return tied


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a parameter's name, or the start of it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
