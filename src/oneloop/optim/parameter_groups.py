"""Settings of parameters by name patterns: frozen, another learning rate, or another weight decay.

A pattern is a parameter's dotted name or the start of one (``backbone``,
``backbone.layer1.conv.weight``). ``*`` matches any text, ``?`` one character and ``[0-5]`` one of
several characters (``*.bias``, ``encoder.[0-5]``). The pattern ``*`` gives defaults, which any
other pattern overrides.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from oneloop.basics.parameter_names import matches

LR_FACTOR = "lr_factor"  # key of a parameter group: its factor of the learning rate
_EVERY = "*"  # the pattern of defaults
Groups = list[dict[str, Any]]
Settings = Mapping[str, Mapping[str, Any]]
"""settings by parameter or by pattern: ``freeze``, ``lr_factor``, ``weight_decay``"""


def chosen(
    model: nn.Module, rules: Settings
) -> tuple[dict[str, dict[str, Any]], dict[str, list[str]]]:
    """Return which settings each parameter gets, and which parameters each pattern names.

    Args:
        model: not yet wrapped.
        rules: settings by pattern.

    Returns:
        settings by name of a parameter, and names by pattern. Tied parameters have their first
        name.

    Raises:
        ValueError: a pattern matches no parameter, or two patterns other than ``*`` that match one
            parameter disagree.
    """
    # Pair each name, also of tied parameters, with the parameter's first name.
    first: dict[int, str] = {}  # by id of a parameter
    every = model.named_parameters(remove_duplicate=False)
    names = [(name, first.setdefault(id(parameter), name)) for name, parameter in every]

    # Merge the settings of all patterns, last of all the defaults.
    found: dict[str, dict[str, Any]] = {}
    taken: dict[str, list[str]] = {}
    for pattern in sorted(rules, key=_EVERY.__eq__):
        taken[pattern] = list(dict.fromkeys(own for name, own in names if matches(pattern, name)))
        if not taken[pattern]:
            parts = dict.fromkeys(".".join(name.split(".")[:2]) for name in first.values())
            raise ValueError(
                f"optimizer.groups: the pattern {pattern!r} matches no parameter; the model "
                f"has {', '.join([*parts][:12])}"
            )
        for name in taken[pattern]:
            own = found.setdefault(name, {})
            for key, value in rules[pattern].items():
                if own.setdefault(key, value) != value and pattern != _EVERY:
                    raise ValueError(
                        f"optimizer.groups: {pattern!r} and an earlier pattern both take {name}, "
                        f"and disagree on {key} ({value} and {own[key]}); narrow one of them"
                    )
    return found, taken


def freeze(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Freeze these parameters.

    Modules whose parameters are all frozen are set to eval mode, so that their buffers do not
    change and their dropout is off. (Training and evaluation keep the mode of each module.)

    Args:
        model: not yet wrapped.
        names: of parameters.

    Returns:
        The modules with dropout or batch statistics whose mode has changed to eval, by name and
        class.
    """
    frozen = set(names)
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    changed = []
    for path, module in model.named_modules():
        parameters = list(module.parameters())
        if not parameters or any(parameter.requires_grad for parameter in parameters):
            continue

        # Report modules that compute something else in eval mode.
        for name, inner in module.named_modules(prefix=path):
            statistics = isinstance(inner, _NormBase) and inner.track_running_stats
            dropout = isinstance(inner, _DropoutNd) and inner.p > 0
            if inner.training and (statistics or dropout):
                changed.append(f"{name} ({type(inner).__name__})")
        module.eval()
    return changed


def layer_decay(model: nn.Module, blocks: Sequence[nn.Module], decay: float) -> dict[str, float]:
    """Return layer-wise learning-rate factors by parameter name.

    They are ``decay ** (n + 1 - depth)`` for n blocks. Depth, in the model's order: 0 before the
    first block (embeddings, stem), the number of the block inside or after a block, and n + 1 after
    the last block (final norm, head). (Clark et al. 2020, ELECTRA; Bao et al. 2022, BEiT.)

    Args:
        model: not yet wrapped.
        blocks: its repeated blocks, in order.
        decay: factor between two blocks.

    Raises:
        ValueError: there are no blocks.
    """
    if not blocks:
        raise ValueError(
            f"optimizer.layer_decay {decay}: {type(model).__name__} has no repeated blocks; set "
            "machine.blocks, or optimizer.groups"
        )
    # Find the parameters of the blocks.
    inside: dict[int, int] = {}  # depth by id of a parameter
    for number, block in enumerate(blocks, 1):
        for parameter in block.parameters():
            inside[id(parameter)] = number

    # Walk through the model. Other parameters belong to the block before them.
    factors: dict[str, float] = {}
    depth = 0
    for name, parameter in model.named_parameters():
        if id(parameter) in inside:
            depth = inside[id(parameter)]
        elif depth == len(blocks):
            depth += 1
        factors[name] = decay ** (len(blocks) + 1 - depth)
    return factors


def parameter_groups(
    parameters: Iterable[tuple[str, Tensor]],
    weight_decay: float,
    *,
    settings: Settings | None = None,
) -> Groups:
    """Group the trained parameters by learning-rate factor and weight decay.

    Args:
        parameters: pairs of bare name and parameter.
        weight_decay: of matrices; vectors (biases, norms) get none.
        settings: by bare name, which override both.
    """
    found: dict[tuple[float, float], list[Tensor]] = {}
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    if weight_decay:  # matrices first
        trained.sort(key=lambda pair: pair[1].ndim < 2)
    for name, parameter in trained:
        own = (settings or {}).get(name, {})
        decay = own.get("weight_decay", weight_decay if parameter.ndim >= 2 else 0.0)
        found.setdefault((own.get(LR_FACTOR, 1.0), decay), []).append(parameter)
    return [
        {"params": members, "weight_decay": decay, LR_FACTOR: factor}
        for (factor, decay), members in found.items()
    ]
