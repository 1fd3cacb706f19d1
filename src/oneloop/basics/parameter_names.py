"""Names of parameters without wrapper prefixes, and patterns that match them."""

from fnmatch import fnmatchcase

_INSERTED = ("_orig_mod.", "_checkpoint_wrapped_module.")


def bare_name(name: str) -> str:
    """Return a parameter's name without the prefixes of wrappers.

    These are DDP, torch.compile and activation checkpointing.
    """
    name = name.removeprefix("module.")
    for inserted in _INSERTED:
        name = name.replace(inserted, "")
    return name


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a parameter's name, or the start of it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
