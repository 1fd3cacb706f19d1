"""Compare two runs by the hashes in their logs, and find the first difference. Needs no torch."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from oneloop.basics.differences import differences
from oneloop.basics.exit_codes import BadInput
from oneloop.checkpoint.manifest import read_manifest
from oneloop.checkpoint.store import Store
from oneloop.recipe.comparison import training_configuration
from oneloop.tools.run_reader import content_of, log_lines, read_yaml

_KINDS = ("model", "optimizer", "ema")  # first parts of tensor names


class FirstDifference(NamedTuple):
    """The first step at which two runs differ."""

    step: int
    # the tensors that differ, in the order of the model; empty if they are not known
    names: list[str]
    of: int  # number of compared tensors
    why: str = ""  # the known reason if there are no names

    def __str__(self) -> str:
        if not self.names:
            return self.why
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        return f"{self.names[0]}{more}, of {self.of} tensors"


def parting(one: Path, other: Path) -> tuple[FirstDifference | None, list[str]]:
    """Compare weights, EMA weights and optimizer state of two runs.

    They are compared at every step that both have logged.

    Args:
        one: A run folder.
        other: The folder of the run to compare it with.

    Returns:
        The first difference (None: bit-identical), and lines that describe it.

    Raises:
        BadInput: A folder has no such log, or no step is in both.
    """
    logs = {folder: _log(folder) for folder in (one, other)}
    steps = sorted(logs[one].keys() & logs[other].keys())
    if not steps:
        raise BadInput(
            f"{one} (steps {min(logs[one])} to {max(logs[one])}) and {other} (steps "
            f"{min(logs[other])} to {max(logs[other])}) have logged no step in common; give both "
            "the same log.every"
        )

    # Different settings may explain a difference.
    recipes = [content_of(folder / "recipe.yaml", read_yaml) for folder in (one, other)]
    changed = []
    if all(recipes):
        apart = differences(*map(training_configuration, recipes))
        changed = [f"different settings: {'; '.join(apart.values())}"] if apart else []

    # Find the first step with other hashes.
    before = None
    for step in steps:
        left = logs[one][step]
        right = logs[other][step]
        if left["bits"] != right["bits"]:
            since = "before it nothing was logged"
            if before is not None:
                since = f"at step {before} they were bit-identical"
            parted = FirstDifference(step, *_tensors(one, other, left, right))
            return parted, [f"they differ from step {step} on ({since}): {parted}", *changed]
        before = step

    # The runs are bit-identical as far as both have logged.
    which = f"step {steps[0]}"
    if len(steps) > 1:
        which = f"{len(steps)} log lines, step {steps[0]} to {steps[-1]}"
    lines = [f"bit-identical at {which}: weights, EMA weights and optimizer state"]
    longest = max(logs, key=lambda folder: max(logs[folder]))
    more = max(logs[longest]) - steps[-1]
    if more:
        lines.append(f"{longest} goes on for {more} steps, which the other run does not have")
    return None, lines + changed


def _log(folder: Path) -> dict[int, dict[str, Any]]:
    found = {line["step"]: line for line in log_lines(folder) if isinstance(line.get("bits"), str)}
    if not found:
        raise BadInput(
            f"{folder} has no hashes in metrics.jsonl; a run logs them if batch.grain is set"
        )
    return found


def _tensors(
    one: Path, other: Path, left: Mapping[str, Any], right: Mapping[str, Any]
) -> tuple[list[str], int, str]:
    """Return the names of the tensors that differ, the number of all tensors, and a reason.

    The reason says more if there are no names."""
    try:
        hashes = [re.findall("....", line["bits_of"]) for line in (left, right)]
    except (KeyError, TypeError):
        return [], 0, "the logs do not name the tensors"
    number = len(hashes[0])
    if number != len(hashes[1]):
        return [], number, f"one holds {number} tensors, the other {len(hashes[1])}"
    apart = [a != b for a, b in zip(*hashes, strict=True)]
    names = _names(one, number) or _names(other, number)
    # The hashes are in the order of the sorted names.
    differ = dict(zip(sorted(names), apart, strict=False))
    wrong = [name for name in names if differ[name]]
    return wrong, number, f"{sum(apart) or 'some'} of {number} tensors"


def _names(folder: Path, number: int) -> list[str]:
    """Return the names of the hashed tensors, in model order, from a checkpoint of the run.

    Empty if no checkpoint has this number of tensors."""
    for path in reversed(Store(folder / "checkpoints").sealed()):
        # Buffers of single ranks are not hashed. A damaged checkpoint has no names.
        try:
            listed = read_manifest(path)["tensors"]
        except ValueError:
            continue
        names = [name for name in listed if not name.startswith("rank.")]
        if len(names) == number and all(name.split(".")[0] in _KINDS for name in names):
            return names
    return []
