"""fit(): a run from Python returns or raises, and leaves the interpreter unchanged."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oneloop.basics.exit_codes import BadInput, Diverged
from oneloop.data.seeded_samples import SampleError
from oneloop.recipe.parse import read, recipe
from worlds import HERE, forget_bitsandbytes, free_port, run, train

pytestmark = pytest.mark.covers(
    "oneloop",
    "oneloop.api",
    "oneloop.basics.exit_codes",
    "oneloop.data.seeded_samples",
    "oneloop.launch.interpreter",
    "oneloop.recipe.class_paths",
    "oneloop.recipe.parse",
)

QUIET = {"track": "none", "watch": {"output": "quiet"}}


class Points:
    """A small task whose loss becomes NaN, or whose samples fail, on request.

    Args:
        nan_after: number of calls after which the loss is NaN.
        fails_at: index of the sample that raises.
    """

    def __init__(self, nan_after: int = 10**9, fails_at: int = -1) -> None:
        self.nan_after, self.fails_at, self.calls = nan_after, fails_at, 0

    def model(self):
        return torch.nn.Linear(1, 1)

    def train_set(self):
        return Numbers(64, self.fails_at)

    def eval_sets(self):
        return {"validation": Numbers(8, -1)}

    def collate(self, samples):
        return {"x": torch.tensor(samples)[:, None]}

    def weight(self, batch):
        return torch.tensor(float(len(batch["x"])))

    def loss(self, model, batch):
        self.calls += 1
        each = (model(batch["x"]) - 1).square()
        return each.sum() * (float("nan") if self.calls > self.nan_after else 1.0), {}


class Numbers:
    def __init__(self, count, fails_at):
        self.count, self.fails_at = count, fails_at

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == self.fails_at:
            raise KeyError("no such number")
        return float(index) / self.count


def left() -> dict[str, object]:
    """Return all process state that a run could change."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    children = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True
    ).stdout
    return {
        "accelerate": [
            dict(state._shared_state) for state in (PartialState, AcceleratorState, GradientState)
        ],
        "group": torch.distributed.is_initialized(),
        "signals": [
            signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        ],
        "threads": [thread.name for thread in threading.enumerate()],
        "children": [line for line in children.splitlines() if not line.startswith("ps ")],
        "files": len(os.listdir("/proc/self/fd")),
        "environment": dict(os.environ),
        "random": [random.getstate(), torch.get_rng_state().tolist()],
        "switches": [
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
        ],
    }


