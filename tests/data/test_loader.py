"""oneloop.Loader: the same samples in each step on any layout, and a state of one number."""

from __future__ import annotations

import json
import os
import random
from collections import namedtuple
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import UUID

import numpy as np
import pandas
import pyarrow
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
)
from transformers import BatchEncoding

from oneloop import Loader
from oneloop.basics.content_hash import content_hash
from oneloop.checkpoint.checkpoints import Checkpoints
from oneloop.checkpoint.resume import RunState
from oneloop.data.fingerprint import SAMPLED, content_of, sample_checksum
from oneloop.data.order import Order, Ordered
from oneloop.data.seeded_samples import SeededSamples
from oneloop.tasks.rows.mixture import Mixture
from remote_data import counted_s3
from worlds import run

pytestmark = pytest.mark.covers(
    "oneloop.data.loader",
    "oneloop.data.fingerprint",
)


@pytest.fixture(autouse=True)
def state_of_accelerate() -> Iterator[None]:
    """Forget what all accelerators of a process share, for the tests that follow."""
    yield
    GradientState._reset_state()


BATCH = 24
STEPS = 5  # of 24 samples: one crosses the end of the first epoch
SEED = 3


class Augmented:
    """70 samples with noise, a flip, a crop and dropout, from all three generators."""

    def __len__(self) -> int:
        return 70

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = torch.arange(4.0) + 10 * index
        if random.random() < 0.5:
            x = x.flip(0)
        x = nn.functional.dropout(x + torch.randn(4), 0.3)
        return {"index": index, "x": x, "crop": np.random.randint(1000)}


def expected() -> list[list[tuple[int, list[float], int]]]:
    """Return the samples of each step, from the order and the seeds alone."""
    samples = SeededSamples(Augmented(), seed=SEED)
    steps = []
    for step in range(STEPS):
        epochs, indices = Order(70, seed=SEED)[step * BATCH : (step + 1) * BATCH]
        places = zip(epochs.tolist(), indices.tolist())
        found = [sample for _, sample in samples.good([*places])]
        steps.append([(one["index"], one["x"].tolist(), int(one["crop"])) for one in found])
    return [sorted(step) for step in steps]


def seen(group: Any) -> list[tuple[int, list[float], int]]:
    rows = []
    for batch in group:
        rows += zip(batch["index"].tolist(), batch["x"].tolist(), batch["crop"].tolist())
    return rows


