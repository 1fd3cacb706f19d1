"""Kill a real run at random moments, restart it with the same command until it finishes, and
compare.

    python tests/helpers/chaos.py --recipe digits --kills 100 --config_file
    accelerate_configs/fsdp2.yaml

Imports once and forks. Most kills hit saving, renaming, pruning and loading; the targets are
launchers, single ranks and writing processes. The printed seed decides all random choices.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from functools import wraps
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
)

PHASES = ("writing", "background writing", "renaming", "pruning", "loading")
TRACE = "CHAOS_TRACE"
SYNC = "CHAOS_SYNC"  # variable: write in the training process


def mark(phase: str, what: str) -> None:
    with open(os.environ[TRACE], "a") as file:
        file.write(f"{os.getpid()} {what} {phase}\n")


def traced(phase: str, function):
    """Return the function with its begin and end recorded, and a short pause at both for a kill."""

    @wraps(function)
    def inner(*args, **kwargs):
        mark(phase, "begin")
        time.sleep(0.02)
        try:
            return function(*args, **kwargs)
        finally:
            time.sleep(0.01)
            mark(phase, "end")

    return inner


def trace_writing(phase: str) -> None:
    """Record what a checkpoint writer does, in this process."""
    from oneloop.checkpoint import store, writer

    writer.write_tensors = traced(phase, writer.write_tensors)
    store.Draft.seal = traced("renaming", store.Draft.seal)
    store.Store.prune = traced("pruning", store.Store.prune)
    flush = store.flush
    # between manifest, rename and its flush
    store.flush = lambda folder: (flush(folder), time.sleep(0.01))


def rank_of(
    parent: int,
    rank: int,
    ranks: int,
    port: int,
    words: list[str],
    environment: dict[str, str],
    output: Path,
) -> None:
    """Train on one rank; never return."""
    from oneloop.basics.launcher import die_with

    die_with(parent)
    os.environ.update(environment)
    if ranks > 1:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(ranks),
            LOCAL_WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            OMP_NUM_THREADS="1",
        )
    handle = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1), os.dup2(handle, 2)
    import torch

    from oneloop import train
    from oneloop.checkpoint import background_save, checkpoints

    torch.set_num_threads(1)
    trace_writing("writing")
    background_save.WRITER = "chaos_writer"
    background_save.MOST_FAILURES = 100
    if environment.get(SYNC):
        from sync_saves import write_in_the_trainer

        write_in_the_trainer()
    checkpoints.Checkpoints.load = traced("loading", checkpoints.Checkpoints.load)
    code = 1
    try:
        train.main(words)
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os._exit(code)


def launcher(ranks: int, words: list[str], environment: dict[str, str], output: Path) -> None:
    """Start the ranks and end all when the first one fails, like torchrun; never return."""
    from worlds import free_port

    port, parent = free_port(), os.getpid()
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            rank_of(parent, rank, ranks, port, words, environment, output)
        pids.append(pid)
    code = 0
    while pids and not code:
        pid, status = os.wait()
        pids.remove(pid)
        code = os.waitstatus_to_exitcode(status)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(0.2 if pids else 0)
    os._exit(abs(code))


def family(pid: int) -> set[int]:
    import psutil

    try:
        return {pid} | {child.pid for child in psutil.Process(pid).children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def gone(pids: set[int], within: float) -> bool:
    """Return whether all of them have ended within this many seconds."""
    import psutil

    limit = time.monotonic() + within
    while time.monotonic() < limit:
        alive = [
            p
            for p in pids
            if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE
        ]
        if not alive:
            return True
        time.sleep(0.02)
    return False


def open_phases(trace: Path, pids: set[int]) -> list[str]:
    """Return the phases in which these processes were."""
    inside: Counter[tuple[int, str]] = Counter()
    for line in trace.read_text().splitlines() if trace.exists() else ():
        pid, what, phase = line.split(maxsplit=2)
        inside[int(pid), phase] += 1 if what == "begin" else -1
    return [phase for (pid, phase), depth in inside.items() if depth > 0 and pid in pids]


class Chaos:
    """Runs of one recipe under one configuration, killed until ``kills`` is reached."""

    def __init__(self, recipe: str, config: str, ranks: int, seed: int, words: list[str]) -> None:
        from worlds import environment

        self.recipe, self.ranks, self.words = recipe, ranks, words
        self.environment = environment(config)
        self.chance = random.Random(seed)
        self.hits: Counter[str] = Counter()
        self.victims: Counter[str] = Counter()
        self.starts = 0

    @property
    def fewest(self) -> int:
        """Return the number of kills in the phase that was hit least."""
        return min(self.hits[phase] for phase in PHASES)

    def start(self, folder: Path, sync: str = "") -> int:
        """Fork one start of the run, which writes in the training process or in a separate one."""
        self.starts += 1
        os.environ[TRACE] = str(folder.parent / "trace")
        words = [
            self.recipe,
            "--run.dir",
            str(folder),
            "--track",
            "none",
            *self.words,
        ]
        pid = os.fork()
        if pid == 0:
            environment = {**self.environment, SYNC: sync}
            launcher(self.ranks, words, environment, folder.parent / "output.txt")
        return pid

    def left_alone(self, folder: Path) -> None:
        pid = self.start(folder)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, (
            folder.parent / "output.txt"
        ).read_text()

    def kill_one(self, folder: Path) -> bool | None:
        """Start and kill once. Return True if killed, None if the run finished before the kill."""
        trace = folder.parent / "trace"
        trace.unlink(missing_ok=True)
        there = any((folder / "checkpoints").glob("step-*"))
        phases = PHASES if there else PHASES[:-1]  # the first start has nothing to load
        phase_hit = min(phases, key=lambda phase: self.hits[phase] + self.chance.random() * 3)
        if self.chance.random() < 0.15:
            phase_hit = "any"
        sync = {"writing": "true", "background writing": ""}.get(
            phase_hit, self.chance.choice(["true", ""])
        )
        turn = self.chance.randrange(1 if phase_hit == "loading" else 3)
        delay = self.chance.random() * (1.5 if phase_hit == "any" else 0.025)
        pid = self.start(folder, sync)
        seen = 0
        began = time.monotonic()
        while phase_hit != "any" and seen <= turn:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return None
            seen = trace.read_text().count(f"begin {phase_hit}\n") if trace.exists() else 0
            if time.monotonic() - began > 4:
                # this start has no such phase (nothing to load, or a different way of writing)
                break
            time.sleep(0.002)
        time.sleep(delay)
        if os.waitpid(pid, os.WNOHANG)[0]:
            return None
        everyone = family(pid)
        trainers = [child for child in family(pid) - {pid} if _parent(child) == pid]
        writers = list(everyone - set(trainers) - {pid})
        kinds = {"launcher": [pid], "rank": trainers, "writer": writers}
        kind = self.chance.choice([name for name, some in kinds.items() if some])
        victim = self.chance.choice(kinds[kind])
        hit = open_phases(trace, everyone if kind == "launcher" else family(victim))
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            return None
        self.victims[kind] += 1
        self.hits.update(set(hit) or {"training"})
        if kind == "writer":  # the run reports it and continues
            os.waitpid(pid, 0)
            return True
        if kind != "launcher":
            os.waitpid(pid, 0)
        assert gone(everyone, 10), f"orphans 10 s after the {kind} was killed"
        if kind == "launcher":
            os.waitpid(pid, 0)
        return True


def _parent(pid: int) -> int:
    import psutil

    try:
        return psutil.Process(pid).ppid()
    except psutil.NoSuchProcess:
        return -1


def outcome(folder: Path) -> tuple[bytes, list[tuple]]:
    """Return the final weights and EMA weights, and every logged metric that depends on the recipe
    only."""
    from worlds import timeless_log

    metrics = [tuple(sorted(line.items())) for line in timeless_log(folder, saves=True)]
    return b"".join(
        path.read_bytes() for path in sorted((folder / "final").glob("*.safetensors"))
    ), metrics


def differences(found: tuple[bytes, list[tuple]], expected: tuple[bytes, list[tuple]]) -> str:
    """Return what differs between two outcomes: the weights, and the first lines of metrics."""
    weights = "equal" if found[0] == expected[0] else "other"
    lines = [f"{weights} weights; {len(found[1])} lines of metrics, {len(expected[1])} expected"]
    pairs = itertools.zip_longest(found[1], expected[1], fillvalue=())
    for line, other in [pair for pair in pairs if pair[0] != pair[1]][:3]:
        lines += [f"  found    {sorted(set(line) - set(other))}"]
        lines += [f"  expected {sorted(set(other) - set(line))}"]
    return "\n".join(lines)


def chaos(
    recipe: str,
    config: str,
    ranks: int,
    kills: int,
    seed: int,
    words: list[str],
    say=print,
    each: int = 0,
) -> Chaos:
    """Kill ``kills`` times, over as many runs as needed; every run must end like the undisturbed
    one.

    Args:
        each: kills in each phase. On a busy machine some come too late for their phase: up to twice
            as many follow.

    Raises:
        AssertionError: a run did not resume, left an orphan, or differs.
    """
    import warm  # noqa: F401

    made = Chaos(recipe, config, ranks, seed, words)
    done = runs = 0
    with tempfile.TemporaryDirectory() as scratch:
        alone = Path(scratch, "alone", "run")
        alone.parent.mkdir()
        made.left_alone(alone)
        expected = outcome(alone)
        while done < kills or (done < 2 * kills and made.fewest < each):
            folder = Path(scratch, "killed", "run")
            shutil.rmtree(folder.parent, ignore_errors=True)
            folder.parent.mkdir()
            for _ in range(made.chance.randrange(6, 14)):
                if (done < kills or made.fewest < each) and made.kill_one(folder):
                    done += 1
            made.left_alone(folder)
            found = outcome(folder)
            assert found == expected, (
                f"{differences(found, expected)}\n{(folder.parent / 'output.txt').read_text()}"
            )
            runs += 1
            say(
                f"{done}/{kills} kills, {runs} runs the same; hit {dict(made.hits)}; victims "
                f"{dict(made.victims)}"
            )
    return made


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--recipe", default="digits")
    asked.add_argument("--kills", type=int, default=100)
    asked.add_argument("--config_file", default="accelerate_configs/single.yaml")
    asked.add_argument("--seed", type=int, default=0)
    given, words = asked.parse_known_args()
    config = Path(given.config_file).stem
    ranks = {"single": 1, "hsdp": 4}.get(config, 2)
    print(f"seed {given.seed}, {config}, {ranks} ranks", flush=True)
    began = time.monotonic()
    each = 10 if given.kills >= 100 else 0
    made = chaos(
        given.recipe,
        config,
        ranks,
        given.kills,
        given.seed,
        words or list(WORDS),
        say=lambda text: print(text, flush=True),
        each=each,
    )
    print(
        f"{given.kills} of {given.kills} kills resumed, {made.starts} starts, "
        f"{time.monotonic() - began:.0f} s"
    )
    assert made.fewest >= each, f"a phase was hit less than {each} times: {made.hits}"


WORDS = (
    "--duration",
    "40",
    "--save.every",
    "2",
    "--log.every",
    "3",
    "--eval.every",
    "10",
    "--batch.size",
    "16",
    "--task.width",
    "8",
    "--ema.half_life",
    "1ep",
    "--guard.nonfinite",
    "skip",
)

if __name__ == "__main__":
    main()
