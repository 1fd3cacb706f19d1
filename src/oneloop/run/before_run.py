"""Let a task work before the first step of a run, on all processes: its ``before_run``."""

import gc
from collections.abc import Callable, Container
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from oneloop.basics.content_hash import content_hash
from oneloop.basics.files import cache_folder
from oneloop.checkpoint.weights import bare
from oneloop.evaluation import evaluating
from oneloop.launch.processes import Run
from oneloop.run.compatibility import source_hash, sources
from oneloop.run.environment import versions


def before_run(
    task: Any,
    model: nn.Module,
    run: Run,
    *,
    sets: Container[str],
    initial_model: Callable[[], nn.Module] | None = None,
) -> None:
    """Call ``task.before_run(model, run)``, if the task has it, in eval mode without gradients.

    A task sees no rank. Its ``run`` has only:

    - ``cache``: a folder of this host's cache, named by the code and the precision of the run. Make
      it, and name what you write by all else that it depends on, such as weights and data.
    - ``sets``: the names of the data sets that are read, such as train and validation.
    - ``share(items)``: this process's share of a list. The list is that of the first process. FSDP2
      needs equally many forwards on all processes, so there some repeat the last item. Collective.
    - ``barrier()``: wait for all processes; raise the error of one on all. Collective.
    - ``initial_model()``: the model with the weights before the first step. A run that starts or
      resumes has it; evaluate and predict load it, so call it only if you need it. Collective.
    - ``prepare(model)``: another model, on the device, in the run's precision, and sharded by
      FSDP2. Nothing holds it after ``before_run``. Collective.

    Collective: call on every rank.

    Args:
        task: of the run.
        model: its model, prepared.
        run: this process.
        sets: the names of the data sets.
        initial_model: loads and prepares the model before the first step; None: it is ``model``.

    Raises:
        BadInput: of the task, on all ranks.
    """
    if not hasattr(task, "before_run"):
        return
    model = bare(model)
    held = [*run.accelerator._models]
    allowed = SimpleNamespace(
        cache=cache_folder() / "frozen" / run.from_main(_code_and_precision(task, model, run)),
        sets=sets,
        share=run.share,
        barrier=run.barrier,
        initial_model=initial_model or (lambda: model),
        prepare=run.prepare_frozen,
    )
    with evaluating(model), run.setting_up():
        task.before_run(model, allowed)

    # Free other models. A sharded model refers to itself.
    run.accelerator._models = held
    gc.collect()


def _code_and_precision(task: Any, model: nn.Module, run: Run) -> str:
    """Return a hash of all sources of the user, of versions, and of what decides the rounding."""
    # Each command of oneloop is another script.
    checksums = set()
    for name, checksum in sources().items():
        if name.partition(".")[0] not in ("oneloop", "__main__"):
            checksums.add(checksum)

    # The classes of a notebook have no module. Those of an installed package have its version.
    packages = {"torch", "transformers"}
    for part in (task, *model.modules()):
        for kind in type(part).__mro__:
            packages.add(kind.__module__.partition(".")[0])
            if kind.__module__ == "__main__":
                checksums.add(source_hash(kind))
    mixed = run.accelerator.mixed_precision
    code = (
        checksums,
        versions(sorted(packages)),
        mixed,
        run.sharded and mixed != "no",
        torch.get_float32_matmul_precision(),
    )
    return content_hash(code)
