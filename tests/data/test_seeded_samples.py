"""Random samples are the same as with a seed before every sample; a data set need not declare that
it is random."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch._utils import ExceptionWrapper

from oneloop.basics.bucket import store_errors
from oneloop.data.batch_layout import BatchLayout
from oneloop.data.order import Order
from oneloop.data.seeded_samples import SampleError, SeededSamples
from oneloop.data.step_batches import CollateWithWeight, groups
from oneloop.run.end import report_error, words_of
from oneloop.tasks.frozen.outputs import FrozenOutputs
from oneloop.tasks.rows.rows import Mapped
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.data.seeded_samples",
    "oneloop.data.step_batches",
    "oneloop.run.end",
)

SIZE, MIDDLE = 40, 17

DRAWS = {  # added to sample ``index``
    "nothing": lambda index: 0.0,
    "torch": lambda index: torch.rand(()).item(),
    "Python": lambda index: random.random(),
    "Python's gauss": lambda index: random.gauss(0.0, 1.0),
    "numpy": lambda index: np.random.rand(),
    "numpy's gauss": lambda index: np.random.randn(),
    "numpy, from the middle on": lambda index: np.random.rand() if index >= MIDDLE else 0.0,
    "Python, for one sample": lambda index: random.random() if index == MIDDLE else 0.0,
    "torch, leaving no trace": lambda index: hidden(),
    "all": lambda index: torch.rand(()).item() + random.random() + np.random.rand(),
}


def hidden() -> float:
    with torch.random.fork_rng(devices=[]):
        return torch.rand(()).item()


class Drawing:
    """Samples with random numbers."""

    def __init__(self, kind: str, *, together: bool = False) -> None:
        self.kind = kind
        self.loads = 0
        if together:
            self.__class__ = Together

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loads += 1
        return torch.tensor([index + DRAWS[self.kind](index), 1.0])


class Together(Drawing):
    """Load many samples at once, drawing in another order."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in reversed(indices)][::-1]


class Always(SeededSamples):
    """Seed every sample."""

    def batch(self, places, collate):
        return collate([self[place] for place in places])


