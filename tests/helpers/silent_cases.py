"""User mistakes, case by case: files, the command line, and the expected message. Run by
test_nothing_silent.py, and by benchmarks/refusals.py against two checkouts."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

BASE = """
import math
import torch
from torch import nn
from torch.nn import functional as F


class Base:
    def __init__(self, samples: int = 64):
        self.x = torch.linspace(-1, 1, samples)[:, None]

    def model(self):
        return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def train_set(self):
        return torch.utils.data.TensorDataset(self.x, self.x.sin())

    def eval_sets(self):
        return {"validation": self.train_set()}

    def collate(self, samples):
        x, y = zip(*samples)
        return {"x": torch.stack(x), "y": torch.stack(y)}

    def weight(self, batch):
        return torch.tensor(float(len(batch["x"])))

    def loss(self, model, batch):
        each = F.mse_loss(model(batch["x"]), batch["y"], reduction="none")
        return each.sum(), {"loss": each.detach()}


class Mine(Base):
"""
"""the file of a right task, to which a case adds the members that are wrong"""


@dataclass(frozen=True)
class Case:
    """One user mistake."""

    expected_text: tuple[str, ...]
    """what the message, or where the code is 0 the output, has to hold"""
    task: str = "    pass"
    """members of the class, indented"""
    words: tuple[str, ...] = ()
    """typed after the recipe"""
    code: int = 2
    ranks: int = 1
    config: str = "single"
    recipe: tuple[str, ...] = ("digits", "--task", "mine.Mine")


LOSS = (
    "    def loss(self, model, batch):\n        each = (model(batch['x']) - batch['y']).square()\n"
)

CONTRACT = {
    "a mean for a sum": Case(
        ("mine.py:34: Mine.loss returned", "that is a mean"),
        LOSS + "        return each.mean(), {}",
    ),
    "a loss that is a number": Case(
        ("loss returned a float as the loss", "0-dim tensor"), LOSS + "        return 1.0, {}"
    ),
    "a loss alone": Case(
        ("loss returned a tensor 0-dim", "return (loss, outputs)"),
        LOSS + "        return each.sum()",
    ),
    "a loss per sample": Case(
        ("loss returned a tensor of shape",), LOSS + "        return each[:, 0], {}"
    ),
    "a loss without a gradient": Case(
        ("without a gradient in training",), LOSS + "        return each.sum().detach(), {}"
    ),
    "outputs in a list": Case(
        ("returned a list as the outputs",), LOSS + "        return each.sum(), [each]"
    ),
    "a loss that fails": Case(
        ("Mine.loss failed: KeyError: 'z'", "mine.py:35"),
        "    def loss(self, model, batch):\n        return batch['z'].sum(), {}",
    ),
    "a loss that takes something else": Case(
        ("Mine.loss failed: TypeError", "takes 2 positional arguments but 3 were given"),
        "    def loss(self, batch):\n        return batch['x'].sum(), {}",
    ),
    "a loss over the batch in training": Case(
        ("in training for samples whose losses are", "additive = False"),
        LOSS
        + "        aux = each.mean() if model.training else 0\n        return each.sum() + aux, {}",
    ),
    "a contrastive loss": Case(
        ("for the same sample twice", "additive = False"),
        LOSS + "        return (each * len(each)).sum(), {}",
    ),
    "a weight that is a number": Case(
        ("weight returned a int",), "    def weight(self, batch):\n        return len(batch['x'])"
    ),
    "a weight below zero": Case(
        ("weight returned -1",), "    def weight(self, batch):\n        return torch.tensor(-1.0)"
    ),
    "a weight that does not add up": Case(
        ("weight returned 1 for a sample and 1 for the same sample twice",),
        "    def weight(self, batch):\n        return torch.tensor(1.0)",
    ),
    "a sample_weight that weight denies": Case(("sample_weight is 2",), "    sample_weight = 2.0"),
    "a sample_weight of nothing": Case(("but sample_weight is 0",), "    sample_weight = 0"),
    "a unit that is none": Case(("got 'words'",), "    unit = 'words'"),
    "a batch in a tuple": Case(
        ("collate returned a tuple of 2",),
        "    def collate(self, samples):\n        return tuple(torch.stack(one) for one in "
        "zip(*samples))",
    ),
    "a batch whose keys change": Case(
        ("collate returned the keys", "the same keys each time"),
        "    def collate(self, samples):\n        batch = super().collate(samples)\n"
        "        return batch if len(samples) == 1 else {**batch, 'extra': batch['x']}",
    ),
    "metrics in a list": Case(
        ("metrics() returned a list",),
        "    def metrics(self):\n        return []\n    def update(self, metrics, batch, "
        "outputs):\n        pass",
    ),
    "an update that fails": Case(
        ("Mine.update failed: KeyError: 'logits'", "mine.py:39"),
        "    def metrics(self):\n        from torchmetrics import MetricCollection, MeanMetric\n"
        "        return MetricCollection({'mean': MeanMetric()})\n"
        "    def update(self, metrics, batch, outputs):\n\n        "
        "metrics.update(outputs['logits'])",
    ),
    "a model that is none": Case(
        ("model returned a int",), "    def model(self):\n        return 3"
    ),
    "a model that fails": Case(
        ("Mine.model failed: ZeroDivisionError", "mine.py:35"),
        "    def model(self):\n        return 1 / 0",
    ),
    "a train_set that fails": Case(
        ("Mine.train_set failed: KeyError: 'no such column'", "mine.py:35"),
        "    def train_set(self):\n        raise KeyError('no such column')",
    ),
    "an __init__ that fails": Case(
        ("__init__ failed: TypeError", "mine.py:35"),
        "    def __init__(self):\n        raise TypeError('not so')",
    ),
    "a state of tensors": Case(
        ("Mine.state_dict cannot be saved as it is", "buffers of the model"),
        "    def state_dict(self):\n        return {'mean': torch.zeros(1)}\n    def "
        "load_state_dict(self, state):\n"
        "        pass",
    ),
    "a state that does not come back": Case(
        ("load_state_dict did not restore",),
        "    n = 0\n    def state_dict(self):\n        self.n += 1\n        return {'n': self.n}\n"
        "    def load_state_dict(self, state):\n        pass",
    ),
    "a state that nothing loads": Case(
        ("it lacks load_state_dict",), "    def state_dict(self):\n        return {}"
    ),
    "eval_sets in a list": Case(
        ("eval_sets() returned a list",),
        "    def eval_sets(self):\n        return [self.train_set()]",
    ),
}

GOOD = {
    "a loss that declares that it is not a sum": Case(
        ("the task declares additive = False: its loss is not a sum over samples",),
        "    additive = False\n" + LOSS + "        return (each * len(each)).sum(), {}",
        code=0,
    ),
    "a loss that draws": Case(
        ("model, loss or collate draw random numbers",),
        LOSS + "        return (each * (1 + torch.rand_like(each))).sum() if model.training else "
        "each.sum(), {}",
        code=0,
    ),
    "a loss that draws in evaluation too": Case(
        ("model, loss or collate draw random numbers",),
        LOSS + "        return (each + torch.randn_like(each)).square().sum(), {}",
        code=0,
    ),
    "a loss that draws from a generator of its own": Case(
        ("the same samples and seeds give a different loss", "a resume"),
        "    own = torch.Generator().manual_seed(0)\n"
        + LOSS
        + "        return (each * torch.rand(each.shape, generator=self.own)).sum(), {}",
        code=0,
    ),
    "a metric that needs two samples": Case(
        ("done",),
        "    def metrics(self):\n        from torchmetrics import MetricCollection, R2Score\n"
        "        return MetricCollection({'r2': R2Score()})\n"
        "    def update(self, metrics, batch, outputs):\n"
        "        metrics.update(outputs['loss'][:, 0], batch['y'][:, 0])",
        words=("--batch.micro", "1"),
        code=0,
    ),
    "a figure that is there now and then": Case(
        ("done",),
        LOSS + "        return each.sum(), {'big': each.max().detach()} if len(each) < 8 else {}",
        code=0,
    ),
    "sparse samples and sets": Case(
        ("done",),
        "    def train_set(self):\n"
        "        return [(self.x[i].to_sparse(), self.x[i].sin(), {'a', 'b'}, lambda: 0) for i "
        "in range(64)]\n"
        "    def eval_sets(self):\n        return {}\n"
        "    def collate(self, samples):\n"
        "        return super().collate([(one[0].to_dense(), one[1]) for one in samples])",
        code=0,
    ),
    "figures of the loss": Case(
        ("done",), LOSS + "        return each.sum(), {'rmse': each.mean().sqrt().detach()}", code=0
    ),
    "names with markup": Case(
        ("done",),
        "    def metrics(self):\n        from torchmetrics import MetricCollection, MeanMetric\n"
        "        return MetricCollection({'[/b]': MeanMetric()})\n"
        "    def update(self, metrics, batch, outputs):\n        metrics.update(outputs['loss'])",
        code=0,
    ),
    "views of one storage": Case(
        ("done",),
        "    def model(self):\n        model, whole = super().model(), torch.arange(8.0)\n"
        "        model.register_buffer('a', whole[:4])\n        model.register_buffer('b', "
        "whole[4:])\n"
        "        return model",
        code=0,
    ),
    "complex weights": Case(
        ("done",),
        "    def model(self):\n        return Complex()\n\nclass Complex(nn.Module):\n    def "
        "__init__(self):\n"
        "        super().__init__()\n        self.w = nn.Parameter(torch.ones(8, "
        "dtype=torch.complex64) * 0.1)\n"
        "        self.head = nn.Linear(8, 1)\n    def forward(self, x):\n        return "
        "self.head((x * self.w).abs())",
        code=0,
    ),
    "a rank that holds no element": Case(
        ("done",),
        "    def model(self):\n        return nn.Linear(1, 1, bias=False)",
        words=("--ema.half_life", "10"),
        code=0,
        ranks=2,
        config="fsdp2",
    ),
    "unused parameters that DDP looks for": Case(
        ("parameters without a gradient in the preflight check",),
        "    def model(self):\n        model = super().model()\n        model.more = "
        "nn.Linear(3, 3)\n"
        "        model.forward = lambda x: nn.Sequential(*list(model)[:3])(x)\n        return "
        "model",
        words=("--machine.find_unused_parameters", "true"),
        code=0,
        ranks=2,
        config="ddp",
    ),
}

FROZEN = "    def model(self):\n        return super().model().requires_grad_(False)"
UNUSED = """    def model(self):
        return Half()

