"""A user's task with a frozen reference (or teacher), whose forwards are counted in files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oneloop.tasks.frozen.outputs import FrozenOutputs
from oneloop.tasks.frozen.task import FrozenModel, FrozenTask

ENTRIES = 16
RECORD = np.dtype([("logp", "<f8")])


def documents(count: int, *, longest: int = 60, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, ENTRIES, rng.integers(3, longest)) for _ in range(count)]


class Next(nn.Module):
    """Predicts the next token from this one and the mean of those before it; two layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ENTRIES, width)
        self.layers = nn.ModuleList([Mix(width), Mix(width)])
        self.head = nn.Linear(width, ENTRIES)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Mix(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        steps = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[:, None]
        return hidden + torch.tanh(self.linear(hidden.cumsum(1) / steps))


def log_probabilities(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1]).double()
    return -F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")


class Docs:
    def __init__(self, values: list[np.ndarray], outputs: FrozenOutputs) -> None:
        self.values = values
        self.outputs = outputs

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int):
        return self.values[index], self.outputs[index]["logp"]


class Frozen(FrozenTask):
    """A policy that keeps close to its reference; ``teacher``: the model of another seed instead.

    Each process lists the documents of its forwards of the pass in the folder $FROZEN_LOG.

    Args:
        store: folder of the outputs.
        count: training documents.
        stop: end this process by SIGKILL in its n-th forward of the pass.
    """

    unit = "tokens"

    def __init__(
        self,
        store: str,
        count: int = 2000,
        teacher: int = 0,
        stop: int = 0,
        seed: int = 0,
        nan: bool = False,
    ) -> None:
        self.log = os.environ.get("FROZEN_LOG", "")
        self.stop = stop
        self.nan = nan
        self.forwards = 0
        self.values = {"train": documents(count, seed=seed), "validation": documents(300, seed=9)}
        outputs = {}
        for name, values in self.values.items():
            lengths = np.array([len(value) for value in values])
            content = str(int(np.concatenate(values) @ np.arange(lengths.sum())))
            outputs[name] = FrozenOutputs(
                RECORD, counts=lengths - 1, lengths=lengths, content=content
            )
        self.frozen = FrozenModel(
            "the teacher" if teacher else "the reference",
            outputs,
            batch=self._batch,
            compute=self._compute,
            kind={"records": "log-probabilities"},
            address=store,
        )
        if teacher:
            self.frozen.content = {"seed": teacher}
            self.frozen.build = lambda: self._teacher(teacher)

    def _teacher(self, seed: int) -> nn.Module:
        if self.log:
            Path(self.log, f"built-{os.getpid()}").touch()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return Next(12).double()

    def model(self) -> nn.Module:
        return Next()

    def train_set(self) -> Docs:
        return Docs(self.values["train"], self.frozen.outputs["train"])

    def eval_sets(self):
        return {"validation": Docs(self.values["validation"], self.frozen.outputs["validation"])}

    def samples_of(self, data: str, *, labelled: bool) -> Docs:
        values = documents(50, seed=int(data))
        lengths = np.array([len(value) for value in values])
        self.frozen.outputs["data"] = FrozenOutputs(
            RECORD, counts=lengths - 1, lengths=lengths, content=f"data {data}"
        )
        self.values["data"] = values
        return Docs(values, self.frozen.outputs["data"])

    def collate(self, samples):
        width = max(len(tokens) for tokens, _ in samples)
        batch = {
            "tokens": np.zeros((len(samples), width), np.int64),
            "reference": np.zeros((len(samples), width - 1)),
            "known": np.zeros((len(samples), width - 1)),
        }
        for row, (tokens, logp) in enumerate(samples):
            batch["tokens"][row, : len(tokens)] = tokens
            batch["reference"][row, : len(logp)] = logp
            batch["known"][row, : len(logp)] = 1
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    def weight(self, batch) -> Tensor:
        return batch["known"].sum()

    def loss(self, model, batch):
        logp = log_probabilities(model, batch["tokens"])
        apart = (logp - batch["reference"]) ** 2
        each = ((apart - 0.1 * logp) * batch["known"]).sum(1)
        return each.sum(), {"loss": each.detach()}

    def _batch(self, name: str, chosen):
        if self.log:
            self.forwards += 1
            with Path(self.log, f"{os.getpid()}").open("a") as file:
                file.write(f"{name} {' '.join(map(str, chosen))}\n")
            if self.forwards == self.stop:
                os.kill(os.getpid(), 9)
        values = [self.values[name][at] for at in chosen]
        width = max(map(len, values))
        tokens = np.zeros((len(values), width), np.int64)
        for row, value in enumerate(values):
            tokens[row, : len(value)] = value
        return {
            "tokens": torch.from_numpy(tokens),
            "lengths": torch.tensor([len(value) for value in values]),
        }

    def _compute(self, model, batch):
        logp = log_probabilities(model, batch["tokens"]).cpu().numpy()
        if self.nan:
            logp[0, 0] = np.nan
        made = []
        for row, length in enumerate(batch["lengths"].tolist()):
            records = np.empty(length - 1, RECORD)
            records["logp"] = logp[row, : length - 1]
            made.append(records)
        return made


def listed(log: Path) -> list[tuple[str, int]]:
    """Return set and document of each document of each forward."""
    found = []
    for file in log.glob("[0-9]*"):
        for line in file.read_text().splitlines():
            name, *numbers = line.split()
            found += [(name, int(number)) for number in numbers]
    return found
