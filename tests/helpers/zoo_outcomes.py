"""The outcome of a zoo model on a parallel layout: equal, different, rejected, or a crash."""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from same_bits import SPLITS, _tensors
from worlds import fresh, run
from zoo import EQUAL, SKIPPED, ZOO, Expected
from zoo_silent import SILENT

# they register their cases in SILENT
for module in ("zoo_silent_state", "zoo_silent_sums"):
    import_module(module)

COMMON = [
    "--batch.size",
    "16",
    "--duration",
    "10",
    "--optimizer.name",
    "sgd",
    "--optimizer.lr",
    "0.05",
]
COMMON += [
    "--optimizer.clip",
    "0",
    "--machine.dtype",
    "float64",
    "--machine.workers",
    "0",
    "--eval.every",
    "0",
]
COMMON += ["--save.every", "0", "--log.every", "1", "--track", "none", "--machine.check_every", "4"]
ENTRIES = ZOO | SILENT
PATIENCE = 60.0
"""seconds after which a world hangs"""
DEPENDS = "another parallel layout trains a different model"
"""end of a report"""
CLOSE = 1e-9
"""relative distance of weights in float64 that counts as equal"""
LAYOUTS = (*SPLITS, (1, "accumulated"))
"""(ranks, config); the last is one process again, with two micro-batches a step"""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run."""

    kind: str
    """trained, rejected (code 2, no traceback, no files), stopped or traceback (code 1), abort or
    hang"""
    output: str = ""
    weights: dict[str, torch.Tensor] | None = None
    digest: dict[str, str] | None = None

    @property
    def message(self) -> str:
        """Return the error message in the output: all lines from the last one that names an
        error."""
        lines = [
            line
            for line in self.output.splitlines()
            if line.strip() and not line.startswith("--- rank")
        ]
        # due to low patience
        lines = [line for line in lines if "but does not exit" not in line] or lines
        errors = [
            n
            for n, line in enumerate(lines)
            if re.match(r"oneloop: |(\w+\.)*\w+Error: |terminate called", line)
        ]
        return "\n".join(lines[errors[-1] :] if errors else lines[-1:])


def outcome(
    name: str,
    ranks: int,
    config: str,
    *,
    grain: bool,
    folder: Path,
    function: Callable[[list[str]], None] = fresh,
    **more: Any,
) -> Outcome:
    """Train a zoo model by ``function`` in a new world, with ``more`` options."""
    place = folder / f"{name}-{config}-{ranks}-{'grain' if grain else 'plain'}"
    place.mkdir(parents=True)
    (place / "recipe.yaml").write_text(f"task: {ENTRIES[name].module}.{name}\n")
    words = [
        str(place / "recipe.yaml"),
        *COMMON,
        *ENTRIES[name].words,
        "--run.dir",
        str(place / "run"),
    ]
    micro = 8 if config == "accumulated" else ENTRIES[name].micro
    if grain:
        words += ["--batch.grain", str(ENTRIES[name].micro or 2)]
    elif micro:
        words += ["--batch.micro", str(micro)]
    if config == "fsdp2" and ("stopped", SKIPPED[0][1]) in ENTRIES[name].expected["fsdp2", grain]:
        # a hang in the first steps is reported after 18 seconds, not 600
        words += ["--machine.patience", "0.03"]
    config = "single" if config == "accumulated" else config
    more = {"watch": ranks > 1, "timeout": PATIENCE} | more
    try:
        world = run(function, words, ranks=ranks, config=config, **more)
    except AssertionError as hung:
        return Outcome("hang", str(hung))
    # for shorter lines
    codes, output = set(world.codes), world.output.replace(str(folder), "").replace(name, "MODEL")
    if codes == {0}:
        final = place / "run" / "final"
        weights = {
            key: value
            for file in final.glob("*.safetensors")
            for key, value in load_file(file).items()
        }
        return Outcome("trained", output, weights, _tensors(final))
    if codes - {0, 1, 2} or re.search("SIGABRT|SIGSEGV|Fatal Python error", output):
        return Outcome("abort", output)
    if "Traceback (most recent call last)" in output:
        return Outcome("traceback", output)
    if 2 in codes:
        return Outcome(
            "rejected, files written" if (place / "run").exists() else "rejected", output
        )
    return Outcome("stopped", output)


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the relative L2 distance over all tensors."""
    assert one.keys() == other.keys()

    def norm(tensors) -> float:
        return (
            sum(float(tensor.to(torch.complex128).abs().square().sum()) for tensor in tensors)
            ** 0.5
        )

    wide = torch.complex128
    return norm(one[name].to(wide) - other[name].to(wide) for name in one) / max(
        norm(one.values()), 1e-30
    )


