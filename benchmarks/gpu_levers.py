"""Levers of LoRA on packed rows, in oneloop alone (line ``lora-8b-levers`` of ``gpu_day.py``).

The kernel for documents of different lengths starts blocks of threads for each entry of ``cuts``,
and as many for each as the longest document needs. oneloop fills ``cuts`` up to the fullest row of
the data set, and passes the length of the row as the longest document. The levers are fewer
entries, the length of the longest document of the batch, and more rows per micro-batch. One loop
runs the levers in turns on the same batches, because a phase chooses its variant.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gpu_lines import Place, Result, line
from gpu_loops import NOW, RandomText, at_step, by_oneloop
from gpu_pacer import SKIPPED, Contender, Pacer, Setting
from gpu_speed import lora_8b_workload
from gpu_trace import Reduced
from gpu_turns import STEPS, WARMED, Arm, contender, peak_tflops
from gpu_workloads import Text
from oneloop.tasks.language import attention

AS_IT_IS = "as it is"
FEW = "few entries"
LONGEST = "longest document"
BOTH = "both"
SIZES = (8, 16, 32, 64)  # entries of cuts per row, if they are enough for a batch
ROUNDS = 3
SECONDS = {2: 150.0, 4: 220.0}  # that must be left for more rows: start, phases and traces

_kernel = attention._KERNEL


# Its first size replaces the length of the row. torch.compile would make a constant of an integer,
# or compile again for each one; it knows that sizes of tensors change.
longest = torch.zeros(0, 1)


def _call_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_cuts: Tensor,
    key_cuts: Tensor,
    _query_length: int,
    _key_length: int,
    **options: Any,
) -> Any:
    """Call the kernel with the first size of ``longest`` in place of the length of the row."""
    tokens = longest.shape[0]
    return _kernel(query, key, value, query_cuts, key_cuts, tokens, tokens, **options)


class LeversOfPackedRows(RandomText):
    """oneloop's language modelling on packed rows, with the levers that the phase asks for."""

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        batch = super().collate(samples)
        rows = len(samples)
        cuts = batch["cuts"]

        # Documents, and one for the padding of each row.
        documents = int((cuts < rows * self.text.length).sum())
        size = next((one for one in SIZES if documents <= rows * one), len(cuts) // rows)
        batch["few_cuts"] = cuts[: rows * size + 1]

        # The host knows the size of a tensor without a wait.
        batch["longest"] = torch.zeros(int(np.diff(cuts.numpy()).max()), 1)
        batch["row"] = torch.zeros(self.text.length, 1)
        return batch

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        global longest
        at_step(self.progress, model)
        variant = NOW["pacer"].variant
        longest = batch["longest" if variant in (LONGEST, BOTH) else "row"]
        if variant in (FEW, BOTH):
            batch = {**batch, "cuts": batch["few_cuts"]}
        return super().loss(model, batch)


def by_levers(setting: Setting, pacer: Pacer) -> None:
    """Train with oneloop's loop, without its checks."""
    attention._KERNEL = _call_kernel
    by_oneloop(setting, pacer, task=LeversOfPackedRows, machine={"check_every": 0})


class Levers:
    """A loop that runs levers in turns.

    Args:
        workload: what it trains.
        place: where the line runs.
        variants: its levers, first what the others are compared with.
    """

    def __init__(self, workload: Text, place: Place, variants: Sequence[str]) -> None:
        self.workload = workload
        self.seconds: dict[str, list[float]] = {variant: [] for variant in variants}
        self.peaks: dict[str, float] = {}
        self.traces: dict[str, Reduced] = {}
        name = f"{workload.rows} rows"
        self._loop: Contender = contender(Arm(name, by_levers), workload, place)

    def measure(self, *, steps: int, rounds: int) -> None:
        """Time the levers in turns, trace each, and end the loop."""
        try:
            # Compile for each lever, before any is timed.
            for variant in self.seconds:
                self._loop.ask("time", WARMED, variant)
            for number in range(rounds):
                variants = list(self.seconds)
                for variant in variants if number % 2 == 0 else variants[::-1]:
                    answer = self._loop.ask("time", steps, variant)
                    self.seconds[variant].append(answer["seconds"] / steps)
                    self.peaks[variant] = answer.get("allocated", 0.0) / 2**30
            # A trace begins with SKIPPED steps and one more, and makes its steps twice: with this
            # number, it ends where it began in the list of batches, and all levers get the same.
            for variant in self.seconds:
                self.traces[variant] = self._loop.ask("trace", steps + SKIPPED - 2, variant)
        finally:
            self._loop.stop()

    def rows(self, place: Place) -> list[dict[str, Any]]:
        """Return a row of the table for each lever."""
        found = []
        first = self.seconds[AS_IT_IS]
        for variant, seconds in self.seconds.items():
            rate = self.workload.per_step / statistics.median(seconds)
            ratios = [slow / fast for slow, fast in zip(first, seconds)]
            trace = self.traces[variant]
            row = {
                "rows": self.workload.rows,
                "lever": variant,
                "tokens per second": rate,
                "ms per step": 1e3 * statistics.median(seconds),
                "MFU": rate * self.workload.flops_per_unit / 1e12 / peak_tflops(place),
                "beside as it is": statistics.median(ratios),
                "from": min(ratios),
                "to": max(ratios),
                "attention ms per step": trace.attention_ms,
                "share of attention": trace.attention_share,
                "idle share": trace.idle_share,
                "allocated GiB": self.peaks[variant],
            }
            found.append(row)
        return found


@line(
    "speed",
    name="lora-8b-levers",
    seconds=240,
    numbers=["levers", "both", "tokens_per_second"],
    on_gpu=["as_it_is_attention_ms"],
    packages=["peft"],
)
def lora_8b_levers(place: Place) -> Result:
    """Entries of ``cuts``, the longest document, and 2 and 4 rows: what does each gain?"""
    workload = lora_8b_workload(place)
    assert isinstance(workload, Text)
    steps = 2 if place.toy else STEPS // 2
    measured = [Levers(_repeated(workload, steps), place, (AS_IT_IS, FEW, LONGEST, BOTH))]
    measured[0].measure(steps=steps, rounds=ROUNDS)

    # More rows take longer, so that fewer rounds are enough.
    left_out = []
    for rows in (2, 4):
        if time.monotonic() > place.until - SECONDS[rows]:
            left_out.append(f"{rows} rows")
            continue
        more = _repeated(replace(workload, rows=rows), steps)
        measured.append(Levers(more, place, (AS_IT_IS, BOTH)))
        measured[-1].measure(steps=steps, rounds=2)

    # Only now ask CUDA about the device: no process that is forked later could use CUDA.
    table = [row for one in measured for row in one.rows(place)]
    one_row = {row["lever"]: row for row in table if row["rows"] == workload.rows}
    numbers = {
        "levers": float(len(table)),
        "tokens_per_second": one_row[AS_IT_IS]["tokens per second"],
        "few_entries": one_row[FEW]["beside as it is"],
        "longest_document": one_row[LONGEST]["beside as it is"],
        "both": one_row[BOTH]["beside as it is"],
        "as_it_is_attention_ms": one_row[AS_IT_IS]["attention ms per step"],
        "both_attention_ms": one_row[BOTH]["attention ms per step"],
    }
    if place.toy:  # there is no trace of a device
        numbers = {name: value for name, value in numbers.items() if value == value}
    says = (
        f"{FEW} {numbers['few_entries']:.3f} x, {LONGEST} {numbers['longest_document']:.3f} x, "
        f"{BOTH} {numbers['both']:.3f} x the speed"
    )
    for row in table[len(one_row) :]:
        says += f"; {row['rows']} rows, {row['lever']}: {row['tokens per second']:,.0f} tokens/s"
    if left_out:
        says += f"; no time was left for {', '.join(left_out)}"
    return Result(says, numbers, {"levers": table})


def _repeated(workload: Text, steps: int) -> Text:
    """Return the workload with as many batches as a phase has steps, so that phases are equal."""
    return replace(workload, batches=SKIPPED + steps)