def here(kind: str) -> dict[str, Any]:
    """Return the arguments of a Loader for this process of a plain script of a kind."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if kind == "accelerate":
        return {"accelerator": Accelerator(cpu=True)}
    if kind == "fabric":
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
        fabric.launch()
        return {"rank": fabric.global_rank, "ranks": fabric.world_size, "device": fabric.device}
    if ranks == 1:
        return {}
    torch.distributed.init_process_group("gloo")
    return {"rank": torch.distributed.get_rank(), "ranks": torch.distributed.get_world_size()}


def loader(arguments: dict[str, Any], dataset: Any = None, **options: Any) -> Loader:
    if "accelerator" in arguments:
        arguments["accelerator"].gradient_accumulation_steps = 1
    return Loader(dataset or Augmented(), BATCH, seed=SEED, **arguments, **options)


def steps_of(made: Loader, until: int) -> list[Any]:
    """Return the samples of this process in each step, until a position."""
    found = []
    for group in made:
        if made.position == until:
            return found
        found.append(seen(group))
    raise AssertionError("the loop ended")


def all_steps(kind: str, settings: list[dict[str, Any]], state: Any = None) -> list[Any]:
    """Return the samples of this process, for each of these settings of a Loader."""
    arguments = here(kind)
    found = []
    for options in settings:
        made = loader(arguments, **options)
        if state is not None:
            made.load_state_dict(state)
        found.append(steps_of(made, STEPS))
    return found


def joined(ranks: list[list[Any]]) -> list[Any]:
    """Return the samples of each step on all processes, sorted."""
    return [sorted(chain(*step)) for step in zip(*ranks, strict=True)]


def same_as_expected(kind: str, ranks: int, settings: list[dict[str, Any]], state: Any) -> None:
    found = run(all_steps, kind, settings, state, ranks=ranks).ok()
    begins = 0 if state is None else state["position"]
    for number, options in enumerate(settings):
        steps = joined([mine[number] for mine in found])
        assert steps == expected()[begins:], (kind, ranks, options)


def saved_at(position: int) -> dict[str, Any]:
    """Return the state of a Loader on one process, as it is in a JSON file."""
    made = Loader(Augmented(), BATCH, seed=SEED)
    steps_of(made, position)
    return json.loads(json.dumps(made.state_dict()))


def micro(*sizes: int | None, workers: tuple[int, ...] = (0,)) -> list[dict[str, Any]]:
    return [{"micro": size, "workers": number} for size in sizes for number in workers]


CASES = [
    ("accelerate", 1, micro(None, 6, workers=(0, 2))),
    ("accelerate", 2, micro(None, 3, workers=(0, 2))),
    pytest.param("accelerate", 3, micro(4), marks=pytest.mark.slow),
    pytest.param("accelerate", 4, micro(2, workers=(0, 2)), marks=pytest.mark.slow),
    ("fabric", 2, micro(4)),
    ("torch", 2, micro(4)),
    *(
        pytest.param(kind, ranks, micro(None, 2, workers=(0, 2)), marks=pytest.mark.slow)
        for kind in ("fabric", "torch")
        for ranks in (1, 2, 3, 4)
    ),
]


@pytest.mark.parametrize(("kind", "ranks", "settings"), CASES)
def test_steps_have_equal_samples_on_any_layout(kind, ranks, settings):
    same_as_expected(kind, ranks, settings, None)


@pytest.mark.parametrize(
    ("kind", "ranks", "settings"),
    [
        ("accelerate", 2, micro(4)),
        pytest.param("accelerate", 3, micro(4, workers=(0, 2)), marks=pytest.mark.slow),
        pytest.param("accelerate", 4, micro(None, workers=(0, 2)), marks=pytest.mark.slow),
        pytest.param("fabric", 3, micro(4), marks=pytest.mark.slow),
        pytest.param("torch", 4, micro(6), marks=pytest.mark.slow),
    ],
)
def test_a_resume_on_another_layout_has_the_same_samples(kind, ranks, settings):
    same_as_expected(kind, ranks, settings, saved_at(2))


# The position.


def an_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def position_of(made: Loader) -> int:
    """Return the position, which is that of a state."""
    assert made.state_dict()["position"] == made.position
    return made.position


INSIDE = "a state of the Loader with batch_size 24 comes inside a group, after batch {} of its {}"


def test_a_group_counts_once_its_last_batch_was_handed_out():
    """Before that, a state is an error."""
    made = Loader(Augmented(), BATCH, micro=6)
    for step, group in enumerate(made, start=1):
        assert position_of(made) == step - 1
        batches = iter(group)
        for number in range(1, 4):
            next(batches)
            assert made.position == step - 1
            with pytest.raises(RuntimeError, match=INSIDE.format(number, 4)):
                made.state_dict()
        next(batches)
        assert position_of(made) == step
        assert list(batches) == [] and position_of(made) == step
        if step == 2:
            break
    assert len(group) == 4 and group.total == BATCH == group.weight


def test_a_state_may_be_taken_after_the_update_inside_the_loop_over_batches():
    """As in the usual Accelerate script. A step that a scaler leaves out is done, too."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu")
    made = loader({"accelerator": accelerator}, micro=12)
    model = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    found = []
    for group in made:
        bad = torch.inf if made.position == 1 else 1
        for batch in group:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch["x"]).sum() * bad)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                found.append(position_of(made))
        if made.position == 3:
            break
    assert found == [1, 2, 3]


def updates(accelerator: Accelerator, group: Any, left_out: int = 0) -> int:
    """Train on a group, without its first batches; return the number of updates."""
    model = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    count = 0
    for number, batch in enumerate(group):
        if number < left_out:
            continue
        with accelerator.accumulate(model):
            accelerator.backward(model(batch["x"]).sum())
            optimizer.step()
            optimizer.zero_grad()
        count += accelerator.sync_gradients
    return count


def trained(accelerator: Accelerator, made: Loader, until: int, left_out: int = 0) -> int:
    """Train until a position; return the number of updates."""
    count = 0
    for group in made:
        count += updates(accelerator, group, left_out)
        if made.position == until:
            break
    return count


def test_two_loaders_on_one_accelerator_update_once_per_group():
    accelerator = Accelerator(cpu=True)
    one = loader({"accelerator": accelerator})
    two = Loader(Augmented(), BATCH, accelerator=accelerator, micro=6)
    assert [trained(accelerator, one, 3), trained(accelerator, two, 3)] == [3, 3]
    Accelerator(cpu=True)  # resets the setting, which all accelerators share
    assert trained(accelerator, two, 5) == 2


def test_a_loader_trains_inside_a_group_of_another():
    """As in a WGAN, whose discriminator has five updates before one of the generator."""
    accelerator = Accelerator(cpu=True)
    outer = loader({"accelerator": accelerator})
    inner = Loader(Augmented(), BATCH, accelerator=accelerator, micro=6)
    found = []
    for group in outer:
        found.append(trained(accelerator, inner, inner.position + 2))
        assert outer.state_dict()["position"] == len(found) // 2
        found.append(updates(accelerator, group))
        if outer.position == 3:
            break
    assert found == [2, 1] * 3


