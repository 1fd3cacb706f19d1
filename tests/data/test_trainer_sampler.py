"""Real Trainers train the samples of oneloop's order: in every step, on any layout, after a
resume."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from oneloop.data.mixture import Mixture
from oneloop.data.order import Order, order_of
from oneloop.data.trainer_sampler import TrainerSampler
from worlds import run

pytestmark = pytest.mark.covers("oneloop.data.trainer_sampler")

SIZE = 37  # samples: steps 4 and 9 cross the end of an epoch
BATCH = 8
STEPS = 12
STOP = 5  # step of the checkpoint
ORDER = Order(SIZE, seed=3)[0 : STEPS * BATCH][1].tolist()
EACH = [sorted(ORDER[k * BATCH : (k + 1) * BATCH]) for k in range(STEPS)]  # samples of each step

Steps = dict[int, list[int]]  # step: samples of this process


class Recorder(nn.Module):
    """A model that keeps the numbers of the samples that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen: list[int] = []

    def forward(self, number):
        self.seen += number.tolist()
        return {"loss": (self.weight - number.float()).square().mean()}


def trainer_of(folder: Path, accumulate: int, **settings: Any):
    """Return a Trainer with the sampler, whose model records the samples of each step.

    Args:
        settings: those of the sampler (batch_size, start, checked), the others of Trainer.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    steps: Steps = {}
    model = Recorder()
    sampler = {name: settings.pop(name) for name in ("batch_size", "start") if name in settings}
    checked = settings.pop("checked", True)

    class Ordered(Trainer):
        def _get_train_sampler(self, train_dataset=None):
            given = {"batch_size": BATCH, "seed": 3, "steps": STEPS, **sampler}
            return TrainerSampler(train_dataset, **given, trainer=self if checked else None)

    class PerStep(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            steps[state.global_step - 1] = model.seen
            model.seen = []

    processes = int(os.environ.get("WORLD_SIZE", 1))
    arguments = {
        "per_device_train_batch_size": BATCH // accumulate // processes,
        "gradient_accumulation_steps": accumulate,
        "max_steps": STEPS,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    trainer = Ordered(
        model=model,
        args=TrainingArguments(str(folder), **(arguments | settings)),
        train_dataset=[{"number": number} for number in range(SIZE)],
        callbacks=[PerStep()],
    )
    return trainer, steps


def trained(folder: Path, accumulate: int, *, resume: Path | None = None, **settings: Any) -> Steps:
    """Train, and return the samples of each step on this process."""
    trainer, steps = trainer_of(folder, accumulate, **settings)
    trainer.train(resume_from_checkpoint=resume and str(resume / f"checkpoint-{STOP}"))
    return steps


SAVES = {"save_strategy": "steps", "save_steps": STOP, "save_total_limit": None}


def one_and_two(folder: Path) -> dict[str, Steps]:
    """Train in one process, in two, and in one again, and return the samples of each run."""
    one, two = folder / "one", folder / "two"
    variables = {name: os.environ.pop(name) for name in list(os.environ) if "RANK" in name}
    variables["WORLD_SIZE"] = os.environ.pop("WORLD_SIZE")
    first = variables["RANK"] == "0"
    found = {}

    # The first process alone, while the other one waits for it.
    if first:
        found["one"] = trained(one, 1, **SAVES)
        found["one, accumulated"] = trained(one, 4)
        found["one, resumed"] = trained(one, 4, resume=one)

    os.environ.update(variables)
    found["two"] = trained(two, 2, **SAVES)
    found["two, resumed"] = trained(two, 2, resume=two)
    found["two, resumed from one"] = trained(two, 2, resume=one)
    torch.distributed.destroy_process_group()

    for name in variables:
        del os.environ[name]
    if first:
        found["one, resumed from two"] = trained(one, 1, resume=two)
    return found


def of_all(ranks: list[dict[str, Steps]], name: str) -> Steps:
    """Return the sorted samples of each step of all processes."""
    each = [found[name] for found in ranks if name in found]
    return {step: sorted(sum((steps[step] for steps in each), [])) for step in each[0]}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run(one_and_two, tmp_path_factory.mktemp("runs"), ranks=2).ok()


@pytest.mark.parametrize("name", ["one", "one, accumulated", "two"])
def test_each_step_has_the_samples_of_the_order(ranks, name):
    assert of_all(ranks, name) == dict(enumerate(EACH))


@pytest.mark.parametrize(
    "name", ["one, resumed", "two, resumed", "two, resumed from one", "one, resumed from two"]
)
def test_a_resumed_run_has_the_samples_of_the_remaining_steps(ranks, name):
    assert of_all(ranks, name) == dict(list(enumerate(EACH))[STOP:])


def test_two_processes_share_each_step(ranks):
    assert [len(found["two"][4]) for found in ranks] == [BATCH // 2, BATCH // 2]


def lost_and_repeated(steps: Steps) -> tuple[int, int]:
    """Return how many positions of the order a resumed run left out and trained again."""
    kept = Counter(sum(EACH[:STOP], [])) + Counter(sum(steps.values(), []))
    wanted = Counter(ORDER)
    return (wanted - kept).total(), (kept - wanted).total()


def skipped(folder: Path) -> dict[str, Any]:
    """Resume with right and wrong settings, and return the samples of each run."""
    trained(folder, 1, **SAVES)
    cases = {
        "right": {},
        "start": {"start": STOP, "ignore_data_skip": True},
        "no start": {"ignore_data_skip": True, "checked": False},
        "both": {"start": STOP, "checked": False},
    }
    found: dict[str, Any] = {
        name: trained(folder, 1, resume=folder, **settings) for name, settings in cases.items()
    }

    # The same wrong settings, with a sampler that knows its Trainer.
    for name in ("no start", "both"):
        with pytest.raises(ValueError) as error:
            trained(folder, 1, resume=folder, **(cases[name] | {"checked": True}))
        found[f"{name}, checked"] = str(error.value)

    # Three epochs, with a sampler that does not know its Trainer.
    with pytest.raises(ValueError) as error:
        trained(folder, 1, max_steps=-1, num_train_epochs=3, checked=False)
    found["epochs"] = str(error.value)
    return found


@pytest.mark.slow
def test_a_start_requires_ignore_data_skip_and_the_reverse(tmp_path):
    (found,) = run(skipped, tmp_path).ok()
    remaining = STEPS - STOP
    assert lost_and_repeated(found["right"]) == (0, 0)
    assert {step: sorted(of) for step, of in found["start"].items()} == dict(
        list(enumerate(EACH))[STOP:]
    )

    # Without start, the run begins at sample 0 again: as many samples as remain are trained twice,
    # and as many never.
    assert [sorted(of) for of in found["no start"].values()] == EACH[:remaining]
    lost, repeated = lost_and_repeated(found["no start"])
    assert lost == repeated > 0

    # With start, Trainer skips as many steps again, which are never trained.
    assert [sorted(of) for of in found["both"].values()] == EACH[2 * STOP :]
    assert lost_and_repeated(found["both"]) == (STOP * BATCH, 0)

    assert "start 0, but Trainer requires 5 with ignore_data_skip=True" in found["no start, checked"]
    assert "start 5, but Trainer requires 0 with ignore_data_skip=False" in found["both, checked"]
    assert "Trainer begins its epoch 1, but the 12 steps" in found["epochs"]


UNFIT = {  # settings of Trainer, and of the sampler: the error
    "batch": ({"batch_size": 16}, "batch_size 16, but a step of Trainer has 8 samples"),
    "steps": ({"max_steps": 13}, "has 12 steps, but Trainer would train 13; set max_steps=12"),
    "epochs": ({"max_steps": -1}, "has 12 steps, but Trainer would train 36; set max_steps=12"),
    "split": ({"accelerator_config": {"split_batches": True}}, "does not work with split_batches"),
    "dispatch": (
        {"accelerator_config": {"dispatch_batches": True}},
        "does not work with split_batches, dispatch_batches",
    ),
    "order": ({"dataloader_in_order": False}, "dataloader_in_order=False, because steps"),
}


def messages(folder: Path) -> dict[str, str]:
    """Return the errors of Trainers with other samples than oneloop's."""
    found = {}
    for name, (settings, _) in UNFIT.items():
        trainer, _ = trainer_of(folder, 1, **settings)
        with pytest.raises(ValueError) as error:
            trainer.get_train_dataloader()
        found[name] = str(error.value)
    trainer, _ = trainer_of(folder, 1, max_steps=-1, num_train_epochs=1)
    trainer.get_train_dataloader()
    return found


