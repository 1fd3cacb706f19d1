"""Reduce a profiler trace of some steps to a few numbers and tables.

>>> with torch.profiler.profile(activities=[CPU, CUDA]) as profiler:
...     for batch in batches:
...         with torch.profiler.record_function(FORWARD):
...             loss = model(batch)
...         loss.backward()                     # on a GPU, autograd runs it on another thread
...         update()
>>> reduced = reduce(events_of(profiler), steps=len(batches))
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORWARD = "benchmark: forward"  # range in which a loop calls the model and its loss
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuEventSynchronize",
)
"""calls in which the host waits for the device"""
PHASES = "time of the device by phase"  # a table
ROWS = 12  # rows of a table

# Kernels of attention by their names (flash attention, cuDNN, CUTLASS's memory-efficient kernel),
# and operators of attention, whose kernels may have other names (a softmax between two products).
# The names of torch.compile's own kernels (triton_...) list what is fused into them, such as rotary
# embeddings next to attention: they do not count.
ATTENTION_KERNEL = re.compile(r"(?!triton_).*(flash|fmha|sdpa|attention)", re.I)
ATTENTION_OPERATOR = re.compile(r"attention", re.I)
NESTED = 16  # operators of attention inside of one another, and their successors, at most


@dataclass(frozen=True)
class Reduced:
    """What a trace says about a step."""

    idle_share: float  # of the time from the first to the last work of the device; the host is
    # slowed down if the trace has the operations of the CPU
    kernels: float  # per step
    kernels_outside: float  # per step, launched outside of forward and backward
    waits: float  # calls per step in which the host waits for the device
    attention_share: float  # of the time of all work of the device
    attention_ms: float  # per step
    tables: dict[str, list[dict[str, Any]]]


def events_of(profiler: Any) -> list[dict[str, Any]]:
    """Return the events of a profiler as dicts, as in Chrome's trace format."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return events


def reduce(events: list[dict[str, Any]], *, steps: int) -> Reduced:
    """Return the numbers and tables of a trace of ``steps`` steps.

    A kernel belongs to the forward if the call that launched it is in a range :data:`FORWARD` on
    its thread; to the backward if another thread launched it than the one of these ranges; else to
    neither ("outside"). It belongs to attention by its own name, or by that of the operator that
    launched it. The backward of attention that is computed with a softmax is not found: its
    operators have other names.
    """
    whole = [event for event in events if event.get("ph") == "X"]
    device = [event for event in whole if event.get("cat") in DEVICE_WORK]
    calls = [event for event in whole if event.get("cat") in LAUNCHES]
    forwards = [
        event
        for event in whole
        if event.get("cat") == "user_annotation" and event["name"] == FORWARD
    ]
    phase_of = {
        event["args"]["correlation"]: _phase(event, forwards)
        for event in calls
        if "correlation" in event.get("args", {})
    }

    attending = _calls_of_attention(whole, calls)

    # Add up the time and the number of all work of the device, by phase and by name.
    attention = 0.0
    times = defaultdict[str, float](float)
    counts = Counter[str]()
    names = defaultdict[tuple[str, str], float](float)
    calls_of = Counter[tuple[str, str]]()
    for event in device:
        launched_by = event.get("args", {}).get("correlation")
        phase = phase_of.get(launched_by, "unknown")
        if ATTENTION_KERNEL.match(event["name"]) or launched_by in attending:
            attention += event["dur"]
        times[phase] += event["dur"]
        counts[phase] += event["cat"] == "kernel"
        names[phase, event["name"]] += event["dur"]
        calls_of[phase, event["name"]] += 1

    phases = [
        {
            "phase": phase,
            "ms per step": times[phase] / steps / 1e3,
            "kernels": counts[phase] / steps,
        }
        for phase in sorted(times, key=lambda phase: -times[phase])
    ]
    longest = sorted(names, key=lambda key: -names[key])[:ROWS]
    kernels = [
        {
            "phase": phase,
            "ms per step": names[phase, name] / steps / 1e3,
            "calls": calls_of[phase, name] / steps,
            "kernel": name[:90],
        }
        for phase, name in longest
    ]
    # The last waits are those of the measurement: it synchronizes after the last step.
    done = {event.get("args", {}).get("correlation") for event in device}
    launched = [call["ts"] for call in calls if call.get("args", {}).get("correlation") in done]
    last = max(launched, default=math.inf)
    waiting = _waits([call for call in calls if call["ts"] <= last], steps)
    return Reduced(
        idle_share=_idle_share(device),
        kernels=sum(counts.values()) / steps,
        kernels_outside=(counts["outside"] + counts["unknown"]) / steps,
        waits=sum(row["calls per step"] for row in waiting),
        attention_share=attention / sum(times.values()) if times else float("nan"),
        attention_ms=attention / steps / 1e3,
        tables={
            PHASES: phases,
            "longest kernels": kernels,
            "waits": waiting,
            "longest gaps of the device": _gaps(device, steps),
        },
    )