def test_an_evaluation_that_is_left_early_does_not_add_updates():
    """accelerate would believe that the end of the training data is near."""
    accelerator = Accelerator(cpu=True)
    made = loader({"accelerator": accelerator}, micro=6)
    evaluation = accelerator.prepare(DataLoader([1, 2], 2))
    for _ in evaluation:
        assert trained(accelerator, made, 3) == 3
        break


def test_a_micro_batch_that_is_left_out_is_an_error():
    """Its group would make no update, and the next would get its gradients."""
    accelerator = Accelerator(cpu=True)
    made = loader({"accelerator": accelerator}, micro=6)
    with pytest.raises(RuntimeError, match="the next step .* after batch 3 of its 4"):
        trained(accelerator, made, 2, left_out=1)


def test_a_new_loop_continues_after_a_group_that_was_handed_out():
    made = Loader(Augmented(), BATCH, seed=SEED)
    for _ in made:
        break
    assert steps_of(made, 1) == [sorted_back(0)]
    for group in made:
        next(iter(group))
        break
    assert steps_of(made, 3) == [sorted_back(2)]


def sorted_back(step: int) -> list[Any]:
    """Return the samples of a step in their order."""
    made = Loader(Augmented(), BATCH, seed=SEED)
    made.position = step
    return next(iter(steps_of(made, step + 1)))


def test_a_group_that_is_left_out_does_not_shift_the_next():
    made = Loader(Augmented(), BATCH, seed=SEED, micro=4)
    for group in made:
        if made.position == 1:
            assert seen(group) == sorted_back(1)
            break


def test_a_state_can_be_loaded_inside_a_loop():
    made = Loader(Augmented(), BATCH, seed=SEED, micro=8)
    begin = made.state_dict()
    found = []
    for group in made:
        found.append(seen(group))
        if len(found) == 3:
            made.load_state_dict(begin)
        if len(found) == 5:
            break
    assert found == [sorted_back(step) for step in (0, 1, 2, 0, 1)]
    assert position_of(made) == 2


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"seed": "4"}, r"another Loader \(seed: 4 -> 3"),
        ({"batch size": "12"}, "batch size: 12 -> "),
        ({"samples": "71"}, "samples: 71 -> 70"),
        ({"hash of 16 samples": "0" * 16}, "hash of 16 samples: 0"),
        ({"position": -1}, "is a number of groups, got -1"),
        ({"identity": None}, "the state of a Loader is damaged"),
        ({"position": True}, "is a number of groups, got True"),
        ({"position": 1.5}, "is a number of groups, got 1.5"),
    ],
)
def test_a_state_of_another_loader_is_rejected(change, match):
    made = Loader(Augmented(), BATCH, seed=SEED)
    state = made.state_dict()
    into = state if change.keys() <= state.keys() else state["identity"]
    into.update(change)
    with pytest.raises(ValueError, match=match):
        made.load_state_dict(state)
    assert made.position == 0


