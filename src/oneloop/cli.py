"""The ``oneloop`` command. The docstring of each command's function is its help page."""

import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from oneloop.basics.command_options import Options, names, positive, summary
from oneloop.basics.exit_codes import BAD_INPUT, ERROR, BadInput, Unavailable
from oneloop.basics.files import dumps, printable
from oneloop.basics.streams import replace_unknown_characters
from oneloop.checkpoint.manifest import MANIFEST
from oneloop.checkpoint.mirror import address_of
from oneloop.checkpoint.mirror import local_run as local_run
from oneloop.checkpoint.named_checkpoint import problems_at
from oneloop.checkpoint.store import Store
from oneloop.launch.command import CPP_LOG, config_files, read_config
from oneloop.recipe.read import is_recipe
from oneloop.tasks.template import task_template
from oneloop.tools.after_training.options import parsed as apply_options
from oneloop.tools.doctor.doctor_words import checked as doctor_words
from oneloop.tools.export.command import export_run as export_run
from oneloop.tools.plan.asked import parsed as plan_options
from oneloop.tools.report.page import write_report as write_report
from oneloop.tools.worth.techniques import named

# Commands that oneloop launch can run on several processes, with their parsers.
AFTER = {name: partial(apply_options, name) for name in ("evaluate", "predict")}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``oneloop`` command; return its exit code."""
    replace_unknown_characters()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print("usage: oneloop COMMAND … (oneloop COMMAND --help explains a command)\n")
        for name, command in COMMANDS.items():
            print(f"  {name:10}{summary(ABOUT.get(name) or command.__doc__ or '')}")
        return 0 if words else BAD_INPUT
    try:
        if words[0] not in COMMANDS:
            raise BadInput(f"unknown command {words[0]!r}; known: {', '.join(COMMANDS)}")
        return COMMANDS[words[0]](words[1:])
    except BadInput as error:
        print(printable(f"oneloop: {error}"), file=sys.stderr)
        return BAD_INPUT
    except Unavailable as error:
        print(printable(f"oneloop: {error}"), file=sys.stderr)
        return ERROR
    except SystemExit as end:  # --help
        return int(end.code or 0)


def new(words: Sequence[str]) -> int:
    """Write a task to start from, or the accelerate config files of oneloop for editing.

    The task trains as it is: oneloop launch --config_file single FILE.py:MyTask
    """
    options = Options("new", new.__doc__)
    options.add_argument(
        "file", nargs="?", type=Path, help="the file to write (my_task.py); with --configs a folder"
    )
    options.add_argument("--configs", action="store_true", help="write the config files")
    given = options.parse_args(words)
    # Collect the texts by file; write them only if no file exists.
    if given.configs:
        folder = given.file or Path("accelerate_configs")
        texts = {
            folder / path.name: path.read_text(encoding="utf-8") for path in config_files().values()
        }
    elif given.file is None:
        raise BadInput(
            "oneloop new takes the file to write (oneloop new my_task.py), or --configs and a "
            "folder"
        )
    else:
        texts = {given.file: task_template(given.file)}
    there = [str(path) for path in texts if path.exists()]
    if there:
        raise BadInput(
            f"oneloop new: {', '.join(there)} already exists; choose another name, or remove it"
        )

    try:
        next(iter(texts)).parent.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(
            f"oneloop new: {error.filename} cannot be written: {error.strerror}"
        ) from error
    lines = [str(path) for path in texts]
    if not given.configs:
        lines.append(f"train it with: oneloop launch --config_file single {given.file}:MyTask")
    print(printable("\n".join(lines)))
    return 0


def launch_processes(words: Sequence[str]) -> int:
    """Start the training processes by accelerate's launcher, and return oneloop's exit code.

      oneloop launch --config_file ddp digits --batch.size 128

    Like `accelerate launch … -m oneloop.train RECIPE …`, but with oneloop's exit codes: 0 done, 1
    error, 2 bad input, 3 diverged, 75 stopped (start the same command again to resume). A recipe is
    a packaged name, a YAML file or a task (my_task.py:MyTask). --config_file takes a config file of
    accelerate or one of: CONFIGS. `accelerate launch --help` lists its options,
    `python -m oneloop.train --help` the keys of a recipe. Several nodes: --nodes 2:8 (least and
    most), --rendezvous HOST:PORT, --processes_per_node, --max_restarts 3, --rejoin 5min.
    """
    from oneloop.launch.command import launch

    if words and words[0] in ("-h", "--help"):
        about = (launch_processes.__doc__ or "").replace("CONFIGS", ", ".join(config_files()))
        usage = "oneloop launch [accelerate's OPTIONS] RECIPE [--key value …]"
        Options("launch", about, usage=usage).print_help()
        return 0
    return launch(words, after=AFTER)


def verify(words: Sequence[str]) -> int:
    """Check every checkpoint of a run, or whether two runs are bit-identical.

    The exit code is 1 if a checkpoint is damaged, or if the runs differ.
    """
    options = Options("verify", verify.__doc__)
    options.add_argument("run", type=local_run, metavar="RUN")
    same = (
        "report whether both runs (with batch.grain) are bit-identical, or the first step and "
        "tensor that differ"
    )
    options.add_argument("--same", type=local_run, metavar="RUN", help=same)
    given = options.parse_args(words)
    if given.same:
        from oneloop.tools.compare.first_difference import parting

        parted, lines = parting(given.same, given.run)
        print(printable("\n".join(lines)))
        return ERROR if parted else 0

    # Check every file of every checkpoint, and of the final weights.
    store = Store(given.run / "checkpoints")
    paths = [*store.sealed()]
    if not paths:
        raise BadInput(f"{given.run} holds no checkpoint (looked for {store.root}/step-…)")
    final = given.run / "final"
    if (final / MANIFEST).exists():
        paths.append(final)
    wrong = {path.name: problems_at(path) for path in paths}
    lines = [f"{name}: {'; '.join(found) or 'good'}" for name, found in wrong.items()]
    print(printable("\n".join(lines)))
    return ERROR if any(wrong.values()) else 0


def check(words: Sequence[str]) -> int:
    """Read all data of a recipe, or a data set, and list everything that cannot be used.

      oneloop check photos          oneloop check my_task.py:MyTask --task.data photos

    A later run does not check the same files again. The exit code is 1 if something cannot be used.
    """
    options = Options(
        "check", check.__doc__, usage="oneloop check DATA|RECIPE [--key value …] [--json]"
    )
    options.add_argument("--json", action="store_true", help="print one JSON object")
    given, training = options.parse_known_args(words)
    if not training:
        raise BadInput("oneloop check takes a data set (a path, or hf:NAME) or a recipe")
    if is_recipe(training[0]):
        _check_keys(training)

    from oneloop.show.terminal import Display
    from oneloop.tools.check_data import as_json, as_lines, check_data

    with Display(quiet=given.json) as display:
        found = check_data(training[0], training[1:])
        display.lines(as_lines(training[0], found))
    if given.json:
        print(dumps(as_json(found)))
    return ERROR if found.unusable or found.empty else 0


def report(words: Sequence[str]) -> int:
    """Write one HTML page about a run, or about several runs in the same charts.

    The page loads nothing from a network.
    """
    options = Options("report", report.__doc__)
    options.add_argument("runs", type=local_run, nargs="+", metavar="RUN")
    where = "default: report.html in the run folder, or in the current folder for several runs"
    options.add_argument("--to", type=Path, metavar="FILE", help=where)
    given = options.parse_intermixed_args(words)
    to = given.to
    if to is None and address_of(given.runs[0]):  # a copy of a mirror
        to = Path("report.html")
    print(printable(write_report(given.runs, to)))
    return 0


def compare(words: Sequence[str]) -> int:
    """Print what differs between runs: keys, final and best metrics, curves, and whether they are
    bit-identical."""
    from oneloop.tools.compare.compare_runs import compare as compared

    options = Options("compare", compare.__doc__)
    options.add_argument("runs", type=local_run, nargs="+", metavar="RUN")
    options.add_argument(
        "--metrics", type=names, default=[], metavar="NAME,NAME", help="curves to draw"
    )
    given = options.parse_intermixed_args(words)
    if len(given.runs) < 2:
        raise BadInput("oneloop compare takes two or more run folders")
    compared(given.runs, metrics=given.metrics)
    return 0


def watch(words: Sequence[str]) -> int:
    """Draw the metrics of runs in the terminal, while they train."""
    from oneloop.tools.watch import watch as live

    options = Options("watch", watch.__doc__)
    options.add_argument("runs", type=local_run, nargs="+", metavar="RUN")
    options.add_argument("--once", action="store_true", help="draw the metrics as they are now")
    options.add_argument(
        "--every", type=positive(float), default=1.0, metavar="SECONDS", help="default: 1"
    )
    metrics = "names as in metrics.jsonl (train/loss, eval/accuracy, speed/mfu)"
    options.add_argument("--metrics", type=names, default=[], metavar="NAME,NAME", help=metrics)
    given = options.parse_intermixed_args(words)
    for folder in given.runs:
        if not folder.is_dir() or (given.once and not (folder / "metrics.jsonl").exists()):
            raise BadInput(f"{folder} holds no run (no metrics.jsonl)")
    # End as an exception would: the exit restores the terminal.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with suppress(KeyboardInterrupt):
        live(given.runs, metrics=given.metrics, every=given.every, once=given.once)
    return 0


def worth(words: Sequence[str]) -> int:
    """Measure what each technique is worth on this recipe and this machine; takes minutes.

    Trains short real runs with each technique and without it, alone and on top of the others
    (fused, bf16, workers, pinned, channels_last, accumulation, recompute, ema, clip, logging,
    compile, fp16), on one process. Prints a table, and writes worth.json and worth.html. No weights
    are kept.
    """
    options = Options(
        "worth", worth.__doc__, usage="oneloop worth RECIPE [--key value …] [OPTIONS]"
    )
    only = "techniques; default: the first eight that this recipe supports"
    options.add_argument("--only", type=names, default=[], metavar="NAME,NAME", help=only)
    options.add_argument("--rounds", type=positive(int), default=5, metavar="N", help="default: 5")
    options.add_argument(
        "--seconds", type=positive(float), default=1.0, metavar="S", help="of a run; default: 1"
    )
    options.add_argument("--to", type=Path, metavar="DIR", help="default: runs/worth-RECIPE")
    given, training = options.parse_known_args(words)
    named(given.only)
    _check_keys(training)

    from oneloop.tools.worth.worth import worth as command

    return command(training, given.to, only=given.only, rounds=given.rounds, seconds=given.seconds)


def prove(words: Sequence[str], **how: Any) -> int:
    """Compare a parallel layout with one process by training the same few steps, in a temporary
    folder.

    Reports bit-identical (with batch.grain), equal (the gradients agree, and the weights differ
    only by rounding), or different: the first step and tensor, and the likely reason. The exit code
    is 0, or 1 if different or failed.

      oneloop prove my_task.py:MyTask --config_file fsdp2
    """
    options = Options(
        "prove",
        prove.__doc__,
        usage="oneloop prove RECIPE [--key value …] --config_file FILE [OPTIONS]",
    )
    options.add_argument(
        "--config_file", required=True, metavar="FILE", help="the layout to compare (ddp, fsdp2, …)"
    )
    options.add_argument(
        "--processes",
        type=positive(int),
        metavar="N",
        help="default: the number in the config file",
    )
    options.add_argument("--steps", type=positive(int), default=8, metavar="N", help="default: 8")
    options.add_argument("--json", action="store_true", help="print the result as JSON")
    given, training = options.parse_known_args(words)
    read_config(given.config_file)
    _check_keys(training)

    from oneloop.tools.prove.prove import prove as command

    return command(given, training, **how)


def export(words: Sequence[str]) -> int:
    """Write the weights of a run as safetensors, with the files that the task adds (config,
    tokenizer).

    Adapters are written in peft's format. --push commits the same files to the Hugging Face hub,
    with the recipe and a model card; a new repository is private unless --public is given.
    """
    options = Options("export", export.__doc__)
    options.add_argument("run", type=local_run, metavar="RUN")
    options.add_argument("--to", type=Path, metavar="DIR", help="the folder to write to")
    options.add_argument("--push", metavar="ORG/NAME", help="the repository to push to")
    options.add_argument(
        "--checkpoint", help="final, best, newest or a step; default: final if the run has ended"
    )
    weights = "raw (default), the name of an EMA, or power:SIGMA (after training with --ema.power)"
    options.add_argument("--weights", default="raw", help=weights)
    options.add_argument("--merged", action="store_true", help="add the adapters to the base model")
    options.add_argument(
        "--task", help="the task to use, if it is not the recorded one (my_task.py:MyTask)"
    )
    options.add_argument("--public", action="store_true", help="make a new repository public")
    options.add_argument("--license", metavar="ID", help="of the model card")
    print(printable("\n".join(export_run(options.parse_args(words)))))
    return 0


def _check_keys(training: Sequence[str]) -> None:
    """Check the recipe and its keys before torch is imported. Raise BadInput."""
    from oneloop.recipe.parse import check_keys as check  # 0.3 s

    check(training)


def _elsewhere(module: str, parse: Callable[[Sequence[str]], Any], words: Sequence[str]) -> int:
    """Run a command of a module that imports torch; ``parse`` rejects wrong words before that."""
    given = parse(words)
    os.environ.setdefault(CPP_LOG, "ERROR")  # torch reads it when it is imported
    return int(importlib.import_module(module).run(given))


# First lines of the help pages that are elsewhere.
ABOUT = {
    "evaluate": "Print loss and metrics of a run's weights.",
    "predict": "Write predictions to a file.",
    "doctor": "Check that this host can train, and that several hosts can train together.",
    "plan": "Report what a run needs, and the cheapest change that makes it fit; needs no GPU.",
}
COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "new": new,
    "launch": launch_processes,
    "doctor": partial(_elsewhere, "oneloop.tools.doctor.doctor", doctor_words),
    "plan": partial(_elsewhere, "oneloop.tools.plan.plan", plan_options),
    "verify": verify,
    "check": check,
    "report": report,
    "compare": compare,
    "watch": watch,
    "worth": worth,
    "prove": prove,
    "evaluate": partial(
        _elsewhere, "oneloop.tools.after_training.evaluate_and_predict", AFTER["evaluate"]
    ),
    "predict": partial(
        _elsewhere, "oneloop.tools.after_training.evaluate_and_predict", AFTER["predict"]
    ),
    "export": export,
}
