"""Loops that are timed in turns, one beside the other, on the same batches.

They run in turns (A B C A, then A C B A, ...; the second A is the control). They start one after
the other, so that each has the device and the CPUs for itself. Ratios are those of one round; their
median is reported.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from gpu_lines import Place, Result
from gpu_loops import by_hand, by_oneloop, by_oneloop_unchecked
from gpu_pacer import LOG_EVERY, SKIPPED, Contender, Loop, Setting
from gpu_trace import Reduced
from gpu_workloads import Text, Workload
from oneloop.measure.flops import data_sheet

STEPS = LOG_EVERY  # of a timed phase; half of it if a step is long: every second phase then logs
ROUNDS = 6
FEWEST = 3  # rounds, if no time is left for more
CONTROL = 0.03  # a control further from 1 makes the line void
WARMED = 2  # steps of the first phase, after those that every phase skips
WAITED = 3 * LOG_EVERY  # steps in which host waits are counted
TRACED = LOG_EVERY  # steps of a trace: it has exactly one log step if they are not slow
SLOW = 0.1  # seconds of a step above which these are fewer steps
RESERVE = 60.0  # seconds that must be left to start another loop; twice as many in turns
ENOUGH = 60.0  # seconds that must be left to trace the loop of another library
RIVAL_TRACED = 3  # steps of its trace: without compile, a step has thousands of kernels


def peak_tflops(place: Place) -> float:
    """Return the data sheet's TFLOP/s in bf16; of an unknown device, the measured rate."""
    peaks = {} if place.toy else data_sheet(torch.cuda.get_device_name())
    if torch.bfloat16 in peaks:
        return peaks[torch.bfloat16] / 1e12
    return place.rates["matmul_tflops"]


class Arm(NamedTuple):
    """A loop that is timed."""

    name: str
    loop: Loop
    compiled: bool = True
    kernels_of: str = ""  # an arm that started earlier, whose compiled kernels this one finds
    ours: bool = True  # a failure fails the line; that of another library's loop is only noted


BY_HAND = "by hand"
OURS = "oneloop"
PAIR = (
    Arm(BY_HAND, by_hand),
    Arm(OURS, by_oneloop),
    Arm("oneloop, check_every 0", by_oneloop_unchecked, kernels_of=OURS),
)


class Timed:
    """What was measured of an arm.

    Args:
        arm: the loop.
        workload: what it trains.
        place: where the line runs.
    """

    def __init__(self, arm: Arm, workload: Workload, place: Place) -> None:
        self.arm = arm
        self._until = place.until
        self.contender = contender(arm, workload, place)
        self.start = 0.0  # seconds until it had made its first steps, alone on the device
        self.seconds: list[float] = []  # of a step, by round
        self.allocated = 0.0  # bytes, at most
        self.reserved = 0.0
        self.trace: Reduced | None = None
        self.waits: dict[str, float] = {}
        self.host: list[dict[str, Any]] = []
        self.failed = ""  # why the loop of another library has ended

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds) if self.seconds else math.nan

    def ask(self, kind: str, count: int) -> Any:
        """Run a phase, and return its answer; None if the loop has failed, now or earlier.

        The loop of another library must leave time for what our loops still measure.
        """
        if self.failed:
            return None
        patience = None
        if not self.arm.ours and self._until < math.inf:
            patience = max(1.0, self._until - RESERVE / 2 - time.monotonic())
        try:
            return self.contender.ask(kind, count, patience=patience)
        except RuntimeError as error:
            if self.arm.ours:
                raise
            self.end(str(error)[:160])
            return None

    def end(self, why: str) -> None:
        """End the loop, and note why."""
        self.failed = why
        self.contender.stop()

    def time(self, steps: int) -> float:
        """Run some steps, and return the seconds of one; NaN if the loop has failed."""
        answer = self.ask("time", steps)
        if answer is None:
            return math.nan
        self.start = self.start or answer["since_start"]
        self.allocated = max(self.allocated, answer.get("allocated", 0.0))
        self.reserved = max(self.reserved, answer.get("reserved", 0.0))
        return float(answer["seconds"]) / steps