def test_a_checkpoint_of_another_loader_is_rejected_before_weights_are_loaded(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoints = Checkpoints(tmp_path, accelerator)
    parts = {"loader": Loader(Augmented(), BATCH, seed=1)}
    RunState(model, optimizer, parts=parts).save(checkpoints, 1)
    checkpoints.finish()
    checkpoints.close()
    nn.init.zeros_(model.weight)
    other = RunState(model, optimizer, parts={"loader": Loader(Augmented(), BATCH, seed=2)})
    with pytest.raises(ValueError, match="seed: 1 -> 2"):
        other.resume(checkpoints, "auto")
    assert not model.weight.any()


def test_a_damaged_state_is_rejected():
    made = Loader(Augmented(), BATCH)
    with pytest.raises(ValueError, match="the state of a Loader is damaged: .*'position'"):
        made.load_state_dict({"seed": 0, "batch_size": 24})


def test_torch_saves_and_loads_it_as_a_part_of_a_distributed_checkpoint(tmp_path):
    import torch.distributed.checkpoint as dcp

    made = Loader(Augmented(), BATCH, seed=SEED)
    steps_of(made, 3)
    dcp.save({"loader": made}, checkpoint_id=tmp_path)
    again = Loader(Augmented(), BATCH, seed=SEED)
    dcp.load({"loader": again}, checkpoint_id=tmp_path)
    assert again.position == 3


# Without shuffling.


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_are_in_their_order_without_shuffle(workers):
    """Each epoch; steps cross its end, and a resume continues."""
    made = Loader([*range(10)], 4, shuffle=False, micro=2, workers=workers)
    made.position = 1
    found = []
    for group in made:
        if made.position == 4:
            break
        found += [number for batch in group for number in batch.tolist()]
    assert found == [4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5]


def test_a_mixture_without_shuffle_has_each_set_in_its_order():
    made = Loader(
        Mixture({"a": [*range(10)], "b": [*range(100, 104)]}, [0.5, 0.5]), 4, shuffle=False
    )
    found = []
    for group in made:
        if made.position == 2:
            break
        found += [number for batch in group for number in batch.tolist()]
    assert [number for number in found if number < 100] == [0, 1, 2, 3]
    assert [number for number in found if number >= 100] == [100, 101, 102, 103]


class ShiftedRows(list):
    """An order that follows something else than its arguments."""

    shift = 0

    def order(self, seed: int, batch: int) -> Ordered:
        return Shifted(len(self), self)


class Shifted(Order):
    def __init__(self, size: int, rows: ShiftedRows) -> None:
        super().__init__(size, seed=0)
        self.rows = rows

    def at(self, positions: Any) -> Any:
        epochs, indices = super().at(positions)
        return epochs, np.where(positions < 4 * BATCH, indices, (indices + self.rows.shift) % 37)


def test_an_order_that_is_another_one_at_the_next_step_is_rejected():
    rows = ShiftedRows(range(37))
    made = Loader(rows, BATCH, workers=0)
    made.position = 4
    state = made.state_dict()
    Loader(rows, BATCH, workers=0).load_state_dict(state)
    rows.shift = 1
    with pytest.raises(ValueError, match="another Loader .order of the samples"):
        Loader(rows, BATCH, workers=0).load_state_dict(state)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_state_of_the_other_order_is_rejected(shuffle):
    state = Loader(Augmented(), BATCH, shuffle=not shuffle).state_dict()
    made = Loader(Augmented(), BATCH, shuffle=shuffle)
    with pytest.raises(ValueError, match="another Loader .order of the samples"):
        made.load_state_dict(json.loads(json.dumps(state)))
    state = made.state_dict()
    Loader(Augmented(), BATCH, shuffle=shuffle).load_state_dict(state)


# Random numbers.


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [True, False])
def test_samples_do_not_depend_on_the_generators_of_the_process(shuffle, workers):
    """However they are seeded, before the loop and inside it."""
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        options = {"shuffle": shuffle, "workers": workers}
        made = Loader(Augmented(), BATCH, seed=SEED, micro=6, **options)
        steps = []
        for group in made:
            torch.rand(seed), random.random(), np.random.randn(seed)
            steps.append(seen(group))
            if len(steps) == 4:
                break
        found.append(steps)
    assert found[0] == found[1]
    if shuffle:
        assert [sorted(step) for step in found[0]] == expected()[:4]


def test_the_generators_of_the_process_stay_as_they_are():
    draws = (torch.rand, lambda _: random.random(), lambda _: np.random.rand(), np.random.randn)
    for generators in draws:
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        alone = [generators(1) for _ in range(6)]
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        beside = []
        made = Loader(Augmented(), BATCH, micro=8)  # an odd number of draws in a group
        for group in made:
            made.state_dict()
            if made.position == 2:
                break
            for _ in group:
                beside.append(generators(1))
        assert alone == beside


def _in_a_thread(function: Any) -> Any:
    """Return the result of a function in another thread, or its exception."""
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(function)
        return future.exception() or future.result()


def test_a_thread_that_trains_may_load_and_data_workers_load_for_any_thread():
    def trains() -> list[Any]:
        made = Loader(Augmented(), BATCH, seed=SEED)
        optimizer = an_optimizer()
        found = []
        for group in made:
            found.append(seen(group))
            optimizer.step()
            if made.position == 2:
                return found
        raise AssertionError("the loop ended")

    assert _in_a_thread(trains) == [sorted_back(0), sorted_back(1)]
    made = Loader(Augmented(), BATCH, seed=SEED, workers=1)
    assert _in_a_thread(lambda: steps_of(made, 2)) == [sorted_back(0), sorted_back(1)]


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), random.random, np.random.rand])
@pytest.mark.parametrize("dataset", [[1.0] * 70, Augmented()])
def test_a_collate_function_that_draws_is_rejected(draw, dataset):
    def collate(samples):
        draw()
        return torch.zeros(len(samples))

    with pytest.raises(ValueError, match="collate draws random numbers"):
        next(iter(Loader(dataset, BATCH, collate=collate)))
    group = next(iter(Loader(dataset, BATCH, collate=collate, grain=3)))
    assert len(group) == 8


def _drawn_in_collate() -> list[Any]:
    accelerator = Accelerator(cpu=True)

    def collate(samples):
        return [
            (one["index"], one["crop"] + random.random() + float(torch.rand(()))) for one in samples
        ]

    made = loader({"accelerator": accelerator}, grain=6, collate=collate)
    found = []
    for group in made:
        found.append([pair for batch in group for pair in batch])
        if len(found) == 2:
            return found
    raise AssertionError("the loop ended")