def _phase(call: dict[str, Any], forwards: list[dict[str, Any]]) -> str:
    """Return in which phase of a step a call was made."""
    threads = {(event["pid"], event["tid"]) for event in forwards}
    if forwards and (call["pid"], call["tid"]) not in threads:
        return "backward"
    for event in forwards:
        if event["ts"] <= call["ts"] <= event["ts"] + event["dur"]:
            return "forward"
    return "outside"


def _calls_of_attention(whole: list[dict[str, Any]], calls: list[dict[str, Any]]) -> set[Any]:
    """Return the correlations of the calls that operators of attention made, on their threads."""
    spans = defaultdict[tuple[Any, Any], list[tuple[float, float]]](list)
    for event in whole:
        if event.get("cat") == "cpu_op" and ATTENTION_OPERATOR.search(event["name"]):
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for found in spans.values():
        found.sort()

    # An operator may call another one: an outer range ends after those inside of it.
    correlations = set()
    for call in calls:
        found = spans.get((call["pid"], call["tid"]), [])
        before = found[: bisect_right(found, (call["ts"], math.inf))]
        if any(call["ts"] <= end for _, end in before[-NESTED:]):
            correlations.add(call.get("args", {}).get("correlation"))
    return correlations - {None}


def _idle_share(device: list[dict[str, Any]]) -> float:
    """Return the share of the span of these events in which none runs."""
    if not device:
        return float("nan")
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in device]
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    return 1 - _covered(spans) / whole


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of these spans."""
    total = 0.0
    end = float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _gaps(device: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Return where the device had nothing to do: the time, and the kernels before and after."""
    ordered = sorted(device, key=lambda event: event["ts"])
    if not ordered:
        return []
    first = ordered[0]["ts"]
    last = ordered[0]
    rows = []
    for event in ordered[1:]:
        end = last["ts"] + last["dur"]
        if event["ts"] > end:
            rows.append(
                {
                    "ms": (event["ts"] - end) / 1e3,
                    "at ms": (end - first) / 1e3,
                    "after": last["name"][:40],
                    "before": event["name"][:40],
                }
            )
        if event["ts"] + event["dur"] > end:
            last = event
    rows.sort(key=lambda row: -row["ms"])
    rest = sum(row["ms"] for row in rows[ROWS:])
    summed = {"ms": rest, "at ms": "", "after": f"{len(rows[ROWS:])} shorter gaps", "before": ""}
    return [*rows[:ROWS], summed]


def _waits(calls: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Return the calls in which the host waits, with their time."""
    found = Counter[str]()
    times = defaultdict[str, float](float)
    for call in calls:
        if call["name"] in WAITS:
            found[call["name"]] += 1
            times[call["name"]] += call["dur"]
    return [
        {"call": name, "calls per step": count / steps, "ms per step": times[name] / steps / 1e3}
        for name, count in found.most_common()
    ]
