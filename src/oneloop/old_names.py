"""Import paths of earlier versions: one table, and a finder that serves it."""

from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

_MOVED = {
    "after.exported": "tools.export.command",
    "apply": "tools.after_training.evaluate_and_predict",
    "data.rows": "tasks.rows",
    "data.rows.csv_json": "tasks.rows.text_tables",
    "data.rows.file_rows": "tasks.rows.csv_json_lines",
    "job.check_data": "tools.check.check_data",
    "after.options": "tools.after_training.command",
    "launch.doctor_words": "tools.doctor.command",
    "launch.environment": "run.environment",
    "plan.asked": "tools.plan.command",
    "prediction": "tools.after_training.prediction",
    "run.power_emas": "tools.export.power_emas",
    "show.graph": "tools.graph",
    "show.model_card": "tools.export.model_card",
    "show.report": "tools.report",
    "show.run_reader": "tools.run_reader",
    "show.worth_table": "tools.worth.worth_table",
}
"""modules and folders by their old names, both below ``oneloop``"""

_DIVIDED = {
    "after.trained_model": (
        "tools.after_training.trained_model",
        "tools.after_training.recorded_task",
    ),
    "data.rows.cache": ("tasks.rows.cache", "data.fingerprint"),
    "plan.step_costs": ("tools.plan.step_costs", "job.trial_steps"),
    "run.export": ("run.final_weights", "tools.export.convert", "tools.export.push"),
    "run.training_state": ("loop.training_state", "loop.open_run"),
    "tasks.evaluation_metrics": (
        "task_protocol.evaluation_metrics",
        "task_protocol.retrieval_metrics",
    ),
    "show.watch": ("tools.watch.watch", "tools.terminal_charts"),
}
"""old names of modules whose content is in several modules now"""

_FOLDERS = ("after", "data.rows", "plan", "show.report")
"""old names of folders"""

_ROOMS = {
    ("after", "tools.compare"): ("compare_runs", "first_difference"),
    ("plan", "tools.plan"): (
        "plan",
        "planned",
        "ledger",
        "gpus",
        "changes",
        "description",
        "fake_mode",
    ),
    ("plan", "tools.worth"): ("worth", "short_run", "techniques"),
    ("plan", "tools.prove"): ("prove", "recorded_run"),
    ("launch", "tools.elastic"): (
        "agent",
        "elastic",
        "rendezvous",
        "node_checks",
        "bounded_store",
        "clocks",
        "signed_backend",
    ),
    ("launch", "tools.doctor"): ("doctor",),
    ("run", "loop"): (
        "counters",
        "gradients",
        "repeat",
        "start_lines",
        "step_checks",
        "steps",
        "upkeep",
    ),
    ("tasks", "task_protocol"): (
        "evaluation_sums",
        "metric_collection",
        "metric_states",
        "protocol",
        "protocol_checks",
        "whole_batch",
    ),
}
"""modules that moved to another room: (old room, new room) -> their names"""

for (_old, _new), _names in _ROOMS.items():
    for _name in _names:
        _MOVED[f"{_old}.{_name}"] = f"{_new}.{_name}"


def new_names(module: str) -> list[str]:
    """Return the present names of a module that had this name; none if it did not move.

    Args:
        module: a dotted name, ``oneloop.tasks.protocol``.
    """
    path = module.removeprefix("oneloop.")
    folder, _, file = path.rpartition(".")
    found: Sequence[str] = ()
    if path in _DIVIDED:
        found = _DIVIDED[path]
    elif path in _MOVED:
        found = [_MOVED[path]]
    elif folder in _MOVED:  # a folder moved with all its modules
        found = [f"{_MOVED[folder]}.{file}"]
    return [f"oneloop.{name}" for name in found]


class OldNames(MetaPathFinder, Loader):
    """A finder for ``sys.meta_path``: an old name leads to a module that reads the new one.

    It belongs at the end, so that a file at the old place comes first.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return how to load a module by its old name; None for every other name."""
        if not name.startswith("oneloop."):
            return None
        folder = name.removeprefix("oneloop.") in _FOLDERS
        if not folder and not new_names(name):
            return None
        # The origin becomes sys.argv[0] of ``python -m``.
        return ModuleSpec(name, self, origin=name, is_package=folder)

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python create an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        """Let the module read each name from the module at its new place, when it is used."""
        modules = new_names(module.__name__)

        def read(name: str) -> Any:
            if name == "__all__":  # ``import *`` asks for it
                public = [vars(import_module(new)) for new in modules]
                return [one for names in public for one in names if not one.startswith("_")]
            if not name.startswith("__"):
                for new in map(import_module, modules):
                    if hasattr(new, name):
                        return getattr(new, name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        vars(module)["__getattr__"] = read

    def get_code(self, name: str) -> CodeType:
        """Return the code of ``python -m`` with an old name."""
        source = f"import runpy; runpy.run_module({new_names(name)[0]!r}, run_name='__main__')"
        return compile(source, name, "exec")
