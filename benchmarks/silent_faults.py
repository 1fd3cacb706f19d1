"""Run the deliberate faults of tests/helpers with the code of a checkout, and print what is found.

    git worktree add ../before COMMIT
    python benchmarks/silent_faults.py --src ../before --to before.json
    python benchmarks/silent_faults.py --src . --to after.json
    python benchmarks/silent_faults.py --table before.json after.json > DATE-silent-faults.txt

Each case is a real run, or several, on one process, DDP and FSDP2, without and with `batch.grain`.
Cases, helpers and expectations are those of this checkout, for both. A file of results is written
after each case, and a second call continues where the first one ended.

The parts: `models` are the cases of zoo_silent*.py; `late` those of late_state.py; `sums` those of
sum_cases.py, wrong and right ones; `changes` are the changes in the dry run of silent_values.py;
`equal` are the models of zoo.py that are right everywhere, in 50 steps;
`programs` are the programs of the folder in `--programs`, with the commands that their first lines
state, for each task class in them.

The step at which a fault is found is the number in the line that reports it. 0: before the line of
the first step. ~N: after step N, by a line without a number.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
PARTS = ("models", "late", "sums", "changes", "equal", "programs")
RANKS = {"single": 1, "ddp": 2, "fsdp2": 2}
WAYS = {"plain": False, "grain": True}
LONGEST = 300.0  # seconds of a program

# Part, name, (layout, "plain" or "grain") of each of its runs, and file and commands of a program.
Case = tuple[str, str, list[tuple[str, str]], Any]

# Lines of a program that report a fault, if it has no error.
REPORTS = "another parallel layout|same micro-batch|is not the sum|changes|has changed|other values"
REPORTS += "|wrong_samples"


@dataclass
class Found:
    """What a run shows.

    Args:
        outcome: "equal", "reported", "rejected", "stopped", "in silence: …", …
        right: whether the case may end like this; None: its file does not say.
        step: where it was found; "-": nowhere.
        line: the line that reports it.
    """

    outcome: str
    right: bool | None
    step: str = "-"
    line: str = ""


# --- Which line reports a fault, and in which step.
# -------------------------------------------------------------------------------------------


def of_rank_0(output: str) -> list[str]:
    """Return the lines that rank 0 has written."""
    own = output.split("--- rank 1")[0]
    return [line for line in own.splitlines() if not line.startswith("--- rank 0")]


def step_of(line: str, lines: Sequence[str]) -> str:
    """Return the step that a line names, or the last one that the lines before it name."""
    if named := re.search(r"\bstep (\d+)\b", line):
        return named[1]
    before = list(lines[: lines.index(line)]) if line in lines else list(lines)
    steps = re.findall(r"^step (\d+)\b", "\n".join(before), re.M)
    return f"~{steps[-1]}" if steps else "0"


def ended(kind: str, message: str, output: str, *, right: bool | None, place: Path) -> Found:
    """Return what a run shows that has ended with an error."""
    line = (message.splitlines() or [""])[0]
    step = step_of(line, of_rank_0(output))

    # Without a number in the message, the log has that of the last step.
    log = place / "run" / "metrics.jsonl"
    if step in ("0", "~1") and log.exists():
        steps = [json.loads(row).get("step", 0) for row in log.read_text().splitlines()]
        step = f"~{max(steps)}" if max(steps, default=0) else step
    return Found(kind, right, "0" if kind == "rejected" else step, line)


# --- models and late: trained on each layout, and compared with one process.
# -------------------------------------------------------------------------------------------


def late_cases() -> dict[str, Any]:
    """Return the tasks of late_state.py as models of the zoo, with what must be found."""
    from zoo import EQUAL, Entry, reported, stopped
    from zoo_silent import AGAIN

    repeated = (f"{AGAIN}|other values",)
    shrunk = (f"{AGAIN}|layers.3.weight",)
    cases = {}
    for name, words in {
        "LateQueue": repeated,
        "LateRank": repeated,
        "LateRows": repeated,
        "ShrinkingNorm": shrunk,
        "NoisyNorm": repeated,
    }.items():
        allowed = {}
        for config in RANKS:
            # The fault of one rank is none on one process.
            harmless = EQUAL if name == "LateRank" and config == "single" else ()
            allowed[config, False] = harmless + reported(*words) + stopped(*words)
            allowed[config, True] = harmless + stopped(*words)
        every = "5" if name.endswith("Norm") else "4"
        options = ("--duration", "16", "--machine.check_every", every)
        cases[name] = Entry(name, options, allowed, micro=4, module="late_state", kind="late")
    return cases


def equal_cases() -> dict[str, Any]:
    """Return the models of the zoo that train the same weights everywhere: nothing may be found."""
    from zoo import EQUAL
    from zoo_outcomes import ZOO

    options = ("--duration", "50", "--machine.check_every", "5", "--eval.every", "5")
    cases = {}
    for name, entry in ZOO.items():
        if set(entry.expected.values()) == {EQUAL}:
            # It diverges in 50 steps at the learning rate of the zoo.
            slow = ("--optimizer.lr", "0.005") if name == "Attention" else ()
            cases[name] = dataclasses.replace(entry, words=(*entry.words, *options, *slow))
    return cases


def model_cases(asked: argparse.Namespace) -> Iterator[Case]:
    """Yield the models, and register each for ``outcome``."""
    import zoo_outcomes

    more = ["--machine.check_every", asked.check_every] if asked.check_every else []
    more += ["--duration", asked.duration] if asked.duration else []
    parts = {"models": zoo_outcomes.SILENT, "late": late_cases(), "equal": equal_cases()}
    for part, entries in parts.items():
        for name, entry in entries.items():
            if asked.kind and entry.kind not in asked.kind:
                continue
            words = (*entry.words, *more)
            zoo_outcomes.ENTRIES[name] = dataclasses.replace(entry, words=words)
            # BatchNorm, which late_state.py has, is rejected with batch.grain.
            no_grain = part == "late" and name.endswith("Norm")
            ways = [way for way in asked.ways if way == "plain" or not no_grain]
            yield part, name, [(layout, way) for way in ways for layout in asked.layouts], None


def of_model(name: str, at: Sequence[tuple[str, str]], folder: Path) -> Iterator[Found]:
    """Yield what a model shows on each of these layouts."""
    from zoo_outcomes import ENTRIES, Runs, contains, expected, fits

    runs = Runs(name, folder)
    alternatives = {
        words
        for allowed in ENTRIES[name].expected.values()
        for kind, words in allowed
        if kind != "equal" and words
    }
    for layout, way in at:
        ranks, grain = RANKS[layout], WAYS[way]
        run = runs.of(ranks, layout, grain=grain)
        verdict = runs.verdict(ranks, layout, grain=grain)
        right = fits(verdict, run, expected(name, ranks, layout, grain=grain))
        if run.weights is None:
            place = folder / f"{name}-{layout}-{ranks}-{way}"
            yield ended(run.kind, run.message, run.output, right=right, place=place)
            continue
        lines = of_rank_0(run.output)
        reports = [line for line in lines if any(contains(line, words) for words in alternatives)]
        if not alternatives:
            reports = [line for line in lines if re.search(REPORTS, line)]
            right = right and not reports
        if reports:
            yield Found("reported", right, step_of(reports[0], lines), reports[0])
        else:
            yield Found("equal" if verdict == "equal" else f"in silence: {verdict}", right)


# --- sums: what is no sum over samples, and what is one.
# -------------------------------------------------------------------------------------------


def table_of_sums() -> dict[str, Any]:
    """Return the tables of test_sums.py, which imports what a checkout may lack."""
    tree = ast.parse((TESTS / "checks" / "test_sums.py").read_text())
    names = ("NOT_A_SUM", "GRADIENT", "STORED", "WRONG", "IN_FLOAT64", "RIGHT", "ACCUSING")
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in names:
            exec(ast.unparse(node), found)
    return found


def of_sums(name: str, layout: str, folder: Path) -> Found:
    """Return what a run of two steps says of a task."""
    from worlds import fresh, run

    tables = table_of_sums()
    micro = "1" if name.endswith("SingleSamples") else "4"
    words = ["digits", "--task", name, "--duration", "2", "--batch.size", "16", "--track", "none"]
    words += ["--batch.micro", micro, "--run.dir", str(folder / "run")]
    if name in tables["IN_FLOAT64"]:  # as oneloop prove --double trains
        words += ["--machine.dtype", "float64"]
    world = run(fresh, words, ranks=RANKS[layout], config=layout, timeout=90.0)
    lines = of_rank_0(world.output)
    wanted = tables["WRONG"].get(name, [])
    if name.endswith(".Skips") and layout == "fsdp2":
        wanted = ["which units run depends on random numbers (LayerDrop)"]
    accused = [line for line in lines if any(word in line for word in tables["ACCUSING"])]
    said = [line for line in lines if wanted and any(word in line for word in wanted)]
    failed = set(world.codes) != {0}
    right = all(word in world.output for word in wanted)
    if not wanted:  # the table is about what comes before the first step
        right = 2 not in world.codes and not accused
    line = next(iter(said or accused or (lines[-1:] if failed else [])), "")
    kind = "rejected" if 2 in world.codes else "stopped" if failed else "reported"
    if not line:
        return Found("in silence" if wanted else "accepted", right)
    return Found(kind, right, step_of(line, lines), line)


# --- changes: the dry run leaves no trace.
# -------------------------------------------------------------------------------------------


def of_change(change: str, layout: str, way: str, folder: Path, controls: Path) -> Found:
    """Return whether a change in the first call leaves a trace in the weights."""
    from silent_runs import differing, final, trained

    words = ["--duration", "3", *(["--batch.grain", "2"] if way == "grain" else [])]
    ranks, task = RANKS[layout], "silent_values.ChangesOnce"
    control = controls / f"{layout}-{way}"
    if not control.exists():
        trained(control, task, *words, ranks=ranks, config=layout).ok()
    words += ["--task.change", change]
    world = trained(folder, task, *words, ranks=ranks, config=layout)
    lines = of_rank_0(world.output)
    if set(world.codes) != {0}:
        names = {"buffer": "offset", "new_buffer": "offset", "layer": "layers.2"}
        named = (names | {"data_set": "data set"}).get(change, "head.weight") in world.output
        right = set(world.codes) == {2} and named and "Traceback" not in world.output
        kind = "rejected" if set(world.codes) == {2} else "stopped"
        return ended(kind, lines[-1] if lines else "", world.output, right=right, place=folder)
    names_of_traces = differing(final(control), final(folder))
    if names_of_traces:
        return Found("in silence: other " + ", ".join(names_of_traces)[:60], False)
    return Found("no trace", True)


# --- programs: files with tasks, and the commands that show their fault.
# -------------------------------------------------------------------------------------------


def programs(folder: Path | None) -> Iterator[tuple[str, Path, str]]:
    """Yield name, file and commands of each task class of these programs."""
    for file in sorted(folder.glob("*.py")) if folder else ():
        if file.name == "common.py":
            continue
        tree = ast.parse(file.read_text())
        text = ast.get_docstring(tree) or ""
        begins = r"(?:R=|oneloop |for |python ).*"
        commands = "\n".join(re.findall(f"^{begins}", text, re.M)) or f"python {file.name}"
        stated = re.findall(rf"{file.name}:(\w+)", commands)
        # Each task class of the file gets the commands of the one that they name.
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        bases = {one.name: [ast.unparse(base) for base in one.bases] for one in classes}
        tasks = [one for one in bases if {"Base", "WholeBatch"} & set(bases[one])] if stated else []
        for task in [*tasks, *(one for one in dict.fromkeys(stated) if one not in tasks)]:
            own = re.sub(rf"{file.name}:\w+", f"{file.name}:{task}", commands)
            yield f"{file.stem}:{task}", file, own
        if not stated:
            yield file.stem, file, commands


def of_program(file: Path, commands: str, folder: Path, source: Path) -> Found:
    """Return exit codes of the commands, run in a copy of the folder, and what they report."""
    shutil.copytree(file.parents[1], folder / "copy")
    (folder / "cache").mkdir()
    shell = (
        f'oneloop() {{ "{sys.executable}" -m oneloop "$@"; echo "EXIT $?"; }}\n'
        f'python() {{ "{sys.executable}" "$@"; echo "EXIT $?"; }}\n{commands}\n'
    )
    variables = {"PYTHONPATH": str(source / "src"), "ONELOOP_CACHE": str(folder / "cache")}
    process = subprocess.Popen(
        ["bash", "-c", shell],
        cwd=folder / "copy" / file.parent.name,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return Found("hang", None)
    codes = " ".join(re.findall(r"^EXIT (\d+)$", output, re.M))
    lines = [line for line in output.splitlines() if line and not line.startswith("EXIT ")]
    errors = [line for line in lines if re.match(r"(oneloop: )?error: |oneloop: ", line)]
    reports = [line for line in lines if re.search(REPORTS, line)]
    line = next(iter(errors or reports or lines[-1:]), "")
    step = step_of(line, lines[: lines.index(line)]) if errors or reports else "-"
    return Found(f"exit {codes}", None, step, line)


# --- All of them, and the table.
# -------------------------------------------------------------------------------------------


def cases(asked: argparse.Namespace) -> Iterator[Case]:
    """Yield all cases of the parts."""
    import silent_values

    yield from model_cases(asked)
    if asked.kind:
        return
    tables = table_of_sums()
    for name in [*tables["WRONG"], *tables["RIGHT"]]:
        # Skips does not use all parameters in each step, which DDP cannot train.
        at = [one for one in asked.layouts if (name, one) != ("sum_cases.Skips", "ddp")]
        yield "sums", name, [(layout, "plain") for layout in at], None
    for change in silent_values.CHANGES:
        if change != "nothing":
            at = [(layout, way) for way in asked.ways for layout in asked.layouts]
            yield "changes", change, at, None
    for name, file, commands in programs(asked.programs):
        yield "programs", name, [("as stated", "plain")], (file, commands)


def runs_of(
    part: str,
    name: str,
    at: Sequence[tuple[str, str]],
    program: Any,
    folder: Path,
    controls: Path,
    source: Path,
) -> Iterator[Found]:
    """Run a case on these layouts; yield what each of them shows."""
    if part in ("models", "late", "equal"):
        yield from of_model(name, at, folder)
        return
    for layout, way in at:
        place = folder / f"{layout}-{way}"
        try:
            if part == "sums":
                yield of_sums(name, layout, place)
            elif part == "changes":
                yield of_change(name, layout, way, place, controls)
            else:
                yield of_program(*program, folder, source)
        except AssertionError as hung:  # of worlds.run
            yield Found("hang", False, line=str(hung).splitlines()[0])


def take(asked: argparse.Namespace, source: Path) -> None:
    """Run the cases that the file of results lacks; write it after each of them."""
    to = asked.to
    results = json.loads(to.read_text()) if to.exists() else {}
    with tempfile.TemporaryDirectory(prefix="silent-") as scratch:
        controls = Path(scratch) / "controls"
        controls.mkdir()
        for part, name, at, program in cases(asked):
            wanted = not asked.only or name.rpartition(".")[2] in asked.only
            left = [one for one in at if f"{part} {name} {one[0]} {one[1]}" not in results]
            if part not in asked.parts or not wanted or not left:
                continue
            folder = Path(scratch) / "case"
            folder.mkdir()
            began = time.perf_counter()
            found = runs_of(part, name, left, program, folder, controls, source)
            for (layout, way), one in zip(left, found, strict=True):
                line = one.line.replace(f"{TESTS.parent}/", "")
                one.line = textwrap.shorten(line, 100, placeholder=" …")
                results[f"{part} {name} {layout} {way}"] = dataclasses.asdict(one)
                mark = "!" if one.right is False else " "
                text = f"{one.outcome:12} step {one.step:4} {one.line[:60]}"
                print(f"{mark} {part} {name} {layout} {way}: {text}", flush=True)
            to.write_text(json.dumps(results, indent=1))
            print(f"  {time.perf_counter() - began:.1f} s", flush=True)
            shutil.rmtree(folder)


def told(one: dict[str, Any] | None) -> str:
    """Return outcome and step in one cell; "!" marks what may not be."""
    if one is None:
        return "not run"
    mark = "! " if one["right"] is False else ""
    step = "" if one["step"] == "-" else f" @{one['step']}"
    return f"{mark}{one['outcome'][:34]}{step}"


def print_table(files: Sequence[Path]) -> None:
    """Print the results of one or two checkouts beside each other, and a summary."""
    import torch

    results = [json.loads(file.read_text()) for file in files]
    print(f"# {date.today()}  {' '.join(['python', *sys.argv])}")
    print(f"# torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}")
    print("# @N: found at step N, 0 before the first one, ~N after step N; !: not as expected")
    names = list(dict.fromkeys(name for one in results for name in one))
    for name in names:
        part, case, layout = name.split(" ", 2)
        cells = [told(one.get(name)) for one in results]
        columns = " | ".join(f"{cell:40}" for cell in cells)
        print(f"{part:8} {case:38} {layout:16} {columns}".rstrip())
        if line := next((one[name]["line"] for one in results[::-1] if name in one), ""):
            print(f"{'':10}{line}")
    print()
    for file, one in zip(files, results, strict=True):
        for part in PARTS:
            own = [found for name, found in one.items() if name.startswith(part)]
            right = sum(found["right"] is not False for found in own)
            print(f"{file.name}, {part}: {right} of {len(own)} as expected")
    for name in names:
        both = all(name in one for one in results)
        if both and len({told(one[name]).partition(" @")[0] for one in results}) > 1:
            print(f"differ: {name}: {' -> '.join(told(one.get(name)) for one in results)}")


def main() -> None:
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("--src", type=Path, help="checkout whose src is run")
    asked.add_argument("--to", type=Path, help="file of results")
    asked.add_argument("--table", type=Path, nargs="+", help="print these files of results")
    asked.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    asked.add_argument("--layouts", nargs="+", choices=RANKS, default=list(RANKS))
    asked.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    asked.add_argument("--only", nargs="+", default=[], help="names of cases")
    asked.add_argument("--kind", default="", help="kinds of `models`, such as AB; nothing else")
    asked.add_argument("--check_every", help="machine.check_every of `models` and `late`")
    asked.add_argument("--default_checks", action="store_true", help="its default instead")
    asked.add_argument("--duration", help="steps of `models` and `late`")
    asked.add_argument("--programs", type=Path, help="folder with programs")
    given = asked.parse_args()
    if given.table:
        print_table(given.table)
        return
    if not given.src or not given.to:
        asked.error("give --src CHECKOUT and --to FILE, or --table FILE ...")

    # The same call again, with the code of the checkout and with the helpers of this one.
    source = given.src.resolve()
    folders = [source / "src", TESTS / "helpers", TESTS]
    path = os.pathsep.join(map(str, folders))
    if not os.environ.get("PYTHONPATH", "").endswith(path):
        os.environ["PYTHONPATH"] = path
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        with tempfile.TemporaryDirectory() as cache:
            os.environ["ONELOOP_CACHE"] = cache
            sys.exit(subprocess.run([sys.executable, *sys.argv]).returncode)
    sys.path.remove(str(HERE))  # its same_bits.py is another one than that of the helpers
    import oneloop
    import zoo_outcomes

    assert str(source) in str(oneloop.__file__)

    # Other programs may slow down a world, and a long run takes longer.
    zoo_outcomes.PATIENCE = 1200.0 if given.duration else 150.0
    if given.default_checks:
        at = zoo_outcomes.COMMON.index("--machine.check_every")
        del zoo_outcomes.COMMON[at : at + 2]
    take(given, source)


if __name__ == "__main__":
    main()
