"""What a parameter is called, whatever has been put around its module, and which patterns take it."""

from fnmatch import fnmatchcase

_INSERTED = ("_orig_mod.", "_checkpoint_wrapped_module.")


def bare_name(name: str) -> str:
    """A parameter's name without what DDP, torch.compile and recompute put into it."""
    name = name.removeprefix("module.")
    for inserted in _INSERTED:
        name = name.replace(inserted, "")
    return name


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern takes the parameter of this name."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
