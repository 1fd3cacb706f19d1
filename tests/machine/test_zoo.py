"""Unusual models train the same weights on every parallel layout, or are rejected with a
message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from same_bits import SPLITS
from worlds import free_port, run, train
from zoo import ZOO
from zoo_outcomes import COMMON, PATIENCE, Runs, outcome, table

pytestmark = pytest.mark.covers(
    "oneloop.basics.loaded_step",
    "oneloop.checks.preflight",
    "oneloop.loop.gradients",
    "oneloop.machine.fsdp2_units",
)

QUICK = [
    ("Transposed", "ddp", True),
    pytest.param("Transposed", "fsdp2", False, marks=pytest.mark.slow),
    ("OneAdapter", "fsdp2", False),
    pytest.param("WeightHook", "fsdp2", False, marks=pytest.mark.slow),
    pytest.param("EverySixth", "ddp", True, marks=pytest.mark.slow),
    pytest.param("MaxNorm", "fsdp2", False, marks=pytest.mark.slow),
    ("ClampFunction", "ddp", False),
    ("TowerForOneSample", "ddp", False),
    pytest.param("TowerInside", "ddp", True, marks=pytest.mark.slow),
    ("Sparse", "ddp", True),
    pytest.param("Scalar", "fsdp2", False, marks=pytest.mark.slow),
    ("DataFollowsProgress", "ddp", False),
    ("NoiseInUpdates", "ddp", False),
    pytest.param("OrderOfRank", "fsdp2", False, marks=pytest.mark.slow),
]


def test_the_zoo_has_forty_models_that_need_care():
    assert len(ZOO) >= 40
    assert all(len(entry.expected) == 6 for entry in ZOO.values())


@pytest.mark.parametrize(("name", "config", "grain"), QUICK)
def test_a_model_trains_the_same_weights_on_two_processes_or_is_rejected(
    tmp_path, name, config, grain
):
    right, line = Runs(name, tmp_path).line(2, config, grain=grain)
    assert right, line


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", ZOO)
def test_every_model_trains_the_same_weights_on_every_layout_or_is_rejected(tmp_path, name):
    found = list(table(name, tmp_path))
    print("\n".join([name, *(line for _, line in found)]))
    assert not [line for right, line in found if not right]


def group_of_one() -> dict[str, str]:
    """Return the variables that ``torchrun --nproc_per_node 1`` sets."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return ranks | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.parametrize("grain", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_one_process_in_a_process_group_trains_the_same_weights(tmp_path, grain):
    runs = Runs("Plain", tmp_path)
    for config in ("ddp", "fsdp2"):
        found = outcome("Plain", 1, config, grain=grain, folder=tmp_path, variables=group_of_one())
        verdict = runs.verdict(1, config, grain=grain, found=found)
        assert verdict == "equal", f"{config}, {verdict}: {found.message}"


def evaluated(folder: Path, *words: str, ranks: int, config: str) -> dict[str, float]:
    """Return the metrics of the last evaluation, on 17 rows."""
    place = folder / f"{config}-{ranks}"
    place.mkdir()
    (place / "recipe.yaml").write_text("task: zoo.ListMetrics\n")
    given = [str(place / "recipe.yaml"), *COMMON, *words, "--run.dir", str(place / "run")]
    run(train, given, ranks=ranks, config=config, timeout=PATIENCE / ranks, watch=False).ok()
    lines = [
        json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    found = [line for line in lines if "eval/auroc" in line][-1]
    return {name: found[name] for name in ("eval/loss", "eval/auroc", "eval/precision")}


def test_a_list_metric_is_exact_if_a_process_gets_no_rows(tmp_path):
    words = ["--eval.micro", "32"]
    one = evaluated(tmp_path, *words, ranks=1, config="single")
    assert evaluated(tmp_path, *words, ranks=2, config="ddp") == pytest.approx(one, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["--eval.micro", "4"], ["--batch.grain", "4"]], ids=["plain", "grain"]
)
def test_a_list_metric_of_17_rows_is_exact_on_every_layout(tmp_path, words):
    one, *others = (
        evaluated(tmp_path, *words, ranks=ranks, config=config) for ranks, config in SPLITS
    )
    assert others == [pytest.approx(one, rel=1e-6)] * len(others)
