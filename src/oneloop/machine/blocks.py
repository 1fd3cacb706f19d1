"""Find a model's blocks and BatchNorm, which decide how it can be run."""

from collections import Counter
from collections.abc import Sequence

from torch import nn


def blocks(model: nn.Module, names: Sequence[str] = ()) -> list[nn.Module]:
    """Return the model's outermost blocks, in order.

    Args:
        model: not yet sharded.
        names: classes of the blocks. None given: the ``_no_split_modules`` of transformers, else
            the classes of which a ``ModuleList`` or ``Sequential`` holds several that have layers.

    Raises:
        ValueError: a named class is missing.
    """
    # Choose the classes.
    classes = set(names)
    present = {type(module).__name__ for module in model.modules()}
    if strange := sorted(classes - present):
        known = ", ".join(sorted(present))
        raise ValueError(
            f"machine.blocks {', '.join(strange)}: not in {type(model).__name__}; it has {known}"
        )
    if not classes:
        for module in model.modules():
            classes.update(getattr(module, "_no_split_modules", None) or ())
        classes &= present
    if not classes:
        classes = _repeated(model)

    # Leave out blocks inside blocks.
    chosen: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if type(module).__name__ in classes and module not in inside:
            chosen.append(module)
            inside.update(module.modules())
    return chosen


def class_names(modules: Sequence[nn.Module]) -> list[str]:
    """Return the class names of these blocks, without duplicates, sorted."""
    return sorted({type(module).__name__ for module in modules})


def _repeated(model: nn.Module) -> set[str]:
    """Return the classes of which a container holds several that have layers and parameters."""
    classes: set[str] = set()
    for container in model.modules():
        if isinstance(container, nn.ModuleList | nn.Sequential):
            counted = Counter[str]()
            for child in container.children():
                has_layers = next(child.children(), None) is not None
                if has_layers and next(child.parameters(), None) is not None:
                    counted[type(child).__name__] += 1
            classes |= {name for name, count in counted.items() if count > 1}
    return classes - {"Sequential", "ModuleList"}


BATCH_STATISTICS = (nn.modules.batchnorm._BatchNorm,)


def has_batch_statistics(model: nn.Module) -> bool:
    """Return whether the model has BatchNorm layers that are not in eval mode."""
    return any(
        isinstance(module, BATCH_STATISTICS) and module.training for module in model.modules()
    )


def statistics_of(model: nn.Module) -> set[str]:
    """Return the names of BatchNorm's buffers, "buffer norm.running_mean", ….

    A forward in training changes them, and does not read them. Layers in eval mode are left out.
    """
    names = set()
    for prefix, module in model.named_modules():
        if isinstance(module, BATCH_STATISTICS) and module.training:
            names |= {f"buffer {prefix}.{name}" for name, _ in module.named_buffers()}
    return names
