"""The precision of float32 products, set by torch's older settings, its new switches, or both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from oneloop.machine.torch_settings import float32_products, float32_restored
from worlds import run

pytestmark = pytest.mark.covers("oneloop.machine.torch_settings")

PAIRS = [
    (backend, part)
    for backend, parts in {
        "generic": ["all"],
        "cuda": ["all", "matmul", "conv", "rnn"],
        "mkldnn": ["all", "matmul", "conv", "rnn"],
    }.items()
    for part in parts
]
OLDER: dict[str, Callable[[], Any]] = {
    "products": torch.get_float32_matmul_precision,
    "cudnn": lambda: torch.backends.cudnn.allow_tf32,
    "cuda": lambda: torch.backends.cuda.matmul.allow_tf32,
}


def state() -> dict[Any, Any]:
    """Return what torch says about its precision; ``mixed`` if it cannot read an older setting."""
    found: dict[Any, Any] = {pair: torch._C._get_fp32_precision_getter(*pair) for pair in PAIRS}
    for name, read in OLDER.items():
        try:
            found[name] = read()
        except RuntimeError:
            found[name] = "mixed"
    return found


def new(path: str, value: str) -> Callable[[], None]:
    """Return a function that sets one of torch's new switches."""

    def choose() -> None:
        owner: Any = torch.backends
        for name in path.split(".")[1:]:
            owner = getattr(owner, name)
        owner.fp32_precision = value

    return choose


def both_of_the_newer() -> None:
    new("backends.cuda.matmul", "tf32")()
    new("backends.cudnn.conv", "ieee")()


def older_then_newer() -> None:
    torch.set_float32_matmul_precision("high")
    new("backends.mkldnn.matmul", "bf16")()


CHOICES: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "older, high": lambda: torch.set_float32_matmul_precision("high"),
    "older, no TF32": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "products": new("backends.cuda.matmul", "tf32"),
    "convolutions": new("backends.cudnn.conv", "ieee"),
    "recurrent": new("backends.cudnn.rnn", "ieee"),
    "cudnn": new("backends.cudnn", "ieee"),
    "all, tf32": new("backends", "tf32"),
    "all, ieee": new("backends", "ieee"),
    "mkldnn": new("backends.mkldnn.matmul", "bf16"),
    "two": both_of_the_newer,
    "mixed": older_then_newer,  # torch cannot read what the older setting was
}


def in_every_mix() -> dict[str, Any]:
    """Set and restore the precision after every choice; return what was found."""
    found = {}
    for name, choose in CHOICES.items():
        with float32_restored():  # undo the choice
            choose()
            before = state()
            for precision in ("highest", "high", "medium"):
                with float32_restored():
                    float32_products(precision)
                    found[name, precision] = state()
                # An older setting that a switch contradicts gets its default.
                known = PAIRS if name == "mixed" else before
                assert {one: state()[one] for one in known} == {one: before[one] for one in known}
    return found


def test_every_choice_is_replaced_and_restored():
    [found] = run(in_every_mix).ok()
    expected = {
        "highest": {("cuda", "matmul"): "ieee", ("cuda", "conv"): "none", "cudnn": False},
        "high": {("cuda", "matmul"): "tf32", ("cuda", "conv"): "tf32", "cudnn": True},
        "medium": {("mkldnn", "matmul"): "bf16", ("cuda", "conv"): "tf32", "cudnn": True},
    }
    for (name, precision), now in found.items():
        # the same state whatever was set before, which torch and its compiler can read
        assert now == found["nothing", precision], (name, precision)
        assert now["products"] == precision
        assert expected[precision].items() <= now.items()


def fitted(choice: str) -> tuple[dict[Any, Any], dict[Any, Any]]:
    from oneloop import fit

    CHOICES[choice]()
    before = state()
    fit("digits", duration=1, run={"dir": "run"}, track="none", machine={"workers": 0})
    return before, state()


@pytest.mark.parametrize("choice", ["two", "older, no TF32"])
def test_fit_leaves_the_switches_as_it_found_them(tmp_path, choice):
    world = run(fitted, choice, folder=tmp_path)
    before, after = world.ok()[0]
    assert before == after
    if choice == "two":
        assert before["products"] == before["cudnn"] == "mixed"
