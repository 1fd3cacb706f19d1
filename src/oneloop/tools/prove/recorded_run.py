"""A run of a few steps that saves gradients and weights of each step, or the times of all steps.

``accelerate launch … -m oneloop.tools.prove.recorded_run tensors:STEPS RECIPE [--key value …]``
"""

if __name__ == "__main__":  # before the slow imports, as in oneloop.train
    import sys

    from oneloop.launch import before_imports

    RECORD = sys.argv.pop(1)
    before_imports.begin()

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from oneloop.basics.files import dumps
from oneloop.basics.memory import peak_memory
from oneloop.basics.parameter_names import bare_name
from oneloop.checkpoint.state_dict import model_tensors
from oneloop.job.build import Job
from oneloop.launch.processes import Run
from oneloop.run import entry
from oneloop.run.folder import Folder
from oneloop.train import train


def _train_recorded(what: str, steps: int, job: Job, run: Run, folder: Folder) -> dict[str, Any]:
    """Train the first steps without evaluation; the learning rate follows the whole schedule."""
    make = job.make_optimizer
    times: list[float] = []

    def optimizer(model: nn.Module) -> Optimizer:
        made = make(model)
        if what == "times":
            made.register_step_pre_hook(lambda *_: times.append(time.perf_counter()))
            return made
        numbers = count(1)

        def keep(*_: Any) -> None:
            gradients = {}
            for name, parameter in model.named_parameters():
                gradients[f"model.{bare_name(name)}"] = parameter.grad
            # Collective under FSDP2: every rank gathers, rank 0 writes.
            both = _full_tensors(gradients), _full_tensors(model_tensors(model, frozen=False))
            # The folder is made after the trial, which steps on a toy model under FSDP2.
            if run.main and folder.path.is_dir():
                torch.save(both, folder.path / f"step-{next(numbers)}.pt")

        made.register_step_post_hook(keep)
        return made

    # The key converts float32 only. The rounding of weights in 16 bits would hide small terms.
    if job.recipe.machine.dtype == "float64":
        job.model.double()

    intervals = replace(job.intervals, total=min(steps, job.steps))
    job = replace(job, intervals=intervals, eval_sets={}, make_optimizer=optimizer)
    summary = train(job, run, folder)

    # What `oneloop worth` asks for.
    if what == "times":
        machine = {
            "device": run.device.type,
            "cores": run.cores,
            "blocks": bool(job.built.blocks),
            "convolutions": any(isinstance(module, nn.Conv2d) for module in job.model.modules()),
        }
        measures = {
            "times": times,
            "batch": job.recipe.batch.size,
            "peak": peak_memory(run.device) / 2**20,
            "machine": machine,
        }
        (folder.path / "measures.json").write_text(dumps(measures))
    return summary


def _full_tensors(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return whole tensors, without those that are None. Collective: call on every rank."""
    whole = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            mine = tensor.detach()
            whole[name] = mine.full_tensor() if isinstance(mine, DTensor) else mine
    return whole


def main(argv: Sequence[str]) -> NoReturn:
    """Train, and end the process with oneloop's exit code.

    ``argv`` is ``tensors:STEPS`` or ``times:STEPS``, and the recipe with its keys."""
    what, _, steps = argv[0].partition(":")
    entry.main(partial(_train_recorded, what, int(steps)), argv[1:])


if __name__ == "__main__":
    main([RECORD, *sys.argv[1:]])
