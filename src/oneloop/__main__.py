"""``python -m oneloop``: the ``oneloop`` command."""

import sys

from oneloop.cli import main

sys.exit(main(sys.argv[1:]))
