"""``oneloop worth``: measure what each technique gains on this recipe and machine."""

import json
import platform
import random
from collections.abc import Mapping, Sequence
from datetime import date
from math import isnan, nan
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import dumps, reject_run_folder, replacing, writing
from oneloop.recipe.parse import read
from oneloop.tools.prove.short_run import Forked, RunFailed, train_briefly
from oneloop.tools.worth.techniques import (
    DEFAULT,
    PRECISION,
    TECHNIQUES,
    Keys,
    Machine,
    check_names,
    keys,
    missing,
)

_SAME_STEPS = 8  # steps before weights are compared; rounding is still small
_ROUNDING = 1e-5
_TIMEOUT = 300.0  # seconds after which a run counts as hung
_WARM_UP = 4  # first steps that are not timed


def worth(words: Sequence[str], folder: Path | None, **how: Any) -> int:
    """Measure a recipe, print a table, and write worth.json. Raise BadInput.

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
        with replacing(folder / "worth.json") as draft:
            draft.write_text(dumps(results, indent=1) + "\n", encoding="utf-8")

    # Print the table, and what it means.
    console = Console()
    console.print(table(results))
    for line in [*sentences(results), f"results in {folder}"]:
        console.print(line, highlight=False, soft_wrap=True)
    return 0


class TimedRun(NamedTuple):
    """Result of a short run."""

    rate: float = nan  # samples per second, after the warm-up steps
    # peak memory of the process in MiB: of the device, or of the host if there is no device
    peak: float = nan
    fault: str = ""  # why there is no result; empty: it succeeded


class Runner:
    """Makes short runs of a recipe, one at a time.

    Args:
        recipe: Recipe and keys.
        timeout: Seconds after which a run counts as hung.
    """

    def __init__(self, recipe: Sequence[str], *, timeout: float) -> None:
        self._recipe = recipe
        self._start = Forked(timeout)
        self.machine: Machine | None = None  # of the last run that was timed

    def _run(self, folder: Path, keys: Keys, record: str) -> None:
        others = dict(keys)
        words = ["--mixed_precision", others.pop(PRECISION, "no"), record, *self._recipe]
        train_briefly(self._start, folder, words, others)

    def weights(self, keys: Keys) -> Tensor:
        """Return all weights after 8 steps. Raise BadInput, RunFailed."""
        with TemporaryDirectory(prefix="oneloop-") as scratch:
            folder = Path(scratch) / "short"
            self._run(folder, keys, f"tensors:{_SAME_STEPS}")
            _, tensors = torch.load(folder / f"step-{_SAME_STEPS}.pt", map_location="cpu")
        return torch.cat([tensor.double().flatten() for tensor in tensors.values()])

    def __call__(self, keys: Keys, *, steps: int) -> TimedRun:
        """Time some steps. ``keys``: of the recipe; with them, the precision."""
        with TemporaryDirectory(prefix="oneloop-") as scratch:
            folder = Path(scratch) / "short"
            try:
                self._run(folder, keys, f"times:{steps}")
            except (RunFailed, BadInput) as error:
                return TimedRun(fault=_in_one_line(error))
            measures = json.loads((folder / "measures.json").read_text())
        self.machine = Machine(**measures["machine"])
        times = measures["times"][_WARM_UP:]
        rate = measures["batch"] * (len(times) - 1) / (times[-1] - times[0])
        return TimedRun(rate, measures["peak"])


def measured(
    words: Sequence[str],
    *,
    only: Sequence[str] = (),
    rounds: int = 5,
    seconds: float = 1.0,
) -> dict[str, Any]:
    """Measure techniques on a recipe; return the results as plain data.

    Args:
        words: Recipe and keys.
        only: Names of techniques (default: the first eight that this machine and model support).
        rounds: Each round has one run per variant.
        seconds: Each run trains for about so long.

    Raises:
        BadInput: The recipe or a name is wrong, or the recipe does not train at all.
    """
    recipe = read(words)
    check_names(only)

    # Run the recipe, to find the number of steps that take about ``seconds``.
    runner = Runner(words, timeout=_TIMEOUT)
    outcome = runner({}, steps=_WARM_UP + 6)
    machine = runner.machine
    if machine is None:
        raise BadInput(f"the unchanged recipe does not train: {outcome.fault}")
    steps = round(seconds * outcome.rate / recipe.batch.size)
    steps = _WARM_UP + 1 + max(6, min(400, steps))

    # Choose what can be tried on this machine.
    on: dict[str, Keys] = {}  # by the name of the technique
    off: dict[str, Keys] = {}
    faults: dict[str, str] = {}
    base: Keys = {}
    keys_of = keys(recipe, machine)
    for name in only or TECHNIQUES:
        reason = missing(name, recipe, machine)
        if reason and only:
            faults[name] = f"does not work with this recipe: {reason}"
        elif not reason and (only or len(on) < DEFAULT):
            on[name], off[name] = keys_of[name]
            base |= off[name]
    print(f"{recipe.name}: {len(on)} techniques, {steps} steps per run, {rounds} rounds")

    # Compare the weights first: what fails here is not timed.
    try:
        plain = runner.weights(base)
    except (RunFailed, BadInput) as error:
        raise BadInput(
            f"the recipe does not train without any technique: {_in_one_line(error)}"
        ) from None
    same: dict[str, str] = {}
    for name in on:
        try:
            same[name] = _difference(runner.weights({**base, **on[name]}), plain)
        except (RunFailed, BadInput) as error:
            faults[name] = f"failed: {_in_one_line(error)}"

    # List the variants of what works.
    full = dict(base)
    for name in same:
        full |= on[name]
    variants = {"none": base, "none again": base, "all": full}
    for name in same:
        variants[f"+{name}"] = {**base, **on[name]}
        variants[f"-{name}"] = {**full, **off[name]}

    # Time them. Shuffle each round, so that a drift of the machine's speed is in no variant alone.
    runs: dict[str, list[TimedRun]] = {name: [] for name in variants}
    order = list(variants)
    for number in range(rounds):
        random.Random(number).shuffle(order)
        for name in order:
            runs[name].append(runner(variants[name], steps=steps))
        print(f"round {number + 1} of {rounds} done")

    # Describe each technique.
    rows = []
    for name, result in same.items():
        alone = runs[f"+{name}"]
        without = runs[f"-{name}"]
        row = {"name": name, "about": TECHNIQUES[name], "on": on[name], "off": off[name]}
        row["result"] = result
        row["alone"] = compare(alone, runs["none"])
        row["on top"] = compare(runs["all"], without)
        row["fault"] = list_faults([*alone, *without])
        rows.append(row)
    for name, fault in faults.items():
        rows.append({"name": name, "about": TECHNIQUES[name], "fault": fault})
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
        "none": {**_summary([run.rate for run in none]), "peak": _peak(none)},
        "all": {
            **compare(runs["all"], none),
            "peak": _peak(runs["all"]),
            "fault": list_faults(runs["all"]),
        },
        "control": compare(runs["none again"], none),
        "techniques": rows,
    }


def _in_one_line(error: Exception) -> str:
    """Return the first line, which has the exit code, and the last one of the run's output."""
    lines = str(error).splitlines()
    return " … ".join(dict.fromkeys([lines[0], lines[-1]]))


