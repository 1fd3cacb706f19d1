"""The tasks and tools of oneloop, which the core reaches only by name: through this table."""

from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from oneloop.basics.exit_codes import BadInput

TASKS = {
    "image_classification": "ImageClassification",
    "causal_lm": "CausalLM",
    "masked_lm": "MaskedLM",
    "sft": "SFT",
    "preference": "Preference",
    "reward": "Reward",
    "distil": "Distil",
    "seq2seq": "Seq2Seq",
    "text_classification": "TextClassification",
    "text_regression": "TextRegression",
    "token_classification": "TokenClassification",
    "text_pairs": "TextPairs",
}
"""short names of the packaged tasks: modules of oneloop.tasks, and their classes"""

COMMANDS: dict[str, tuple[str, ...]] = {
    "new": ("tools.new",),
    "launch": ("launch.command",),
    "doctor": ("tools.doctor.command", "tools.elastic", "tools.nodes"),
    "plan": ("tools.plan.command", "tools.nodes", "tools.server_context"),
    "verify": ("tools.verify",),
    "check": ("tools.check.command", "tasks"),
    "report": ("tools.report.command", "tools.run_reader"),
    "compare": ("tools.compare.command", "tools.run_reader", "tools.terminal_charts"),
    "watch": ("tools.compare.command", "tools.run_reader", "tools.terminal_charts"),
    "worth": ("tools.worth.command", "tools.prove", "tools.server_context"),
    "prove": (
        "tools.prove.command",
        "tools.compare",
        "tools.run_reader",
        "tools.server_context",
    ),
    "evaluate": ("tools.after_training.command",),
    "predict": ("tools.after_training.command",),
    "export": (
        "tools.export.command",
        "tools.after_training",
        "tools.run_reader",
        "tools.terminal_charts",
    ),
}
"""the commands: a module with a function of that name, and what it needs, all below ``oneloop``"""

TOOLS = {
    **COMMANDS,
    # Modules that a run, another command or a call from Python uses.
    "graph": ("tools.graph",),
    "advice on memory": ("tools.plan.out_of_memory",),
    "batch.micro auto": ("tools.plan.micro_batch",),
    "examples": ("tools.report.examples",),
    "goodput": ("tools.report.starts",),
    "the report page": ("tools.report.page", "tools.run_reader"),
    "a packaged task": ("tasks",),
    "a new task": ("tasks.template",),
    "nodes": ("tools.nodes",),
    "several nodes or restarts": ("tools.elastic.elastic", "tools.nodes"),
    "verify --same": ("tools.compare.first_difference", "tools.run_reader"),
    "evaluate or predict": ("tools.after_training.evaluate_and_predict",),
}
"""a module, and what it needs of the tools and tasks, all below ``oneloop``"""


def tool(name: str) -> ModuleType | None:
    """Return the module of a tool; None if its file or folder was deleted.

    Args:
        name: in TOOLS.
    """
    return None if missing(name) else import_module(module_of(name))


def required(name: str) -> ModuleType:
    """Return the module of a tool. Raise BadInput if its file or folder was deleted.

    Args:
        name: in TOOLS.
    """
    return import_module(module_of(name))


def module_of(name: str) -> str:
    """Return the full name of a tool's module. Raise BadInput if it was deleted."""
    absent = missing(name)
    if absent:
        raise BadInput(f"oneloop cannot run {name}, because {absent}; install oneloop again")
    return f"oneloop.{TOOLS[name][0]}"


def missing(name: str) -> str:
    """Return the line that stands for a deleted tool, or a tool without what it needs; or ""."""
    for part in TOOLS[name]:
        spec = None
        # find_spec imports the folder of a module, which may have been deleted, too.
        with suppress(ModuleNotFoundError):
            spec = find_spec(f"oneloop.{part}")
        # A folder without __init__.py has no origin: a deleted one may keep its __pycache__.
        if spec is None or spec.origin is None:
            return f"oneloop.{part} is not in this copy of oneloop"
    return ""
