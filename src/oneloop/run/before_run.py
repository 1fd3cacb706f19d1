"""Let a task work before the first step of a run, on all processes: its ``before_run``."""

import gc
from collections.abc import Callable, Container
from types import SimpleNamespace
from typing import Any

from torch import nn

from oneloop.basics.files import cache_folder
from oneloop.checkpoint.weights import bare
from oneloop.evaluation import evaluating
from oneloop.launch.processes import Run


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

    - ``cache``: a folder of this host's cache. Make it, and name what you write by all that it
      depends on, such as code, precision, weights and data.
    - ``precision``: a text that decides how products are rounded, such as bf16.
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
    mixed = run.accelerator.mixed_precision
    allowed = SimpleNamespace(
        cache=cache_folder() / "frozen",
        # FSDP2 casts the weights, where autocast casts the arguments of products.
        precision=f"{mixed}, FSDP2" if run.sharded and mixed != "no" else mixed,
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