def _difference(weights: Tensor, others: Tensor) -> str:
    if torch.equal(weights, others):
        return "bit-identical"
    distance = float((weights - others).norm() / others.norm())
    words = "equal up to rounding" if distance <= _ROUNDING else "different"
    return f"{words} ({distance:.1e})"


def compare(runs: Sequence[TimedRun], others: Sequence[TimedRun]) -> dict[str, float]:
    """Return the ratios of throughput, and the change of peak memory."""
    pairs = zip(runs, others, strict=True)
    ratios = _summary([one.rate / other.rate for one, other in pairs])
    return ratios | {"memory": _peak(runs) - _peak(others)}


def _summary(values: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum of the runs that did not fail."""
    values = [value for value in values if not isnan(value)] or [nan]
    return {"median": median(values), "min": min(values), "max": max(values)}


def _peak(runs: Sequence[TimedRun]) -> float:
    return _summary([outcome.peak for outcome in runs])["median"]


def list_faults(runs: Sequence[TimedRun]) -> str:
    """Return why some of the runs failed; empty: none did."""
    return "; ".join(sorted({outcome.fault for outcome in runs if outcome.fault}))


def table(results: Mapping[str, Any]) -> Table:
    """Return the results of :func:`measured` as a terminal table."""
    shown = Table(show_edge=False, pad_edge=False)
    spread = "spread"
    for column in ("technique", "alone", spread, "on top of the others", spread, "memory"):
        shown.add_column(column)
    shown.add_column(f"weights after {_SAME_STEPS} steps")
    for row in results["techniques"]:
        cells = [""] * 5
        text = row["fault"]
        if "alone" in row:
            alone = row["alone"]
            cells = [*_cells(alone), *_cells(row["on top"]), f"{alone['memory']:+,.0f} MiB"]
            text = "; ".join(filter(None, [row["result"], text]))
        shown.add_row(row["name"], *cells, text)
    return shown


def _cells(metric: Mapping[str, float]) -> tuple[str, str]:
    """Return the median and the spread of a ratio as text."""
    if isnan(metric["median"]):
        return "n/a", ""
    return f"{metric['median']:.2f}x", f"{metric['min']:.2f} to {metric['max']:.2f}"


def sentences(results: Mapping[str, Any]) -> list[str]:
    """Return the lines below the table: the baseline, all techniques together, and the control."""
    none = results["none"]
    full = results["all"]
    ratio, spread = _cells(full)
    failed = f"; of these runs some failed: {full['fault']}" if full["fault"] else ""
    noise, noise_spread = _cells(results["control"])
    return [
        (
            f"without any of them: {none['median']:,.0f} samples/s ({none['min']:,.0f} to "
            f"{none['max']:,.0f}), peak {none['peak']:,.0f} MiB; {results['steps']} steps a run, "
            f"{results['rounds']} rounds"
        ),
        f"with all of them: {ratio} ({spread}), peak {full['peak']:,.0f} MiB{failed}",
        (
            f"control (two runs without techniques): {noise} ({noise_spread}); smaller gains are "
            "noise"
        ),
    ]