def beside(
    workload: Workload,
    place: Place,
    *,
    steps: int,
    arms: Sequence[Arm] = PAIR,
    host: bool = True,
    rounds: int = ROUNDS,
) -> Result:
    """Time loops in turns.

    Args:
        workload: what they train.
        place: where the line runs.
        steps: of a timed phase.
        arms: the loops; the others are compared with the first one.
        host: also profile the host, in the first arm and in oneloop.
        rounds: at most.

    Returns:
        Numbers of the first arm and of oneloop, and a table of all of them.

    Raises:
        RuntimeError: a loop of ours failed, or the rates of this card are not known.
    """
    if "matmul_tflops" not in place.rates:
        raise RuntimeError("speed/card gave no rates, which all numbers are compared with")

    # Each phase trains on all batches once, so that all of them train on the same ones.
    if isinstance(workload, Text):
        workload = replace(workload, batches=SKIPPED + steps)
    timed: list[Timed] = []
    with ExitStack() as running:
        # Start and warm up one after the other.
        for arm in arms:
            one = Timed(arm, workload, place)
            running.callback(one.contender.stop)
            timed.append(one)
            if not arm.ours and time.monotonic() > place.until - 2 * RESERVE:
                one.end("no time was left")
            one.time(WARMED)

        # Time them in turns, in every second round backwards. The first one also ends each round.
        first, *others = timed
        again: list[float] = []
        for number in range(2 if place.toy else rounds):
            if number >= FEWEST and time.monotonic() > place.until - 2 * RESERVE:
                break
            first.seconds.append(first.time(steps))
            for one in others if number % 2 == 0 else others[::-1]:
                one.seconds.append(one.time(steps))
            again.append(first.time(steps))

        # Look into a few steps, and count the host's waits.
        waited, traced = (WAITED, TRACED)
        if place.toy:
            waited, traced = (4, 2)
        elif first.median > SLOW:
            waited, traced = (WAITED // 4, TRACED // 2)
        needed = (first.arm.name, OURS)
        for one in sorted(timed, key=lambda one: one.arm.name not in needed):
            if one.arm.name not in needed and time.monotonic() > place.until - ENOUGH:
                continue
            one.trace = one.ask("trace", traced if one.arm.ours else min(traced, RIVAL_TRACED))
            if one.arm.name in needed:
                one.waits = one.ask("waits", waited)
                one.host = one.ask("host", traced) if host else []
    return summed_up(workload, place, timed, again)


def once_each(workload: Workload, place: Place, *, steps: int, others: list[Arm]) -> Result:
    """Time other loops once each. A failure of one is noted, and does not fail the line."""
    plain = [
        Arm("by hand, compile off", by_hand, compiled=False),
        Arm("oneloop, compile off", by_oneloop, compiled=False),
    ]
    if isinstance(workload, Text):
        workload = replace(workload, batches=SKIPPED + steps)
    timed: list[Timed] = []
    for arm in [*others, *plain]:
        one = Timed(arm._replace(ours=False), workload, place)
        timed.append(one)
        if time.monotonic() > place.until - RESERVE:
            one.end("no time was left")
        one.seconds.append(one.time(steps))
        one.trace = one.ask("trace", 2 if place.toy else TRACED // 2)
        one.contender.stop()

    # Only now ask CUDA about the device: no process that is forked later could use CUDA.
    rows = [row(one, workload, place) for one in timed]
    ran = [one for one in timed if not one.failed]
    says = "; ".join(
        f"{one.arm.name}: {workload.per_step / one.median:,.0f} {workload.unit}/s" for one in ran
    )
    return Result(says or "no loop ran", {"loops": float(len(ran))}, {"loops": rows})


def contender(arm: Arm, workload: Workload, place: Place) -> Contender:
    """Start the process of an arm."""
    setting = Setting(
        workload=workload,
        device=place.device,
        mixed_precision=place.precision,
        compiled=arm.compiled and not place.toy,
        folder=place.folder / slug(arm.name),
        kernels=place.folder / slug(arm.kernels_of or arm.name),
    )
    return Contender(arm.loop, setting)


def slug(name: str) -> str:
    """Return a name of words for files and numbers."""
    return re.sub(r"\W+", "_", name).strip("_")


def row(one: Timed, workload: Workload, place: Place, first: Timed | None = None) -> dict[str, Any]:
    """Return an arm's row of the table of loops.

    Args:
        one: the arm.
        workload: what it trains.
        place: where the line runs.
        first: the arm that it is compared with.
    """
    if one.failed:
        return {"loop": one.arm.name, "failed": one.failed}
    rate = workload.per_step / one.median
    tflops = rate * workload.flops_per_unit / 1e12
    causal = rate * workload.causal_flops_per_unit / 1e12
    found = {
        "loop": one.arm.name,
        f"{workload.unit} per second": rate,
        "ms per step": 1e3 * one.median,
        "TFLOP/s": tflops,
        "MFU": tflops / peak_tflops(place),
        "MFU, causal": causal / peak_tflops(place),
        "share of the measured matmul rate": tflops / place.rates["matmul_tflops"],
        "allocated GiB": one.allocated / 2**30,
        "reserved GiB": one.reserved / 2**30,
        "first steps after s": one.start,
        "warm kernels": "yes" if one.arm.kernels_of else "no",
    }
    if one.trace is not None:
        found["attention ms per step"] = one.trace.attention_ms
        found["share of attention"] = one.trace.attention_share
    if first is not None:
        ratios = ratios_of(first, one)
        found["speed beside the first"] = statistics.median(ratios)
        found["from"] = min(ratios)
        found["to"] = max(ratios)
        found["memory beside the first"] = one.allocated / (first.allocated or math.nan)
    return found


def ratios_of(first: Timed, one: Timed) -> list[float]:
    """Return how many times as fast an arm is as another one, by round."""
    return [slow / fast for slow, fast in zip(first.seconds, one.seconds)]


def summed_up(workload: Workload, place: Place, timed: list[Timed], again: list[float]) -> Result:
    """Return the numbers and tables of a workload.

    Args:
        workload: what was trained.
        place: where the line ran.
        timed: the arms.
        again: seconds of a step of the first arm, at the end of each round.
    """
    arms = {one.arm.name: one for one in timed}
    first, ours = timed[0], arms[OURS]
    prefix = slug(first.arm.name)
    assert first.trace is not None
    assert ours.trace is not None
    control = statistics.median(late / early for late, early in zip(again, first.seconds))
    rate = workload.per_step / ours.median
    tflops = rate * workload.flops_per_unit / 1e12
    mfu = tflops / peak_tflops(place)
    numbers = {
        f"{workload.unit}_per_second": rate,
        "rounds": float(len(again)),
        "control": control,
        "mfu": mfu,
        "mfu_causal": mfu * workload.causal_flops_per_unit / workload.flops_per_unit,
        "share_of_matmul_rate": tflops / place.rates["matmul_tflops"],
        "flops_per_unit": workload.flops_per_unit,
        "idle_share": ours.trace.idle_share,
        "kernels_per_step": ours.trace.kernels,
        "kernels_outside": ours.trace.kernels_outside,
        "waits_in_trace_per_step": ours.trace.waits,
        "host_waits": float(ours.waits["waits"]),
        "host_waits_in_steps": float(ours.waits["steps"]),
        "logs_in_these_steps": float(ours.waits["steps"] // LOG_EVERY),
    }
    if first is not ours:
        numbers |= {
            f"{prefix}_{workload.unit}_per_second": workload.per_step / first.median,
            f"{prefix}_idle_share": first.trace.idle_share,
            f"{prefix}_kernels_outside": first.trace.kernels_outside,
            f"{prefix}_host_waits": float(first.waits["waits"]),
        }
    for name, one in arms.items():
        if one.failed:
            continue
        own = "" if one is ours else f"{slug(name)}_"
        numbers[f"{own}peak_gib"] = one.allocated / 2**30
        numbers[f"{own}seconds_to_first_steps"] = one.start
        if one.trace is not None:
            numbers[f"{own}attention_share"] = one.trace.attention_share
        if one is not first:
            ratios = ratios_of(first, one)
            numbers[f"{own}ratio_to_{prefix}"] = statistics.median(ratios)
            numbers[f"{own}ratio_min"] = min(ratios)
            numbers[f"{own}ratio_max"] = max(ratios)
            if one is not ours:
                numbers[f"ratio_to_{slug(name)}"] = statistics.median(ratios_of(one, ours))
    if place.toy:  # without a device there is nothing to trace, and memory is not measured
        numbers = {name: value for name, value in numbers.items() if value == value}
    tables = {"loops": [row(one, workload, place, first) for one in timed]}
    for name, one in arms.items():
        if one.trace is not None:
            tables |= {f"{name}: {title}": rows for title, rows in one.trace.tables.items() if rows}
        if one.host:
            tables[f"{name}: time of the host"] = one.host

    # The sentence: oneloop beside the first arm, and beside the others.
    says = f"{rate:,.0f} {workload.unit}/s"
    about = f"control {control:.3f}"
    if first is not ours:
        ratios = ratios_of(first, ours)
        says += f", {statistics.median(ratios):.3f} x {first.arm.name}"
        about = f"{min(ratios):.3f} to {max(ratios):.3f}; {about}"
    says += f" ({about}); {100 * mfu:.1f} % MFU with attention counted as full"
    for one in timed[1:]:
        if one.failed:
            says += f"; {one.arm.name} failed: {one.failed}"
        elif ours is first:
            ratio = statistics.median(ratios_of(first, one))
            says += f"; {one.arm.name} is {ratio:.3f} x as fast"
        elif one is not ours:
            ahead = statistics.median(ratios_of(one, ours))
            says += f"; {ahead:.3f} x {one.arm.name}"
    if abs(control - 1) > CONTROL and not place.toy:
        says += "; VOID, since the control is not within 3 %"
    return Result(says, numbers, tables)