def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Collate with random numbers, like a collate function that masks tokens."""
    noise = torch.rand(()).item() + random.random() + np.random.rand()
    return {"x": torch.stack(samples) + noise}


def stream(
    kind: str, *, micro: int, workers: int, together: bool, always: bool, start: int = 0
) -> torch.Tensor:
    from oneloop.data import step_batches as module

    module.SeededSamples = Always if always else SeededSamples
    try:
        order, split = Order(SIZE, seed=3), BatchLayout(8, 1, micro)
        weighed = CollateWithWeight(collate, lambda batch: torch.tensor(1.0))
        made = groups(
            Drawing(kind, together=together),
            weighed,
            order,
            split,
            rank=0,
            seed=3,
            start=start,
            device=torch.device("cpu"),
            workers=workers,
        )
        steps = (2 * SIZE - start) // 8
        return torch.cat(
            [
                torch.cat([batch["x"] for batch in group.batches])
                for group, _ in zip(made, range(steps))
            ]
        )
    finally:
        module.SeededSamples = SeededSamples


@pytest.mark.parametrize(
    ("workers", "together"),
    [(0, False), (0, True), pytest.param(2, False, marks=pytest.mark.slow), (2, True)],
)
@pytest.mark.parametrize("kind", DRAWS)
def test_samples_are_those_of_seeding_always(kind, workers, together):
    for micro in (1, 8) if workers == 0 else (4,):
        how = {"micro": micro, "workers": workers, "together": together}
        random.seed(), np.random.seed(), torch.seed()
        np.random.randn()  # numpy keeps the second number of a pair for the next call
        expected = stream(kind, **how, always=True)
        assert torch.equal(stream(kind, **how, always=False), expected)
        # from the middle
        assert torch.equal(stream(kind, **how, always=False, start=3 * 8), expected[3 * 8 :])


def test_what_draws_nothing_is_loaded_once_and_what_draws_is_seeded_from_then_on():
    for kind, loads in (
        ("nothing", 16),
        ("torch", 16),
        ("numpy", 24),
        ("numpy, from the middle on", 24),
    ):
        keyed = SeededSamples(drawing := Drawing(kind), seed=0)
        for first in (0, 16):
            keyed.batch([(0, index) for index in range(first, first + 8)], list)
        assert drawing.loads == loads, kind


# --- whole runs
# --------------------------------------------------------------------------------------------------


class Task:
    """Fit a line to points that numpy moves at random."""

    def __init__(self, kind: str = "nothing") -> None:
        self.kind = kind

    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def train_set(self) -> Drawing:
        return Drawing(self.kind)

    def eval_sets(self) -> dict:
        return {}

    def collate(self, samples):
        return collate(samples)

    def weight(self, batch):
        return torch.tensor(float(len(batch["x"])))

    def loss(self, model, batch):
        return (model(batch["x"] / SIZE) - 1).square().sum(), {}


def always(words: list[str]) -> None:
    from oneloop.data import step_batches as module

    module.SeededSamples = Always
    train(words)


@pytest.mark.parametrize(
    ("ranks", "config", "workers"),
    [
        (1, "single", 0),
        pytest.param(2, "ddp", 2, marks=pytest.mark.slow),
        pytest.param(2, "fsdp2", 0, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "kind", [pytest.param("nothing", marks=pytest.mark.slow), "numpy, from the middle on"]
)
def test_weights_are_those_of_seeding_always(tmp_path, kind, ranks, config, workers):
    words = [
        "digits",
        "--task",
        "test_seeded_samples.Task",
        "--task.kind",
        kind,
        "--duration",
        "12",
        "--batch.size",
        "8",
    ]
    words += [
        "--batch.micro",
        "2",
        "--track",
        "none",
        "--machine.workers",
        str(workers),
        "--eval.every",
        "0",
    ]
    weights = []
    for name, function in (("plain", train), ("always", always)):
        run(function, [*words, "--run.dir", name], ranks=ranks, config=config, folder=tmp_path).ok()
        weights.append(load_file(tmp_path / name / "final" / "model.safetensors"))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


class Unread:
    """A data set whose storage does not answer."""

    def __getitem__(self, index: int) -> int:
        with store_errors("s3://bucket/rows"):
            raise TimeoutError("no answer")


class Gone(Unread):
    """A data set of which a file has gone."""

    def __getitem__(self, index: int) -> int:
        two = np.array([2])
        outputs = FrozenOutputs(np.dtype([("p", "<f4")]), counts=two, lengths=two, content="")
        outputs.folder = Path("gone")
        return len(outputs[index])


def unfit(row: int) -> int:
    raise ValueError("of the user")


class Unfit:
    def __getitem__(self, index: int) -> int:
        return unfit(index)


@pytest.mark.parametrize("in_worker", [False, True])
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (Unread(), "StoreError: s3://bucket/rows: TimeoutError: no answer"),
        (Gone(), "Unavailable: gone/00000000.bin cannot be read"),
        (Mapped([7], unfit), "ValueError: row 0: of the user"),
        (Unfit(), ""),  # the traceback shows the user's code
    ],
    ids=["no answer", "gone", "row", "user"],
)
def test_what_oneloop_itself_has_found_is_one_line(data, expected, in_worker, capsys):
    with pytest.raises(SampleError) as raised:
        SeededSamples(data, seed=0, name="train").batch([(0, 0)], list)
    error: BaseException = raised.value
    if in_worker:
        info = (raised.type, raised.value, raised.tb)
        with pytest.raises(SampleError) as passed_on:
            ExceptionWrapper(info, where="in DataLoader worker process 0").reraise()
        error = passed_on.value
    report_error(error, words_of(error))
    printed = capsys.readouterr().err
    if expected:
        message = f"sample 0 of the train set cannot be loaded: {expected}"
        assert printed.partition(": ")[2].startswith(message) and len(printed.splitlines()) == 1
    else:
        assert "Traceback" in printed and "in unfit" in printed
