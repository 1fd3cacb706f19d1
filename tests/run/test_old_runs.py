"""Runs that commit 95c85fa wrote resume, are evaluated and are exported.

At that commit, no module was in tools/ or loop/ yet, and those of task_protocol/ were in tasks/.
old_runs/95c85fa.tar.gz holds what it wrote. In ``runs/``, each recipe has trained 12 steps:

- ``digits.yaml`` has the class path ``oneloop.tasks.image_classification.ImageClassification``.
- ``sign.yaml`` has a user's task, ``old_imports.py``, whose imports are those of that commit.

``longer/`` has the summaries of the same recipes after 24 steps without a stop. The archive has no
reports. A resume needs no run.accept_changes: oneloop only reports that the source of a task has
changed.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from oneloop.cli import main
from worlds import after, here, run

pytestmark = pytest.mark.covers(
    "oneloop.old_names",
    "oneloop.run.compatibility",
    "oneloop.loop.open_run",
    "oneloop.tools.after_training.trained_model",
    "oneloop.tools.export.convert",
)

RUNS = Path(__file__).parent / "old_runs" / "95c85fa.tar.gz"


@pytest.fixture
def folder(tmp_path) -> Path:
    with tarfile.open(RUNS) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def metrics(folder: Path) -> dict[str, float]:
    """Return the metrics of evaluations in a summary; torch may round a little differently."""
    found = {name: value for name, value in summary(folder).items() if "eval/" in name}
    assert any(name.startswith("ema/") for name in found)
    return pytest.approx(found, rel=1e-4)


@pytest.mark.parametrize("name", ["digits", "sign"])
def test_a_run_resumes_to_a_longer_duration(folder, name):
    world = run(here, [f"{name}.yaml", "--duration", "24"], folder=folder)
    world.ok()
    assert f"resuming from runs/{name}/checkpoints/step-00000012" in world.output
    resumed = summary(folder / "runs" / name)
    assert resumed["step"] == 24
    assert {key: resumed[key] for key in resumed if "eval/" in key} == metrics(
        folder / "longer" / name
    )


@pytest.mark.parametrize("name", ["digits", "sign"])
@pytest.mark.parametrize(("weights", "prefix"), [("raw", ""), ("ema", "ema/")])
def test_a_run_is_evaluated_to_its_own_metrics(folder, name, weights, prefix):
    world = after(folder, "evaluate", f"runs/{name}", "--weights", weights, "--json")
    world.ok()
    found = json.loads(world.output[world.output.index("{") :])
    recorded = summary(folder / "runs" / name)
    assert found["eval/loss"] == pytest.approx(recorded[f"{prefix}eval/loss"], rel=1e-5)
    assert found["eval/accuracy"] == pytest.approx(recorded[f"{prefix}eval/accuracy"])


@pytest.mark.parametrize("name", ["digits", "sign"])
def test_a_run_is_exported(folder, name, monkeypatch):
    monkeypatch.chdir(folder)
    words = ["export", f"runs/{name}", "--to", "exported", "--weights", "ema"]
    assert main([*words, "--checkpoint", "newest"]) == 0
    exported = load_file(folder / "exported" / "model.safetensors")
    final = load_file(folder / "runs" / name / "final" / "ema.safetensors")
    assert exported.keys() == final.keys()
    assert all(exported[key].equal(final[key]) for key in final)
