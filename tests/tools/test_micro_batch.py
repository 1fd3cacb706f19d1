"""batch.micro auto: a child process finds it by real steps, may run out of memory, and the run
equals a fixed value."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from safetensors.torch import load_file
from torch.distributed.elastic.utils.distributed import get_free_port

from oneloop.basics.memory import is_out_of_memory
from oneloop.tools.plan.micro_batch import search
from oneloop.tools.plan.out_of_memory import explained
from tiny import Ragged
from worlds import CONFIGS, HERE, run, train

pytestmark = pytest.mark.covers(
    "oneloop.basics.memory",
    "oneloop.run.end",
    "oneloop.tools.plan.out_of_memory",
    "oneloop.tools.plan.largest_samples",
    "oneloop.tools.plan.micro_batch",
)


class Heavy(Ragged):
    """Run out of memory above a micro-batch size, which may differ between ranks."""

    def __init__(self, fits: int = 4, fits_on_rank_1: int = 4) -> None:
        super().__init__()
        self.fits = fits_on_rank_1 if os.environ.get("HEAVY_RANK") == "1" else fits

    def loss(self, model, batch):
        if model.training and len(batch["input"]) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return super().loss(model, batch)


def heavy(argv: list[str]) -> None:
    """Train; child processes read from HEAVY_RANK for which rank they search."""
    os.environ["HEAVY_RANK"] = os.environ.get("RANK", "0")
    train(argv)


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6, 8, 59, 60, 100])
def test_the_threshold_is_found(limit):
    tried = []
    candidates = [micro for micro in range(1, 61) if 60 % micro == 0]

    def seconds(micro: int) -> float:
        tried.append(micro)
        return 1.0 / micro if micro <= limit else inf

    assert search(candidates, seconds) == max(micro for micro in candidates if micro <= limit)
    assert len(tried) == len(set(tried)) <= 5
    if limit == 100:
        assert tried == [60]


def test_fastest_is_the_quickest_that_fits():
    seconds = {1: 4.0, 2: 2.0, 4: 1.0, 8: 1.5, 16: inf}
    assert search(list(seconds), seconds.__getitem__, fastest=True) == 4
    with pytest.raises(ValueError, match="not even a micro-batch of 1"):
        search(list(seconds), lambda micro: inf)


def test_what_is_a_lack_of_memory():
    assert is_out_of_memory(torch.OutOfMemoryError("x")) and is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as huge:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(huge.value) and not is_out_of_memory(RuntimeError("shape mismatch"))


def test_memory_outside_of_the_allocator_has_its_own_advice():
    # The last line of what torch raises if cudaHostAlloc fails, also in its thread for pinning.
    pinning = RuntimeError(
        "Caught AcceleratorError in pin memory thread.\nCUDA error: out of memory"
    )
    assert is_out_of_memory(pinning)
    rank = SimpleNamespace(device=torch.device("cuda", 1))
    for error in (pinning, MemoryError()):
        advice = explained(None, rank, Path("no run"), error)
        assert "if the memory of the host is short, use --machine.pinned false" in advice
        assert "batch.micro" not in advice and "fsdp2" not in advice


WORDS = [
    "--batch.size",
    "16",
    "--duration",
    "6",
    "--track",
    "none",
    "--eval.every",
    "0",
    "--save.every",
    "0",
]


@pytest.mark.parametrize(
    ("ranks", "config", "second", "found"),
    [
        pytest.param(1, "single", 4, 4, marks=pytest.mark.slow),
        pytest.param(2, "ddp", 2, 2, marks=pytest.mark.slow),
        pytest.param(2, "fsdp2", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_the_run_is_that_of_a_fixed_micro_batch(tmp_path, ranks, config, second, found):
    (tmp_path / "r.yaml").write_text(
        f"task: {{name: test_micro_batch.Heavy, fits: 4, fits_on_rank_1: {second}}}\n"
    )
    variables = {"ONELOOP_CACHE": str(tmp_path / "cache")}
    auto = ["r.yaml", *WORDS, "--batch.micro", "auto", "--run.dir"]
    world = run(
        heavy, [*auto, "auto"], ranks=ranks, config=config, folder=tmp_path, variables=variables
    )
    world.ok()
    assert (
        f"batch.micro auto: {found} fits" in world.output
        and f"batch.micro auto: {2 * found} does not fit" in world.output
    )
    run(
        heavy,
        ["r.yaml", *WORDS, "--batch.micro", str(found), "--run.dir", "fixed"],
        ranks=ranks,
        config=config,
        folder=tmp_path,
        variables=variables,
    ).ok()
    weights = [
        load_file(tmp_path / name / "final" / "model.safetensors") for name in ("auto", "fixed")
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
    if config == "single":
        again = run(heavy, [*auto, "again"], folder=tmp_path, variables=variables)
        again.ok()
        assert (
            "batch.micro auto: 4 (from an earlier search on this machine" in again.output
            and "does not fit" not in again.output
        )


class Recorded(Heavy):
    """Write the size of each training micro-batch to a file of its rank, but not of trials."""

    def loss(self, model, batch):
        if model.training and multiprocessing.parent_process() is None:
            with Path(f"sizes-{os.environ['RANK']}").open("a") as file:
                file.write(f"{len(batch['input'])}\n")
        return super().loss(model, batch)


LAUNCHERS = {
    "oneloop": ["oneloop", "launch"],
    "accelerate": ["accelerate.commands.accelerate_cli", "launch"],
}


@pytest.mark.slow
@pytest.mark.parametrize("config", ["fsdp2", "ddp"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_search_ends_under_a_launcher_with_one_size_for_all_ranks(tmp_path, launcher, config):
    (tmp_path / "r.yaml").write_text("task: {name: test_micro_batch.Recorded, fits: 4}\n")
    program = [] if launcher == "oneloop" else ["-m", "oneloop.train"]
    words = [*LAUNCHERS[launcher], "--config_file", str(CONFIGS / f"{config}.yaml"), *program]
    path = [str(HERE), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    found = subprocess.run(
        [sys.executable, "-m", *words, "r.yaml", *WORDS, "--batch.micro", "auto"],
        cwd=tmp_path,
        env={
            **os.environ,
            "ONELOOP_CACHE": str(tmp_path / "cache"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path),
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "batch.micro auto: 8 does not fit" in found.stdout
    assert "batch 16 = 2 ranks x 2 micro-batches x 4" in found.stdout
    trained = [(tmp_path / f"sizes-{rank}").read_text().split() for rank in range(2)]
    assert [sizes[-12:] for sizes in trained] == [["4"] * 12] * 2  # 6 steps of 2 micro-batches


def as_under_an_agent() -> tuple[str | None, float]:
    """Connect the trial processes of two ranks that an agent has started.

    The agent holds the store at its own port only. Return the agent's variable in the trial
    process, and the sum over the ranks of two collectives.
    """
    from oneloop.launch.processes import start
    from oneloop.tools.plan.micro_batch import connect_at

    first = start()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    connect_at(first.from_main(get_free_port()))
    dist.destroy_process_group()
    PartialState._reset_state()

    start()
    shared = torch.ones(())
    dist.all_reduce(shared)
    group = dist.new_group(backend="gloo")
    dist.all_reduce(shared, group=group)
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE"), shared.item()


def test_trial_processes_connect_without_the_agents_store(tmp_path):
    found = run(as_under_an_agent, ranks=2, config="fsdp2", folder=tmp_path, timeout=120).ok()
    assert found == [(None, 4.0)] * 2


@pytest.mark.slow
def test_nothing_fits_and_a_bug_is_not_a_lack_of_memory(tmp_path):
    (tmp_path / "r.yaml").write_text("task: {name: test_micro_batch.Heavy, fits: 0}\n")
    variables = {"ONELOOP_CACHE": str(tmp_path / "cache")}
    world = run(
        heavy, ["r.yaml", *WORDS, "--batch.micro", "auto"], folder=tmp_path, variables=variables
    )
    assert (
        world.codes == [2]
        and "not even a micro-batch of 1 fits into memory; set machine.recompute full"
        in world.output
    )


def test_out_of_memory_in_a_run_states_what_to_change(tmp_path):
    (tmp_path / "r.yaml").write_text("task: {name: test_micro_batch.Heavy, fits: 4}\n")
    world = run(heavy, ["r.yaml", *WORDS, "--batch.micro", "8", "--run.dir", "a"], folder=tmp_path)
    assert world.codes == [1]
    reason = json.loads((tmp_path / "a" / "summary.json").read_text())["exit_reason"]
    assert (
        "out of memory on cpu with a micro-batch of 8; --batch.micro 4 (now 8; the result "
        "stays the same)" in reason
    )
    assert "fsdp2.yaml" in reason and "GiB" in reason
