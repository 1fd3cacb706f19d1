"""A group of a Loader belongs to its accelerator from its first batch to its last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn

from oneloop import Loader
from oneloop.data.order import Order
from worlds import run

pytestmark = pytest.mark.covers("oneloop.data.loader")

DATA = torch.randn(90, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
ONE = 12  # batch sizes of two Loaders
TWO = 24
STEPS = 5


@pytest.fixture(autouse=True)
def state_of_accelerate() -> Iterator[None]:
    """Forget what all accelerators of a process share, for the tests that follow."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class Training:
    """A linear model on this process, and how it is trained with the batches of a Loader."""

    def __init__(self, config: str = "single") -> None:
        if config == "fsdp2":
            from oneloop.launch.processes import start

            self.accelerator = start().accelerator
        else:
            self.accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model = nn.Linear(6, 3).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def loader(self, batch_size: int, micro: int | None = 3, **options: Any) -> Loader:
        return Loader(DATA, batch_size, micro=micro, accelerator=self.accelerator, **options)

    def backward(self, batch: Tensor, target: float, factor: float) -> None:
        with self.accelerator.accumulate(self.model):
            loss = (self.model(batch) - target).square().sum()
            self.accelerator.backward(loss * factor)

    def train(self, loader: Loader, group: Any, batches: Any = None, target: float = 1) -> None:
        """Train on the batches, without an update."""
        for batch in batches or group:
            self.backward(batch, target, loader.factor / group.total)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> Tensor:
        weight = self.accelerator.unwrap_model(self.model).weight
        return (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach().cpu()


def reference(batch_sizes: dict[int, float], *, together: bool) -> Tensor:
    """Return the weights of a plain loop, with whole batches.

    Args:
        batch_sizes: and the target of each.
        together: whether the batches of a step have one update.
    """
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for number, (size, target) in enumerate(batch_sizes.items(), start=1):
            _, indices = Order(len(DATA), seed=0)[step * size : (step + 1) * size]
            ((model(DATA[indices]) - target).square().sum() / size).backward()
            if not together or number == len(batch_sizes):
                optimizer.step()
                optimizer.zero_grad()
    return model.weight.detach()


# What begins inside a group.


def _loop(training: Training, made: Loader, _: Any) -> None:
    next(iter(made))


def _position(training: Training, made: Loader, _: Any) -> None:
    made.position = 0


def _state(training: Training, made: Loader, state: Any) -> None:
    made.load_state_dict(state)


def _state_of_a_script(training: Training, made: Loader, state: Any) -> None:
    made.check_state_dict(state)


def _other_group(training: Training, made: Loader, _: Any) -> None:
    other = training.loader(TWO, 6)
    training.train(other, next(iter(other)))


def _new_loader(training: Training, made: Loader, _: Any) -> None:
    next(iter(training.loader(ONE, 6)))


EVENTS = {
    "a new loop of the Loader with batch_size 12": _loop,
    "position 0 of the Loader with batch_size 12": _position,
    "a loaded state of the Loader with batch_size 12": _state,
    "a loaded state": _state_of_a_script,
    "a new loop of the Loader with batch_size 24": _other_group,
    "a new loop": _new_loader,
}
INSIDE = "comes inside a group, after batch {} of its 4"


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("kept", [False, True])
def test_nothing_else_begins_inside_a_group(event, kept):
    """With batches that are used one by one, or kept in a list, of which two are trained."""
    training = Training()
    made = training.loader(ONE)
    state = made.state_dict()
    for group in made:
        if made.position == 1:
            batches = list(group)[:2] if kept else [next(iter(group))]
            training.train(made, group, batches)
            break
        training.train(made, group)
        training.update()
    with pytest.raises(RuntimeError, match=f"^{event}.*{INSIDE.format(len(batches))}"):
        EVENTS[event](training, made, state)


@pytest.mark.parametrize("with_accelerate", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_group_is_not_left_by_an_exception_that_the_script_catches(with_accelerate, workers):
    """The gradients of its first batch would be added to those of the next group."""
    training = Training()
    where = {"accelerator": training.accelerator} if with_accelerate else {"device": "cpu"}
    made = Loader(DATA, ONE, micro=3, workers=workers, **where)

    def trains() -> None:
        for group in made:
            try:
                for batch in group:
                    training.backward(batch, 1, 1)
                    raise MemoryError
            except MemoryError:
                if made.position == 2:
                    return

    with pytest.raises(RuntimeError, match="the next step of .* after batch 1 of its 4"):
        trains()


def test_a_group_may_be_left_after_its_last_batch():
    training = Training()
    made = training.loader(ONE)
    while made.position < STEPS:
        for group in made:
            for number, batch in enumerate(group, start=1):
                training.backward(batch, 1, made.factor / group.total)
                if number == len(group):
                    break
            training.update()
            break
    torch.testing.assert_close(training.weights(), reference({ONE: 1}, together=True))


def test_a_state_is_not_loaded_inside_a_group_by_accelerate(tmp_path):
    training = Training()
    made = training.loader(ONE)
    training.accelerator.register_for_checkpointing(made)
    training.accelerator.save_state(tmp_path)
    group = next(iter(made))
    training.train(made, group, [next(iter(group))])
    with pytest.raises(RuntimeError, match="a loaded state .* after batch 1 of its 4"):
        training.accelerator.load_state(tmp_path)


@pytest.mark.parametrize("kept", [False, True])
def test_a_state_is_not_saved_inside_a_group_by_accelerate(tmp_path, kept):
    """accelerate knows how many of the batches are trained that were kept in a list."""
    training = Training()
    made = training.loader(ONE)
    training.accelerator.register_for_checkpointing(made)
    for group in made:
        batches = list(group) if kept else iter(group)
        training.train(made, group, batches[:2] if kept else [next(batches)])
        done = 2 if kept else 1
        with pytest.raises(RuntimeError, match=f"a state of .* after batch {done} of its 4"):
            training.accelerator.save_state(tmp_path)
        training.train(made, group, batches[2:] if kept else batches)
        training.update()
        training.accelerator.save_state(tmp_path)
        if made.position == 2:
            break
    again = training.loader(ONE)
    again.load_state_dict(made.state_dict())
    assert again.position == 2


def test_batches_of_an_older_loop_are_not_used():
    made = Loader(DATA, ONE, micro=3)
    older = next(iter(made))
    next(iter(made))
    with pytest.raises(RuntimeError, match="another loop over this Loader has begun"):
        next(iter(older))


def test_batches_of_before_a_new_position_are_not_used():
    made = Loader(DATA, ONE, micro=3)
    group = next(iter(made))
    made.position = 5
    with pytest.raises(RuntimeError, match="or its position was set"):
        next(iter(group))


# Two Loaders of one accelerator.


def train_two(
    training: Training, sizes: tuple[int | None, int | None], *, together: bool, **options: Any
) -> Tensor:
    """Train groups of two Loaders, one after the other; return the weights."""
    one = training.loader(ONE, sizes[0], **options)
    two = training.loader(TWO, sizes[1], **options)
    for first, second in zip(one, two):
        training.train(one, first)
        if not together:
            training.update()
        training.train(two, second, target=0)
        training.update()
        if one.position == STEPS:
            break
    return training.weights()


@pytest.mark.parametrize("sizes", [(3, 12), (12, 3), (None, 4), (4, None)])
@pytest.mark.parametrize("together", [True, False])
def test_loaders_with_other_numbers_of_batches_take_turns(sizes, together):
    """Weights are those of a plain loop; and a third Loader is created between them."""
    training = Training()
    found = train_two(training, sizes, together=together)
    torch.testing.assert_close(found, reference({ONE: 1, TWO: 0}, together=together))
    third = training.loader(TWO, None)
    assert len(next(iter(third))) == 1


def test_a_later_loader_follows_what_the_user_has_set():
    """And not what the groups of another Loader have set."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    for size in (TWO, ONE):
        group = next(iter(Loader(DATA, size, accelerator=accelerator)))
        assert len(group) == 2
        for _ in group:
            with accelerator.accumulate():
                pass
        accelerator.gradient_accumulation_steps = 3  # as a group of three batches sets it
    with pytest.raises(ValueError, match="but the accelerator's gradient_accumulation_steps are 2"):
        Loader(DATA, TWO, micro=6, accelerator=accelerator)


def test_kept_batches_of_two_loaders_are_trained_with_equal_numbers():
    training = Training()
    one = training.loader(ONE, 3)
    two = training.loader(TWO, 6)
    for first, second in zip(one, two):
        for batch, other in zip(list(first), list(second), strict=True):
            training.backward(batch, 1, one.factor / first.total)
            training.backward(other, 0, two.factor / second.total)
        training.update()
        if one.position == STEPS:
            break
    torch.testing.assert_close(training.weights(), reference({ONE: 1, TWO: 0}, together=True))


@pytest.mark.parametrize("sizes", [(12, 6), (3, 24), (3, 12), (6, 4)])
def test_kept_batches_of_two_loaders_are_rejected_with_other_numbers(sizes):
    """Accelerate has one number for both, so that a loss would be divided by a wrong one."""
    training = Training()
    one = training.loader(ONE, sizes[0])
    two = training.loader(TWO, sizes[1])

    def trains() -> None:
        for first, second in zip(one, two):
            groups = [(one, first, list(first)), (two, second, list(second))]
            for loader, group, batches in groups:
                for batch in batches:
                    training.backward(batch, 1, loader.factor / group.total)
            training.update()
            if one.position == 2 or two.position == 2:
                return

    match = f"has gradient_accumulation_steps {TWO // sizes[1]}, .* expects {ONE // sizes[0]}"
    with pytest.raises(RuntimeError, match=match):
        trains()


def test_another_accelerator_inside_a_group_is_an_error():
    """It sets the number of micro-batches by which backward() divides to 1."""
    training = Training()
    made = training.loader(ONE)
    group = next(iter(made))
    batches = iter(group)
    training.backward(next(batches), 1, made.factor)
    Accelerator(cpu=True)
    with pytest.raises(RuntimeError, match="gradient_accumulation_steps 1, .* expects 4"):
        training.backward(next(batches), 1, made.factor)


# Several processes.


def _on_two(config: str) -> None:
    training = Training(config)
    for sizes, workers in (((3, 12), 2), ((6, 3), 0)):
        found = train_two(training, sizes, together=True, workers=workers)
        expected = reference({ONE: 1, TWO: 0}, together=True)
        torch.testing.assert_close(found, expected)
        # Begin again.
        AcceleratorState._reset_state()
        GradientState._reset_state()
        training = Training(config)
    made = training.loader(ONE)
    group = next(iter(made))
    training.train(made, group, [next(iter(group))])
    with pytest.raises(RuntimeError, match="a new loop of .* after batch 1 of its 2"):
        next(iter(made))


@pytest.mark.parametrize("config", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_groups_of_two_loaders_on_two_processes(config):
    run(_on_two, config, config=config, ranks=2).ok()


# Schedulers.


def test_a_prepared_scheduler_is_rejected():
    training = Training()
    made = training.loader(ONE)
    rate = torch.optim.lr_scheduler.OneCycleLR(training.optimizer, 0.1, total_steps=9)
    training.accelerator.prepare(rate)
    with pytest.raises(ValueError, match="has prepared the scheduler OneCycleLR, so that each"):
        training.train(made, next(iter(made)))


def test_a_prepared_scheduler_that_counts_updates_is_right():
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer, rate = accelerator.prepare(optimizer, rate)
    made = Loader(DATA, ONE, micro=3, accelerator=accelerator)
    for group in made:
        list(group)
        optimizer.step()
        rate.step()
        if made.position == 3:
            break
    assert optimizer.param_groups[0]["lr"] == 0.125
