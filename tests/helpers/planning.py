"""One step of a recipe under the ledger: on real tensors in the processes of a world, or planned by
one process."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lessons import lessons

SOURCE = Path(__file__).parents[2] / "src" / "oneloop" / "launch" / "processes.py"

LAYOUTS = {"single": 1, "ddp": 2, "fsdp2": 2}
GPT = [
    "gpt",
    "--task.width",
    "32",
    "--task.heads",
    "2",
    "--task.block",
    "32",
    "--task.data",
    str(SOURCE),
    "--batch.size",
    "8",
    "--batch.micro",
    "2",
]
"""a GPT on one small file: to read the packaged texts takes seconds"""
LLAMA = [*GPT, "--task.architecture", "llama", "--task.layers", "4", "--ema.half_life", "5ep"]
SFT = ["sft", "--task.length", "96", "--batch.size", "8", "--batch.micro", "2"]


def few_chats(folder: Path) -> list[str]:
    """Write a few chats; return the keys of a recipe that trains on them.

    The packaged chats, which are thousands, would take seconds for each tokenizer.
    """
    file = folder / "chats.jsonl"
    chats = [{"messages": chat} for chat in lessons("train")[:200]]
    file.write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    return ["--task.data", str(file)]


def planned_recipes(base: Path) -> dict[str, list[str]]:
    """Return small recipes by name; ``base`` is a model for LoRA."""
    sft = [*SFT, *few_chats(base)]
    lora = [*sft, "--task.pack", "padded", "--task.model", str(base), "--task.lora.rank", "4"]
    return {
        "digits": ["digits"],
        "gpt": GPT,
        "llama": LLAMA,
        "lora": lora,
        "packed": [*sft, "--task.pack", "packed"],
    }


def one_step(
    words: list[str], planned_ranks: int = 0, capability: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Return what a step of this recipe takes.

    Args:
        words: recipe and keys.
        planned_ranks: plan it for so many processes (0: on real tensors).
        capability: compute capability of the GPU that is planned (None: the CPU's rules).
    """
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from oneloop.basics.tensors import Planned
    from oneloop.job.build import build_job
    from oneloop.launch.processes import start
    from oneloop.recipe.parse import read
    from oneloop.tools.plan.step_costs import StepCosts

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
    Planned.capability = capability
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

    # Collect the names of the operators of one step.
    operators: list[str] = []
    counted = costs.ledger._event

    def noted(operator: str) -> None:
        if operator != "resize":  # no operator
            operators.append(operator)
        counted(operator)

    costs.ledger._event = noted
    # A trace takes seconds, and shows only what gloo does.
    if run.ranks > 1 and not planned_ranks:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
            costs._run_step()
        events = trace.events()
    else:
        costs._run_step()
        events = []
    called = [
        (event.name, event.input_shapes) for event in events if event.name.startswith("gloo:")
    ]
    return {
        "peak": step.peak,
        "kinds": step.kinds,
        "collectives": [
            (call.name, call.size, call.ranks, call.calls) for call in step.collectives
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


@torch.library.custom_op("planning::same", mutates_args=())
def same(values: Tensor) -> Tensor:
    """Return a copy, and allocate for a moment what no plan can see."""
    return (values.repeat(64, 1)[: len(values)]).clone()


same.register_fake(torch.empty_like)
same.register_autograd(lambda _, gradient: gradient)


class Recurrent(nn.Module):
    """An LSTM on sequences of one value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.LSTM(width, width)

    def forward(self, values: Tensor) -> Tensor:
        return self.inner(values[None])[0][0]


class Foreign(nn.Module):
    """A module with an operator that is not torch's own."""

    def forward(self, values: Tensor) -> Tensor:
        return same(values)


class Head(nn.Module):
    """A head like that of BERT: the output layer's bias has another name, too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.output = nn.Linear(width, 1)
        self.bias = self.output.bias

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def forward(self, values: Tensor) -> Tensor:
        return self.output(values) + self.bias


class Tied(Blocks):
    """A model that FSDP2 cannot shard: a tied bias, or one module in two blocks."""

    def __init__(self, what: str = "bias") -> None:
        super().__init__()
        self.what = what

    def model(self) -> nn.Module:
        if self.what == "bias":
            return Head(self.width)
        one, two = Block(self.width), Block(self.width)
        two.up = one.up
        return nn.Sequential(one, two, nn.Linear(self.width, 1))


class Odd(Blocks):
    """A task that does something unusual: exit, pop, print, norm (BatchNorm) or lines.

    Of lstm, operator and reads, a plan cannot count everything."""

    def __init__(self, does: str = "pop", **sizes: int) -> None:
        super().__init__(**sizes)
        self.does = does

    def model(self) -> nn.Module:
        if self.does == "exit":
            sys.exit(5)
        if self.does == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        print("printed by the task")
        first = {"lstm": Recurrent, "operator": lambda _: Foreign()}.get(self.does)
        if first is not None:
            return nn.Sequential(first(self.width), super().model())
        return (
            nn.Sequential(super().model(), nn.BatchNorm1d(1))
            if self.does == "norm"
            else super().model()
        )

    def train_set(self) -> Any:
        return super().train_set() * (5 if self.does == "many" else 1)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        if self.does == "lines":
            raise ValueError("one line\nand another")
        values = batch.pop("x")
        total, each = super().loss(model, {"x": values})
        if self.does == "reads" and not model.training:
            float(total)
        return total, each
