"""Part faults of ``gpu_day.py``: what goes wrong in real runs must end as it does on a CPU.

    PYTHONPATH=src python benchmarks/gpu_day.py --part faults

Each line starts ``oneloop launch`` as a user does, breaks the run, and starts it again.
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from torch import Tensor, nn

from gpu_lines import Place, Result, line
from oneloop.basics.exit_codes import DIVERGED, STOPPED
from oneloop.tasks.image_classification import ImageClassification
from same_bits_gpu import environment

HERE = Path(__file__).parent
DIGITS = ["digits", "--eval.every", "0", "--machine.deterministic", "true", "--track", "none"]
PATIENCE = 240.0  # seconds for a run
TRAINS = 200 << 20  # bytes that a process with torch uses, and its supervisor does not


class SpoiledDigits(ImageClassification):
    """The digits; the loss of one step is NaN.

    Args:
        spoiled: number of steps before that step.
    """

    progress: Any = None

    def __init__(self, spoiled: int = 10, **others: Any) -> None:
        super().__init__(**others)
        self.spoiled = spoiled

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss, outputs = super().loss(model, batch)
        trains = model.training and self.progress.total > 1
        if trains and self.progress.step == self.spoiled:
            loss = loss * float("nan")
        return loss, outputs


class Launched:
    """A run that ``oneloop launch`` has started; its output is collected."""

    def __init__(self, place: Place, words: list[str], folder: Path) -> None:
        options = ["--config_file", "single", "--mixed_precision", place.precision]
        self.folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "oneloop", "launch", *options, *words, "--run.dir", str(folder)],
            env={**environment(), "XDG_CACHE_HOME": str(place.folder)},  # no earlier search
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            print(text, end="", flush=True)  # the record of a failure has it
            self._lines.append(text)

    @property
    def output(self) -> str:
        return "".join(self._lines)

    def code(self) -> int:
        """Wait for the end, and return the exit code."""
        code = self._process.wait(PATIENCE)
        self._reader.join(10)
        return code

    def wait_for(self, file: Path) -> None:
        """Wait until a file of the run folder exists. Raise RuntimeError if the run ends before."""
        until = time.monotonic() + PATIENCE
        while not file.exists():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the run ended before it wrote {file.name}")
            time.sleep(0.005)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the launcher."""
        self._process.send_signal(number)

    def kill_training(self) -> None:
        """Kill the process that trains. It maps torch, as only it and its later children do."""
        family = psutil.Process(self._process.pid).children(recursive=True)
        training = [one for one in family if one.memory_info().rss > TRAINS]
        min(training, key=lambda one: one.create_time()).kill()


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}" / "MANIFEST.json"


def weights(folder: Path) -> str:
    """Return the hash of the final weights."""
    return hashlib.sha256((folder / "final" / "model.safetensors").read_bytes()).hexdigest()


def recipe(place: Place) -> list[str]:
    """Return a run that takes some seconds, so that there is time to break it."""
    steps, every = (400, 20) if place.toy else (2_000, 100)
    return [*DIGITS, "--duration", str(steps), "--save.every", str(every), "--log.every", "20"]


def first_checkpoint(place: Place, folder: Path) -> Path:
    """Return the file that a run has written when it may be broken."""
    return checkpoint(folder, 40 if place.toy else 200)


def undisturbed(place: Place) -> str:
    """Train without a fault, and return the hash of the final weights."""
    run = Launched(place, recipe(place), place.folder / "undisturbed")
    assert run.code() == 0, run.output
    return weights(run.folder)


@line("faults", seconds=50, numbers=["resumed_at"])
def killed_process(place: Place) -> Result:
    """The training process is killed; the same command resumes, and the end is bit-identical."""
    expected = undisturbed(place)
    folder = place.folder / "run"
    run = Launched(place, recipe(place), folder)
    run.wait_for(first_checkpoint(place, folder))
    run.kill_training()
    code = run.code()
    assert code == 1, f"exit code {code}"
    again = Launched(place, recipe(place), folder)
    assert again.code() == 0, again.output
    assert weights(folder) == expected, "the final weights differ"
    step = _resumed_at(again.output)
    return Result(f"exit code 1; resumed at step {step}, to the same bits", {"resumed_at": step})


@line("faults", seconds=50, numbers=["resumed_at"])
def sigterm(place: Place) -> Result:
    """SIGTERM saves and stops with 75; the same command resumes, and the end is bit-identical."""
    expected = undisturbed(place)
    folder = place.folder / "run"
    run = Launched(place, recipe(place), folder)
    run.wait_for(first_checkpoint(place, folder))
    run.send(signal.SIGTERM)
    code = run.code()
    assert code == STOPPED, f"exit code {code}"
    summary = json.loads((folder / "summary.json").read_text())
    again = Launched(place, recipe(place), folder)
    assert again.code() == 0, again.output
    assert weights(folder) == expected, "the final weights differ"
    step = _resumed_at(again.output)
    assert step == summary["step"], (step, summary["step"])
    return Result(f"exit code 75; resumed at step {step}, to the same bits", {"resumed_at": step})


