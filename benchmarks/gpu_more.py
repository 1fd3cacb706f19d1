"""More lines of part speed of ``gpu_day.py``: how much fits, levers, a real run, fp8, the loss.

    PYTHONPATH=src python benchmarks/gpu_day.py --part speed --only largest-micro-batch

Each line keeps within its own seconds. A run that fails becomes a row of the table with the reason
under "failed"; the rows of the other runs remain.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpu_lines import FORK, Place, Result, line
from gpu_loops import RandomText, by_oneloop
from gpu_pacer import SKIPPED, Contender, Loop, Pacer, Setting
from gpu_rivals import by_tuned_trainer
from gpu_speed import gpt2_workload, llama_1b_workload
from gpu_turns import OURS, RESERVE, STEPS, Arm, beside, slug
from gpu_workloads import Text
from loss_memory import plain, torchs
from oneloop.tasks.language.chunked_loss import chunked_cross_entropy

MARGIN = 15.0  # seconds that a line leaves, so that its result is recorded
GIB = float(2**30)


def end_of(place: Place, seconds: float) -> float:
    """Return when a line that may take ``seconds`` from now must end, on the monotonic clock."""
    return min(place.until - MARGIN, time.monotonic() + seconds)


def text_of(workload: Any) -> Text:
    """Return a workload that is known to be a text."""
    assert isinstance(workload, Text)
    return workload


# Calls in processes of their own. The process of a line must not use CUDA before it forks.


def in_child(call: Callable[[], Any], *, until: float) -> Any:
    """Call a function in a forked process, and return its result.

    A process that ends with exit code 0 and no result returns None.

    Args:
        call: the function.
        until: when the process is ended, on the monotonic clock.

    Raises:
        RuntimeError: the function failed, or took too long.
    """
    ours, theirs = FORK.Pipe(duplex=False)
    child = FORK.Process(target=_answer, args=(call, theirs))
    child.start()
    theirs.close()
    try:
        if not ours.poll(max(0.0, until - time.monotonic())):
            raise RuntimeError("it took longer than the time that was left")
        failed, answer = ours.recv()
    except EOFError:
        child.join()
        if child.exitcode:
            raise RuntimeError(f"its process ended with code {child.exitcode}") from None
        return None
    finally:
        if child.is_alive():
            child.kill()
        child.join()
        ours.close()
    if failed:
        raise RuntimeError(answer)
    return answer


def _answer(call: Callable[[], Any], connection: Connection) -> None:
    try:
        connection.send((False, call()))
    except BaseException as error:
        traceback.print_exc()
        connection.send((True, f"{type(error).__name__}: {error}"[:400]))
        os._exit(1)
    os._exit(0)


class Unpaced(Pacer):
    """A pacer that never pauses a loop.

    Args:
        layers: file in which the linear layers of the model are counted by class.
        steps: after which the process ends with exit code 0, without a last save (None: the loop
            ends by itself).
    """

    def __init__(self, layers: Path, steps: int | None = None) -> None:
        self._layers = layers
        self._steps = steps

    def knows(self, model: nn.Module) -> None:
        """Count the linear layers of the model that trains, once."""
        if not self._layers.exists():
            linear = [one for one in model.modules() if isinstance(one, nn.Linear)]
            counts = Counter(type(one).__name__ for one in linear)
            self._layers.write_text(json.dumps(counts))

    def step(self, number: int | None = None) -> None:
        """End the process at the start of the step after the last one."""
        if self._steps is not None and number is not None and number >= self._steps:
            os._exit(0)


class RealRun(NamedTuple):
    """What a run of oneloop has written."""

    lines: list[dict[str, Any]]  # of metrics.jsonl
    summary: dict[str, Any]  # empty if the run did not end by itself
    layers: dict[str, int]  # number of linear layers by class
    failed: str  # why the run failed, or nothing

    def logged(self, name: str) -> dict[int, float]:
        """Return the values of a metric, by step."""
        return {one["step"]: float(one[name]) for one in self.lines if name in one}

    @property
    def peak_gib(self) -> float:
        """The largest memory that the run's allocator held (without a GPU: the process)."""
        return max(self.logged("memory/peak_gib").values(), default=math.nan)


