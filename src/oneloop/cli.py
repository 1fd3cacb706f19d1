"""The ``oneloop`` command: new, launch, verify, report, watch, worth, prove, evaluate, predict, export."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from oneloop.basics.errors import BAD_INPUT, ERROR, BadInput
from oneloop.basics.files import printable
from oneloop.basics.words import parsed
from oneloop.checkpoint.chosen import base_problems, chosen_of
from oneloop.checkpoint.store import MANIFEST, Store, problems, problems_of_files
from oneloop.run.launch import config_files

AFTER = ("evaluate", "predict")  # commands that run on many processes too, through launch
_USAGE = """usage: oneloop new FILE.py | --configs [DIR]
       oneloop launch [accelerate launch's options] RECIPE [--key value …]
       oneloop verify RUN [--same RUN]
       oneloop report RUN [RUN …] [--to FILE]
       oneloop watch RUN [RUN …] [--once] [--every SECONDS] [--figures NAME,NAME]
       oneloop worth RECIPE [--key value …] [--only NAME,NAME] [--rounds N] [--seconds S] [--to DIR]
       oneloop prove RECIPE [--key value …] --config_file FILE [--processes N] [--steps 8] [--json]
       oneloop evaluate RUN [--data PLACE] [--checkpoint final|STEP|best|newest] [--weights raw|ema] [--json] …
       oneloop predict RUN --data PLACE --to FILE.parquet|jsonl|csv [--checkpoint …] [--weights …] [--raw]
       oneloop export RUN --to DIR | --push ORG/NAME [--checkpoint final|STEP|best|newest]
                      [--weights raw|ema|power:SIGMA] [--merged] [--license ID] [--public]

new     Writes a task to start from, which runs as it stands (then: oneloop launch --config_file single FILE.py:MyTask),
        or the accelerate config files that oneloop brings along, to be edited.
launch  Starts the training processes as `accelerate launch … -m oneloop.train RECIPE …` does, and exits with oneloop's
        own code: 0 done, 1 error, 2 bad input, 3 diverged, 75 stopped (start again to go on).
          oneloop launch --config_file ddp digits --batch.size 128
        A recipe is a packaged name, a YAML file or a task (my_task.py:MyTask). --config_file takes a file of
        accelerate's, or CONFIGS. `accelerate launch --help` lists its options, `python -m oneloop.train --help` the
        keys of a recipe.
verify  Reads every checkpoint of a run and lists what is wrong; exits with 1 where anything is. --same says instead
        whether two runs are the same bits (batch.grain), else at which step they part, and by which tensor.
report  Writes one HTML page about a run (by default its report.html), or about several laid over one another (by
        default ./report.html); nothing in it is fetched from a network.
watch   Draws a run in the terminal while it goes on, or several side by side; --once: as they are now. Figures have
        their names of metrics.jsonl (train/loss, eval/accuracy, speed/mfu).
worth   What each technique is worth on this recipe and this machine: short real runs with it and without it, alone and
        on top of the others (fused, bf16, workers, pinned, channels_last, accumulation, recompute, ema, clip, logging,
        compile, fp16: the first eight that can be done here, or those that --only names). Takes minutes; a table, and
        worth.json and worth.html in --to (by default runs/worth-RECIPE). One process; no weights are kept.
prove   Trains the same few steps on one process and as the config file says, in a temporary folder, and reports
        bit-identical (batch.grain), equal (the gradients agree, and the weights are as close as rounding leaves them),
        or different: from which step on, first in which tensor, and the likely reason. Exits with 0, or 1 if different.
          oneloop prove my_task.py:MyTask --config_file fsdp2
evaluate
        Prints loss and metrics of a run's weights (by default those of final/, else of its newest checkpoint) on its
        own validation and test sets, or on all rows of another place.
predict Writes what the model says of each row of a place (or of the run's own validation set) to a file, in order: its
        number, the file of an image, and columns of the task's own; with --raw the model's outputs too.
        Both take --micro N (samples at once), refuse data that is not what the run was trained with (--accept_changes:
        take it; its classes may then be others), and run on many processes through launch, to the same file:
          oneloop launch --config_file ddp predict runs/digits --data new/ --to said.csv
export  Writes a run's weights (by default those of final/, else of its newest checkpoint) as plain safetensors, with
        what the task adds (config, tokenizer): raw, an average by its name, or the power-function average of any width
        (when trained with --ema.power). Adapters in peft's own format; --merged: added to the model they stand on.
        --push commits them to a repository of the Hugging Face hub, with recipe and model card; one that is made for it
        is private, or --public."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``oneloop`` command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or "-h" in words[:2] or "--help" in words[:2]:
        print(_usage())
        return 0 if words else BAD_INPUT
    commands: dict[str, Callable[[Sequence[str]], int]] = {
        "new": new,
        "launch": launch_processes,
        "verify": verify,
        "export": export,
        "report": report,
        "watch": watch,
        "worth": worth,
        "prove": prove,
    }
    commands |= {name: partial(after, name) for name in AFTER}
    command, *rest = words
    try:
        if command not in commands:
            raise BadInput(f"unknown command {command!r}; known: {', '.join(commands)}")
        return commands[command](rest)
    except BadInput as error:
        print(printable(f"oneloop: {error}"), file=sys.stderr)
        return BAD_INPUT


def _usage() -> str:
    return _USAGE.replace("CONFIGS", ", ".join(config_files()))


def new(words: Sequence[str]) -> int:
    """Writes a task to start from, or the config files."""
    configs = "--configs" in words
    places = [Path(word) for word in words if word != "--configs"]
    if len(places) > 1 or (not places and not configs) or str(*places).startswith("-"):
        raise BadInput("oneloop new takes the file to write (oneloop new my_task.py), or --configs and a folder")
    if configs:
        folder = places[0] if places else Path("accelerate_configs")
        texts = {folder / path.name: path.read_text() for path in config_files().values()}
    else:
        file = places[0]
        taken = file.stem in sys.stdlib_module_names or (file.stem.isidentifier() and _installed(file))
        if file.suffix != ".py" or not file.stem.isidentifier() or taken:
            raise BadInput(f"oneloop new: {file} cannot be a module of yours; name it like my_task.py")
        template = (Path(__file__).parent / "tasks" / "template.py").read_text()
        texts = {file: re.sub(r"\bmy_task(\.py)?\b", lambda found: str(file) if found[1] else file.stem, template)}
    if there := [str(path) for path in texts if path.exists()]:
        raise BadInput(f"oneloop new: {', '.join(there)} is there already; name another, or remove it")
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    except OSError as error:
        raise BadInput(f"oneloop new: {error.filename} cannot be written: {error.strerror}") from error
    print(printable("\n".join(map(str, texts))))
    if not configs:
        print(printable(f"train it with: oneloop launch --config_file single {file}:MyTask"))
    return 0


def _installed(file: Path) -> bool:
    found = find_spec(file.stem)
    return found is not None and bool(found.origin) and "site-packages" in str(found.origin)


def launch_processes(words: Sequence[str]) -> int:
    """Starts the processes of a run, or of a command on many processes."""
    from oneloop.run.launch import launch

    if words and words[0] in ("-h", "--help"):
        print(_usage())
        return 0
    return launch(words, after=AFTER)


def verify(words: Sequence[str]) -> int:
    """Lists what is wrong with the checkpoints of a run, or says where two runs part."""
    if "--same" in words and len(words) != 3:
        raise BadInput("oneloop verify --same takes two runs: oneloop verify --same RUN RUN")
    given = parsed("verify", words, {"--same": None})
    if given["--same"]:
        from oneloop.run.parting import parting

        parted, lines = parting(Path(given["--same"]), Path(given["RUN"]))
        print(printable("\n".join(lines)))
        return ERROR if parted else 0
    store = _store(given["RUN"])
    bad = 0
    for path in store.sealed():
        wrong = problems(path) or base_problems(path)
        bad += bool(wrong)
        print(printable(f"{path.name}: {'good' if not wrong else '; '.join(wrong)}"))
    final = Path(given["RUN"]) / "final"
    if (final / MANIFEST).exists():
        wrong = problems_of_files(final)
        bad += bool(wrong)
        print(printable(f"final: {'good' if not wrong else '; '.join(wrong)}"))
    return ERROR if bad else 0


def report(words: Sequence[str]) -> int:
    """Writes one page about runs."""
    from oneloop.show.report.page import report as page

    given = parsed("report", words, {"--to": None}, several=True)
    folders = [Path(one) for one in given["RUN"]]
    to = Path(given["--to"] or (folders[0] / "report.html" if len(folders) == 1 else "report.html"))
    try:
        to.write_text(page(folders))
    except ValueError as error:
        raise BadInput(str(error)) from error
    except OSError as error:
        raise BadInput(f"--to {to} cannot be written: {error.strerror}") from error
    print(printable(to))
    return 0


def watch(words: Sequence[str]) -> int:
    """Draws runs in the terminal."""
    from oneloop.show.live import watch as live

    given = parsed("watch", words, {"--once": False, "--every": "1", "--figures": ""}, several=True)
    folders = [Path(one) for one in given["RUN"]]
    for folder in folders:
        if not folder.is_dir() or (given["--once"] and not (folder / "metrics.jsonl").exists()):
            raise BadInput(f"{folder} holds no run (no metrics.jsonl)")
    try:
        every = float(given["--every"])
    except ValueError:
        every = 0.0
    if not every > 0:
        raise BadInput(f"oneloop watch: --every {given['--every']} is no number of seconds above 0")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the terminal is put right on the way out
    with suppress(KeyboardInterrupt):
        live(
            folders, figures=[name for name in given["--figures"].split(",") if name], every=every, once=given["--once"]
        )
    return 0


def after(command: str, words: Sequence[str]) -> int:
    """Evaluates or predicts, on one process."""
    from oneloop.apply import main as apply

    apply([command, *words])


def worth(words: Sequence[str]) -> int:
    """Measures what techniques are worth."""
    from oneloop.plan.worth import worth as command

    return command(words)


def prove(words: Sequence[str]) -> int:
    """Compares a layout with one process."""
    from oneloop.plan.prove import prove as command

    return command(words)


def export(words: Sequence[str]) -> int:
    """Writes the weights of one checkpoint."""
    options = {"--to": None, "--checkpoint": None, "--weights": "raw", "--merged": False, "--task": None}
    given = parsed("export", words, {**options, "--push": None, "--public": False, "--license": None})
    if given["--to"] is None and given["--push"] is None:
        raise BadInput("export needs a folder to write to (--to DIR), or a repository of the hub (--push ORG/NAME)")
    if given["--push"] is None and (given["--public"] or given["--license"]):
        raise BadInput("--public and --license are of a repository of the hub: give --push ORG/NAME too")
    run, push = Path(given["RUN"]), given["--push"]
    folder = chosen_of(run, given["--checkpoint"], weights=given["--weights"])
    with TemporaryDirectory(prefix="oneloop-") as scratch:
        to = Path(given["--to"] or scratch)
        try:
            if push is not None:
                from oneloop.run.push import check_push

                check_push(push)
            _export(run, folder, to, given)
        except BadInput:
            raise
        except (ValueError, OSError) as error:
            raise BadInput(str(error)) from error
        if given["--to"]:
            print(printable(f"{folder.name} of {run} is in {to}"))
        if push is not None:
            from oneloop.run import push as hub

            print(printable(hub.push(run, to, push, licence=given["--license"], public=given["--public"])))
    return 0


def _export(run: Path, checkpoint: Path, to: Path, given: Mapping[str, Any]) -> None:
    from oneloop.run.trained import recipe_of

    recipe = recipe_of(run, command="export", task=given["--task"])
    from oneloop.run.build import make_task
    from oneloop.run.export import export_checkpoint

    how: dict[str, Any] = {"weights": given["--weights"], "merge": given["--merged"]}
    how["base_dtype"] = recipe.machine.base_dtype
    export_checkpoint(checkpoint, to, make_task(recipe), **how)


def _store(run: str) -> Store:
    store = Store(Path(run) / "checkpoints")
    if not store.sealed():
        raise BadInput(f"{run} holds no checkpoint (looked for {store.root}/step-…)")
    return store


if __name__ == "__main__":
    sys.exit(main())