def _resumed_at(output: str) -> int:
    found = re.search(r"resum\w+ .*step[- ](\d+)", output)
    assert found, f"no line about a resume in: {output[-2_000:]}"
    return int(found[1])


@line("faults", seconds=60, numbers=["bad_steps", "stop_code"])
def not_a_number(place: Place) -> Result:
    """A NaN ends a run with 3 before it reaches the weights, or is skipped, or rewound."""
    words = [
        f"{HERE / 'gpu_faults.py'}:SpoiledDigits",
        "--task.spoiled",
        "30",
        "--batch.size",
        "64",
    ]
    words += ["--duration", "60", "--save.every", "20", "--eval.every", "0", "--track", "none"]
    words += ["--log.every", "1"]
    codes = {}
    bad_steps = {}  # by policy
    for policy in ("stop", "skip", "rewind"):
        folder = place.folder / policy
        run = Launched(place, [*words, "--guard.nonfinite", policy], folder)
        codes[policy] = run.code()
        if policy != "stop" and not codes[policy]:
            lines = [json.loads(text) for text in (folder / "metrics.jsonl").open()]
            losses = [one["train/loss"] for one in lines if "train/loss" in one]
            assert all(loss == loss for loss in losses), "a NaN was logged as a loss"
            assert json.loads((folder / "summary.json").read_text())["step"] == 60
            bad_steps[policy] = sum(one.get("event") == policy for one in lines)
            assert bad_steps[policy], "no line about a bad step in metrics.jsonl"
    assert codes == {"stop": DIVERGED, "skip": 0, "rewind": 0}, codes
    numbers = {"stop_code": codes["stop"], "bad_steps": sum(bad_steps.values())}
    return Result(f"exit codes {codes}", numbers)


TOO_MANY = 256  # rows of 1,024 tokens, with 0.5 B parameters: too many for 80 and for 141 GB


@line("faults", seconds=150, numbers=["micro"], on_gpu=["peak_gib"], alone=True)
def out_of_memory(place: Place) -> Result:
    """The search for the micro-batch runs out of memory for real; the run at its size does not."""
    words = ["gpt", "--batch.micro", "auto", "--duration", "2", "--eval.every", "0"]
    words += ["--save.every", "0", "--track", "none", "--task.tokenizer", "bytes"]
    if place.toy:
        words += ["--task.width", "32", "--task.layers", "1", "--task.heads", "2"]
        words += ["--batch.size", "8"]
    else:
        words += ["--task.width", "2048", "--task.layers", "8", "--task.heads", "16"]
        words += ["--task.block", "1024", "--batch.size", str(TOO_MANY)]
        words += ["--task.padded_vocab", "50304"]
    run = Launched(place, words, place.folder / "run")
    with _PeakOfDevice(enabled=not place.toy) as peak:
        code = run.code()
    assert code == 0, run.output[-2_000:]
    fits = re.findall(r"batch\.micro \w+: (\d+) fits", run.output)
    assert fits, f"no size fits in: {run.output[-2_000:]}"
    micro = max(map(int, fits))
    numbers = {"micro": float(micro)}
    if not place.toy:
        assert micro < TOO_MANY, "everything fits: the search did not run out of memory"
        numbers["peak_gib"] = peak.gib
    return Result(f"found {micro}; the device's peak was {peak.gib:.1f} GiB", numbers)


class _PeakOfDevice:
    """The largest memory in use on the first GPU, as the driver reports it."""

    def __init__(self, *, enabled: bool) -> None:
        self.gib = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._enabled = enabled

    def __enter__(self) -> _PeakOfDevice:
        if self._enabled:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._enabled:
            self._thread.join()

    def _watch(self) -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self._over.wait(0.05):
            used = subprocess.run(query, capture_output=True, text=True, check=True).stdout
            self.gib = max(self.gib, float(used.split()[0]) / 1024)


@line("faults", seconds=60, numbers=["worlds"])
def process_group_of_one(place: Place) -> Result:
    """torchrun starts one process: DDP's and FSDP2's paths run with NCCL (gloo without a GPU)."""
    words = ["digits", "--duration", "20", "--eval.every", "0", "--track", "none"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "1"]
    launcher += ["--standalone", "-m", "oneloop.train"]
    sharding = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    for name, more in (("ddp", {}), ("fsdp2", sharding)):
        folder = place.folder / name
        command = [*launcher, *words, "--run.dir", str(folder)]
        variables = {**environment(), "ACCELERATE_MIXED_PRECISION": place.precision, **more}
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=PATIENCE
        )
        print(done.stdout, done.stderr)
        assert done.returncode == 0, done.stderr[-2_000:]
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["step"] == 20, summary
    return Result("one process of torchrun trains, under DDP and under FSDP2", {"worlds": 2})