def _one_interpreter() -> None:
    from accelerate import notebook_launcher

    from oneloop import fit

    # in the first run, libraries open their own files
    small = {"width": 8}
    fit("digits", task=small, duration=1, run={"dir": "warm"}, **QUIET)
    before = left()
    plain = fit(
        "digits",
        task=small,
        duration=6,
        run={"dir": "plain"},
        machine={"deterministic": True, "matmul": "high"},
        **QUIET,
    )
    assert plain["exit_code"] == 0 and plain["step"] == 6 and "eval/accuracy" in plain
    assert left() == before
    again = fit(
        "digits",
        task=small,
        duration=6,
        run={"dir": "plain"},
        machine={"deterministic": True},
        **QUIET,
    )
    assert again == json.loads(json.dumps(plain))  # finished: nothing to do
    half = fit(
        "digits", task=small, duration=6, run={"dir": "half"}, mixed_precision="bf16", **QUIET
    )
    assert (
        half["train/loss"] != plain["train/loss"]
        and abs(half["train/loss"] - plain["train/loss"]) < 0.05
    )
    assert (
        json.loads(Path("half/environment.json").read_text())["accelerate"][
            "ACCELERATE_MIXED_PRECISION"
        ]
        == "bf16"
    )
    with pytest.raises(Diverged, match="step 10: the (loss|gradient) is not finite"):
        fit(
            Points,
            task={"nan_after": 10},
            batch={"size": 8},
            duration=20,
            run={"dir": "nan"},
            **QUIET,
        )
    assert json.loads(Path("nan/summary.json").read_text())["exit_code"] == 3
    with pytest.raises(BadInput, match="did you mean 'batch.size'"):
        fit("digits", batch={"siz": 3})
    with pytest.raises(BadInput, match="batch.size must be a whole number"):
        fit("digits", batch={"size": "many"}, run={"dir": "bad"})
    with pytest.raises(BadInput, match="mixed_precision 'half' does not exist; use no, bf16"):
        fit("digits", mixed_precision="half", run={"dir": "bad"})
    assert not Path("bad").exists() and left() == before

    threading.Thread(target=_interrupt, args=("long", signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        fit(
            Points,
            duration=10**6,
            save={"every": 10**6},
            run={"dir": "long"},
            eval={"every": 0},
            **QUIET,
        )
    stopped = json.loads(Path("long/summary.json").read_text())
    assert (stopped["exit_code"], stopped["exit_reason"]) == (75, "stopped by Ctrl-C")
    assert (
        Path(f"long/checkpoints/step-{stopped['step']:08d}/MANIFEST.json").exists()
        and left() == before
    )

    forget_bitsandbytes()
    notebook_launcher(_in_two, num_processes=2, mixed_precision="bf16", use_port=str(free_port()))
    there = json.loads(Path("two/environment.json").read_text())
    assert there["processes"] == 2 and there["accelerate"]["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert json.loads(Path("two/summary.json").read_text())["step"] == 6
    assert left()["accelerate"] == before["accelerate"] and left()["children"] == before["children"]


def _interrupt(folder: str, number: int) -> None:
    """Send the signal once the run has started."""
    while not (Path(folder) / "metrics.jsonl").exists():
        time.sleep(0.05)
    time.sleep(0.3)
    os.kill(os.getpid(), number)


def _in_two() -> None:
    from oneloop import fit

    assert fit("digits", duration=6, run={"dir": "two"}, **QUIET)["exit_code"] == 0


def test_one_interpreter(tmp_path):
    run(_one_interpreter, folder=tmp_path, variables={"ACCELERATE_MIXED_PRECISION": ""}).ok()


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        ("single", 1),
        pytest.param("ddp", 2, marks=pytest.mark.slow),
        pytest.param("fsdp2", 2, marks=pytest.mark.slow),
    ],
)
def test_the_weights_are_those_of_the_command_line(tmp_path, config, ranks):
    words = ["digits", "--duration", "6", "--batch.size", "32", "--track", "none"]
    how = {"ranks": ranks, "config": config, "folder": tmp_path}
    run(train, [*words, "--run.dir", "typed"], **how).ok()
    summaries = run(_fitted, "called", **how).ok()
    assert all(summary == summaries[0] for summary in summaries[1:]), "every rank returns it"
    typed, called = (
        (tmp_path / way / "final" / "model.safetensors").read_bytes() for way in ("typed", "called")
    )
    assert typed == called
    environment = json.loads((tmp_path / "called" / "environment.json").read_text())
    assert environment["command"] == ["oneloop.fit", "called/recipe.yaml"]


def _fitted(folder: str) -> dict:
    from oneloop import fit

    fit("digits", duration=2, batch={"size": 32}, run={"dir": f"{folder}-before"}, **QUIET)
    summary = fit("digits", duration=6, batch={"size": 32}, run={"dir": folder}, **QUIET)
    return {name: value for name, value in summary.items() if name not in ("seconds", "goodput")}


def _beside_another() -> None:
    from accelerate import Accelerator

    from oneloop import fit

    own = Accelerator(mixed_precision="no", gradient_accumulation_steps=3)
    layer = own.prepare(torch.nn.Linear(2, 2))
    before, group = left()["accelerate"], torch.distributed.is_initialized()
    assert (
        fit("digits", duration=2, run={"dir": "run"}, mixed_precision="bf16", **QUIET)["step"] == 2
    )
    assert left()["accelerate"] == before and torch.distributed.is_initialized() is group
    own.backward(layer(torch.ones(1, 2)).sum())
    assert (
        own.mixed_precision == "no"
        and float(own.reduce(torch.ones(()), "sum")) == own.num_processes
    )


@pytest.mark.parametrize(
    ("config", "ranks"), [("single", 1), pytest.param("ddp", 2, marks=pytest.mark.slow)]
)
def test_an_accelerator_of_ones_own_stays_as_it_was(tmp_path, config, ranks):
    run(_beside_another, ranks=ranks, config=config, folder=tmp_path).ok()


def _fails() -> None:
    from oneloop import fit

    fit("digits", duration=1, run={"dir": "warm"}, machine={"workers": 1}, **QUIET)
    before = left()
    for where in ({"fails_at": 41}, {}):
        task = Points if where else Unlucky
        with pytest.raises((SampleError, ZeroDivisionError)) as raised:
            fit(
                task,
                task=where,
                duration=40,
                batch={"size": 8},
                machine={"workers": 1},
                run={"dir": "run"},
                **QUIET,
            )
        # still held
        assert raised.value.__traceback__ is not None and not isinstance(raised.value, BadInput)
        ended = json.loads(Path("run/summary.json").read_text())
        assert ended["exit_code"] == 1 and type(raised.value).__name__ in ended["exit_reason"]
        now = left()
        assert now["children"] == before["children"], now["children"]
        assert now["threads"] == before["threads"]
        assert (
            not where
            or "sample 41 of the train set cannot be loaded by data worker 0: KeyError"
            in ended["exit_reason"]
        )
        subprocess.run(["rm", "-r", "run"], check=True)


class Unlucky(Points):
    def loss(self, model, batch):
        self.calls += 1
        return super().loss(model, batch) if self.calls < 20 else 1 / 0


def test_an_error_of_the_task_is_raised_as_it_is_and_ends_all_processes(tmp_path):
    run(_fails, folder=tmp_path).ok()


def _terminated() -> None:
    from oneloop import fit

    threading.Thread(target=_interrupt, args=("run", signal.SIGTERM)).start()
    fit(
        Points,
        duration=10**6,
        save={"every": 10**6},
        eval={"every": 0},
        run={"dir": "run"},
        **QUIET,
    )
    os._exit(0)  # not reached: fit sends the signal again


def test_another_signal_is_passed_on_after_saving(tmp_path):
    assert run(_terminated, folder=tmp_path).codes == [-signal.SIGTERM]
    ended = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (
        ended["exit_code"] == 75
        and (tmp_path / f"run/checkpoints/step-{ended['step']:08d}").is_dir()
    )


def _interrupted_twice() -> None:
    from oneloop import fit

    class Slow(Points):
        def loss(self, model, batch):
            if Path("run/metrics.jsonl").exists():
                time.sleep(60)
            return super().loss(model, batch)

    globals()["Slow"], Slow.__qualname__ = Slow, "Slow"

    def twice() -> None:
        _interrupt("run", signal.SIGINT)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=twice).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fit(Slow, duration=100, run={"dir": "run"}, **QUIET)
    assert time.monotonic() - began < 40 and not Path("run/owner.json").exists()
    assert (
        left()["children"] == [] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )


