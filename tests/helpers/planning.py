"""One step of a recipe under the ledger: on real tensors in the processes of a world, or planned by
one process."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

LAYOUTS = {"single": 1, "ddp": 2, "fsdp2": 2}
GPT = [
    "gpt",
    "--task.width",
    "32",
    "--task.heads",
    "2",
    "--task.block",
    "32",
    "--batch.size",
    "8",
    "--batch.micro",
    "2",
]
LLAMA = [*GPT, "--task.architecture", "llama", "--task.layers", "4", "--ema.half_life", "5ep"]
SFT = ["sft", "--task.length", "96", "--batch.size", "8", "--batch.micro", "2"]


def planned_recipes(base: Path) -> dict[str, list[str]]:
    """Return small recipes by name; ``base`` is a model for LoRA."""
    lora = [*SFT, "--task.pack", "padded", "--task.model", str(base), "--task.lora.rank", "4"]
    return {
        "digits": ["digits"],
        "gpt": GPT,
        "llama": LLAMA,
        "lora": lora,
        "packed": [*SFT, "--task.pack", "packed"],
    }


def one_step(words: list[str], planned_ranks: int = 0) -> dict[str, Any]:
    """Return what a step of this recipe takes. ``planned_ranks``: plan it for so many processes,
    with the CPU's rules (0: on real tensors)."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from oneloop.job.build import build_job
    from oneloop.launch.processes import start
    from oneloop.plan.step_costs import StepCosts
    from oneloop.recipe.parse import read

    if planned_ranks > 1:
        places = {
            "RANK": 0,
            "LOCAL_RANK": 0,
            "WORLD_SIZE": planned_ranks,
            "LOCAL_WORLD_SIZE": planned_ranks,
        }
        os.environ |= {name: str(value) for name, value in places.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        dist.init_process_group("fake", rank=0, world_size=planned_ranks, store=FakeStore())
    recipe = read(words)
    how = {
        "sync_each_batch": recipe.machine.sync_each_batch,
        "exact": recipe.batch.grain is not None,
    }
    how["find_unused_parameters"] = recipe.machine.find_unused_parameters
    run = start(**how)
    job = build_job(recipe, ranks=run.ranks, sharded=run.sharded, on_meta=bool(planned_ranks))
    costs = StepCosts(
        job, run, FakeTensorMode(allow_non_fake_inputs=True) if planned_ranks else None
    )
    step, evaluation = costs.step(), costs.evaluation()
    costs.ledger.operators = []
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
        costs._run_step()
    operators, costs.ledger.operators = costs.ledger.operators, None
    called = [
        (event.name, event.input_shapes)
        for event in trace.events()
        if event.name.startswith("gloo:")
    ]
    return {
        "peak": step.peak,
        "kinds": step.kinds,
        "collectives": [
            (call.name, call.size, call.ranks, number) for call, number in step.collectives
        ],
        "operations": step.operations,
        "evaluation": evaluation and evaluation.peak,
        "operators": operators,
        "kept": costs.owned(),
        "called": called,
        "parameters": [tuple(parameter.shape) for parameter in costs.model.parameters()],
        "threads": torch.get_num_threads(),
    }


class Block(nn.Module):
    """A block that repeats, as :func:`oneloop.machine.blocks.blocks` finds it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.down(torch.tanh(self.up(values)))


class Blocks:
    """Regression by repeated blocks on 64 samples: a task that is planned in half a second."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        self.width, self.layers = width, layers

    def model(self) -> nn.Module:
        return nn.Sequential(
            *(Block(self.width) for _ in range(self.layers)), nn.Linear(self.width, 1)
        )

    def train_set(self) -> Any:
        return [torch.full((self.width,), index / 64) for index in range(64)]

    def eval_sets(self) -> dict[str, Any]:
        return {"validation": self.train_set()[:16]}

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        return {"x": torch.stack(samples)}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(float(len(batch["x"])))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        each = (model(batch["x"])[:, 0] - batch["x"].mean(1)).square()
        return each.sum(), {"loss": each.detach()}


class Odd(Blocks):
    """A task that does something unusual: exit, pop, print, norm (BatchNorm) or lines."""

    def __init__(self, does: str = "pop", **sizes: int) -> None:
        super().__init__(**sizes)
        self.does = does

    def model(self) -> nn.Module:
        if self.does == "exit":
            sys.exit(5)
        if self.does == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        print("printed by the task")
        return (
            nn.Sequential(super().model(), nn.BatchNorm1d(1))
            if self.does == "norm"
            else super().model()
        )

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        if self.does == "lines":
            raise ValueError("one line\nand another")
        values = batch.pop("x")
        return super().loss(model, {"x": values})