def test_with_a_grain_a_collate_function_may_draw():
    (one,) = run(_drawn_in_collate).ok()
    two = run(_drawn_in_collate, ranks=2).ok()
    assert joined(two) == [sorted(step) for step in one]


# Weights, batches and data sets.


class Texts:
    """Samples of different lengths."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((index % 7 + 1,), index)


def _totals() -> list[tuple[float, float]]:
    made = loader(
        {"accelerator": Accelerator(cpu=True)},
        Texts(),
        micro=4,
        collate=lambda samples: torch.cat(samples),
        weight=len,
    )
    found = []
    for group in made:
        own = sum(len(batch) for batch in group)
        assert own == group.weight
        found.append((group.total, own))
        if len(found) == 4:
            return found
    raise AssertionError("the loop ended")


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_total_is_the_weight_of_the_global_batch(ranks):
    found = run(_totals, ranks=ranks).ok()
    indices = [Order(50, seed=SEED)[step * 24 : (step + 1) * 24][1] for step in range(4)]
    lengths = [float((step % 7 + 1).sum()) for step in indices]
    for rank in found:
        assert [total for total, _ in rank] == lengths
    assert [sum(own for _, own in step) for step in zip(*found)] == lengths


def _begins_again(late: int) -> str:
    """Begin the loop again on the last ranks, at step 3, as after an exception."""
    accelerator = Accelerator(cpu=True)
    made = loader({"accelerator": accelerator}, Texts(), collate=torch.cat, weight=len)
    optimizer = an_optimizer()
    again = accelerator.process_index >= accelerator.num_processes - late
    try:
        for group in made:
            if again and made.position == 2:
                break
            list(group)
            optimizer.step()
            if made.position == 5:
                return "ended"
        for _ in made:
            pass
    except RuntimeError as error:
        return str(error)
    raise AssertionError("the loop ended")


def test_totals_of_different_steps_are_not_added():
    """A rank that begins its loop again makes an all-reduce more than the others."""
    for found in run(_begins_again, 1, ranks=2).ok():
        assert "the ranks sum up the weights of different steps: this one of step" in found
    assert run(_begins_again, 0, ranks=2).ok() == ["ended", "ended"]


@pytest.mark.parametrize("weight", [0, -1, float("nan"), torch.tensor(float("inf"))])
def test_a_step_without_weight_is_an_error(weight):
    with pytest.raises(ValueError, match="the weight of step 1 is"):
        next(iter(Loader(DATA, 4, weight=lambda batch: weight)))


Pair = namedtuple("Pair", ["x", "y"])


def test_batches_of_any_form():
    data = TensorDataset(torch.arange(8.0), torch.arange(8))
    x, y = next(iter(next(iter(Loader(data, 4)))))
    assert x.shape == y.shape == (4,)
    named = [Pair(torch.tensor(1.0), 2)] * 4
    assert next(iter(next(iter(Loader(named, 2))))).y.tolist() == [2, 2]
    assert next(iter(next(iter(Loader(torch.arange(3), 3))))).sum() == 3
    texts = next(iter(next(iter(Loader(["a", "b"], 2, collate=sorted)))))
    assert texts == ["a", "b"]


def test_nested_batches_go_to_the_device():
    """Meta tensors stand for those of another device."""

    def collate(samples):
        return {
            "encoded": BatchEncoding({"ids": torch.zeros(2)}),
            "pairs": [Pair(torch.zeros(2), "text"), {"deep": (torch.zeros(1), 3)}],
        }

    batch = next(iter(next(iter(Loader([1, 2], 2, collate=collate, device="meta")))))
    assert isinstance(batch["encoded"], BatchEncoding) and batch["encoded"]["ids"].is_meta
    assert batch["pairs"][0].x.is_meta and batch["pairs"][0].y == "text"
    assert batch["pairs"][1]["deep"][0].is_meta and batch["pairs"][1]["deep"][1] == 3


def _data_sets(folder: Path) -> list[Any]:
    """Return the samples of the first steps of this process, of several kinds of data sets."""
    import datasets

    table = datasets.Dataset.from_dict({"n": list(range(70))})
    parts = {"a": list(range(50)), "b": list(range(100, 130))}
    accelerator = Accelerator(cpu=True)
    found = []
    for dataset in (
        table.with_format("torch"),
        Mixture(parts, [0.75, 0.25]),
        Subset([*range(100)], [*range(30, 70)]),
    ):
        made = loader({"accelerator": accelerator}, dataset, micro=4)
        steps = []
        for group in made:
            rows = []
            for batch in group:
                rows += (batch["n"] if isinstance(batch, dict) else batch).tolist()
            steps.append(rows)
            if len(steps) == 4:
                break
        found.append(steps)
    return found


def test_data_sets_of_datasets_and_torch_and_mixtures(tmp_path):
    (one,) = run(_data_sets, tmp_path).ok()
    two = run(_data_sets, tmp_path, ranks=2).ok()
    for number, alone in enumerate(one):
        assert joined([rank[number] for rank in two]) == [sorted(step) for step in alone]
    for step in one[1]:  # the mixture
        assert sum(index >= 100 for index in step) == 6


def _packed_chats() -> list[Any]:
    """Return tokens and totals of the first steps, of a packed data set of a task."""
    from oneloop.tasks.sft import SFT

    task = SFT(length=64)
    made = loader(
        {"accelerator": Accelerator(cpu=True)},
        task.train_set(),
        micro=4,
        collate=task.collate,
        weight=task.weight,
    )
    found = []
    for group in made:
        rows = []
        for batch in group:
            rows += batch["input"].tolist()
        found.append((group.total, rows))
        if len(found) == 3:
            return found
    raise AssertionError("the loop ended")


def _rows(address: str) -> list[Any]:
    """Return the rows of the first steps, of Parquet files on a disk or in a bucket."""
    from oneloop.tasks.rows.open_data import Source, whole

    rows = whole(Source(address, {"number": "n"}), window=4).parts["all"]
    made = loader({"accelerator": Accelerator(cpu=True)}, rows, micro=4, workers=0)
    found = []
    for group in made:
        found.append([number for batch in group for number in batch["n"].tolist()])
        if len(found) == 6:
            return found
    raise AssertionError("the loop ended")


@pytest.mark.slow
def test_packed_conversations_and_the_weight_of_their_tokens():
    (one,) = run(_packed_chats).ok()
    two = run(_packed_chats, ranks=2).ok()
    assert [[total for total, _ in rank] for rank in two] == [[total for total, _ in one]] * 2
    rows = [[rows for _, rows in rank] for rank in (one, *two)]
    assert joined(rows[1:]) == [sorted(step) for step in rows[0]]


@pytest.mark.slow
def test_parquet_on_a_disk_and_in_a_bucket(tmp_path):
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"n": [*range(100)]})
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=10)
    (one,) = run(_rows, str(tmp_path)).ok()
    assert sorted(chain(*one[:4]))[:90] != [*range(90)] and len({*chain(*one)}) == 100
    with counted_s3() as s3:
        s3.copy(tmp_path, "s3://bucket/data")
        for ranks in (1, 2):
            found = run(_rows, "s3://bucket/data", ranks=ranks, variables=s3.variables).ok()
            assert joined(found) == [sorted(step) for step in one]


# Wrong inputs.


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


DATA = TensorDataset(torch.arange(8))
COLUMNS = {"x": [*range(8)], "y": [*range(8)]}
WRONG = [
    (lambda: Loader(pandas.DataFrame(COLUMNS), 4), "DataFrame has columns or splits; give it"),
    (lambda: Loader(pyarrow.table(COLUMNS), 4), "Table has columns or splits; give it"),
    (lambda: Loader(COLUMNS, 4), "dict has columns or splits; give it"),
    (lambda: Loader(BatchEncoding(COLUMNS), 4), "BatchEncoding has columns or splits; give it"),
    (
        lambda: next(iter(Loader([1, 2, None], 3))),
        r"sample 2 of .* is None; .*\.SkipSample",
    ),
    (lambda: Loader(DATA, 4, num_workers=2), "unexpected keyword argument 'num_workers'"),
    (lambda: Loader(RandomSampler(DATA), 4), "got RandomSampler: give it the data set of a"),
    (lambda: Loader(DataLoader(DATA), 4), "got DataLoader: give it the data set of a loader"),
    (lambda: Loader(Loader(DATA, 4), 4), "got Loader: give it the data set of a loader"),
    (lambda: Loader(Stream(), 4), "got Stream: .* a stream has no position"),
    (lambda: Loader(iter([1]), 4), "got list_iterator: .* a stream has no"),
    (lambda: Loader([], 4), "an order needs at least one sample, got 0"),
    (lambda: Loader(DATA, 0), "batch_size of a Loader must be a positive integer, got 0"),
    (lambda: Loader(DATA, 2.5), "batch_size of a Loader must be a positive integer, got 2.5"),
    (lambda: Loader(DATA, 4, micro=-1), "micro of a Loader must be a positive integer, got -1"),
    (lambda: Loader(DATA, 4, micro=2, grain=4), "micro 2 and grain 4 of a Loader"),
    (lambda: Loader(DATA, 5, micro=2), "micro 2 does not divide this number; nearest: 1"),
    (lambda: Loader(DATA, 5, rank=0, ranks=2), "batch_size 5 cannot be split over 2 ranks"),
    (lambda: Loader(DATA, 12, grain=4, rank=0, ranks=3), "batch_size 12 / grain 4 gives 3 micro"),
    (lambda: Loader(DATA, 4, ranks=2), "needs both 0 <= rank < ranks, got rank None and ranks 2"),
    (lambda: Loader(DATA, 4, rank=2, ranks=2), "needs both 0 <= rank < ranks, got rank 2"),
    (lambda: Loader(DATA, 4, rank=0, ranks=2, weight=len), "the weights of 2 processes are summed"),
    (lambda: next(iter(Loader(DATA, 4, workers=-1))), "num_workers option should be non-negative"),
    (
        lambda: Loader(DATA, 4, accelerator=Accelerator(cpu=True), rank=0, ranks=1),
        "got an accelerator, and also rank, ranks or device",
    ),
    (
        lambda: Loader(DATA, 6, accelerator=Accelerator(cpu=True, gradient_accumulation_steps=4)),
        "has 6 micro-batches of 1 in a group, but the accelerator's gradient_accumulation_steps",
    ),
    (
        lambda: Loader(
            DATA, 8, micro=1, accelerator=Accelerator(cpu=True, gradient_accumulation_steps=4)
        ),
        "has 8 micro-batches of 1 in a group, but the accelerator's gradient_accumulation_steps",
    ),
]


@pytest.mark.parametrize(("make", "match"), WRONG)
def test_wrong_arguments_are_rejected_with_what_to_do(make, match):
    with pytest.raises((TypeError, ValueError), match=match):
        make()


def test_a_dict_by_index_is_a_data_set_and_none_may_be_left_out_by_collate_with_weight():
    made = Loader({0: 5, 1: 6}, 2)
    assert sorted(next(iter(next(iter(made)))).tolist()) == [5, 6]

    def without_none(samples: list[Any]) -> torch.Tensor:
        return torch.tensor([one for one in samples if one is not None])

    made = Loader([5, 6, None], 3, collate=without_none, weight=len)
    group = next(iter(made))
    (batch,) = group
    assert group.total == len(batch) == 2


def test_the_accelerators_accumulation_divides_a_group():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    made = Loader(Augmented(), BATCH, accelerator=accelerator)
    assert len(next(iter(made))) == made.factor == 4


def test_prepare_returns_it_unchanged():
    made = Loader(Augmented(), BATCH)
    assert Accelerator(cpu=True).prepare(made) is made


def _without_a_place() -> None:
    Accelerator(cpu=True)
    with pytest.raises(ValueError, match="Loader runs on 2 processes, and each would load all"):
        Loader(Augmented(), BATCH)


def test_several_processes_need_a_rank():
    run(_without_a_place, ranks=2).ok()


class Shuffled:
    """The same 50 samples in the order of a seed. ``order`` and ``fingerprint`` are not methods."""

    fingerprint = "of version 1"

    def __init__(self, seed: int) -> None:
        self.order = torch.randperm(50, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.order[index]


def _with_other_settings() -> None:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    with pytest.raises(ValueError, match="order of the samples .*: [0-9a-f]+ -> "):
        Loader(Augmented(), BATCH, accelerator=accelerator, shuffle=rank == 0)
    with pytest.raises(ValueError, match="rank 0 -> rank 1.: seed: 0 -> 1; "):
        Loader(Augmented(), BATCH, accelerator=accelerator, seed=rank)
    with pytest.raises(ValueError, match="hash of 16 samples: "):
        Loader(Shuffled(seed=rank), 10, accelerator=accelerator)
    Loader(Shuffled(seed=0), 10, accelerator=accelerator)


def test_ranks_need_one_seed_and_the_same_data():
    run(_with_other_settings, ranks=2).ok()


class OwnGenerator(Augmented):
    """Noise from a generator that nothing seeds again."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.generator.normal(size=2)}


