"""The blocks of a model: the repeated layers that are recomputed, compiled and sharded one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn


def blocks(model: nn.Module, names: Sequence[str] = ()) -> list[nn.Module]:
    """Return the model's outermost blocks, in order.

    Blocks are the classes in ``names``; else the ``_no_split_modules`` of transformers; else the classes of which a
    ``ModuleList`` or ``Sequential`` holds several that have layers. Raises ValueError if a named class is missing.
    """
    classes = set(names)
    present = {type(module).__name__ for module in model.modules()}
    if strange := sorted(classes - present):
        raise ValueError(
            f"machine.blocks {', '.join(strange)}: no such class in {type(model).__name__}; it has"
            f" {', '.join(sorted(present))}"
        )
    if not classes:
        said = [getattr(module, "_no_split_modules", None) or () for module in model.modules()]
        classes = {name for several in said for name in several} & present
    if not classes:
        classes = _repeated(model)
    chosen: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if _class_name(module) in classes and module not in inside:
            chosen.append(module)
            inside.update(module.modules())
    return chosen


def class_names(modules: Sequence[nn.Module]) -> list[str]:
    """The class names of these blocks, each once."""
    return sorted({_class_name(module) for module in modules})


def _class_name(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("FSDP")  # fully_shard gives a module a class of its own


def _repeated(model: nn.Module) -> set[str]:
    classes: set[str] = set()
    for container in model.modules():
        if isinstance(container, nn.ModuleList | nn.Sequential):
            layers = [child for child in container.children() if any(True for _ in child.children())]
            counted = Counter(type(child).__name__ for child in layers if any(True for _ in child.parameters()))
            classes |= {
                name for name, count in counted.items() if count > 1 and name not in ("Sequential", "ModuleList")
            }
    return classes
