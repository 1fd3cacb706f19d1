"""The inputs of a run (recipe, code, model, data): flat texts that checkpoints store.

A resume compares them, and so do all ranks before the first step, and commands after training.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from oneloop.basics.content_hash import content_hash, is_strided
from oneloop.basics.differences import Texts, differences, listed, texts
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.parameter_names import bare_name
from oneloop.basics.tensors import scalar_names
from oneloop.basics.untrusted import damaged
from oneloop.data.fingerprint import content_of
from oneloop.job.build import Job
from oneloop.launch.processes import Run
from oneloop.recipe.class_paths import resolve
from oneloop.recipe.comparison import (
    PATH,
    is_training_key,
    only_extends,
    training_configuration,
)
from oneloop.recipe.schema import Recipe
from oneloop.run.environment import computed_by
from oneloop.task_protocol.user_code import source_hash, sources, theirs

SOURCE = "source of the task"
ORDER = "order of the training set (let order() depend on its arguments only)"
_DEVICE = "device"
_LONG = 1 << 15  # characters of the description of a model
_HASHED = 1 << 20  # elements of a tensor that are hashed, at most
_REPORTED = {
    _DEVICE: "the samples stay the same, but rounding and the numbers of dropout are others",
    SOURCE: "the run continues with the new source",
}
"""inputs that may change, and what follows"""


def recipe_inputs(recipe: Recipe) -> Texts:
    """Return the inputs that are known before the job is built: training configuration, code."""
    return {
        **training_configuration(recipe.resolved),
        SOURCE: source_hash(resolve("task", recipe.task.name)),
    }


def inputs_of(job: Job, run: Run) -> Texts:
    """Return the inputs of a job. It reads some samples of data sets without a fingerprint."""
    recipe = job.recipe
    workers = run.workers(recipe.machine.workers)
    inputs: Texts = {
        **recipe_inputs(recipe),
        "precision": f"{run.accelerator.mixed_precision}, weights in {recipe.machine.dtype}",
        "steps along which the loss changes": str(job.steps * hasattr(job.task, "progress")),
        _DEVICE: run.device.type,
        **_model_inputs(job),
        **data_inputs(job.task, job.sets, seed=recipe.seed, workers=workers),
    }
    if job.exact:
        inputs |= texts(computed_by(recipe, run.device), "batch.grain needs the same ")
    return inputs


def _model_inputs(job: Job) -> Texts:
    """Return the lines that describe the model, or a hash if they are many."""
    lines = job.built.structure.splitlines()
    scalars = scalar_names(job.model)  # which FSDP2 holds with the shape (1,)
    for name, parameter in job.model.named_parameters():
        bare = bare_name(name)
        shape = () if bare in scalars else tuple(parameter.shape)
        line = f"{bare}: {shape} {parameter.dtype}"
        lines.append(line if parameter.requires_grad else f"{line}, frozen")
    if sum(map(len, lines)) > _LONG:
        return {"structure of the model": content_hash(lines)}
    return {f"structure of the model, line {number}": line for number, line in enumerate(lines, 1)}


def data_inputs(task: Any, sets: Mapping[str, Any], *, seed: int, workers: int = 0) -> Texts:
    """Return what identifies data sets, as "train set, samples".

    Args:
        task: returned the sets.
        sets: the data sets by name.
        seed: of the samples' random numbers.
        workers: of the run; if there are any, one reads the samples.
    """
    inputs: Texts = {}
    for name, dataset in sets.items():
        member = "train_set()" if name == "train" else "eval_sets()"
        call = partial(theirs, task, member)
        content, _ = content_of(dataset, seed=seed, workers=workers, call=call)
        inputs |= texts(content, f"{name} set, ")
    return inputs


def input_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return a line for each input that differs, by name, without what need not be the same.

    Args:
        before: the recorded inputs.
        now: the current ones.
    """
    lines = differences(before, now)
    lines.pop(PATH, None)
    if "duration" in lines and only_extends(before, now):
        del lines["duration"]
    return lines


@dataclass
class InputCheck:
    """The inputs of a run, which its checkpoints store and a resume checks.

    Args:
        job: the job of this run, with its inputs.
        count: has the ``position`` of a checkpoint that is saved now.
        say: reports to the user.
    """

    job: Job
    count: Any
    say: Callable[[str], object]

    def state_dict(self) -> Texts:
        return {**self.job.inputs, ORDER: self.job.order_hash(self.count.position)}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Compare the inputs of a checkpoint with the current inputs.

        Raises:
            ValueError: they differ, and changes are not accepted.
        """
        with damaged("the record of the inputs in the checkpoint"):
            order = self.job.order_hash(saved["counters"]["position"])
            lines = input_differences(saved["identity"], {**self.job.inputs, ORDER: order})

        # Another device rounds differently; the user may have corrected the source of the task.
        # A checkpoint that the user names may be of another recipe.
        keys = self.job.recipe.run
        changed = {}
        for name, line in lines.items():
            if name in _REPORTED:
                self.say(f"{line}; {_REPORTED[name]}")
            elif keys.resume in ("auto", "never") or not (name == ORDER or is_training_key(name)):
                changed[name] = line
        if changed and not keys.accept_changes:
            raise ValueError(
                f"inputs of the run have changed: {listed(changed)}; restore them, choose another "
                "run.dir, or continue with --run.accept_changes true"
            )
        for line in changed.values():
            self.say(f"accepted: {line}")


def reject_other_jobs(job: Job, run: Run) -> None:
    """Raise BadInput if the ranks have different inputs, or models with other values.

    Collective: call on every rank.
    """
    with run.setting_up():
        mine: Texts = {**job.inputs, ORDER: job.order_hash(), **_values_of(job.model)}
        code = sources()
    reports = run.gathered((mine, code))

    # All ranks compare the same reports, so all of them raise the same error.
    first, first_code = reports[0]
    for rank, (inputs, code) in enumerate(reports):
        lines = input_differences(first, inputs)
        # A module that only one of them has imported is not compared.
        lines |= differences(first_code, {name: code.get(name) for name in first_code})
        if lines:
            raise BadInput(
                f"the ranks differ (rank 0 -> rank {rank}): {listed(lines)}; give all of them the "
                "same data, model and code; let model() draw from the global generators of torch, "
                "numpy or Python, which are seeded alike"
            )


def _values_of(model: nn.Module) -> Texts:
    """Return hashes of what a model holds: parameters, buffers, and other tensors and arrays.

    Args:
        model: not yet wrapped or sharded.
    """
    # Of a large one, hash every n-th element.
    hashes: Texts = {}
    for prefix, module in model.named_modules():
        for key, value in {**vars(module), **module._parameters, **module._buffers}.items():
            if isinstance(value, np.ndarray) or (isinstance(value, Tensor) and is_strided(value)):
                flat = value.reshape(-1)
                name = f"values of {prefix}.{key}".replace(" .", " ")
                hashes[name] = content_hash(flat[:: 1 + len(flat) // _HASHED])
    return hashes
