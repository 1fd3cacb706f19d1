"""evaluate, predict, export and report from Python: what the commands of the same name do."""

from __future__ import annotations

import importlib
import json
import pkgutil
import random
import signal

import pytest
import torch

import oneloop
from oneloop.basics.exit_codes import BadInput
from pages import program
from worlds import after, run

pytestmark = pytest.mark.covers(
    "oneloop",
    "oneloop.api",
    "oneloop.tools.api",
    "oneloop.tools.after_training.command",
    "oneloop.tools.export.command",
)

SCRIPT = """
import json
import random
import oneloop
small = {"task": {"width": 8}, "duration": 6}
quiet = {"track": "none", "watch": {"output": "quiet"}}
summary = oneloop.fit("digits", **small, **quiet, run={"dir": "run"})
before = random.getstate()
metrics = oneloop.evaluate(summary)
rows = oneloop.predict("run")
written = oneloop.predict(summary, to="rows.jsonl")
line = oneloop.export("run", to="out")
page = oneloop.report("run", to="page.html")
same = before == random.getstate()
"""


def test_train_evaluate_predict_export_and_report_in_one_script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    wanted = ("summary", "metrics", "rows", "line", "same")
    ((summary, metrics, rows, line, same),) = run(
        program, "script.py", *wanted, folder=tmp_path
    ).ok()
    assert metrics["eval/accuracy"] == summary["eval/accuracy"] and same
    assert rows == [json.loads(text) for text in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 270 and {"row", "prediction", "confidence"} <= rows[0].keys()
    assert (tmp_path / "out" / "model.safetensors").is_file() and line == "final of run is in out"
    assert "<html" in (tmp_path / "page.html").read_text()
    typed = after(tmp_path, "evaluate", "run", "--json")
    typed.ok()
    (printed,) = (text for text in typed.output.splitlines() if text.startswith("{"))
    assert json.loads(printed) == metrics


def test_the_functions_stay_whatever_is_imported():
    assert set(oneloop.__all__) <= set(dir(oneloop))
    for module in pkgutil.walk_packages(oneloop.__path__, "oneloop."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in oneloop.__all__:
        home = {"Loader": "oneloop.data.loader", "fit": "oneloop.api"}.get(
            name, "oneloop.tools.api"
        )
        assert callable(getattr(oneloop, name)) and getattr(oneloop, name).__module__ == home


def test_what_is_wrong_is_raised_and_leaves_no_trace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    states = random.getstate(), torch.get_rng_state().tolist()
    with pytest.raises(BadInput, match="nowhere holds no run"):
        oneloop.evaluate("nowhere")
    with pytest.raises(BadInput, match=r"rows.txt must end with one of"):
        oneloop.predict("nowhere", to="rows.txt")
    with pytest.raises(BadInput, match="export needs a folder to write to"):
        oneloop.export("nowhere")
    with pytest.raises(TypeError, match="unexpected keyword argument 'wieghts'"):
        oneloop.evaluate("nowhere", wieghts="ema")
    with pytest.raises(BadInput, match="holds no run"):
        oneloop.report("nowhere")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert (random.getstate(), torch.get_rng_state().tolist()) == states and list(
        tmp_path.iterdir()
    ) == []
