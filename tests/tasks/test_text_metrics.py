"""Metrics of texts: known values, all alphabets, and the same on any number of processes."""

from __future__ import annotations

import pytest
from torchmetrics.text import BLEUScore, CHRFScore

from oneloop.task_protocol.evaluation_metrics import directions
from oneloop.tasks.language.text_metrics import (
    DEFAULT,
    WritesTexts,
    check_text_metrics,
    words,
)
from worlds import run

pytestmark = pytest.mark.covers("oneloop.tasks.language.text_metrics")
TEXTS = ["the cat sat on the mat", "a dog", "", "it rains cats and dogs today"]
REFERENCES = ["the cat sat on a mat", "a dog", "nothing", "it rains cats and dogs again"]


class Task(WritesTexts):
    """Has the references in its batch, and no near ties."""

    beams = 2

    def __init__(self, names: list[str]) -> None:
        self.text_metrics = names

    def _references(self, batch: dict) -> list[str]:
        return batch["references"]


def computed(texts: list[str], references: list[str], names: list[str] = DEFAULT) -> dict:
    task = Task(names)
    metrics = task.generated_metrics()
    task.update_generated(metrics, {"references": references}, texts)
    return {name: float(value) for name, value in metrics.compute().items()}


def test_known_values() -> None:
    found = computed(TEXTS, REFERENCES)
    assert found["exact_match"] == 0.25
    nested = [[reference] for reference in REFERENCES]
    assert found["bleu"] == pytest.approx(float(BLEUScore()(TEXTS, nested)), rel=1e-6)
    chrf = CHRFScore(n_word_order=0)(TEXTS, nested)
    assert found["chrf"] == pytest.approx(float(chrf), rel=1e-6)

    # By hand: 5 of 6 words, 2 of 2, none, 5 of 6; bigrams 3 of 5, 1 of 1, none, 4 of 5.
    assert found["rouge1"] == pytest.approx((5 / 6 + 1 + 0 + 5 / 6) / 4)
    assert found["rouge2"] == pytest.approx((3 / 5 + 1 + 0 + 4 / 5) / 4)
    assert found["rougeL"] == pytest.approx((5 / 6 + 1 + 0 + 5 / 6) / 4)
    assert [*found] == [*directions_of(DEFAULT)]


def directions_of(names: list[str]) -> dict[str, bool | None]:
    known = directions(Task(names), generated=True)
    del known["loss"]
    assert set(known.values()) == {True}
    return dict(sorted(known.items(), key=lambda item: [*computed(["a"], ["a"])].index(item[0])))


def test_all_alphabets_count() -> None:
    assert words("Größe – 12 кг, 你好!") == "größe 12 кг 你好 "
    found = computed(["кот спит"], ["кот ест"], ["rouge1"])
    assert found == {"rouge1": 0.5}


def test_unknown_names_are_rejected() -> None:
    for names, message in (
        (["meteor"], "'meteor' is unknown; known: exact_match, bleu"),
        ([], "is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            check_text_metrics(names)


def _of_ranks() -> dict[str, float]:
    """Return the metrics of all texts, of which each rank sees a part; one rank sees none."""
    from accelerate import Accelerator

    from oneloop.task_protocol.evaluation_metrics import make_metrics, scalars
    from oneloop.task_protocol.metric_states import RankMetrics

    accelerator = Accelerator(cpu=True)
    metrics = RankMetrics(make_metrics(Task(DEFAULT), "generated_metrics"), _update, ranks=3)
    mine = [slice(0, 3), slice(3, 4), None][accelerator.process_index]
    if mine is not None:
        metrics.update(REFERENCES[mine], TEXTS[mine])
    return scalars(metrics.compute())


def _update(metrics, references: list[str], texts: list[str]) -> None:
    Task(DEFAULT).update_generated(metrics, {"references": references}, texts)


@pytest.mark.slow
def test_three_processes_compute_what_one_does() -> None:
    assert run(_of_ranks, ranks=3).ok() == [computed(TEXTS, REFERENCES)] * 3
