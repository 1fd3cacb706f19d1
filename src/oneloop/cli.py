"""The ``oneloop`` command. The docstring of each command's function is its help page."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from oneloop.basics.command_options import Options, summary
from oneloop.basics.exit_codes import BAD_INPUT, DONE, ERROR, BadInput, Unavailable
from oneloop.basics.files import printable, reject_run_folder, writing
from oneloop.basics.houses import missing, required
from oneloop.basics.streams import replace_unknown_characters
from oneloop.basics.system.signals import on_stops
from oneloop.checkpoint.manifest import MANIFEST
from oneloop.checkpoint.mirror import local_run
from oneloop.checkpoint.named_checkpoint import problems_at
from oneloop.checkpoint.store import Store
from oneloop.launch.command import launch
from oneloop.launch.config_files import config_files
from oneloop.launch.launched import end_early

Command = Callable[[Sequence[str]], int]
"""takes the words after its name, returns oneloop's exit code"""

COMMANDS = (
    "new",
    "launch",
    "doctor",
    "plan",
    "verify",
    "check",
    "report",
    "compare",
    "watch",
    "worth",
    "prove",
    "evaluate",
    "predict",
    "export",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``oneloop`` command; return its exit code."""
    replace_unknown_characters()
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None and words[:1] == ["launch"]:
        on_stops(end_early)  # until the processes are started
    if not words or words[0] in ("-h", "--help"):
        print("usage: oneloop COMMAND … (oneloop COMMAND --help explains a command)\n")
        for name in COMMANDS:
            print(f"  {name:10}{_about(name)}")
        return DONE if words else BAD_INPUT
    try:
        return command(words[0])(words[1:])
    except BadInput as error:
        print(printable(f"oneloop: {error}"), file=sys.stderr)
        return BAD_INPUT
    except Unavailable as error:
        print(printable(f"oneloop: {error}"), file=sys.stderr)
        return ERROR
    except SystemExit as end:  # --help
        return int(end.code or 0)


def command(name: str) -> Command:
    """Return the function of a command; its docstring begins with a summary.

    Raise BadInput for an unknown command, or one of a tool that was deleted."""
    if name not in COMMANDS:
        raise BadInput(f"unknown command {name!r}; known: {', '.join(COMMANDS)}")
    if name in _OWN:
        return _OWN[name]
    found: Command = getattr(required(name), name)
    return found


def _about(name: str) -> str:
    """Return the line about a command."""
    if name not in _OWN and missing(name):
        return missing(name)
    return summary(command(name).__doc__ or "")


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
        texts = {given.file: required("a new task").task_template(given.file)}
    for path in texts:
        reject_run_folder(path)
    there = [str(path) for path in texts if path.exists()]
    if there:
        raise BadInput(
            f"oneloop new: {', '.join(there)} already exists; choose another name, or remove it"
        )

    first = next(iter(texts))
    with writing(first, "choose another name"):
        first.parent.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
    lines = [str(path) for path in texts]
    if not given.configs:
        lines.append(f"train it with: oneloop launch --config_file single {given.file}:MyTask")
    print(printable("\n".join(lines)))
    return DONE


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
    if words and words[0] in ("-h", "--help"):
        about = (launch_processes.__doc__ or "").replace("CONFIGS", ", ".join(config_files()))
        usage = "oneloop launch [accelerate's OPTIONS] RECIPE [--key value …]"
        Options("launch", about, usage=usage).print_help()
        return DONE
    return launch(words)


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
        parted, lines = required("verify --same").parting(given.same, given.run)
        print(printable("\n".join(lines)))
        return ERROR if parted else DONE

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
    return ERROR if any(wrong.values()) else DONE


_OWN: dict[str, Command] = {"new": new, "launch": launch_processes, "verify": verify}
"""commands of the core; each other one is a tool"""
