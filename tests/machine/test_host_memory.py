"""Host memory of a model while several processes on one host start under FSDP2."""

from __future__ import annotations

import threading
import time

import pytest
import transformers

from own_files import anonymous
from worlds import run

pytestmark = pytest.mark.covers(
    "oneloop.job.model",
    "oneloop.tasks.transformers_models",
)


Samples = list[tuple[float, float]]
"""(time, increase of anonymous memory in MB)"""


def watched(make) -> Samples:
    """Call ``make``; return the memory samples during the call."""
    before, running = anonymous(), True
    seen: Samples = []

    def look():
        while running:
            seen.append((time.time(), anonymous() - before))
            time.sleep(0.002)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    kept = make()
    running = False
    thread.join()
    del kept
    return seen


def most(seen: Samples) -> float:
    return max(value for _, value in seen)


def bert(layers: int):
    return transformers.BertConfig(
        vocab_size=30000,
        hidden_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=16,
        intermediate_size=8192,
        num_labels=3,
    )


def pretrained(folder: str) -> Samples:
    """Measure a pretrained model that is memory-mapped and sharded."""
    from oneloop.launch.processes import start
    from oneloop.tasks.transformers_models import auto_model

    world = start()

    def make():
        model, _ = auto_model("AutoModelForSequenceClassification", folder, list("abc"))
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
        most(seen) for seen in run(pretrained, str(tmp_path / "bert"), ranks=4, config="fsdp2").ok()
    ]
    print(
        f"a copy of {copy:.0f} MB; peaks {[round(peak) for peak in peaks]}, "
        f"{sum(peaks) / copy:.3f} copies in all"
    )
    assert copy > 1000 and sum(peaks) < 1.3 * copy
