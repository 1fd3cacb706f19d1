"""What a parameter is called, whatever has been put around its module."""

from __future__ import annotations

_INSERTED = ("_orig_mod.", "_checkpoint_wrapped_module.")


def bare_name(name: str) -> str:
    """A parameter's name without what DDP, torch.compile and recompute put into it."""
    name = name.removeprefix("module.")
    for inserted in _INSERTED:
        name = name.replace(inserted, "")
    return name
