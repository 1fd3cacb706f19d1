"""Real Trainers train the samples of oneloop's order: in every step, on any layout, after a
resume."""

from __future__ import annotations

import gc
import os
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from oneloop.data.order import Order, order_of
from oneloop.tasks.rows.mixture import Mixture
from oneloop.tools.trainer_sampler import TrainerSampler
from worlds import run

pytestmark = pytest.mark.covers("oneloop.tools.trainer_sampler")

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
    gc.disable()
    from transformers import Trainer, TrainerCallback, TrainingArguments

    gc.freeze()  # Trainer collects garbage: half a second with all imported modules
    gc.enable()
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


SAVES = {"save_strategy": "steps", "save_steps": STOP}
DISPATCH = {"accelerator_config": {"dispatch_batches": True}}
SPLIT = {"accelerator_config": {"split_batches": True}}


def all_runs(folder: Path) -> dict[str, Any]:
    """Train in one process, in two, and in one again: one world, which imports Trainer once.

    Returns:
        The samples of each step of each run on this process, and the errors of wrong settings.
    """
    one, two = folder / "one", folder / "two"
    launched = {name: os.environ.pop(name) for name in list(os.environ) if "RANK" in name}
    launched["WORLD_SIZE"] = os.environ.pop("WORLD_SIZE")
    first = launched["RANK"] == "0"
    found: dict[str, Any] = {}

    # The first process alone, while the other one waits for it.
    if first:
        found["one"] = trained(one, 1, **SAVES)
        found["one, accumulated"] = trained(one, 4)
        found["one, resumed"] = trained(one, 4, resume=one)
        found |= starts(one) | rejected(one)

    os.environ.update(launched)
    found["two"] = trained(two, 2, **SAVES)
    found["two, resumed"] = trained(two, 2, resume=two)
    found["two, resumed from one"] = trained(two, 2, resume=one)

    # Settings that the sampler rejects if it knows the Trainer.
    found["dispatched"] = trained(two, 2, checked=False, **DISPATCH)
    found["dispatched, resumed"] = trained(two, 2, resume=two, checked=False, **DISPATCH)
    found["split"] = trained(two, 2, checked=False, **SPLIT)
    torch.distributed.destroy_process_group()

    for name in launched:
        del os.environ[name]
    if first:
        found["one, resumed from two"] = trained(one, 1, resume=two)
    return found


def of_all(ranks: list[dict[str, Steps]], name: str) -> Steps:
    """Return the sorted samples of each step of all processes."""
    each = [found[name] for found in ranks if name in found]
    return {step: sorted(chain(*(steps[step] for steps in each))) for step in each[0]}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run(all_runs, tmp_path_factory.mktemp("runs"), ranks=2).ok()


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


def never_and_twice(steps: Steps) -> tuple[int, int]:
    """Return how many steps of the order a resumed run never trained, and how many twice."""
    trained = EACH[:STOP] + [sorted(of) for of in steps.values()]
    counts = [trained.count(of) for of in EACH]
    assert set(counts) <= {0, 1, 2}
    return counts.count(0), counts.count(2)


STARTS: dict[str, dict[str, Any]] = {
    "start": {"start": STOP, "ignore_data_skip": True},
    "no start": {"ignore_data_skip": True, "checked": False},
    "both": {"start": STOP, "checked": False},
}


def starts(folder: Path) -> dict[str, Any]:
    """Resume with right and wrong starts, and return the samples or the error of each run."""
    found: dict[str, Any] = {
        name: trained(folder, 1, resume=folder, **settings) for name, settings in STARTS.items()
    }

    # The same wrong settings, with a sampler that knows its Trainer.
    for name in ("no start", "both"):
        with pytest.raises(ValueError) as error:
            trained(folder, 1, resume=folder, **(STARTS[name] | {"checked": True}))
        found[f"{name}, checked"] = str(error.value)

    # Three epochs, with a sampler that does not know its Trainer.
    with pytest.raises(ValueError) as error:
        trained(folder, 1, max_steps=-1, num_train_epochs=3, checked=False)
    found["epochs, not checked"] = str(error.value)
    return found


def test_a_start_is_for_runs_that_skip_nothing(ranks):
    assert of_all(ranks, "start") == dict(list(enumerate(EACH))[STOP:])


def test_a_run_that_skips_nothing_and_has_no_start_trains_samples_twice(ranks):
    found = ranks[0]["no start"]
    assert [sorted(of) for of in found.values()] == EACH[: STEPS - STOP]
    assert never_and_twice(found) == (STOP, STOP)
    assert (
        "start 0, but Trainer requires 5 with ignore_data_skip=True"
        in (ranks[0]["no start, checked"])
    )


def test_a_start_in_a_run_that_skips_loses_samples(ranks):
    """Trainer skips as many steps again, and ends two steps later without an error."""
    found = ranks[0]["both"]
    assert [sorted(of) for of in found.values()] == EACH[2 * STOP :]
    assert never_and_twice(found) == (STOP, 0)
    assert (
        "start 5, but Trainer requires 0 with ignore_data_skip=False" in (ranks[0]["both, checked"])
    )


def test_a_second_epoch_of_trainer_is_rejected(ranks):
    assert "Trainer begins its epoch 1, but the 12 steps" in ranks[0]["epochs, not checked"]


UNFIT: dict[str, tuple[dict[str, Any], str]] = {  # settings, and the error
    "batch": ({"batch_size": 16}, "batch_size 16, but a step of Trainer has 8 samples"),
    "steps": ({"max_steps": 13}, "has 12 steps, but Trainer would train 13; set max_steps=12"),
    "epochs": ({"max_steps": -1}, "has 12 steps, but Trainer would train 36; set max_steps=12"),
    "order": ({"dataloader_in_order": False}, "dataloader_in_order=False, because steps"),
    "dispatched batches": (DISPATCH, "does not work with split_batches, dispatch_batches"),
    "split batches": (SPLIT, "does not work with split_batches, dispatch_batches"),
}


def rejected(folder: Path) -> dict[str, str]:
    """Return the errors of Trainers that would train other samples."""
    found = {}
    for name, (settings, _) in UNFIT.items():
        trainer, _ = trainer_of(folder, 1, **settings)
        with pytest.raises(ValueError) as error:
            trainer.get_train_dataloader()
        found[name] = str(error.value)

    # One epoch is as good as max_steps.
    trainer, _ = trainer_of(folder, 1, max_steps=-1, num_train_epochs=1)
    assert len(trainer.get_train_dataloader()) == STEPS
    return found


@pytest.mark.parametrize("name", UNFIT)
def test_settings_with_other_samples_are_rejected(ranks, name):
    assert UNFIT[name][1] in ranks[0][name]


def test_rejected_settings_do_train_other_samples(ranks):
    """If this fails, accelerate has changed, and the sampler may allow these settings."""
    assert of_all(ranks, "dispatched") == dict(enumerate(EACH))
    resumed = of_all(ranks, "dispatched, resumed")  # each process skips as much as one needs
    assert resumed[STOP] == sorted(ORDER[STOP * BATCH // 2 :][:BATCH])
    assert of_all(ranks, "split")[0] == sorted(ORDER[: BATCH // 2])


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
    with pytest.raises(TypeError, match="TrainerSampler needs a data set.*got "):
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