class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.more = nn.Linear(1, 1), nn.Linear(3, 3)
    def forward(self, x):
        return self.used(x)"""
BUFFER = """    def model(self):
        model = super().model()
        model.register_buffer('odd', {0})
        return model"""

NO_DECAY = ("--optimizer.weight_decay", "0")
START = {
    "betas above 1": Case(
        ("optimizer.name adamw betas=(2.0, 0.9)",), words=("--optimizer.betas", "[2.0,0.9]")
    ),
    "an eps below 0": Case(("optimizer.name adamw", "eps=-1.0"), words=("--optimizer.eps", "-1.0")),
    "a momentum below 0": Case(
        ("momentum",), words=("--optimizer.name", "sgd", "--optimizer.momentum", "-1.0")
    ),
    "muon's betas above 1": Case(
        ("muon", "betas"), words=("--optimizer.name", "muon", "--optimizer.betas", "[0.9,2.0]")
    ),
    "LBFGS": Case(("LBFGS", "closure"), words=("--optimizer.name", "torch.optim.LBFGS", *NO_DECAY)),
    "SparseAdam": Case(
        ("SparseAdam", "dense gradients"),
        words=("--optimizer.name", "torch.optim.SparseAdam", *NO_DECAY),
    ),
    "all frozen": Case(
        ("Mine.model returned a model with 4 parameters of which none is trained",), FROZEN
    ),
    "a lazy module": Case(
        ("LazyModule", "dummy batch"), "    def model(self):\n        return nn.LazyLinear(1)"
    ),
    "an extra state": Case(
        ("get_extra_state", "buffer"),
        "    def model(self):\n        return Odd(1, 1)\n\nclass Odd(nn.Linear):\n"
        "    def get_extra_state(self):\n        return {'seen': 3}\n    def "
        "set_extra_state(self, state): ...",
    ),
    "a type that no file holds": Case(
        ("odd has uint16",), BUFFER.format("torch.zeros(3, dtype=torch.uint16)")
    ),
    "an expanded buffer": Case(
        ("odd is an expanded view",), BUFFER.format("torch.zeros(1).expand(3)")
    ),
    "unused parameters under DDP": Case(
        ("more.weight", "the loss does not use", "machine.find_unused_parameters"),
        UNUSED,
        ranks=2,
        config="ddp",
    ),
    "mixed types under FSDP2": Case(
        ("float32 and float64", "FSDP2"),
        "    def model(self):\n        return nn.Sequential(nn.Linear(1, 8), nn.Linear(8, "
        "1).double())",
        ranks=2,
        config="fsdp2",
    ),
    "a decay longer than the run": Case(
        ("schedule.decay 200%", "shorten"),
        words=("--schedule.name", "wsd", "--schedule.decay", "200%"),
    ),
    "a learning rate of infinity": Case(
        ("optimizer.lr", "got inf"), words=("--optimizer.lr", ".inf")
    ),
    "a name too long": Case(("run.dir", "too long"), words=("--run.dir", "x" * 300)),
    "a checkpoint that is not there": Case(
        ("it does not exist",), words=("--run.resume", "nowhere")
    ),
    "the best weights of no evaluation": Case(
        ("save.final best", "requires a validation set"),
        "    def eval_sets(self):\n        return {}",
        ("--save.final", "best"),
    ),
    "the best weights that are not kept": Case(
        ("save.best",), words=("--save.final", "best", "--save.best", "false")
    ),
    "a key without its value": Case(("run.resume needs a value",), words=("--run.resume",)),
}

ALONE = """    def loss(self, model, batch):
        import os
        if os.environ.get("RANK") == "1":
            raise KeyError("only here")
        return super().loss(model, batch)"""
START["what one rank alone finds, under FSDP2"] = Case(
    ("rank 1: ", "KeyError: 'only here'"), ALONE, ranks=2, config="fsdp2"
)
START["what one rank alone finds, under DDP"] = Case(
    ("KeyError: 'only here'",), ALONE, ranks=2, config="ddp"
)

CODE = {
    "a program for a task": Case(
        ("it is a class that lacks model",),
        recipe=("digits", "--task", "subprocess.Popen", "--task.args", "[touch,ran]"),
    ),
    "a builtin for a task": Case(("not a class",), recipe=("digits", "--task", "builtins.exec")),
    "a function for a task": Case(
        ("is a function, not a class",), recipe=("digits", "--task", "torch.save")
    ),
    "a class that is no task": Case(
        ("is a class that lacks",), recipe=("digits", "--task", "torch.nn.Linear")
    ),
    "a class that is no optimizer": Case(
        ("optimizer.name 'torch.nn.Linear'", "not a torch.optim.optimizer.Optimizer"),
        words=("--optimizer.name", "torch.nn.Linear"),
    ),
    "two optimizers": Case(
        (
            "optimizer.name mine.both",
            "it returned a tuple",
            "a run has one optimizer, which may train several networks (docs/how-to/gans.md)",
        ),
        "    pass\n\n\ndef both(params, lr: float = 0.1):\n    return (torch.optim.SGD(params, "
        "lr=lr),) * 2",
        words=("--optimizer.name", "mine.both", "--optimizer.weight_decay", "0"),
    ),
    "a program for an optimizer": Case(
        ("with the arguments ()",), words=("--optimizer.name", "os.system")
    ),
    "a schedule of one argument": Case(
        ("schedule.name 'torch.nn.functional.relu6'", "a function (step, total) -> factor"),
        words=("--schedule.name", "torch.nn.functional.relu6"),
    ),
}

DATA = {
    "a column of chats": Case(
        ("in 'messages' is an object or a list", "expected text"),
        recipe=("gpt", "--task.data", "chats.jsonl", "--task.column", "messages"),
    ),
    "csv without the column": Case(
        ("no column 'text'", "id, body", "task.column"), recipe=("gpt", "--task.data", "rows.csv")
    ),
    "what is no text": Case(
        ("odd.txt is not UTF-8 text",), recipe=("gpt", "--task.data", "odd.txt")
    ),
    "a file beside named parts": Case(
        ("parts", "other.txt belongs to no split"), recipe=("gpt", "--task.data", "parts")
    ),
}

ALL = {**CONTRACT, **START, **CODE, **DATA, **GOOD}


def files(case: Case) -> dict[str, str | bytes]:
    """Return the files of the working folder."""
    return {
        "mine.py": BASE + case.task + "\n",
        "chats.jsonl": '{"messages": [{"role": "user", "content": "hi"}]}\n' * 50,
        "rows.csv": "id,body\n" + "".join(f"{n},text number {n}\n" for n in range(50)),
        "odd.txt": b"\x00\x01\x02\xff",
        "parts/train.txt": "to train on\n" * 50,
        "parts/validation.txt": "to validate with\n" * 50,
        "parts/other.txt": "what is this\n" * 50,
    }


def words(case: Case) -> list[str]:
    """Return the command-line words."""
    given = ["--duration", "4", "--batch.size", "8", "--track", "none"]
    return [
        *case.recipe,
        *given,
        *([] if "--run.dir" in case.words else ["--run.dir", "run"]),
        *case.words,
    ]


# --- changes to a run that was killed
# ---------------------------------------------------------------------------------

WORDS = [
    "digits",
    "--task",
    "mine.Mine",
    "--duration",
    "12",
    "--batch.size",
    "8",
    "--track",
    "none",
]
WORDS += [
    "--save.every",
    "4",
    "--save.keep",
    "9",
    "--log.every",
    "1",
    "--eval.every",
    "6",
    "--run.dir",
    "run",
]


def lay(folder: Path, members: str = "    pass", base: str = BASE) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(base + members + "\n")
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)


def unfinished(folder: Path, step: int = 8) -> None:
    """Turn a finished run into one that was killed after ``step``."""
    shutil.rmtree(folder / "final")
    (folder / "summary.json").unlink()
    for path in (folder / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)


CHANGES = {
    "more data": (
        (
            "    def train_set(self):\n        x = self.x.repeat(2, 1)\n"
            "        return torch.utils.data.TensorDataset(x, x.sin())"
        ),
        [],
        "train set, samples: 64 -> 128; ",
    ),
    "other data": (
        (
            "    def train_set(self):\n        return torch.utils.data.TensorDataset(self.x, "
            "self.x.cos())"
        ),
        [],
        "train set, hash of 16 samples: ",
    ),
    "requires a validation set": (
        "    def eval_sets(self):\n        return {}",
        [],
        "validation set, samples: 64 -> missing",
    ),
    "another activation": (
        (
            "    def model(self):\n        return nn.Sequential(nn.Linear(1, 8), nn.ReLU(), "
            "nn.Linear(8, 1))"
        ),
        [],
        "structure of the model, line 3:   (1): Tanh() ->   (1): ReLU()",
    ),
    "a frozen layer": (
        (
            "    def model(self):\n        model = super().model()\n        "
            "model[0].requires_grad_(False)\n"
            "        return model"
        ),
        [],
        "0.weight: (8, 1) torch.float32 -> 0.weight: (8, 1) torch.float32, frozen",
    ),
    "another precision": (
        "    pass",
        ["--mixed_precision", "bf16"],
        "precision: no, weights in float32 -> bf16",
    ),
}

DAMAGE = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "of another kind": lambda content: b"[1, 2]\n",
    "not UTF-8": lambda content: b"\xff\xfe\x00" + content[3:],
}
