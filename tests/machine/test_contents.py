"""The contents of parameters and buffers are compared, whatever torch knows of a write."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from oneloop.basics.exit_codes import Inexact
from oneloop.machine.contents import Contents

pytestmark = pytest.mark.covers(
    "oneloop.machine.contents",
    "oneloop.machine.small_tensors",
)


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 3, dtype=torch.float64)
        self.table = nn.Embedding(700, 200)  # 560 KB
        self.large = nn.Parameter(torch.zeros(600, 500))  # beyond the first megabyte
        self.register_buffer("code", torch.arange(6, dtype=torch.int16))
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("phase", torch.zeros(3, dtype=torch.complex64))
        self.register_buffer("wide", torch.zeros(2, 3, 4).transpose(0, 2))
        self.register_buffer("later", None)

    def forward(self, x):
        return self.layer(x)


def moved(model) -> None:
    model.large.data = torch.ones(600, 500)


def registered(model) -> None:
    model.register_buffer("late", torch.zeros(1))


def filled(model) -> None:
    model.later = torch.zeros(2)


def renamed(model) -> None:
    model._buffers["other"] = model._buffers.pop("code")


def replaced(model) -> None:
    model.layer = nn.Linear(4, 3, dtype=torch.float64)


CHANGES = {
    "parameter layer.weight has changed": lambda model: model.layer.weight.data.mul_(2.0),
    "parameter layer.bias has changed": lambda model: model.layer.bias.detach().numpy().fill(3.0),
    "parameter table.weight has changed": lambda model: model.table.weight.data[699].mul_(2.0),
    "buffer code has changed": lambda model: model.code.copy_(model.code.roll(1)),
    "buffer flag has changed": lambda model: model.flag.fill_(True),
    "buffer phase has changed": lambda model: model.phase.data[2].fill_(1j),
    "buffer wide has changed": lambda model: model.wide.set_(torch.ones(4, 3, 2)),
    "parameter layer.(weight|bias) has changed": replaced,
    "buffer late was registered": registered,
    "buffer later was registered": filled,
    "buffer other was registered": renamed,
}


def compared(model, change, *, everything: bool = False, **options) -> None:
    contents = Contents(model, device=torch.device("cpu"), **options)
    for step in range(3):
        contents.begin(step, everything=everything)
        change(model)
        contents.end()
        contents.confirm()


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_found_in_its_step_and_named(name):
    with pytest.raises(Inexact, match=f"the {name} in a step"):
        compared(Net(), CHANGES[name])


def test_a_large_tensor_is_found_in_steps_that_compare_everything():
    model = Net()
    contents = Contents(model, device=torch.device("cpu"))
    for step in range(3):
        contents.begin(step)  # the first one compares all tensors
        if step:
            moved(model)
        contents.end()
        contents.confirm()
    with pytest.raises(Inexact, match="the parameter large has changed in a step"):
        compared(Net(), moved, everything=True)


def test_a_large_buffer_that_changes_between_two_checks_is_found_in_the_next_one():
    model = Net()
    model.register_buffer("codes", torch.zeros(600, 500))
    contents = Contents(model, device=torch.device("cpu"))

    def trained(until: int) -> None:
        for step in range(until):
            contents.begin(step, everything=step == 8)
            if step == 3:
                model.codes.data[7] = 1
            contents.end()
            contents.confirm()
            with torch.no_grad():
                model.large += 1  # as an optimizer does

    trained(8)
    found = "the buffer codes has changed after step 0, but not by an update"
    with pytest.raises(Inexact, match=found) as caught:
        trained(9)
    assert caught.value.equal_at == 0


def test_equal_contents_are_no_change():
    def rewritten(model) -> None:
        model.layer.weight.data.copy_(model.layer.weight.clone())
        model.code = model.code.clone()
        model.wide = model.wide.clone()

    compared(Net(), rewritten, everything=True)


def test_an_update_between_steps_is_no_change():
    model = Net()
    contents = Contents(model, device=torch.device("cpu"))
    for step in range(4):
        contents.begin(step, everything=True)
        contents.end()
        contents.confirm()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1)


def test_a_moving_buffer_is_reported_once_if_that_is_no_error():
    said = []
    some = {"rejected": ["parameter"], "report": said.append}
    compared(Net(), lambda model: model.code.add_(1), **some)
    assert said == ["the buffer code has changed in a step, but not by its update"]
    with pytest.raises(Inexact, match="parameter layer.bias"):
        compared(Net(), CHANGES["parameter layer.bias has changed"], **some)


def test_on_one_process_a_moving_parameter_is_reported_once():
    said = []
    compared(Net(), CHANGES["parameter layer.bias has changed"], rejected=[], report=said.append)
    assert said == ["the parameter layer.bias has changed in a step, but not by its update"]


def test_a_change_that_is_an_error_goes_before_one_that_is_reported():
    said = []

    def both(model) -> None:
        model.code.add_(1)
        model.layer.bias.data.fill_(3.0)

    with pytest.raises(Inexact, match="parameter layer.bias"):
        compared(Net(), both, rejected=["parameter"], report=said.append)
    assert said == []


def test_a_tensor_of_another_shape_in_the_same_memory_has_changed():
    def shortened(model) -> None:
        model.code.data = model.code.data[:2]

    with pytest.raises(Inexact, match="the buffer code has changed in a step"):
        compared(Net(), shortened)


def test_a_large_buffer_may_be_dropped_and_is_named():
    model = Net()
    model.register_buffer("cache", torch.zeros(600, 500))
    with pytest.raises(Inexact, match="the buffer cache was removed"):
        compared(model, lambda model: setattr(model, "cache", None))


def test_what_is_not_compared_may_change():
    compared(Net(), lambda model: model.code.add_(1), compared=["parameter"])


def test_an_evaluation_changes_nothing():
    model = Net()
    contents = Contents(model, device=torch.device("cpu"))
    with contents.unchanged("an evaluation"):
        model(torch.zeros(2, 4, dtype=torch.float64))
    with (
        pytest.raises(Inexact, match="parameter large has changed in an evaluation"),
        contents.unchanged("an evaluation"),
    ):
        moved(model)


def test_a_step_may_end_before_the_one_before_it_is_read():
    model = Net()
    contents = Contents(model, device=torch.device("cpu"))
    contents.begin(1)
    model.flag.fill_(True)
    contents.end()
    contents.begin(2)
    contents.end()
    with pytest.raises(Inexact, match="buffer flag"):
        contents.confirm()
    contents.confirm()


def test_the_message_of_a_large_tensor_names_the_last_step_that_was_right():
    model = Net()
    contents = Contents(model, device=torch.device("cpu"))
    for step in (4, 8, 12):
        contents.begin(step, everything=True)
        if step == 12:
            moved(model)
        contents.end()
        if step < 12:
            contents.confirm()
    with pytest.raises(Inexact) as caught:
        contents.confirm()
    assert caught.value.equal_at == 8
