"""Profiles of some steps: a trace, a table, and on a CPU a note about memory; quiet and JSON
output."""

from __future__ import annotations

import gzip
import json

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from oneloop.basics.duration import span
from oneloop.measure.profiling import covered, exposed
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
    assert "aten::addmm" in table and ("communication that nothing else overlaps" in table) == (
        ranks > 1
    )
    lines = [json.loads(line) for line in (folder / "a" / "metrics.jsonl").read_text().splitlines()]
    exposed = [line for line in lines if "profile/exposed_communication" in line]
    if ranks > 1:
        share = float(table.split("overlaps: ")[1].split(" %")[0])
        assert 0 < share < 100 and exposed[0]["step"] == 6
        assert 100 * exposed[0]["profile/exposed_communication"] == pytest.approx(share, abs=0.06)
        assert (
            f"took {share:.1f} % of the profiled steps"
            in (folder / "a" / "report.html").read_text()
        )
    else:
        assert not exposed
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


def test_the_union_of_spans():
    assert covered([(0, 4), (2, 6), (10, 11), (10.5, 10.7)]) == 7 and covered([]) == 0


def event(name: str, start: float, end: float, *, annotation: bool = False) -> FunctionEvent:
    """Return what the profiler reports of a GPU."""
    return FunctionEvent(
        id=0,
        name=name,
        thread=0,
        start_us=start,
        end_us=end,
        device_type=DeviceType.CUDA,
        is_user_annotation=annotation,
    )


def test_ranges_on_a_gpu_are_no_computation():
    # A product of 10 us, an all-reduce of 30 us, of which a second product overlaps 10.
    kernels = [
        event("sm90_xmma_gemm", 0, 10),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 10, 40),
        event("sm90_xmma_gemm", 20, 30),
    ]
    assert exposed(kernels) == (20, 40)
    ranges = [
        event("FSDP::post_backward_reduce", 5, 45, annotation=True),
        event("nccl:all_reduce", 10, 42, annotation=True),
    ]
    assert exposed([*kernels, *ranges]) == (20, 40)


def test_json_is_json_and_quiet_is_quiet(folder):
    world = run(train, [*WORDS, "--watch.json"], folder=folder)
    world.ok()
    records = [json.loads(line) for line in world.output.splitlines() if not line.startswith("---")]
    logged = [
        json.loads(line) for line in (folder / "a" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["train/loss"] for line in records if "train/loss" in line][:4] == [
        line["train/loss"] for line in logged if "train/loss" in line
    ]
    assert records[-1]["exit_reason"] == "done" and records[-1]["folder"] == "a"
    world = run(train, [*WORDS[:-1], "b", "--watch.quiet"], folder=folder)
    world.ok()
    assert [line for line in world.output.splitlines() if not line.startswith("---")] == [
        "done; results in b"
    ]
