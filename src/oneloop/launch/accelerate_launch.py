"""accelerate's launcher, which is killed when the process that started it ends.

python -m oneloop.launch.accelerate_launch PARENT OPTIONS … -m MODULE …
"""

import sys

from oneloop.basics.system.processes import die_with


def main() -> None:
    """Run ``accelerate launch`` with the words after the first, which is the parent's id."""
    die_with(int(sys.argv[1]))
    sys.argv[:2] = ["accelerate", "launch"]

    from accelerate.commands.accelerate_cli import main as accelerate

    accelerate()


if __name__ == "__main__":
    main()
