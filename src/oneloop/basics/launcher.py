"""A process and its launcher: rank, world size, and the exit code."""

import os
import sys
from contextlib import suppress
from pathlib import Path

from oneloop.basics.exit_codes import ERROR, STOPPED
from oneloop.basics.system.processes import die_with, is_alive, is_python


def ranks() -> int:
    """Return the number of processes (world size), from the environment."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return the rank of this process; 0 if there is only one process."""
    return int(os.environ.get("RANK", "0")) if ranks() > 1 else 0


def local_ranks() -> int:
    """Return the number of processes of the run on this host, from the environment."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def die_with_launcher() -> None:
    """End this process with torchrun or accelerate, if one of them started it.

    Call it before anything slow.
    """
    process = launcher()
    if process is not None:
        die_with(process)


def launcher() -> int | None:
    """Return the process id of the torchrun or accelerate that started this process, or None.

    If the launcher has already ended, init has adopted this process: then end this process.
    """
    variables = {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"} & os.environ.keys()
    if not variables:
        return None
    parent = os.getppid()
    if parent == 1 and not is_python(1):
        print(
            "oneloop: the launcher of this process has exited; to run without one, unset "
            f"{', '.join(sorted(variables))}",
            file=sys.stderr,
        )
        os._exit(1)
    if "TORCHELASTIC_RUN_ID" not in os.environ and not is_python(parent):
        return None  # accelerate's variable was set in a shell
    return parent


# variable with the path of the file in which ``oneloop launch`` expects the exit code
FILE = "ONELOOP_EXIT_FILE"
HOST = "ONELOOP_HOST"  # variable with the name of this node, if there are several
_LAUNCHER = "launcher"
CTRL_C = "interrupted"  # file that exists once ``oneloop launch`` has received a Ctrl-C


def exit_file_variable(folder: Path) -> dict[str, str]:
    """Return the variable that lets launched processes report their exit code in this folder."""
    (folder / _LAUNCHER).write_text(str(os.getpid()))
    return {FILE: str(folder / "exit_code")}


def launcher_waits() -> bool:
    """Return whether ``oneloop launch`` is running, and waits for an exit code."""
    try:
        return is_alive(int((exit_folder() / _LAUNCHER).read_text()))
    except (OSError, ValueError):
        return False


def exit_folder() -> Path:
    """Return the folder of the exit codes, which does not exist without ``oneloop launch``."""
    return Path(os.environ.get(FILE) or "/dev/null/none").parent


def register_process() -> None:
    """If ``oneloop launch`` waits for this process, ask it to forward its signals here."""
    with suppress(OSError):
        (exit_folder() / f"process-{os.getpid()}").touch()


def registered(folder: Path) -> list[str]:
    """Return the ids of the processes that have registered in the folder of exit codes."""
    return [file.name.removeprefix("process-") for file in folder.glob("process-*")]


def report_exit_code(code: int) -> bool:
    """Report the exit code to ``oneloop launch``; return whether there is one.

    An error overrides other codes, a stop none.
    """
    if not os.environ.get(FILE):
        return False
    file = Path(os.environ[FILE])
    try:
        known = file.read_text() if file.exists() else ""
        if code == ERROR or known in ("", str(STOPPED)):
            file.write_text(str(code))
    except OSError:  # the launcher has ended
        return False
    return True