def real_run(
    setting: Setting,
    *,
    until: float,
    task: type[RandomText] | None = None,
    steps: int | None = None,
    **recipe: Any,
) -> RealRun:
    """Train with oneloop in a process of its own, without pauses.

    Args:
        setting: what is trained, and where.
        until: when the run is ended, on the monotonic clock.
        task: in place of :class:`RandomText`.
        steps: after which the process ends, without a last save (None: as ``duration`` says).
        recipe: groups of keys.
    """

    layers = setting.folder / "layers.json"

    def train() -> None:
        setting.folder.mkdir(parents=True, exist_ok=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(setting.kernels / "inductor")
        os.environ["TRITON_CACHE_DIR"] = str(setting.kernels / "triton")
        torch.manual_seed(0)
        by_oneloop(setting, Unpaced(layers, steps), task, recipe=recipe)

    failed = ""
    try:
        in_child(train, until=until)
    except RuntimeError as error:
        failed = str(error)[:300]

    # Also a run that failed has written what it had measured.
    folder = setting.folder / "run"
    lines = []
    if (folder / "metrics.jsonl").exists():
        lines = [json.loads(text) for text in (folder / "metrics.jsonl").open()]
    summary = {}
    if not failed and (folder / "summary.json").exists():
        summary = json.loads((folder / "summary.json").read_text())
    counts = json.loads(layers.read_text()) if layers.exists() else {}
    return RealRun(lines, summary, counts, failed)


# How many rows train at once?

LARGEST = 240.0  # seconds of the line
LENGTHS = (2_048, 8_192, 32_768)  # tokens per row
SMALL_LENGTHS = (32, 64)  # of the toy
TRAINERS: dict[str, Loop] = {OURS: by_oneloop, "Trainer, tuned": by_tuned_trainer}
USABLE = 0.97  # of the card's memory; CUDA itself and fragments need the rest
SMALLER = 0.93  # times the predicted rows, if those do not train
BEYOND = 1.15  # times the rows that train, which should not
FEW = 2  # timed steps of a run; three untimed ones come before them
PATIENCE = 90.0  # seconds for a run


class Search:
    """Runs of one loop with rows of one length.

    Args:
        name: of the loop.
        length: tokens per row.
        place: where the line runs.
        total: bytes of the card.
        until: when no more runs start, on the monotonic clock.
    """

    def __init__(self, name: str, length: int, place: Place, total: float, until: float) -> None:
        self.name = name
        self.length = length
        self.table: list[dict[str, Any]] = []  # a row for each run
        self.allocated: dict[int, float] = {}  # bytes at most, by rows that train
        self.expected = 0  # rows, extrapolated from one and two
        self._place = place
        self._total = total
        self._until = until

    @property
    def largest(self) -> int:
        """The most rows that trained; 0 if none did."""
        return max(self.allocated, default=0)

    def run(self, rows: int, why: str) -> bool:
        """Train a few steps with this many rows, and return whether they train."""
        about = {"loop": self.name, "row length": self.length, "rows": rows, "why": why}
        left = self._until - time.monotonic()
        if left < 5:
            self.table.append({**about, "failed": "no time was left"})
            return False
        workload = replace(
            text_of(llama_1b_workload(self._place)),
            length=self.length,
            rows=rows,
            batches=SKIPPED + FEW,
        )
        folder = self._place.folder / f"{slug(self.name)}-{self.length}-{rows}"
        setting = Setting(
            workload=workload,
            device=self._place.device,
            mixed_precision=self._place.precision,
            compiled=False,
            folder=folder,
            kernels=folder,
        )
        contender = Contender(TRAINERS[self.name], setting)
        try:
            answer = contender.ask("last", FEW, patience=min(PATIENCE, left))
        except RuntimeError as error:
            self.table.append({**about, "failed": str(error)[:300]})
            return False
        finally:
            contender.stop()

        # A CPU does not measure memory: the toy invents a peak.
        allocated = answer.get("allocated", (0.1 + 0.4 * rows) * GIB)
        self.allocated[rows] = allocated
        self.table.append(
            {
                **about,
                "allocated GiB": allocated / GIB,
                "reserved GiB": answer.get("reserved", allocated) / GIB,
                "tokens per second": rows * self.length * FEW / answer["seconds"],
            }
        )
        return True

    def extrapolate(self) -> None:
        """Train one row and two, and compute how many fill the usable memory."""
        if self.run(1, "for the line") and self.run(2, "for the line"):
            each = self.allocated[2] - self.allocated[1]
            left = USABLE * self._total - self.allocated[1]
            if each > 0:
                self.expected = max(2, 1 + int(left / each))

    def confirm(self) -> None:
        """Train the extrapolated rows; if they do not train, somewhat fewer."""
        if self.expected <= self.largest:
            return
        if not self.run(self.expected, "extrapolated"):
            fewer = int(SMALLER * self.expected)
            if fewer > self.largest:
                self.run(fewer, "fewer than extrapolated")

    def exceed(self) -> None:
        """Try more rows than those that train. The card should run out of memory."""
        if self.expected and self.largest >= int(SMALLER * self.expected):
            more = max(self.largest + 1, math.ceil(BEYOND * self.largest))
            self.run(more, "beyond; expected: out of memory")


@line(
    "speed",
    name="largest-micro-batch",
    seconds=LARGEST,
    numbers=["card_gib", "runs"],
    gpu_packages=["liger_kernel"],
)
def largest_micro_batch(place: Place) -> Result:
    """Find how many rows of Llama 1B train at once, for oneloop and for the tuned Trainer.

    Nothing is compiled, because two dozen compilations take too long. Compiled, both need less
    memory: see the peaks of 4 rows in the lines llama-1b and llama-1b-rivals.
    """
    until = end_of(place, LARGEST)
    if place.toy:
        _import_for_all()
    total = GIB if place.toy else in_child(_memory_of_card, until=until)
    lengths = SMALL_LENGTHS if place.toy else LENGTHS
    searches = [
        Search(name, length, place, total, until) for length in lengths for name in TRAINERS
    ]

    # One length after the other: time may end before the last one.
    for search in searches:
        search.extrapolate()
        if not place.toy:
            search.confirm()
    if not place.toy:
        for search in searches:
            search.exceed()

    # Report the rows that trained, beside the extrapolated ones.
    numbers = {"card_gib": total / GIB}
    numbers["runs"] = float(sum(len(search.allocated) for search in searches))
    if not numbers["runs"]:
        raise RuntimeError(f"nothing trained: {searches[0].table[0]['failed']}")
    parts = []
    table = []
    for search in searches:
        prefix = f"{slug(search.name)}_{search.length}"
        numbers[f"{prefix}_tried_rows"] = float(search.largest)
        numbers[f"{prefix}_expected_rows"] = float(search.expected)
        parts.append(
            f"{search.name} {search.largest} rows of {search.length:,} tokens "
            f"(extrapolated: {search.expected or 'not tried'})"
        )
        table += search.table
    found = "; ".join(parts)
    says = (
        f"{total / GIB:.1f} GiB, not compiled; the most rows that were tried and trained: {found}"
    )
    return Result(says, numbers, {"runs": table})


def _import_for_all() -> None:
    """Import once what each loop would import in its own process.

    Only in a toy: on a GPU these imports use CUDA, which no forked process could use afterwards.
    """
    import torch._dynamo  # noqa: F401
    import transformers.trainer  # noqa: F401


def _memory_of_card() -> float:
    return float(torch.cuda.get_device_properties(0).total_memory)


# What would make GPT-2 faster?


class HalfStream(RandomText):
    """Language modelling with a residual stream in bfloat16 (GPT-2's is float32 under autocast)."""

    def bare_model(self) -> nn.Module:
        model: Any = super().bare_model()
        model.transformer.drop.register_forward_hook(_halved)
        return model  # type: ignore[no-any-return]


def _halved(module: nn.Module, given: Any, output: Tensor) -> Tensor:
    """Return the embeddings in bfloat16 under autocast.

    oneloop also tests a model without autocast, which needs its float32 there.
    """
    if torch.is_autocast_enabled(output.device.type):
        return output.bfloat16()
    return output


def _lever(mode: str = "default", task: type[RandomText] | None = None) -> Loop:
    """Return oneloop's loop with a mode of torch.compile, or another task."""

    def loop(setting: Setting, pacer: Pacer) -> None:
        machine: dict[str, Any] = {"check_every": 0}
        if setting.compiled:  # otherwise the key is rejected, since it has no effect
            machine["compile_mode"] = mode
        by_oneloop(setting, pacer, task, machine)

    return loop


# The arms share compiled kernels where they can: this line does not compare the start. The one that
# compiles longest is the last.
LEVERS = (
    Arm(OURS, _lever()),
    Arm("residual stream in bf16", _lever(task=HalfStream), kernels_of=OURS, ours=False),
    Arm("reduce-overhead", _lever("reduce-overhead"), kernels_of=OURS, ours=False),
    Arm("max-autotune-no-cudagraphs", _lever("max-autotune-no-cudagraphs"), ours=False),
)
LEVERS_SECONDS = 240.0


@line(
    "speed",
    name="gpt2-levers",
    seconds=LEVERS_SECONDS,
    numbers=["tokens_per_second", "control", "mfu"],
)
def gpt2_levers(place: Place) -> Result:
    """Time oneloop on GPT-2 as it is, and with settings that may be faster."""
    if place.toy:
        _import_for_all()

    # With two reserves left, beside() starts no further arm, and after some rounds no other one.
    until = min(place.until, time.monotonic() + LEVERS_SECONDS + RESERVE)
    steps = 2 if place.toy else STEPS
    limited = replace(place, until=until)
    return beside(gpt2_workload(place), limited, steps=steps, arms=LEVERS, host=False)


# A real run of some minutes.

REAL = 230.0  # seconds of the line
HELD_OUT = 256  # rows that are not trained


class HeldOutText(RandomText):
    """Language modelling with rows that are only evaluated."""

    def eval_sets(self) -> dict[str, Any]:
        text = self.text
        trained = set(text.samples.indices)
        rows = [number for number in range(len(text.rows_of_texts)) if number not in trained]
        return {"validation": [text.rows_of_texts[number] for number in rows[:HELD_OUT]]}


@line(
    "speed",
    name="three-minutes",
    seconds=REAL,
    numbers=["steps", "tokens_per_second", "median_tokens_per_second"],
    on_gpu=["peak_gib"],
)
def three_minutes(place: Place) -> Result:
    """Train GPT-2 as a user does: saves, an EMA, evaluations, checks and logs, without pauses.

    The rate is that of the whole time from the first step to the last log line. It includes the
    evaluations and saves in between.
    """
    until = end_of(place, REAL)
    steps, save, evaluation, half_life = (30, 10, 10, 10) if place.toy else (2_000, 400, 500, 200)

    # Train on 2,240 rows over and over; some of the others are held out.
    workload = replace(text_of(gpt2_workload(place)), batches=70)
    setting = Setting(
        workload=workload,
        device=place.device,
        mixed_precision=place.precision,
        compiled=not place.toy,
        folder=place.folder / "real",
        kernels=place.folder / "real",
    )
    ran = real_run(
        setting,
        until=until,
        task=HeldOutText,
        duration=steps,
        ema={"half_life": half_life},
        eval={"every": evaluation, "samples": 0},
        save={"every": save},
        log={"every": "auto"},
        schedule={"name": "constant", "warmup": steps // 20},
    )
    times = ran.logged("time")
    if not times:
        raise RuntimeError(f"the run logged nothing: {ran.failed}")

    # The rate of the run, and that of its median step. The clock starts before the first step.
    last = max(times)
    seconds = times[last]
    rate = last * workload.per_step / seconds
    median = workload.per_step / statistics.median(ran.logged("speed/step_seconds").values())
    numbers = {
        "steps": float(last),
        "seconds": seconds,
        "tokens_per_second": rate,
        "median_tokens_per_second": median,
        "peak_gib": ran.peak_gib,
        "evaluations": float(sum("eval/loss" in one for one in ran.lines)),
        "saves": float(sum(one.get("event") == "save" for one in ran.lines)),
    }

    # Shares of the time: each log line has those since the line before it.
    shares: dict[str, float] = {}
    before = 0.0
    for one in ran.lines:
        if "share/data" not in one:
            continue
        for name in one:
            if name.startswith("share/"):
                part = float(one[name]) * (one["time"] - before) / seconds
                shares[name] = shares.get(name, 0.0) + part
        before = one["time"]
    numbers |= {f"share_{name.removeprefix('share/')}": value for name, value in shares.items()}

    # What the summary says, with the start and the last save.
    goodput = ran.summary.get("goodput", {})
    if goodput:
        numbers["whole_seconds"] = ran.summary["seconds"]
        numbers["goodput"] = goodput["share"]
        numbers |= {f"lost_{name}_seconds": value for name, value in goodput["lost"].items()}
    says = (
        f"{last:,} steps in {seconds:.0f} s: {rate:,.0f} tokens/s, {rate / median:.3f} x the "
        f"median step's {median:,.0f}; of the time {_percent(shares, 'evaluate')} evaluation, "
        f"{_percent(shares, 'save')} saves, {_percent(shares, 'data')} waiting for data; peak "
        f"{ran.peak_gib:.1f} GiB"
    )
    if ran.failed:
        says += f"; then it failed: {ran.failed}"
    table = [
        {
            "step": one["step"],
            "time": one["time"],
            "ms per step": 1e3 * one.get("speed/step_seconds", math.nan),
            **{name: one[name] for name in one if name.startswith(("share/", "train/loss"))},
        }
        for one in ran.lines
        if "share/data" in one
    ]
    return Result(says, numbers, {"log lines": table})


def _percent(shares: dict[str, float], name: str) -> str:
    return f"{100 * shares.get(f'share/{name}', 0.0):.1f} %"


# fp8 beside bf16.

EIGHT = 150.0  # seconds of the line
EIGHT_STEPS = 200
COMPARED = (50, 100, 150, 200)  # steps at which the losses are compared
EACH = 10  # steps between two log lines
CONVERTED = "Float8Linear"  # torchao's class


@line(
    "speed",
    name="fp8-llama-1b",
    seconds=EIGHT,
    numbers=["runs", "fp8_layers"],
    gpus=1,
    packages=["torchao"],
)
def fp8_llama_1b(place: Place) -> Result:
    """Train the shape of Llama 1B in fp8 and in bf16, on the same batches.

    accelerate converts all linear layers but the first and the last with torchao. The blocks are
    compiled (regional), which starts faster than the whole model. A loss is the mean of 10 steps.
    If no layer was converted, the line fails: the run was one in bf16.
    """
    until = end_of(place, EIGHT + RESERVE)
    workload = replace(text_of(llama_1b_workload(place)), compile="regional", batches=EIGHT_STEPS)
    runs: dict[str, RealRun] = {}
    for precision in ("bf16", "fp8"):
        setting = Setting(
            workload=workload,
            device=place.device,
            mixed_precision=precision,
            compiled=not place.toy,
            folder=place.folder / precision,
            kernels=place.folder / "kernels",
        )
        runs[precision] = real_run(setting, until=until, steps=EIGHT_STEPS, log={"every": EACH})

    # The rate of the second half, from the times of two log lines.
    numbers: dict[str, float] = {}
    table = []
    for precision, ran in runs.items():
        row: dict[str, Any] = {"precision": precision}
        losses = ran.logged("train/loss")
        times = ran.logged("time")
        half = EIGHT_STEPS // 2
        if EIGHT_STEPS in times and half in times:
            rate = half * workload.per_step / (times[EIGHT_STEPS] - times[half])
            numbers[f"{precision}_tokens_per_second"] = rate
            row["tokens per second"] = rate
        for step in COMPARED:
            if step in losses:
                numbers[f"{precision}_loss_{step}"] = losses[step]
                row[f"loss at {step}"] = losses[step]
        numbers[f"{precision}_peak_gib"] = ran.peak_gib
        row["peak GiB"] = ran.peak_gib
        row |= {f"layers of class {name}": count for name, count in ran.layers.items()}
        if ran.failed:
            row["failed"] = ran.failed
        table.append(row)
    numbers["runs"] = float(sum(not ran.failed for ran in runs.values()))
    converted = runs["fp8"].layers.get(CONVERTED, 0)
    if converted:
        numbers["fp8_layers"] = float(converted)
    if not any(ran.lines for ran in runs.values()):
        raise RuntimeError("; ".join(f"{name}: {ran.failed}" for name, ran in runs.items()))
    return Result(_eight_sentence(runs, numbers), numbers, {"runs": table})


def _eight_sentence(runs: dict[str, RealRun], numbers: dict[str, float]) -> str:
    """Return what both runs found, or why one failed."""
    says = []
    for precision, ran in runs.items():
        if ran.failed:
            says.append(f"{precision} failed: {ran.failed}")
            continue
        rate = numbers.get(f"{precision}_tokens_per_second", math.nan)
        loss = numbers.get(f"{precision}_loss_{COMPARED[-1]}", math.nan)
        says.append(
            f"{precision} {rate:,.0f} tokens/s, loss {loss:.4f} at step {COMPARED[-1]}, peak "
            f"{ran.peak_gib:.1f} GiB"
        )
    if not any(ran.failed for ran in runs.values()):
        ratio = numbers["fp8_tokens_per_second"] / numbers["bf16_tokens_per_second"]
        says.append(f"fp8 is {ratio:.3f} x as fast")
    layers = runs["fp8"].layers
    if layers:
        says.append(f"{layers.get(CONVERTED, 0)} of {sum(layers.values())} linear layers in fp8")
    return "; ".join(says)


# The last layer and its loss.

Way = Callable[[Tensor, Tensor, Tensor], Tensor]
TIMES = 5  # of which the median is taken


def _chunked(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return chunked_cross_entropy(hidden, weight, target, right=False).total


@line("speed", name="linear-cross-entropy", seconds=40, numbers=["ways"])
def linear_cross_entropy(place: Place) -> Result:
    """Time the last layer with its loss: torch's function, oneloop's, and all logits in memory.

    Nothing is compiled. In a compiled model oneloop's loss is compiled, too, with larger chunks.
    """
    sizes = {"gpt2": (32 * 1_024, 768, 50_304), "llama_1b": (4 * 2_048, 2_048, 128_256)}
    if place.toy:
        sizes = {"gpt2": (64, 16, 128), "llama_1b": (32, 32, 256)}
    ways: dict[str, Way] = {"logits in memory": plain, OURS: _chunked}
    known = hasattr(F, "linear_cross_entropy") and hasattr(nn, "LinearCrossEntropyOptions")
    if known:
        ways["torch"] = torchs
    numbers: dict[str, float] = {}
    table = []
    for shape, (tokens, width, vocabulary) in sizes.items():
        inputs = _inputs(place, tokens, width, vocabulary)
        for name, way in ways.items():
            row: dict[str, Any] = {"shape": shape, "way": name}
            try:
                row |= _measured(way, inputs, place)
                row |= _distances(way, inputs, tokens // 4)
            except RuntimeError as error:  # also out of memory
                row["failed"] = str(error)[:200]
            table.append(row)
            for key in ("ms", "GiB above the inputs", "gradient of weight"):
                if key in row:
                    numbers[f"{shape}_{slug(name)}_{slug(key)}"] = row[key]
        del inputs
    numbers["ways"] = float(sum("failed" not in row for row in table))

    # One part of the sentence per shape.
    parts = []
    for shape in sizes:
        found = [
            f"{row['way']} {row['ms']:.1f} ms"
            + (f" and {row['GiB above the inputs']:.2f} GiB" if not place.toy else "")
            if "ms" in row
            else f"{row['way']} failed"
            for row in table
            if row["shape"] == shape
        ]
        parts.append(f"{shape}: {', '.join(found)}")
    says = f"forward and backward, {'float32' if place.toy else 'bf16'}: {'; '.join(parts)}"
    if not known:
        says += f"; torch {torch.__version__} has no linear_cross_entropy"
    return Result(says, numbers, {"ways": table})


def _inputs(
    place: Place, tokens: int, width: int, vocabulary: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, a weight and targets of random numbers, on the device."""
    dtype = torch.float32 if place.toy else torch.bfloat16
    draw = torch.Generator(place.device).manual_seed(0)
    about: dict[str, Any] = {"device": place.device, "generator": draw}
    hidden = torch.randn(tokens, width, **about).to(dtype)
    weight = (torch.randn(vocabulary, width, **about) * width**-0.5).to(dtype)
    target = torch.randint(vocabulary, (tokens,), **about)
    return hidden.requires_grad_(), weight.requires_grad_(), target


def _measured(way: Way, inputs: tuple[Tensor, Tensor, Tensor], place: Place) -> dict[str, float]:
    """Return the milliseconds of forward and backward, and the peak memory above the inputs."""
    hidden, weight, target = inputs
    found: dict[str, float] = {}
    seconds = []
    for number in range(TIMES + 1):
        hidden.grad = weight.grad = None
        if not place.toy:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        began = time.perf_counter()
        way(hidden, weight, target).backward()
        if not place.toy:
            torch.cuda.synchronize()
            most = torch.cuda.max_memory_allocated() - before
            found["GiB above the inputs"] = most / GIB
        if number:  # the first one warms up
            seconds.append(time.perf_counter() - began)
    hidden.grad = weight.grad = None
    return {"ms": 1e3 * statistics.median(seconds), **found}


def _distances(way: Way, inputs: tuple[Tensor, Tensor, Tensor], tokens: int) -> dict[str, float]:
    """Return how far the gradients of some tokens are from those of float64 logits.

    A distance is the norm of the difference, divided by the norm of the exact gradient.
    """
    hidden = inputs[0].detach()[:tokens].requires_grad_()
    weight = inputs[1]
    target = inputs[2][:tokens]
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    exact = torch.autograd.grad(plain(wide[0], wide[1], target), wide)
    own = torch.autograd.grad(way(hidden, weight, target), (hidden, weight))
    found = {}
    for name, mine, true in zip(("hidden", "weight"), own, exact):
        found[f"gradient of {name}"] = float((mine.double() - true).norm() / true.norm())
    return found
