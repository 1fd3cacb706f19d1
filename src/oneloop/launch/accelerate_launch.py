"""accelerate's launcher, which is killed when the process that started it ends.

python -m oneloop.launch.accelerate_launch PARENT OPTIONS … -m MODULE …
"""

import logging
import signal
import sys
from subprocess import CalledProcessError

from oneloop.basics.exit_codes import ERROR, STOPPED
from oneloop.basics.launcher import exit_folder, registered
from oneloop.basics.system.processes import die_with


def main() -> None:
    """Run ``accelerate launch`` with the words after the first, which is the parent's id."""
    die_with(int(sys.argv[1]))
    sys.argv[:2] = ["accelerate", "launch"]

    from accelerate.commands.accelerate_cli import main as accelerate
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # The training processes report their errors. torch's agent would repeat the exit codes.
    logging.disable(logging.ERROR)
    signal.signal(signal.SIGTERM, _stop)
    try:
        accelerate()
    except (ChildFailedError, CalledProcessError):
        sys.exit(ERROR)


def _stop(number: int, frame: object) -> None:
    """End all processes, unless they receive the signal, too, and save."""
    if not registered(exit_folder()):
        sys.exit(STOPPED)


if __name__ == "__main__":
    main()
