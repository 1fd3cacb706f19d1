"""Part plan of ``gpu_day.py``: ``oneloop plan`` beside the memory that a step takes on a GPU.

    PYTHONPATH=src python benchmarks/gpu_day.py --part plan

Each recipe is planned on the CPU, and then its step runs for real, in a process of its own. The
measured bytes are those that torch's allocator has allocated and reserved; in a toy, which runs on
a CPU in float32, those of the ledger.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import torch

from gpu_lines import Place, Result, line
from same_bits_gpu import environment

GIB = 2**30
WITHIN = 0.05  # the largest error of the predicted peak (goal G11)
SMALL = ["--task.width", "32", "--task.heads", "2", "--batch.size", "4"]


def measured(words: list[str]) -> None:
    """Run the real step and print bytes.

    These are the peak allocated without cuBLAS's workspaces, the peak reserved, the peak of the
    ledger, and the workspaces.
    """
    from oneloop.job.build import build_job
    from oneloop.launch.processes import start
    from oneloop.recipe.parse import read
    from oneloop.tools.plan.step_costs import StepCosts

    run = start()
    costs = StepCosts(build_job(read(words), ranks=1, device=run.device.type), run)
    allocated = reserved = workspaces = 0
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        costs._run_step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        reserved = torch.cuda.max_memory_reserved()

        # cuBLAS's workspaces (32 MiB for each thread that multiplies) are in no plan. They are
        # there in the whole step, since the constructor has made one.
        held = torch.cuda.memory_allocated()
        torch._C._cuda_clearCublasWorkspaces()
        workspaces = held - torch.cuda.memory_allocated()
        allocated = peak - workspaces
    print(json.dumps([allocated, reserved, costs.step().peak, workspaces]))


def _beside(place: Place, words: list[str]) -> Result:
    """Plan a recipe, and measure it."""
    options = ["--config_file", "single", "--mixed_precision", place.precision, "--no_changes"]
    command = [sys.executable, "-m", "oneloop", "plan", *words, *options, "--json"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    plan = subprocess.Popen(command, env=environment(), **pipes)

    # Measure meanwhile: the plan needs no GPU.
    variables = {**environment(), "ACCELERATE_MIXED_PRECISION": place.precision}
    command = [sys.executable, __file__, "--one", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    allocated, reserved, ledger, workspaces = json.loads(done.stdout.splitlines()[-1])

    found, errors = plan.communicate()
    assert found.startswith("{"), found + errors  # exit code 1: it does not fit
    planned = json.loads(found)["memory"]["step"]["peak"]
    real = allocated or ledger
    error = planned / real - 1
    numbers = {
        "planned_gib": planned / GIB,
        "measured_gib": real / GIB,
        "error": error,
        "ledger_gib": ledger / GIB,
    }
    if allocated:
        numbers["reserved_gib"] = reserved / GIB
        numbers["cublas_workspaces_gib"] = workspaces / GIB
    says = (
        f"planned {planned / GIB:.3f} GiB, measured {real / GIB:.3f} ({error:+.1%}), "
        f"reserved {reserved / GIB:.3f}, ledger {ledger / GIB:.3f}"
    )
    assert abs(error) <= WITHIN, f"{says}: more than {WITHIN:.0%} apart"
    return Result(says, numbers)


NUMBERS = ["planned_gib", "measured_gib", "error"]
ON_GPU = ["reserved_gib"]


@line("plan", name="plan_gpt2_micro_8", seconds=45, numbers=NUMBERS, on_gpu=ON_GPU, gpus=1)
def gpt2(place: Place) -> Result:
    return _beside(place, ["gpt2"])


@line("plan", name="plan_llama_1b_micro_1", seconds=60, numbers=NUMBERS, on_gpu=ON_GPU, gpus=1)
def llama_1b(place: Place) -> Result:
    return _beside(place, ["llama-1b", "--batch.micro", "1"])


@line("plan", name="plan_gpt2_ema_selective", seconds=45, numbers=NUMBERS, on_gpu=ON_GPU, gpus=1)
def gpt2_ema(place: Place) -> Result:
    return _beside(place, ["gpt2", "--ema.half_life", "5%", "--machine.recompute", "selective"])


@line("plan", name="plan_llama_packed", seconds=40, numbers=NUMBERS, on_gpu=ON_GPU, gpus=1)
def llama(place: Place) -> Result:
    return _beside(place, ["llama"])


@line("plan", name="plan_digits", seconds=30, numbers=NUMBERS, on_gpu=ON_GPU)
def digits(place: Place) -> Result:
    return _beside(place, ["digits"])


@line("plan", name="plan_gpt", seconds=30, numbers=NUMBERS, on_gpu=ON_GPU)
def gpt(place: Place) -> Result:
    return _beside(place, ["gpt", *(SMALL if place.toy else [])])


@line("plan", name="plan_gpt2_recompute", seconds=45, numbers=NUMBERS, on_gpu=ON_GPU, gpus=1)
def gpt2_recompute(place: Place) -> Result:
    return _beside(place, ["gpt2", "--machine.recompute", "full"])


@line("plan", name="plan_llama_1b_recompute", seconds=60, numbers=NUMBERS, on_gpu=ON_GPU, gpus=1)
def llama_1b_recompute(place: Place) -> Result:
    return _beside(place, ["llama-1b", "--machine.recompute", "full"])


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if sys.argv[1:2] != ["--one"]:
        sys.exit("this is a part of gpu_day.py: python benchmarks/gpu_day.py --part plan")
    measured(sys.argv[2:])
