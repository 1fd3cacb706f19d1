"""Find a model's blocks, dropout and BatchNorm, which decide how it can be run."""

from collections import Counter
from collections.abc import Sequence

from torch import nn


def blocks(model: nn.Module, names: Sequence[str] = ()) -> list[nn.Module]:
    """Return the model's outermost blocks, in order.

    Blocks are the classes in ``names``; else the ``_no_split_modules`` of transformers; else the
    classes of which a ``ModuleList`` or ``Sequential`` holds several that have layers. Raise
    ValueError if a named class is missing."""
    classes = set(names)
    present = {type(module).__name__ for module in model.modules()}
    if strange := sorted(classes - present):
        known = ", ".join(sorted(present))
        raise ValueError(
            f"machine.blocks {', '.join(strange)}: not in {type(model).__name__}; it has {known}"
        )
    if not classes:
        marked = [getattr(module, "_no_split_modules", None) or () for module in model.modules()]
        classes = {name for several in marked for name in several} & present
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
    """Return the class names of these blocks, without duplicates, sorted."""
    return sorted({_class_name(module) for module in modules})


def _class_name(module: nn.Module) -> str:
    # fully_shard replaces the class of a module by a subclass
    return type(module).__name__.removeprefix("FSDP")


def _repeated(model: nn.Module) -> set[str]:
    classes: set[str] = set()
    for container in model.modules():
        if isinstance(container, nn.ModuleList | nn.Sequential):
            layers = [
                child for child in container.children() if any(True for _ in child.children())
            ]
            counted = Counter(
                type(child).__name__ for child in layers if any(True for _ in child.parameters())
            )
            classes |= {
                name
                for name in counted
                if counted[name] > 1 and name not in ("Sequential", "ModuleList")
            }
    return classes


_BATCH_STATISTICS = (nn.modules.batchnorm._BatchNorm,)
DROPOUT = (nn.modules.dropout._DropoutNd,)


def has_batch_statistics(model: nn.Module) -> bool:
    """Return whether the model has BatchNorm layers that are not in eval mode."""
    return any(
        isinstance(module, _BATCH_STATISTICS) and module.training for module in model.modules()
    )


def has_dropout(model: nn.Module) -> bool:
    """Return whether the model has dropout: a dropout layer, or a rate of attention dropout in its
    config."""
    config = getattr(model, "config", None)
    rates = [
        getattr(config, name, 0.0)
        for name in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    ]
    return any(isinstance(m, DROPOUT) and m.p > 0 for m in model.modules()) or any(
        rate for rate in rates if rate
    )