def test_a_second_interrupt_ends_at_once(tmp_path):
    run(_interrupted_twice, folder=tmp_path).ok()


def test_in_a_thread(tmp_path):
    run(_in_a_thread, folder=tmp_path).ok()


def _in_a_thread() -> None:
    from oneloop import fit

    found, rejected = [], []

    def one(folder: str) -> None:
        try:
            found.append(fit("digits", duration=2, run={"dir": folder}, **QUIET))
        except BadInput as error:
            rejected.append(str(error))

    threads = [threading.Thread(target=one, args=(folder,)) for folder in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [summary["step"] for summary in found] == [
        2
    ] and "another call of oneloop is under way" in rejected[0]
    for wrong in ({"name": "other.py:T"}, "other.py:T"):
        with pytest.raises(BadInput, match="two tasks given"):
            fit(Points, task=wrong)
    assert "ACCELERATE_MIXED_PRECISION" in os.environ


SCRIPT = """
import sys
import torch
sys.path[:0] = {folders!r}
import test_fit

class Mine(test_fit.Points):
    pass

if __name__ == "__main__":
    from oneloop import fit
    print(fit(Mine, duration=3, machine=dict(workers=1), run=dict(dir="run"), track="none")["step"])
"""


@pytest.mark.slow
def test_a_class_of_the_script_that_runs_is_found_again(tmp_path):
    """The class is found by the script's file. A notebook's class cannot be found again; the error
    reports it."""
    folders = [str(Path(__file__).parent), str(HERE)]
    (tmp_path / "script.py").write_text(SCRIPT.format(folders=folders))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "3", done.stderr
    assert "script.py:Mine" in (tmp_path / "run" / "recipe.yaml").read_text()
    from worlds import after

    evaluated = after(tmp_path, "evaluate", "run")
    evaluated.ok()
    assert "eval/loss" in evaluated.output
    text = (tmp_path / "run" / "recipe.yaml").read_text()
    name = next(line for line in text.splitlines() if "script.py:Mine" in line)
    (tmp_path / "run" / "recipe.yaml").write_text(text.replace(name, "  name: __main__.Mine"))
    lost = after(tmp_path, "evaluate", "run")
    assert lost.codes == [2] and "was defined in a notebook" in lost.output
    after(tmp_path, "evaluate", "run", "--task", "script.py:Mine").ok()


def test_recipes_from_python():
    for name in ("digits", "gpt", "snippets"):
        assert recipe(name) == read([name]) == recipe(read([name]))
    typed = [
        "digits",
        "--optimizer",
        "muon",
        "--optimizer.lr",
        "3e-3",
        "--duration",
        "10%",
        "--ema.half_life",
        "[1ep,2ep]",
    ]
    from oneloop.basics.duration import Duration

    made = recipe(
        "digits",
        optimizer={"name": "muon", "lr": 3e-3},
        duration=Duration("10%"),
        ema={"half_life": ("1ep", "2ep")},
    )
    assert made == read(typed)
    assert recipe({"task": {"name": "causal_lm"}, "batch": {"size": 8}}).batch.size == 8
    assert recipe(made, batch={"size": 16}).optimizer.name == "muon"
    assert recipe("digits", run={"dir": Path("here")}).run.dir == "here"
    groups = {"backbone": {"lr_factor": 0.1}}
    assert recipe("digits", optimizer={"groups": groups}) == read(
        ["digits", "--optimizer.groups", json.dumps(groups)]
    )
    assert recipe(task=Points).task.name == "test_fit.Points"
    assert recipe(task={"name": Points, "nan_after": 3}).name == "test_fit"

    import numpy

    assert recipe("digits", batch={"size": numpy.int64(16)}, seed=numpy.int32(3)) == read(
        ["digits", "--batch.size", "16", "--seed", "3"]
    )

    class Hidden(Points):
        pass

    other = type("Points", (Points,), {})  # a different class of the same name

    rejected = {
        "cannot be found by its name": {"task": Hidden},
        "so a resume could not find it": {"task": other},
        "batch.size is given twice": {"source": "digits", "batch.size": 16, "batch": {"size": 32}},
        r"batch.size is given \{3\}": {"source": "digits", "batch": {"size": {3}}},
        "batch is a group of keys and has no value": {"source": "digits", "batch": 64},
        "batch.size must be a whole number": {"source": "digits", "batch": {"size": None}},
        "changed after it was read": {"source": replace(made, seed=3)},
        "no recipe given": {},
        "cannot be read": {"source": "not_here.yaml"},
    }
    for message, asked in rejected.items():
        with pytest.raises(BadInput, match=message):
            recipe(**asked)
