"""``oneloop worth``: measure what each technique gains on this recipe and machine."""

import platform
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import dumps, reject_run_folder, replacing, writing
from oneloop.recipe.parse import read
from oneloop.recipe.schema import Recipe
from oneloop.tools.worth.short_run import Measured, Runner
from oneloop.tools.worth.techniques import (
    DEFAULT,
    KNOWN,
    TECHNIQUES,
    Keys,
    Machine,
    Technique,
    named,
)
from oneloop.tools.worth.worth_table import as_page, as_table, sentences


def worth(words: Sequence[str], folder: Path | None, **how: Any) -> int:
    """Measure a recipe, print a table, and write worth.json and worth.html. Raise BadInput.

    Args:
        words: Recipe and keys.
        folder: Where to write (None: runs/worth-RECIPE).
        how: See :func:`measured`.

    Returns:
        The exit code.
    """
    recipe = read(words)
    if recipe.batch.grain is not None:
        raise BadInput(
            "oneloop worth changes how a recipe is computed, which batch.grain forbids; remove it"
        )

    # Measure before the folder is created: nothing is written if that fails.
    folder = folder or Path(f"runs/worth-{recipe.name}")
    reject_run_folder(folder)
    results = measured(words, **how)
    with writing(f"--to {folder}", "make room, or name another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        texts = {"worth.json": dumps(results, indent=1) + "\n", "worth.html": as_page(results)}
        for file, text in texts.items():
            with replacing(folder / file) as draft:
                draft.write_text(text, encoding="utf-8")

    # Print the table, and what it means.
    console = Console()
    console.print(as_table(results))
    for line in [*sentences(results), f"results in {folder}"]:
        console.print(line, highlight=False, soft_wrap=True)
    return 0


_SAME_STEPS = 8  # steps before weights are compared; rounding is still small
_ROUNDING = 1e-5
_WARM_UP = 4


@dataclass(frozen=True)
class _Trial:
    technique: Technique
    on: Keys
    off: Keys


def measured(
    words: Sequence[str],
    *,
    only: Sequence[str] = (),
    rounds: int = 5,
    seconds: float = 1.0,
    timeout: float = 300.0,
    say: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Measure techniques on a recipe; return the results as plain data.

    Args:
        words: Recipe and keys.
        only: Names of techniques (default: the first eight that this machine and model support).
        rounds: Each round has one run per variant.
        seconds: Each run trains for about so long.
        timeout: A run of more seconds counts as hung.
        say: Prints a line about the progress.

    Raises:
        BadInput: The recipe or a name is wrong, or the recipe does not train at all.
    """
    recipe = read(words)
    chosen = named(only)

    # Choose what can be tried on this machine.
    runner = Runner(words, timeout=timeout)
    steps, machine = _steps_and_machine(runner, seconds, recipe.batch.size)
    tried, rejected = _select(recipe, machine, chosen)
    base: Keys = {}
    for trial in tried:
        base |= trial.off
    say(f"{recipe.name}: {len(tried)} techniques, {steps} steps per run, {rounds} rounds")

    # Compare the weights first: what fails here is not timed.
    same, faults = _compare_weights(runner, base, tried)
    failed = []
    for name, why in rejected.items():
        failed.append(_failed(KNOWN[name], f"does not work with this recipe: {why}"))
    for name, fault in faults.items():
        failed.append(_failed(KNOWN[name], f"failed: {fault}"))
    tried = [trial for trial in tried if trial.technique.name not in faults]

    # Time what works.
    runs = _run_rounds(runner, base, tried, steps=steps, rounds=rounds, say=say)
    none = runs["none"]
    return {
        "recipe": recipe.name,
        "words": list(words),
        "date": str(date.today()),
        "machine": {
            "processor": platform.machine(),
            "device": machine.device,
            "cores": machine.cores,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "steps": steps,
        "rounds": rounds,
        "none": {
            **_summary([outcome.rate for outcome in none if not outcome.fault]),
            "peak": _peak(none),
        },
        "all": {
            **_ratios(runs["all"], none),
            "peak": _peak(runs["all"]),
            "fault": _faults(runs["all"]),
        },
        "control": _ratios(runs["none again"], none),
        "techniques": [_row(trial, runs, same[trial.technique.name]) for trial in tried] + failed,
    }


def _failed(technique: Technique, why: str) -> dict[str, Any]:
    return {"name": technique.name, "about": technique.about, "fault": why}


def _steps_and_machine(runner: Runner, seconds: float, batch: int) -> tuple[int, Machine]:
    """Run the recipe; return the number of steps that take about ``seconds``, and the machine."""
    outcome = runner({}, steps=_WARM_UP + 6, warm=_WARM_UP)
    if outcome.fault or outcome.machine is None:
        raise BadInput(f"the unchanged recipe does not train: {outcome.fault}")
    steps = _WARM_UP + 1 + max(6, min(400, round(seconds * outcome.rate / batch)))
    return steps, outcome.machine


def _select(
    recipe: Recipe, machine: Machine, chosen: Sequence[Technique]
) -> tuple[list[_Trial], dict[str, str]]:
    tried: list[_Trial] = []
    rejected: dict[str, str] = {}
    for technique in chosen or TECHNIQUES:
        keys = technique.keys(recipe, machine)
        if isinstance(keys, str):
            rejected[technique.name] = keys
        elif chosen or len(tried) < DEFAULT:
            tried.append(_Trial(technique, *keys))
    return tried, rejected if chosen else {}


def _compare_weights(
    runner: Runner, base: Keys, tried: Sequence[_Trial]
) -> tuple[dict[str, str], dict[str, str]]:
    plain = runner(base, steps=_SAME_STEPS, warm=0, weights=True)
    if plain.fault or plain.weights is None:
        raise BadInput(f"the recipe does not train without any technique: {plain.fault}")
    same, faults = {}, {}
    for trial in tried:
        outcome = runner({**base, **trial.on}, steps=_SAME_STEPS, warm=0, weights=True)
        if outcome.fault or outcome.weights is None:
            faults[trial.technique.name] = outcome.fault
        else:
            same[trial.technique.name] = _difference(outcome.weights, plain.weights)
    return same, faults


def _difference(weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> str:
    if all(torch.equal(weights[name], others[name]) for name in others):
        return "bit-identical"
    apart = sum(
        float((weights[name].double() - other.double()).square().sum())
        for name, other in others.items()
    )
    size = sum(float(other.double().square().sum()) for other in others.values())
    distance = (apart / size) ** 0.5
    words = "equal up to rounding" if distance <= _ROUNDING else "different"
    return f"{words} ({distance:.1e})"


def _run_rounds(
    runner: Runner,
    base: Keys,
    tried: Sequence[_Trial],
    *,
    steps: int,
    rounds: int,
    say: Callable[[str], object],
) -> dict[str, list[Measured]]:
    """Return the outcomes by configuration, one list entry per round."""
    full = dict(base)
    for trial in tried:
        full |= trial.on
    configurations: dict[str, Keys] = {"none": base, "none again": base, "all": full}
    for trial in tried:
        configurations[f"+{trial.technique.name}"] = {**base, **trial.on}
        configurations[f"-{trial.technique.name}"] = {**full, **trial.off}
    order = list(configurations)

    # Shuffle each round, so that a drift of the machine's speed is in no variant alone.
    outcomes: dict[str, list[Measured]] = {name: [] for name in configurations}
    for number in range(rounds):
        random.Random(number).shuffle(order)
        for name in order:
            outcomes[name].append(runner(configurations[name], steps=steps, warm=_WARM_UP))
        say(f"round {number + 1} of {rounds} done")
    return outcomes


def _row(trial: _Trial, runs: Mapping[str, list[Measured]], same: str) -> dict[str, Any]:
    name = trial.technique.name
    alone = runs[f"+{name}"]
    without = runs[f"-{name}"]
    return {
        "name": name,
        "about": trial.technique.about,
        "on": trial.on,
        "off": trial.off,
        "result": same,
        "alone": _ratios(alone, runs["none"]) | {"memory": _peak(alone) - _peak(runs["none"])},
        "on top": _ratios(runs["all"], without) | {"memory": _peak(runs["all"]) - _peak(without)},
        "fault": _faults([*alone, *without]),
    }


def _ratios(runs: Sequence[Measured], others: Sequence[Measured]) -> dict[str, float]:
    pairs = zip(runs, others, strict=True)
    return _summary([a.rate / b.rate for a, b in pairs if not a.fault and not b.fault])


def _summary(values: Sequence[float]) -> dict[str, float]:
    nan = float("nan")
    if not values:
        return {"median": nan, "min": nan, "max": nan}
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _peak(runs: Sequence[Measured]) -> float:
    return _summary([outcome.peak for outcome in runs if not outcome.fault])["median"]


def _faults(runs: Sequence[Measured]) -> str:
    return "; ".join(sorted({outcome.fault for outcome in runs if outcome.fault}))