class OwnNumbers(OwnGenerator):
    """The same as a number and a text of Python."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": float(self.generator.normal()), "text": "constant"}


class Reseeded(OwnGenerator):
    """The same, and each sample seeds the generator from torch's."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.generator = np.random.default_rng(int(torch.randint(2**31, ())))
        return super().__getitem__(index)


class InPlace(Augmented):
    """Normalizes what it stores."""

    def __init__(self) -> None:
        self.stored = torch.ones(70, 2)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.stored[index].mul_(0.5)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (OwnGenerator, "the data set returns other content for the same sample and seeds"),
        (OwnNumbers, "the data set returns other content for the same sample and seeds"),
        (InPlace, "the data set changes what it stores when a sample is read"),
    ],
)
def test_samples_that_cannot_be_repeated_are_rejected(kind, match, workers):
    with pytest.raises(ValueError, match=match):
        Loader(kind(), BATCH, workers=workers)


def test_a_generator_that_each_sample_seeds_repeats():
    first, second = (next(iter(Loader(Reseeded(), BATCH))) for _ in range(2))
    assert torch.equal(*(next(iter(group))["x"] for group in (first, second)))


def test_an_accelerator_that_accumulates_must_be_given():
    """backward() divides by 4, and factor would not undo it."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    with pytest.raises(RuntimeError, match="gradient_accumulation_steps 4, by which its backward"):
        seen(next(iter(Loader(Augmented(), BATCH, micro=6))))
    accelerator.gradient_accumulation_steps = 1
    assert len(seen(next(iter(Loader(Augmented(), BATCH, micro=6))))) == BATCH


def test_groups_that_are_collected_are_not_silently_empty():
    made = iter(Loader(Augmented(), BATCH))
    first = next(made)
    second = next(made)
    with pytest.raises(RuntimeError, match="or the next group was taken"):
        list(first)
    assert len(list(second)) == 1
    with pytest.raises(TypeError, match="'Group' object is not subscriptable"):
        second["x"]


def test_a_data_set_that_has_grown_is_rejected():
    data = [*range(50)]
    state = Loader(data, 4).state_dict()
    data += range(50)
    with pytest.raises(ValueError, match="samples: 50 -> 100"):
        Loader(data, 4).load_state_dict(state)


def test_arrays_of_objects_are_compared_by_content():
    """Their bytes are addresses, which are others in each process."""
    arrays = [np.array([["a", number], None], dtype=object) for number in (3, 3, 4)]
    one, same, other = (content_hash(array) for array in arrays)
    assert one == same != other


class Stamp(datetime):
    """As pandas.Timestamp, which has attributes, but none of its own."""


@dataclass(slots=True)
class Price:
    amount: Decimal


OBJECTS = {
    "date": (lambda number: date(2026, 1, number)),
    "time of a zone": (lambda number: datetime(2026, 1, number, tzinfo=timezone.utc)),
    "subclass": (lambda number: Stamp(2026, 1, number)),
    "duration": timedelta,
    "decimal": (lambda number: Decimal(number) / 10),
    "fraction": (lambda number: Fraction(number, 7)),
    "identifier": (lambda number: UUID(int=number)),
    "path": (lambda number: PurePosixPath(f"/data/{number}")),
    "range": range,
    "slots": (lambda number: Price(Decimal(number))),
    "bytes": (lambda number: bytearray([number])),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_dates_decimals_and_other_objects_are_compared_by_value(kind):
    make = OBJECTS[kind]
    one, same, other = (content_hash({"when": make(number)}) for number in (3, 3, 4))
    assert one == same != other


class SecondIsRandom:
    """Its second sample has its own generator: ranks cannot compare it."""

    def __init__(self) -> None:
        self.own = np.random.default_rng()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return self.own.random() if index == 1 else float(index)


def test_samples_of_which_one_is_random_are_not_compared():
    content, wrong = content_of(SecondIsRandom(), seed=0, workers=0)
    assert content == {"samples": "8", SAMPLED: None} and "other content" in wrong
    content, wrong = content_of([0.0] * 8, seed=0, workers=0)
    assert content[SAMPLED] == sample_checksum(0, [0.0] * 8)[0] and not wrong


def test_a_data_set_with_other_dates_is_rejected():
    def of_year(year: int) -> Loader:
        return Loader([{"day": date(year, 1, 1 + k)} for k in range(24)], 8, collate=list)

    state = json.loads(json.dumps(of_year(2025).state_dict()))
    of_year(2025).load_state_dict(state)
    with pytest.raises(ValueError, match="hash of 16 samples: "):
        of_year(2026).load_state_dict(state)


def test_objects_whose_text_has_an_address_are_compared_by_class():
    """The address differs between processes."""
    assert content_hash([object()]) == content_hash([object()])
    assert content_hash([object()]) != content_hash([date(2026, 1, 1)])


def test_a_fingerprint_is_compared_as_json_keeps_it():
    class Versioned(Augmented):
        def fingerprint(self):
            return {"version": (1, 2), "parts": {1: "a"}}

    state = json.loads(json.dumps(Loader(Versioned(), 4).state_dict()))
    Loader(Versioned(), 4).load_state_dict(state)


def test_a_group_is_used_once_and_the_newest_loop_counts():
    made = Loader(Augmented(), BATCH)
    group = next(iter(made))
    list(group)
    with pytest.raises(RuntimeError, match="batches = list"):
        list(group)
    older = iter(made)
    next(older)
    next(iter(made))
    with pytest.raises(RuntimeError, match="another loop over this Loader has begun"):
        next(older)
