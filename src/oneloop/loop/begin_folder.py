"""Write what a run's folder holds from its start on: the recipe and environment.json."""

from oneloop.data.step_batches import in_memory
from oneloop.job.build import Job
from oneloop.launch.processes import Run
from oneloop.loop.training_state import State
from oneloop.recipe.class_paths import CHOICES, source
from oneloop.run.environment import environment
from oneloop.run.folder import Folder


def begin_folder(job: Job, run: Run, folder: Folder, state: State) -> None:
    """Write the recipe and environment.json."""
    recipe = job.recipe

    # Without a GPU, training uses all cores. Data in memory needs no workers.
    alone = run.device.type == "cpu" or in_memory(job.train_set)

    # Describe the run. Keys that do not apply are left out of the file.
    about = environment(
        command=[*run.command],
        device=str(run.device),
        processes=run.ranks,
        inputs=job.inputs,
        eval_micro=recipe.eval.micro or job.layout.each,
        workers=run.workers(recipe.machine.workers),
        data_cores=0 if alone else run.cores,
    )
    file = source("task", recipe.task.name)
    if file:
        about["task"] = str(file)
    if recipe.task.name in CHOICES["task"] and hasattr(job.task, "recorded"):
        about["recorded"] = {"task": recipe.task.name, **job.task.recorded}
    skipped = getattr(job.task, "skipped_rows", None)
    if skipped:
        about["skipped_rows"] = skipped

    about["starts"] = folder.starts(run.began, state.count.seconds)
    folder.begin(recipe.yaml(), about)