def fits(verdict: str, found: Outcome, expected: Expected) -> bool:
    """Return whether the outcome is one of the expected ones.

    A model that is expected to be equal, and nothing else, may not be reported either.
    """
    if expected == EQUAL and DEPENDS in found.output:
        return False
    for kind, words in expected:
        # a report is one line
        texts = found.output.splitlines() if kind == "reported" else [found.message]
        matches = any(contains(text, words) for text in texts) or not words
        reached = {"equal": verdict == "equal", "reported": found.kind == "trained"}
        reached |= {
            "rejected": found.kind == "rejected",
            "ended": found.kind == "stopped",
            "stopped": found.kind in ("stopped", "traceback"),
        }
        if reached[kind] and (matches or kind == "equal"):
            return True
    return False


def contains(text: str, words: Sequence[str]) -> bool:
    """Return whether a text has all words; ``|`` separates alternatives."""
    text = text.lower()
    return all(any(one in text for one in word.lower().split("|")) for word in words)


def expected(name: str, ranks: int, config: str, *, grain: bool) -> Expected:
    """Return the expected outcome of a zoo model on a layout."""
    return ENTRIES[name].expected["single" if ranks == 1 else config, grain]


class Runs:
    """The runs of one model; each layout is run once.

    Args:
        name: name of the model.
        folder: where the runs are written.
        function: trains.
    """

    def __init__(
        self, name: str, folder: Path, function: Callable[[list[str]], None] = fresh
    ) -> None:
        self.name, self._folder, self._made = name, folder, dict[tuple[int, str, bool], Outcome]()
        self._function = function

    def of(self, ranks: int, config: str, *, grain: bool) -> Outcome:
        """Return the outcome on this layout."""
        key = ranks, config, grain
        if key not in self._made:
            self._made[key] = outcome(
                self.name,
                ranks,
                config,
                grain=grain,
                folder=self._folder,
                function=self._function,
            )
        return self._made[key]

    def verdict(self, ranks: int, config: str, *, grain: bool, found: Outcome | None = None) -> str:
        """Return "equal", "differs by ...", or the kind of the outcome.

        Without ``batch.grain``, "equal" means up to rounding, compared with the run on one process.
        With it, "equal" is bit-identical to one process with ``batch.grain``; that run must equal
        the one without it up to rounding.
        """
        found = found or self.of(ranks, config, grain=grain)
        if found.weights is None:
            return found.kind
        first = (ranks, config) == (1, "single")
        reference = self.of(1, "single", grain=grain and not first)
        if reference.weights is None and first:
            return "equal"  # the reference itself
        if reference.weights is None:
            return "trained, and one process did not"
        if grain and first and self._is_own_reference():
            return "equal"
        if reference.weights.keys() != found.weights.keys():
            return "has other tensors"
        apart = distance(reference.weights, found.weights)
        if grain and not first:
            return "equal" if found.digest == reference.digest else f"differs by {apart:.2g}"
        return "equal" if apart <= CLOSE else f"differs by {apart:.2g}"

    def _is_own_reference(self) -> bool:
        """Return whether the weights of one process depend on the micro-batch."""
        entry = ENTRIES[self.name]
        alone = entry.expected["single", False]
        return ("equal", ()) not in alone or bool(entry.kind and alone != EQUAL)

    def line(self, ranks: int, config: str, *, grain: bool) -> tuple[bool, str]:
        """Return whether the outcome is right, and a line that describes it."""
        found, verdict = (
            self.of(ranks, config, grain=grain),
            self.verdict(ranks, config, grain=grain),
        )
        right = fits(verdict, found, expected(self.name, ranks, config, grain=grain))
        report = "" if found.weights is not None else ": " + found.message[:300].replace("\n", " ")
        mark = " " if right else "!"
        return (
            right,
            f"{mark} {config:<11} {ranks} {'grain' if grain else 'plain'}  {verdict}{report}",
        )


def table(
    name: str, folder: Path, layouts=LAYOUTS, grains=(False, True)
) -> Iterator[tuple[bool, str]]:
    """Yield for each layout whether the outcome is right, and a line that describes it."""
    runs = Runs(name, folder)
    for grain in grains:
        for ranks, config in layouts:
            narrow = ranks > 2 and not ENTRIES[name].wide
            if not (narrow or (grain and config == "accumulated")):
                yield runs.line(ranks, config, grain=grain)


def main(words: Sequence[str], *, silent: bool = False) -> None:
    """Print a table: model x layout x grain -> outcome; of ZOO, or of the silent cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="models (default: all)")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of processes"
    )
    parser.add_argument("--only", choices=["plain", "grain"], help="without or with batch.grain")
    parser.add_argument("--kind", default="", help="kinds of silent cases, such as AC")
    given = parser.parse_args(words)
    names = SILENT if silent else ZOO
    names = [name for name in names if not given.kind or names[name].kind in given.kind]
    layouts = [(ranks, config) for ranks, config in LAYOUTS if ranks in given.ranks]
    grains = {None: (False, True), "plain": (False,), "grain": (True,)}[given.only]
    wrong = 0
    for name in given.names or names:
        print(name, flush=True)
        with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
            for right, line in table(name, Path(folder), layouts, grains):
                wrong += not right
                print(f"  {line}", flush=True)
    print(f"{wrong} outcomes are wrong (!)")
