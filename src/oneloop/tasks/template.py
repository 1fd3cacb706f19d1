"""The task that ``oneloop new`` writes."""

import importlib.util
import re
import sys
from pathlib import Path

from oneloop.basics.exit_codes import BadInput


def task_template(file: Path) -> str:
    """Return the text of a task for this file. Raise BadInput if it cannot be a module."""
    name = file.stem
    usable = file.suffix == ".py" and name.isidentifier() and name not in sys.stdlib_module_names
    if usable:
        installed = importlib.util.find_spec(name)
        usable = installed is None or "site-packages" not in str(installed.origin)
    if not usable:
        raise BadInput(f"oneloop new: {file} cannot be a module of yours; name it like my_task.py")
    template = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    # The template names its file and its module.
    return re.sub(r"\bmy_task(\.py)?\b", lambda found: str(file) if found[1] else name, template)
