"""oneloop plan against torch.cuda.max_memory_allocated on one GPU, for eight recipes; takes at most
6 minutes.

    python benchmarks/plan_on_gpu.py > benchmarks/DATE-plan-on-gpu.txt

Each recipe is planned, and then its step runs for real, in a process of its own. With --toy, for
tests on a CPU, it has fewer and smaller recipes in float32, and the measured bytes are those of the
ledger.
"""

import json
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import version

import torch

RECIPES = {
    "digits": ["digits"],
    "gpt": ["gpt"],
    "gpt2, micro 8": ["gpt2"],
    "gpt2, recompute full": ["gpt2", "--machine.recompute", "full"],
    "gpt2, EMA, selective": ["gpt2", "--ema.half_life", "5%", "--machine.recompute", "selective"],
    "llama, packed": ["llama"],
    "llama-1b, micro 1": ["llama-1b", "--batch.micro", "1"],
    "llama-1b, recompute full": ["llama-1b", "--machine.recompute", "full"],
}
TOY = {
    "digits": ["digits"],
    "gpt": ["gpt", "--task.width", "32", "--task.heads", "2", "--batch.size", "4"],
}
PRECISION = "no" if "--toy" in sys.argv else "bf16"


def measured(precision: str, words: list[str]) -> None:
    """Run the real step and print its peak, in bytes: of the allocator (allocated, reserved), and
    of the ledger."""
    import os

    os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    from oneloop.job.build import build_job
    from oneloop.launch.processes import start
    from oneloop.plan.step_costs import StepCosts
    from oneloop.recipe.parse import read

    run = start()
    costs = StepCosts(build_job(read(words), ranks=1, device=run.device.type), run)
    allocated = reserved = 0
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        costs._run_step()
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(json.dumps([allocated, reserved, costs.step().peak]))


def main() -> None:
    recipes = TOY if "--toy" in sys.argv else RECIPES
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    names = ("torch", "accelerate", "transformers", "oneloop")
    print(f"{date.today()}: {device}, " + ", ".join(f"{name} {version(name)}" for name in names))
    rows, began = [], time.monotonic()
    for name, words in recipes.items():
        options = [
            "--config_file",
            "single",
            "--mixed_precision",
            PRECISION,
            "--no_changes",
            "--json",
        ]
        command = [sys.executable, "-m", "oneloop", "plan", *words, *options]
        plan = json.loads(
            subprocess.run(command, capture_output=True, text=True, check=False).stdout
        )
        planned = plan["memory"]["step"]["peak"]
        done = subprocess.run(
            [sys.executable, __file__, "--one", PRECISION, *words],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            print(f"{name}: {done.stderr.strip().splitlines()[-1]}", flush=True)
            continue
        allocated, reserved, ledger = json.loads(done.stdout.splitlines()[-1])
        rows.append((name, planned, allocated or ledger, reserved, ledger))
        print(f"{name} after {time.monotonic() - began:.0f} s", flush=True)
    print(
        f"\n{'recipe':28}{'planned':>10}{'measured':>10}{'error':>8}{'reserved':>10}{'ledger':>10} "
        "  GiB"
    )
    for name, planned, real, reserved, ledger in rows:
        sizes = f"{planned / 2**30:10.3f}{real / 2**30:10.3f}{planned / real - 1:8.1%}"
        print(f"{name:28}{sizes}{reserved / 2**30:10.3f}{ledger / 2**30:10.3f}")


if __name__ == "__main__":
    measured(sys.argv[2], sys.argv[3:]) if sys.argv[1:2] == ["--one"] else main()
