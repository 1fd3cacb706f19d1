"""Which rank hangs: the rules alone; and slow work in every phase, which is no hang."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.distributed as dist

from oneloop.basics import heartbeats
from oneloop.basics.heartbeats import EVALUATION, LOADING, SET_UP, TRAINING, Beats
from oneloop.supervise import hangs, pipe
from oneloop.supervise.crash_report import Cause, describe_exit
from oneloop.supervise.hangs import RankStatus, Watch, describe_hang, hung_ranks
from slow_disk import RATE, UPLOAD_RATE
from slow_runs import FROZEN, slow_disk
from worlds import run

pytestmark = pytest.mark.covers(
    "oneloop.basics.heartbeats",
    "oneloop.supervise.crash_report",
    "oneloop.supervise.hangs",
    "oneloop.supervise.pipe",
)


def status(rank: int, **about) -> RankStatus:
    return RankStatus(
        rank,
        **({"phase": TRAINING, "since": 11.0, "limit": 10.0, "where": "task.py:3 in loss"} | about),
    )


CASES = [
    ([status(0), status(1, since=9.0)], []),  # one makes progress: the other may wait for it
    ([status(0, waits=True), status(1)], [1]),
    ([status(0, waits=True), status(1, waits=True, silent=6.0)], [1]),
    ([status(0), status(1, silent=6.0)], [1]),  # of two that do not wait, the silent one
    ([status(0, waits=True, count=9), status(1, waits=True, count=8)], [1]),  # the furthest behind
    (
        [status(0, waits=True, count=9), status(1, waits=True, count=9)],
        [0, 1],
    ),  # they wait for each other
    ([status(0, held=True), status(1)], []),  # a debugger holds one
    ([status(0, silent=11.0, stopped=True)], []),  # the user stopped a run of one process
    ([status(0, waits=True), status(1, silent=11.0, stopped=True)], [1]),
    ([status(0, limit=600.0)], []),
    ([], []),
]
TEXT = "sample 17 of the train set"


@pytest.mark.parametrize(("statuses", "expected"), CASES)
def test_who_hangs(statuses, expected):
    assert [one.rank for one in hung_ranks(statuses)] == expected


def test_what_is_reported():
    assert describe_hang(status(1, median=0.5)) == (
        "rank 1 hangs in training for 11 s (median step: 0.5 s): it is at task.py:3 in loss"
    )
    assert describe_hang(status(1, stopped=True, silent=9.0)).endswith("it is stopped (SIGSTOP)")
    assert describe_hang(status(1, silent=9.0)).endswith(
        "it does not respond, last seen at task.py:3 in loss"
    )
    assert describe_hang(status(1, waits=True)).endswith(
        "it waits for other ranks at task.py:3 in loss"
    )
    reads = {"waits": True, "reads": TEXT}
    assert describe_hang(status(1, **reads)) == f"rank 1 waits for data for 11 s: {TEXT}"
    assert "rank 1 hangs in training" in describe_hang(status(1, **reads, silent=9.0))
    assert describe_exit(2, -9, stopped_by="SIGTERM").startswith(
        "rank 2 was killed by SIGKILL, after a stop request by SIG"
    )


def test_slow_storage_has_ten_minutes(monkeypatch):
    now, said = [0.0], []
    monkeypatch.setattr(hangs.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(hangs, "say", said.append)
    watch = Watch(2)

    def look(since: float, rank: int = 1, **about) -> Cause | None:
        now[0] = since
        for one in range(2):
            more = about if one == rank else {"waits": True}
            watch.update(status(one, since=since, **more))
        return watch.look(lambda _: None)

    assert look(12.0, reads=TEXT) is None and len(said) == 1
    assert f"rank 1 waits for data for 12 s: {TEXT}; the run ends in 588 s" in said[0]
    assert look(599.0, reads=TEXT) is None
    assert "rank 1 waits for data" in look(601.0, reads=TEXT).words
    assert "rank 0 hangs" in look(300.0, rank=0).words  # another rank, which reads nothing


def test_bytes_are_progress_except_of_steps(monkeypatch, tmp_path):
    """A rank may verify, fetch or write for hours."""
    now = [0.0]
    monkeypatch.setattr(heartbeats, "monotonic", lambda: now[0])
    seen = Beats()
    for phase, last in ((LOADING, 7.0), (TRAINING, 0.0)):
        now[0] = 0.0
        seen.enter(phase)
        now[0] = 7.0
        seen.moved()
        assert seen.last == last
    before = pipe.bytes_moved()
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    (tmp_path / "file").read_bytes()
    assert 2 << 20 <= pipe.bytes_moved() - before < 3 << 20


def test_a_limit_is_learned_from_what_is_usual(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(heartbeats, "monotonic", lambda: now[0])
    seen = Beats()
    assert seen.limit(1.0) == 1800 and seen.now_in == SET_UP
    seen.enter(TRAINING)
    for seconds in (60.0, 5.0, 2.0, 2.0):  # the first steps compile
        now[0] += seconds
        seen.beat()
        assert seen.limit(1.0) == 600 and seen.limit(3.0) == 1800
    now[0] += 8.0
    seen.beat()
    assert seen.usual() == (2.0, 8.0) and seen.limit(1.0) == 8 + 9 and seen.limit(0.5) == 8 + 4.5
    with seen.phase(EVALUATION):
        assert seen.limit(1.0) == 600
        now[0] += 100.0
    assert seen.usual() == (2.0, 8.0) and seen.last == now[0]  # an evaluation is not a step
    for _ in range(200):
        now[0] += 4.0
        seen.beat()
    assert seen.limit(1.0) == 4 + 12  # three medians are more than nine seconds


# --- slow work, with all limits divided by 5 to 20
# --------------------------------------------------------------------------------------------------

WORDS = ["slow.yaml", "--run.dir", "run"]
RECIPE = (
    "task: slow_runs.Slow\nbatch: {size: 8}\nduration: 60\nlog: {every: 10}\neval: {every: 30}\n"
    "save: {every: 20}\ntrack: []\n"
)
SHORT = 1.0  # seconds: more than the limit of a short step
SAVE_RATE = 12e6  # bytes per second; a checkpoint of width 1024 has 25 MB, and the limit is 1 s
LAYOUTS = [("single", 1), ("ddp", 2), ("fsdp2", 2)]
PLACES = {  # of slow work, and further keys
    "first step": [],
    "sample": [],
    "collate": [],
    "worker": ["--machine.workers", "1", "--task.place", "sample"],
    "metric": [],
    "compute": [],
    "evaluation": [],
    "state_dict": [],
    "save": ["--task.width", "1024"],
    "frozen base": [],
    "final": [],
    "upload": ["--save.mirror", "mirror"],
}
GENERATION = ["--eval.generate", "10", "--eval.micro", "1"]
READ = {  # of these, the sample is named
    "sample": ": it reads sample ",
    "worker": ": data worker 0 reads sample ",
    "collate": ": it collates a batch",
}
DEFAULT = {("evaluation", "single")}
CELLS = [
    pytest.param(
        place,
        config,
        ranks,
        marks=() if (place, config) in DEFAULT else pytest.mark.slow,
        id=f"{place}-{config}",
    )
    for place in PLACES
    for config, ranks in LAYOUTS
]


def slow_run(
    folder,
    place,
    config,
    ranks,
    seconds: float,
    *more: str,
    patience: float = 0.05,
    timeout: float = 120.0,
):
    (folder / "slow.yaml").write_text(RECIPE)
    words = [*WORDS, "--task.place", place, "--task.seconds", str(seconds)]
    words += ["--machine.patience", str(patience), *more]
    # only rank 0 writes final/
    words += ["--task.rank", str(0 if place == "final" else ranks - 1), *PLACES.get(place, [])]
    if place == "generation":
        words += GENERATION
    if place == "upload":
        words[words.index("mirror")] = f"file://{folder}/mirror"
    rates = {"frozen base": 4 * FROZEN / seconds, "save": SAVE_RATE}
    variables = {RATE: str(rates.get(place, 1e9))}
    if place == "upload":
        variables[UPLOAD_RATE] = str(4 * FROZEN / (3 * SHORT))
    return run(
        slow_disk,
        words,
        variables=variables,
        config=config,
        ranks=ranks,
        folder=folder,
        watch=True,
        timeout=timeout,
    )


@pytest.mark.parametrize(("place", "config", "ranks"), CELLS)
def test_slow_work_is_no_hang(tmp_path, place, config, ranks):
    # What is read must be in a report before the limit, and reports come twice a second.
    patience, seconds = (0.2, 6 * SHORT) if place in READ else (0.1, 4 * SHORT)
    if (place, config) in DEFAULT:  # runs beside others, which may stop it for a second
        patience, seconds = 0.4, 9 * SHORT
    world = slow_run(tmp_path, place, config, ranks, seconds, patience=patience)
    world.ok()
    # Reports come twice a second at any patience: one without a stack is too old.
    hung = [line for line in world.output.splitlines() if "hangs" in line]
    assert all("no stack is known" in line for line in hung), world.output
    assert "killing it" not in world.output
    assert ("waits for data" in world.output) == (place in READ), world.output
    assert READ.get(place, "") in world.output
    assert (tmp_path / "once").exists() or place in ("save", "frozen base", "upload")


STOPS = [
    "first step",
    "sample",
    "collate",
    "worker",
    "metric",
    "compute",
    "evaluation",
    "state_dict",
    "exit handler",
]


@pytest.mark.parametrize(
    ("place", "config", "ranks"),
    [
        pytest.param(
            place,
            *layout,
            marks=() if (place, layout[0]) == ("compute", "single") else pytest.mark.slow,
        )
        for place in STOPS
        for layout in LAYOUTS
    ],
)
def test_a_stop_shortens_no_limit(tmp_path, place, config, ranks):
    """The stop is requested before slow work, which takes longer than a hang of a step could."""
    words = ["--task.stops", "true"]
    world = slow_run(tmp_path, place, config, ranks, 9 * SHORT, *words, patience=0.4)
    code, reason = (0, "done") if place == "exit handler" else (75, "stopped by")
    assert world.codes == [code] * ranks, world.output
    assert "hangs" not in world.output and "killing it" not in world.output, world.output
    ended = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert ended["exit_code"] == code and ended["exit_reason"].startswith(reason)
    assert (tmp_path / "run" / "checkpoints" / f"step-{ended['step']:08d}").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("config", "ranks"), LAYOUTS)
def test_a_long_text_is_no_hang(tmp_path, config, ranks):
    """The last text takes 8 s, after nine short ones; each of its forwards takes 1 s."""
    world = slow_run(tmp_path, "generation", config, ranks, 8.0, patience=0.3)
    world.ok()
    assert "hangs" not in world.output, world.output


def _hours() -> list[float]:
    """Return the time-outs of both groups at the start, in hours."""
    from oneloop.launch.processes import start

    started = start()
    hours = []
    for group in (dist.group.WORLD, started.host):
        seconds = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        hours.append(seconds / 3600)
    return hours


def test_one_rank_has_two_hours_for_its_set_up():
    assert run(_hours, ranks=2).ok() == [[2.0, 2.0]] * 2


BEYOND = {  # what is named if it never ends, and after how many seconds
    "first step": (r"hangs in training \(new epoch\)", 30),
    "sample": ("waits for data", 30),
    "collate": ("waits for data", 30),
    "worker": ("waits for data", 30),
    "step": (r"hangs in training( \(new epoch\))?", 0),
    "metric": ("hangs in evaluation", 30),
    "compute": (r"hangs in evaluation \(metrics\)", 30),
    "evaluation": ("hangs in evaluation", 30),
    "state_dict": ("hangs in saving", 30),
    "frozen base": ("hangs in saving", 30),
    "final": ("hangs in ending", 90),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", BEYOND)
@pytest.mark.parametrize(("config", "ranks"), LAYOUTS)
def test_work_without_end_is_named(tmp_path, place, config, ranks):
    words, seconds = BEYOND[place]
    world = slow_run(tmp_path, place, config, ranks, 3600.0, timeout=240.0)
    rank = 0 if place in ("final", "frozen base") else ranks - 1
    others = 0 if place == "final" else 1  # they have ended
    assert world.codes == [1 if one == rank else others for one in range(ranks)], world.output
    ended = json.loads((tmp_path / "run" / "summary.json").read_text())["exit_reason"]
    found = re.match(rf"error: rank {rank} {words} for (?P<seconds>\d+) s", ended)
    assert found and seconds <= int(found["seconds"]) <= seconds + 10, ended
    assert READ.get(place, "") in ended
    assert "slow_runs.py" in ended or place in READ or place == "frozen base", ended
