"""Host memory of a model while several processes on one host start under FSDP2."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
import transformers
from safetensors.torch import load_file

from own_files import anonymous
from tiny import Ragged
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.job.model",
    "oneloop.machine.load_in_turn",
    "oneloop.tasks.transformers_models",
)


class Many(Ragged):
    """A task whose model is large enough for the memory message."""

    def model(self):
        model = super().model()
        model.large = torch.nn.Linear(4096, int(os.environ["ROWS"]))
        model.large.requires_grad_(False)
        return model


@pytest.mark.parametrize(
    ("config", "ranks"), [pytest.param("ddp", 3, marks=pytest.mark.slow), ("fsdp2", 2)]
)
def test_models_made_in_turn_are_the_same_to_the_bit(tmp_path, config, ranks):
    (tmp_path / "r.yaml").write_text("task: tiny.Ragged\n")
    words = [
        "r.yaml",
        "--duration",
        "2",
        "--save.every",
        "0",
        "--batch.size",
        "12",
        "--track",
        "none",
        "--eval.every",
        "0",
        "--run.dir",
    ]
    (tmp_path / "scratch").mkdir()
    how = {
        "ranks": ranks,
        "config": config,
        "folder": tmp_path,
        "variables": {"TMPDIR": str(tmp_path / "scratch")},
    }
    run(train, [*words, "together"], **how).ok()
    run(train, [*words, "in_turn", "--machine.in_turn", "true"], **how).ok()
    one, other = (
        load_file(tmp_path / name / "final" / "model.safetensors")
        for name in ("together", "in_turn")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not [
        path
        for path in (tmp_path / "scratch").iterdir()
        if path.is_dir() and "oneloop" in path.name
    ]


Samples = list[tuple[float, float]]
"""(time, increase of anonymous memory in MB)"""


def watched(make) -> tuple[Samples, float]:
    """Call ``make``; return the memory samples during the call, and the memory in use after it."""
    before, running = anonymous(), True
    seen: Samples = []

    def look():
        while running:
            seen.append((time.time(), anonymous() - before))
            time.sleep(0.002)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    kept = make()
    after = anonymous() - before
    running = False
    thread.join()
    del kept
    return seen, after


def most(seen: Samples) -> float:
    return max(value for _, value in seen)


def at_once(several: list[Samples]) -> float:
    """Return the peak of the sum over all ranks."""
    largest, now = 0.0, [0.0] * len(several)
    for _, rank, value in sorted(
        (when, rank, value) for rank, seen in enumerate(several) for when, value in seen
    ):
        now[rank] = value
        largest = max(largest, sum(now))
    return largest


def bert(layers: int):
    return transformers.BertConfig(
        vocab_size=30000,
        hidden_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=16,
        intermediate_size=8192,
        num_labels=3,
    )


def pretrained(folder: str) -> tuple[Samples, float]:
    """Measure a pretrained model that is memory-mapped and sharded."""
    from oneloop.launch.processes import start
    from oneloop.tasks.transformers_models import auto_model

    world = start()

    def make():
        model, _ = auto_model("AutoModelForSequenceClassification", folder, list("abc"))
        return world.prepare(model, blocks=["BertLayer"])

    world.gathered(None)
    return watched(make)


def from_scratch(turns: bool, layers: int, sharded: bool) -> tuple[Samples, float]:
    """Measure a model that is built from scratch, by one process at a time or by all at once."""
    from oneloop.launch.processes import start
    from oneloop.machine.load_in_turn import in_turn

    world = start()

    def build():
        torch.manual_seed(0)
        return transformers.BertForSequenceClassification(bert(layers))

    def make():
        model = in_turn(build) if turns else build()
        if not sharded:
            return model
        world.gathered(None)
        return world.prepare(model, blocks=["BertLayer"])

    world.gathered(None)
    return watched(make)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_four_processes_need_little_more_than_one_copy_of_a_pretrained_model(tmp_path):
    model = transformers.BertForSequenceClassification(bert(5))
    copy = sum(parameter.numel() for parameter in model.parameters()) * 4 / 2**20
    model.save_pretrained(tmp_path / "bert")
    del model
    peaks = [
        most(seen)
        for seen, _ in run(pretrained, str(tmp_path / "bert"), ranks=4, config="fsdp2").ok()
    ]
    print(
        f"a copy of {copy:.0f} MB; peaks {[round(peak) for peak in peaks]}, "
        f"{sum(peaks) / copy:.3f} copies in all"
    )
    assert copy > 1000 and sum(peaks) < 1.3 * copy


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_models_made_in_turn_leave_nothing_of_them_in_memory():
    together = run(from_scratch, False, 2, False, ranks=3, config="fsdp2", timeout=600).ok()
    turns = run(from_scratch, True, 2, False, ranks=3, config="fsdp2", timeout=600).ok()
    assert min(after for _, after in together) > 500  # each keeps a whole copy
    assert max(after for _, after in turns) < 50  # the weights are memory-mapped
    copy = max(map(most, (seen for seen, _ in together)))
    assert (
        at_once([seen for seen, _ in together]) > 2 * copy
        and at_once([seen for seen, _ in turns]) < 1.3 * copy
    )
