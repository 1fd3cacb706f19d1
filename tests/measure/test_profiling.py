"""Profiles of some steps: a trace, a table, and on a CPU a note about memory; quiet and JSON
output."""

from __future__ import annotations

import gzip
import json

import pytest

from oneloop.basics.duration import span
from slow_cases import with_slow
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.basics.duration",
    "oneloop.measure.profiling",
)

WORDS = [
    "r.yaml",
    "--batch.size",
    "8",
    "--duration",
    "12",
    "--log.every",
    "3",
    "--track",
    "none",
    "--eval.every",
    "6",
    "--save.every",
    "0",
    "--run.dir",
    "a",
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "r.yaml").write_text("task: tiny.Ragged\n")
    return tmp_path


@pytest.mark.parametrize(
    ("ranks", "config"), with_slow([(1, "single"), (2, "ddp")], [(1, "single")])
)
def test_the_trace_holds_the_steps_that_were_asked_for(folder, ranks, config):
    words = [*WORDS, "--watch.profile", "4-6", "--watch.memory", "2"]
    world = run(train, words, ranks=ranks, config=config, folder=folder)
    world.ok()
    trace = json.loads(gzip.decompress((folder / "a" / "profile" / "trace.json.gz").read_bytes()))
    names = [event.get("name") for event in trace["traceEvents"]]
    # one or two per step
    assert names.count("aten::_fused_adamw_") == 3 or names.count("aten::_fused_adamw_") == 6
    table = (folder / "a" / "profile" / "operators.txt").read_text()
    assert "aten::addmm" in table
    lines = [json.loads(line) for line in (folder / "a" / "metrics.jsonl").read_text().splitlines()]
    shares = next(line for line in lines if line["step"] == 9 and "share/other" in line)
    # writing the trace does not count as waiting for data
    assert shares["share/other"] > shares["share/transfer"]
    assert "watch.memory: a snapshot needs a GPU; the peak of this process is" in world.output


def test_a_span_that_is_none_is_rejected(folder):
    assert span("3", "k") == (3, 3) and span("10-15", "k") == (10, 15)
    for bad in ("0", "5-3", "a", "1-", "-2"):
        with pytest.raises(ValueError, match="is not a range of steps"):
            span(bad, "watch.profile")
    world = run(train, [*WORDS, "--watch.profile", "9-3"], folder=folder)
    assert world.codes == [2] and "watch.profile '9-3' is not a range of steps" in world.output


def test_json_is_json_and_quiet_is_quiet(folder):
    world = run(train, [*WORDS, "--watch.output", "json"], folder=folder)
    world.ok()
    records = [json.loads(line) for line in world.output.splitlines() if not line.startswith("---")]
    logged = [
        json.loads(line) for line in (folder / "a" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["train/loss"] for line in records if "train/loss" in line][:4] == [
        line["train/loss"] for line in logged if "train/loss" in line
    ]
    assert records[-1]["exit_reason"] == "done" and records[-1]["folder"] == "a"
    world = run(train, [*WORDS[:-1], "b", "--watch.output", "quiet"], folder=folder)
    world.ok()
    assert [line for line in world.output.splitlines() if not line.startswith("---")] == [
        "done; results in b"
    ]