@pytest.mark.slow
def test_settings_with_other_samples_are_rejected(tmp_path):
    (found,) = run(messages, tmp_path).ok()
    for name, (_, message) in UNFIT.items():
        assert message in found[name]


def dispatched(folder: Path) -> dict[str, Steps]:
    """Train and resume with settings that the sampler would reject."""
    unchecked = {"checked": False, **SAVES}
    config = {"accelerator_config": {"dispatch_batches": True}}
    return {
        "whole": trained(folder, 2, **unchecked, **config),
        "resumed": trained(folder, 2, resume=folder, **unchecked, **config),
        "split": trained(folder, 2, **unchecked, accelerator_config={"split_batches": True}),
    }


@pytest.mark.slow
def test_the_rejected_settings_do_give_other_samples(tmp_path):
    """If this fails, accelerate has changed, and the sampler may allow these settings."""
    found = run(dispatched, tmp_path, ranks=2).ok()
    assert of_all(found, "whole") == dict(enumerate(EACH))
    assert of_all(found, "resumed") != dict(list(enumerate(EACH))[STOP:])
    assert of_all(found, "split") != dict(enumerate(EACH))


def test_the_order_of_a_data_set_is_used():
    mixture = Mixture({"a": range(10), "b": range(33)}, weights=[0.3, 0.7])
    _, expected = order_of(mixture, seed=1, batch=16)[0:9600]
    sampler = TrainerSampler(mixture, batch_size=16, seed=1, steps=600)
    assert len(sampler) == 9600
    assert list(sampler) == expected.tolist() == list(sampler)
    begun = TrainerSampler(mixture, batch_size=16, seed=1, steps=600, start=299)
    assert np.array_equal(list(begun), expected[299 * 16 :]) and len(begun) == 9600


class Stream(IterableDataset):
    def __iter__(self):
        return iter(ROWS)

    def __len__(self):
        return len(ROWS)


ROWS = [1, 2, 3]


@pytest.mark.parametrize("wrong", [Stream(), DataLoader(ROWS), RandomSampler(ROWS), iter(ROWS)])
def test_only_a_map_style_data_set_is_accepted(wrong):
    with pytest.raises(TypeError, match="requires a map-style data set.*got "):
        TrainerSampler(wrong, batch_size=2, seed=0, steps=2)


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"steps": 0}, {"start": -1}, {"start": 3}, {"steps": -2}]
)
def test_numbers_out_of_range_are_rejected(wrong):
    given = {"batch_size": 2, "seed": 0, "steps": 2, "start": 0, **wrong}
    with pytest.raises(ValueError, match="at least 1, and a start from 0 to steps; got batch_size"):
        TrainerSampler(ROWS, **given)


def test_an_empty_data_set_is_rejected():
    with pytest.raises(ValueError, match="an order needs at least one sample"):
        TrainerSampler([], batch_size=2, seed=0, steps=2)
