"""Clear stops before a run: names of files and classes, tied weights, streams, trackers."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn
from torch.utils.data import IterableDataset, default_collate

from oneloop import fit
from oneloop.basics.exit_codes import BadInput
from oneloop.checkpoint.weights import load_weights
from oneloop.measure.noise_scale import NoiseScale
from oneloop.recipe.class_paths import path_of, resolve
from oneloop.show.tracking import check_trackers
from oneloop.task_protocol.protocol import check_sets
from worlds import ROOT

pytestmark = pytest.mark.covers(
    "oneloop.checkpoint.weights",
    "oneloop.launch.hidden_modules",
    "oneloop.measure.noise_scale",
    "oneloop.recipe.class_paths",
    "oneloop.show.tracking",
    "oneloop.task_protocol.protocol",
)

TASK = """
from torch import nn
class Task:
    def model(self): return nn.Linear(1, 1)
    def loss(self, model, batch): return batch, {}
"""


@pytest.mark.parametrize(
    "words",
    [
        ["numbers.py:Task"],
        ["digits", "--task=numbers.py:Task"],
        ["digits", "--optimizer.name", "numbers.py:Task"],
    ],
)
def test_a_task_file_that_hides_a_module_of_python_is_named(tmp_path, words):
    (tmp_path / "numbers.py").write_text(TASK)
    done = subprocess.run(
        [sys.executable, "-m", "oneloop.train", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "hides the module 'numbers' of Python itself; give it another name" in done.stderr


def test_a_class_without_a_name_in_its_module_is_named():
    unnamed = type("Unnamed", (), {"__module__": __name__})
    with pytest.raises(BadInput, match="Unnamed is not .*, so a resume could not find"):
        path_of(unnamed)
    globals()["Unnamed"] = unnamed
    assert path_of(unnamed) == f"{__name__}.Unnamed"
    globals()["Unnamed"] = type("Unnamed", (), {"__module__": __name__})
    with pytest.raises(BadInput, match="is not .*, so a resume could not find"):
        path_of(unnamed)


def test_an_attribute_error_of_the_users_code_is_reported(tmp_path):
    (tmp_path / "broken_task.py").write_text("import math\nmath.nothing\n")
    with pytest.raises(BadInput, match="importing .* failed: AttributeError: module 'math'"):
        resolve("task", f"{tmp_path / 'broken_task.py'}:Task")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.wte.weight = self.head.weight


def test_a_file_may_have_any_name_of_tied_weights(tmp_path):
    torch.manual_seed(0)
    source = Tied()
    save_model(source, str(tmp_path / "tied.safetensors"))
    both = ["head.weight", "wte.weight"]
    for number, names in enumerate((both[:1], both[1:], both)):
        file = tmp_path / f"{number}.safetensors"
        save_file({name: source.head.weight.detach().clone() for name in names}, file)
        model = Tied()
        load_weights(model, str(file))
        assert torch.equal(model.wte.weight, source.wte.weight)
        assert model.wte.weight is model.head.weight
    model = Tied()
    load_weights(model, str(tmp_path / "tied.safetensors"))
    assert torch.equal(model.wte.weight, source.wte.weight)

    # Other values under the second name would be lost, and no name at all is another model.
    other = {"head.weight": torch.zeros(10, 4), "wte.weight": torch.ones(10, 4)}
    save_file(other, tmp_path / "untied.safetensors")
    with pytest.raises(ValueError, match="are tied in the model, and differ in the file"):
        load_weights(Tied(), str(tmp_path / "untied.safetensors"))
    save_file({"other": torch.zeros(1)}, tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match="missing: head.weight, wte.weight"):
        load_weights(Tied(), str(tmp_path / "none.safetensors"))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_a_stream_is_rejected_with_the_ways_out():
    for stream in (Stream(), (number for number in range(3))):
        with pytest.raises(ValueError, match=r"Parquet, or index its offsets .*from-streams\.md"):
            check_sets(stream, {})
    page = ROOT / "docs" / "how-to" / "from-streams.md"
    assert page.is_file()
    check_sets([1], {"validation": [1]})


def test_no_tracker_in_a_list_names_the_spelling():
    with pytest.raises(BadInput, match="set --track none alone"):
        check_trackers(["none"])


def test_a_step_of_one_part_measures_no_noise():
    noise = NoiseScale()
    noise.add(1.0, 0.25, 0.25, norm=1.0)
    assert noise.value is None
    noise.add(1.0, 0.5, 0.25, norm=0.9)
    assert noise.value is not None


class Plain:
    collate = staticmethod(default_collate)

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_set(self) -> Any:
        return Stream()

    def eval_sets(self) -> dict[str, Any]:
        return {}

    def weight(self, batch: Any) -> torch.Tensor:
        return torch.tensor(1.0)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return model(batch["x"]).sum(), {}


def test_nothing_is_written_for_a_stream(tmp_path):
    with pytest.raises(BadInput, match="a stream without length or items"):
        fit(Plain, duration=1, run={"dir": str(tmp_path / "run")})
    assert not (tmp_path / "run").exists()
