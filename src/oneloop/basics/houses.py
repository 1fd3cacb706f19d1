"""The tasks and tools of oneloop, which the core reaches only by name: through this table."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

TASKS = {
    "image_classification": "ImageClassification",
    "causal_lm": "CausalLM",
    "sft": "SFT",
    "text_classification": "TextClassification",
    "text_regression": "TextRegression",
    "token_classification": "TokenClassification",
    "text_pairs": "TextPairs",
}
"""short names of the packaged tasks: modules of oneloop.tasks, and their classes"""

TOOLS = {
    "graph": "oneloop.tools.graph",
    "report": "oneloop.tools.report.page",
}
"""modules that a run uses if they are there"""


def tool(name: str) -> ModuleType | None:
    """Return the module of a tool; None if its file or folder was deleted.

    Args:
        name: in TOOLS.
    """
    module = TOOLS[name]
    return import_module(module) if _exists(module) else None


def _exists(module: str) -> bool:
    # find_spec imports the folder of a module, which must exist.
    folder = module.rpartition(".")[0]
    return (not folder or _exists(folder)) and find_spec(module) is not None


def missing(name: str) -> str:
    """Return the line that a run prints in place of a deleted tool."""
    return f"{TOOLS[name]} is not in this copy of oneloop"
