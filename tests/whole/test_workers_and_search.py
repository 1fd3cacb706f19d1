"""The programs of the pages about data workers and about the search for hyperparameters."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pages import blocks, program
from worlds import ROOT, run, timeless, train

pytestmark = pytest.mark.covers("oneloop.api", "oneloop.data.data_workers")

ZIPPED = blocks("how-to/data-workers.md", "python")
SEARCH = blocks("how-to/search.md", "python")


def test_every_program_of_both_pages_is_run():
    assert ZIPPED.keys() == {"make_zip.py", "zipped.py"}
    assert SEARCH.keys() == {"halving.py", "with_optuna.py"}


def zipped(folder: Path) -> list[str]:
    """Write the zip file and the task; return the words of the page's command."""
    for name, text in ZIPPED.items():
        (folder / name).write_text(text)
    subprocess.run([sys.executable, "make_zip.py"], cwd=folder, check=True)
    page = (ROOT / "docs" / "how-to" / "data-workers.md").read_text()
    start = "oneloop launch --config_file single "
    (line,) = (line for line in page.splitlines() if line.startswith(start))
    return [*line.removeprefix(start).split(), "--log.every", "1", "--track", "none"]


def log(folder: Path) -> list[dict]:
    """Return the metrics of a run without events and times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    return [timeless(line) for line in logged if "event" not in line]


@pytest.mark.slow
def test_a_zip_file_is_read_by_two_workers_as_by_none(tmp_path):
    words = zipped(tmp_path)
    for workers in ("0", "2"):
        more = ["--machine.workers", workers, "--run.dir", f"run-{workers}", "--duration", "1ep"]
        run(train, [*words, *more], folder=tmp_path).ok()
    without, with_two = log(tmp_path / "run-0"), log(tmp_path / "run-2")
    assert len(without) > 20 and with_two == without
    assert without[-1]["eval/accuracy"] > 0.7


@pytest.mark.slow
def test_a_zip_file_is_read_by_the_workers_of_two_processes(tmp_path):
    words = [*zipped(tmp_path), "--duration", "20"]
    for ranks in (1, 2):
        run(train, [*words, "--run.dir", f"run-{ranks}"], ranks=ranks, folder=tmp_path).ok()
    losses = {
        ranks: [
            line["train/loss"] for line in log(tmp_path / f"run-{ranks}") if "train/loss" in line
        ]
        for ranks in (1, 2)
    }
    assert len(losses[1]) == 20 and losses[2] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, workers do not inherit open files")
def test_a_file_that_is_opened_early_is_shared_by_the_workers(tmp_path):
    words = zipped(tmp_path)
    early = ZIPPED["zipped.py"].replace(
        "self.archive = None", "self.archive = zipfile.ZipFile(path)"
    )
    (tmp_path / "zipped.py").write_text(early)
    world = run(train, [*words, "--duration", "40ep"], folder=tmp_path)
    assert world.codes == [1]
    assert "cannot be loaded by data worker" in world.output and "BadZipFile" in world.output


def halving(folder: Path, trials: int, ranks: int = 1) -> list[dict[int, float]]:
    """Run the random search; return the accuracies of its last round on each process."""
    text = SEARCH["halving.py"]
    assert "range(8)" in text
    text = text.replace("range(8)", f"range({trials})")
    # a small model is enough
    assert text.count('"digits",\n') == 1
    text = text.replace('"digits",\n', '"digits",\n            task={"width": 8},\n')
    (folder / "halving.py").write_text(text)
    world = run(program, "halving.py", "accuracy", ranks=ranks, folder=folder)
    return [accuracy for (accuracy,) in world.ok()]


def test_a_run_that_the_search_continues_is_that_of_its_whole_length(tmp_path):
    (accuracy,) = halving(tmp_path, 2)
    ((best, reached),) = accuracy.items()
    folder = tmp_path / "runs" / "halving" / str(best)
    settings = json.loads((folder / "summary.json").read_text())
    assert settings["eval/accuracy"] == reached

    # The same settings in one run of two epochs, on the command line.
    words = [str(folder / "recipe.yaml"), "--run.dir", "whole"]
    run(train, words, folder=tmp_path).ok()
    whole = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert whole["eval/accuracy"] == reached and whole["step"] == settings["step"] == 40
    one = load_file(folder / "final" / "model.safetensors")
    other = load_file(tmp_path / "whole" / "final" / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.slow
def test_the_search_ends_with_a_good_run_on_one_process_and_on_two(tmp_path):
    for ranks in (1, 2):
        place = tmp_path / str(ranks)
        place.mkdir()
        found = halving(place, 8, ranks)
        assert all(accuracy == found[0] for accuracy in found)
        ((best, reached),) = found[0].items()
        assert reached > 0.95
        recipes = [*place.glob("runs/halving/*/recipe.yaml")]
        assert len(recipes) == 8 and f"halving/{best}" in str([*map(str, recipes)])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("optuna") is None, reason="optuna is not installed")
def test_optuna_searches(tmp_path):
    (tmp_path / "with_optuna.py").write_text(SEARCH["with_optuna.py"])
    ((value,),) = run(program, "with_optuna.py", "best", folder=tmp_path, timeout=280).ok()
    assert value > 0.9
