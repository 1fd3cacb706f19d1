"""When a run ends early, it names the cause, all processes exit, and the same command resumes the
run."""

from __future__ import annotations

import html
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from endings import LAUNCHERS, RECIPE, faulty, summary, supervisors
from worlds import CONFIGS, run, train

pytestmark = pytest.mark.covers(
    "oneloop.basics.exit_codes",
    "oneloop.checkpoint.background_save",
    "oneloop.data.data_workers",
    "oneloop.data.seeded_samples",
    "oneloop.data.step_batches",
    "oneloop.launch.accelerate_launch",
    "oneloop.launch.launched",
    "oneloop.launch.signals",
    "oneloop.run.folder",
    "oneloop.supervise.crash_report",
    "oneloop.supervise.hangs",
    "oneloop.supervise.ranks",
    "oneloop.supervise.supervisor",
    "oneloop.supervise.worker",
    "oneloop.train",
)

LAYOUTS = [("single", 1), ("ddp", 2), ("fsdp2", 2)]
TWENTY = pytest.mark.parametrize(
    "repeat", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 21))]
)


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "f.yaml").write_text(RECIPE)
    return tmp_path


def resumes(folder: Path, *words: str, config: str = "single", ranks: int = 1) -> None:
    """The same command resumes and completes the run."""
    world = faulty(folder, *words, config=config, ranks=ranks)
    world.ok()
    assert "resuming from" in world.output and summary(folder)["exit_reason"] == "done"


# --- deaths
# --------------------------------------------------------------------------------------------------

OS_EXIT = "exited with code 5 and no error message: some code called os._exit"
DEATHS = [
    ("raise:ValueError", "loss", "ValueError: the fault"),
    ("raise:ValueError", "sample", "of the train set cannot be loaded: ValueError: the fault"),
    (
        "raise:StopIteration",
        "sample",
        "of the train set cannot be loaded: StopIteration: the fault",
    ),
    ("raise:MemoryError", "loss", "out of memory on cpu"),
    ("exit:3", "loss", "RuntimeError: sys.exit(3) was called"),
    ("os_exit:5", "loss", OS_EXIT),
    (
        "kill:SIGKILL",
        "loss",
        "was killed by SIGKILL (the kernel does this if memory runs out, and so do schedulers)",
    ),
    ("kill:SIGSEGV", "loss", "was killed by SIGSEGV"),
]
DEFAULT = {("single", 2), ("ddp", 6)}


@pytest.mark.parametrize(
    ("config", "ranks", "rank", "fault", "where", "expected_text"),
    [
        pytest.param(
            config,
            ranks,
            ranks - 1,
            *death,
            marks=() if (config, number) in DEFAULT else pytest.mark.slow,
            id=f"{config}-{death[0]}-{death[1]}",
        )
        for config, ranks in LAYOUTS
        for number, death in enumerate(DEATHS)
    ],
)
@TWENTY
def test_a_death_is_named_and_all_go(
    folder, config, ranks, rank, fault, where, expected_text, repeat
):
    words = [
        "--task.fault",
        fault,
        "--task.where",
        where,
        "--task.rank",
        str(rank),
        "--task.at",
        "170" if where == "sample" else "45",  # a step has several samples
    ]
    words += ["--task.once", str(folder / "once"), "--duration", "60"]
    world = faulty(folder, *words, config=config, ranks=ranks)
    assert world.codes == [1] * ranks, world.output
    ended = summary(folder)
    assert ended["exit_code"] == 1 and expected_text in ended["exit_reason"], ended
    assert ranks == 1 or f"rank {rank}" in ended["exit_reason"]
    assert ended["exit_reason"] in html.unescape((folder / "run" / "report.html").read_text())
    if fault.startswith("raise"):
        # of the cause, and its consequence
        assert world.output.count("Traceback (most recent call last)") in (1, 2)
        assert world.output.count("the fault") >= 1 and "faulty.py" in world.output
        assert "Connection" not in world.output
    resumes(folder, *words, config=config, ranks=ranks)


def test_a_data_worker_that_goes_is_named(folder):
    words = [
        "--machine.workers",
        "1",
        "--task.fault",
        "os_exit:4",
        "--task.where",
        "sample",
        "--task.at",
        "100",
    ]
    world = faulty(folder, *words)
    assert world.codes == [1] and (folder / "run" / "summary.json").exists(), world.output
    assert "DataLoader worker" in summary(folder)["exit_reason"]


class Dying:
    """A data set whose worker exits at its third sample."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 2:
            os._exit(4)
        return index


def live_iterators() -> list[int]:
    """Count the live worker iterators before and after ``end_workers`` handles the error."""
    import gc

    import torch
    from torch.utils.data._utils import signal_handling
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    from oneloop.data.data_workers import end_workers
    from oneloop.data.seeded_samples import SeededSamples
    from oneloop.data.step_batches import CollateWithWeight, loader

    collate = CollateWithWeight(
        lambda samples: {"x": torch.tensor(samples)}, lambda batch: torch.tensor(1.0)
    )
    places = [[(0, index)] for index in range(8)]
    counts = []
    # else torch raises in any code when the worker's exit is reported
    signal_handling._SIGCHLD_handler_set = True
    try:
        try:
            for _ in loader(
                SeededSamples(Dying(), seed=0),
                collate,
                places,
                workers=1,
                device=torch.device("cpu"),
            ):
                pass
        except RuntimeError as error:
            raise ValueError("what was made of it") from error
    except ValueError as error:
        for end in (lambda _: None, end_workers):
            end(error)
            counts.append(
                sum(isinstance(one, _MultiProcessingDataLoaderIter) for one in gc.get_objects())
            )
    return counts


def test_a_worker_that_has_gone_is_let_go_behind_another_error(folder):
    """A live iterator would make torch raise when the worker's exit is reported, at any later point
    of the run."""
    assert run(live_iterators).ok() == [[1, 0]]


def test_a_sample_in_a_worker_is_named(folder):
    words = [
        "--machine.workers",
        "1",
        "--task.fault",
        "raise:ValueError",
        "--task.where",
        "sample",
        "--task.at",
        "100",
    ]
    world = faulty(folder, *words)
    assert world.codes == [1]
    assert (
        "of the train set cannot be loaded by data worker 0: ValueError: the fault"
        in summary(folder)["exit_reason"]
    )


@pytest.mark.slow
def test_data_workers_go_with_their_trainer(folder):
    words = [
        "--machine.workers",
        "1",
        "--task.fault",
        "sleep:600",
        "--task.where",
        "sample",
        "--task.at",
        "100",
    ]
    trainer = _started(folder, *words)
    deadline = time.monotonic() + 120
    while not (family := psutil.Process(trainer.pid).children(recursive=True)) or len(family) < 2:
        assert time.monotonic() < deadline and trainer.poll() is None
        time.sleep(0.1)
    time.sleep(0.5)
    family = psutil.Process(trainer.pid).children(recursive=True)
    family[0].kill()
    assert trainer.wait(120) == 1
    _, alive = psutil.wait_procs(family, 5)
    assert not alive


# --- hangs
# --------------------------------------------------------------------------------------------------

HANGS = [("kill:SIGSTOP", "loss"), ("loop", "loss"), ("read", "loss"), ("sleep:600", "loss")]


@pytest.mark.parametrize(
    ("config", "ranks", "fault", "where"),
    [
        pytest.param(
            config,
            ranks,
            *hang,
            marks=() if (config, number) == ("ddp", 2) else pytest.mark.slow,
        )
        for config, ranks in LAYOUTS
        for number, hang in enumerate(HANGS)
        if (config, number)
        != ("single", 0)  # a run of one process that the user stopped stays stopped
    ],
)
@TWENTY
def test_who_hangs_is_named_and_all_go(folder, config, ranks, fault, where, repeat):
    rank = ranks - 1
    words = [
        "--task.fault",
        fault,
        "--task.where",
        where,
        "--task.rank",
        str(rank),
        "--task.at",
        "45",
    ]
    words += ["--machine.patience", "0.3", "--task.once", str(folder / "once")]
    words += ["--duration", "60"]
    world = faulty(
        folder, *words, config=config, ranks=ranks, variables={"TORCH_FR_BUFFER_SIZE": "200"}
    )
    assert world.codes == [1] * ranks, world.output
    ended = summary(folder)
    assert f"rank {rank} hangs in training" in ended["exit_reason"], ended
    assert ("it is stopped (SIGSTOP)" if "STOP" in fault else "faulty.py") in ended["exit_reason"]
    for number in range(ranks):
        stacks = (folder / "run" / "stacks" / f"rank-{number:05d}.txt").read_text()
        assert "Thread 0x" in stacks and "train.py" in stacks, stacks
        assert (" in happens" in stacks) == (number == rank), stacks
    waiting = [
        number for number in range(ranks) if ranks > 1 and (number != rank or "STOP" not in fault)
    ]
    last = {
        number: _collectives(folder / "run" / "stacks" / f"rank-{number:05d}-collectives.json")
        for number in waiting
    }
    assert all("all_reduce" in name or "gather" in name for name, _ in last.values()), last
    resumes(folder, *words, config=config, ranks=ranks)


def _collectives(file: Path) -> tuple[str, int]:
    """Return the name of the last collective in torch's flight recorder, and the number of all."""
    entries = json.loads(file.read_text())["entries"]
    return entries[-1]["profiling_name"], len(entries)


@pytest.mark.slow
def test_a_hang_before_the_first_checkpoint_starts_over(folder):
    words = [
        "--task.fault",
        "loop",
        "--task.at",
        "40",
        "--task.once",
        str(folder / "once"),
        "--save.every",
        "1000",
    ]
    world = faulty(folder, *words, "--machine.patience", "0.3")
    assert world.codes == [1] and (folder / "run" / "stacks").exists(), world.output
    faulty(folder, *words).ok()
    assert summary(folder)["exit_reason"] == "done"


@pytest.mark.slow
def test_a_worker_that_hangs_shows_its_stack(folder):
    words = [
        "--machine.workers",
        "1",
        "--task.fault",
        "loop",
        "--task.where",
        "sample",
        "--task.at",
        "100",
    ]
    world = faulty(folder, *words, "--machine.patience", "0.05")
    assert world.codes == [1], world.output
    assert "rank 0 waits for data for 30 s" in summary(folder)["exit_reason"]
    assert "data worker 0 reads sample" in summary(folder)["exit_reason"]
    stacks = (folder / "run" / "stacks" / "rank-00000.txt").read_text()
    assert "which loads data" in stacks and "faulty.py" in stacks


def test_slow_steps_are_no_hang(folder):
    """A rank that continues is reported, and the run completes."""
    words = [
        "--task.fault",
        "sleep:5",
        "--task.rank",
        "1",
        "--task.at",
        "25",
        "--task.once",
        str(folder / "once"),
        # After the fault, two seconds of training: reports come twice a second.
        "--task.pause",
        "0.02",
        "--duration",
        "120",
    ]
    world = faulty(folder, *words, "--machine.patience", "0.4", config="ddp", ranks=2)
    world.ok()
    assert "rank 1 hangs in training" in world.output and "rank 1 continues" in world.output


def _with_a_stuck_writer(argv: list[str]) -> None:
    from oneloop.checkpoint import background_save

    background_save.WRITER = "stuck_writer"
    train(argv)


@pytest.mark.parametrize(
    ("config", "ranks"), [("single", 1), pytest.param("fsdp2", 2, marks=pytest.mark.slow)]
)
def test_a_stuck_save_does_not_hold_training(folder, config, ranks):
    words = ["f.yaml", "--machine.patience", "0.1", "--duration", "60", "--save.every", "20"]
    world = run(
        _with_a_stuck_writer,
        words,
        config=config,
        ranks=ranks,
        folder=folder,
        watch=True,
        variables={"STUCK": f"rank-0000{ranks - 1}"},
    )
    assert world.codes == [1] * ranks, world.output
    assert (
        f"the save of step 20 did not finish within 1 s (rank {ranks - 1}): its storage "
        "does not respond; continuing" in world.output
    )
    ended = summary(folder)["exit_reason"]
    assert "its storage does not respond" in ended
    assert ended.startswith("error: rank 1: SaveError" if ranks == 2 else "error: SaveError"), ended
    logged = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert max(line["step"] for line in logged if "train/loss" in line) == 60


# --- signals
# --------------------------------------------------------------------------------------------------


def _started(folder: Path, *words: str) -> subprocess.Popen:
    """Start ``python -m oneloop.train`` with the recipe in a new process."""
    command = [sys.executable, "-m", "oneloop.train", "f.yaml", *words]
    return subprocess.Popen(
        command, cwd=folder, env=_environment(), stderr=subprocess.PIPE, text=True
    )


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _until(true, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _spent(pid: int) -> float:
    """Return the CPU time of a process and its descendants in seconds."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(times.user + times.system for times in (process.cpu_times() for process in family))


def _handles_sigterm(pid: int) -> bool:
    """Return whether a process catches SIGTERM already; Python itself does not."""
    status = Path("/proc", str(pid), "status")
    if not status.exists():  # another system than Linux does not say
        return True
    caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "config", "name"),
    [
        ("accelerate", "single", "SIGTERM"),
        ("oneloop", "single", "SIGUSR1"),
        ("oneloop", "single", "SIGTERM"),
        ("oneloop", "ddp", "SIGTERM"),
        ("oneloop", "ddp", "SIGUSR1"),
        ("oneloop", "fsdp2", "SIGHUP"),
        ("accelerate", "ddp", "SIGTERM"),
        ("accelerate", "fsdp2", "SIGTERM"),
        ("accelerate", "single", "SIGKILL"),
        ("accelerate", "ddp", "SIGKILL"),
    ],
)
@pytest.mark.parametrize("repeat", range(1, 21))
def test_a_signal_to_the_launcher_saves(folder, launcher, config, name, repeat):
    words = ["--config_file", str(CONFIGS / f"{config}.yaml")]
    words += ["-m", "oneloop.train", "f.yaml"] if launcher == "accelerate" else ["f.yaml"]
    words += ["--task.pause", "0.02", "--duration", "20000"]
    process = subprocess.Popen([*LAUNCHERS[launcher], *words], cwd=folder, env=_environment())
    _until(lambda: (folder / "run" / "checkpoints" / "step-00000010").exists())
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(getattr(signal, name))
    code = process.wait(120)
    assert code == 75 if launcher == "oneloop" else code != 0
    _, alive = psutil.wait_procs(family, 15)
    assert not alive
    ended = summary(folder)
    assert ended["exit_code"] == 75 and "stopped" in ended["exit_reason"], ended


@pytest.mark.parametrize("after", [0.1, 0.7, pytest.param(2.0, marks=pytest.mark.slow)])
def test_a_signal_before_the_run_has_begun_leaves_nothing(folder, after):
    """``after`` is in seconds of CPU time, so that a busy machine has no effect."""
    process = _started(folder)
    early = after < 0.5  # before oneloop is imported; the others wait for its handler
    _until(lambda: _spent(process.pid) >= after and (early or _handles_sigterm(process.pid)))
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=120)[1]
    if not (folder / "run").exists():
        assert process.returncode == 75 or early, output
        assert "Traceback" not in output
    else:
        assert summary(folder)["exit_code"] == 75


@pytest.mark.slow
def test_a_hang_during_a_stop_ends_with_the_limit_of_its_phase(folder):
    words = [
        "--task.fault",
        "read",
        "--task.where",
        "sample",
        "--task.at",
        "28",
        "--task.once",
        "once",
    ]
    process = _started(folder, *words, "--machine.patience", "0.05")  # 600 s become 30 s
    _until(lambda: (folder / "once").exists())
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=120)[1]
    assert process.returncode == 1 and "rank 0 waits for data for 30 s" in output, output
    assert "it reads sample" in summary(folder)["exit_reason"]


RESTARTS = "oneloop: one node, up to 1 restarts; processes on this node: 2\n"
ONE_LINE = "oneloop: stopped by Ctrl-C before the run started; nothing was written\n"


@pytest.mark.parametrize(
    ("config", "moment"),
    [
        ("ddp", "launcher"),
        *(pytest.param(config, "ranks", marks=pytest.mark.slow) for config in ("ddp", "fsdp2")),
        pytest.param("single", "ranks", marks=pytest.mark.slow),
        pytest.param("ddp --max_restarts 1", "ranks", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_in_the_set_up_is_one_line(folder, config, moment):
    command = [*LAUNCHERS["oneloop"], "--config_file", *config.split(), "f.yaml"]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    _until(lambda: _handles_sigterm(process.pid))
    if moment == "ranks":
        _until(lambda: supervisors(process.pid))
    os.killpg(process.pid, signal.SIGINT)
    output = process.communicate(timeout=120)[0]
    # With restarts, the number of processes is in a line before it.
    assert output.removeprefix(RESTARTS) == ONE_LINE and process.returncode == 75, output
    assert not (folder / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("config", ["single", "ddp"])
def test_a_second_ctrl_c_ends_the_run(folder, config):
    command = [*LAUNCHERS["oneloop"], "--config_file", config, "f.yaml"]
    words = ["--task.fault", "sleep:600", "--task.at", "28", "--task.once", "once"]
    process = subprocess.Popen(
        [*command, *words], cwd=folder, env=_environment(), start_new_session=True
    )
    _until(lambda: (folder / "once").exists())
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(2)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(120) == 130
    assert not psutil.wait_procs(family, 15)[1]


# --- before the first step
# --------------------------------------------------------------------------------------------


def _own_folders(argv: list[str]) -> None:
    """Train with a different working folder on each rank."""
    folder = Path(f"rank-{os.environ['RANK']}")
    folder.mkdir()
    (folder / "f.yaml").write_text(Path("f.yaml").read_text())
    os.chdir(folder)
    train(argv)


@pytest.mark.slow
def test_another_folder_on_each_rank_is_rejected(folder):
    world = run(
        _own_folders,
        ["f.yaml", "--machine.patience", "0.2"],
        config="ddp",
        ranks=2,
        folder=folder,
        watch=True,
    )
    assert world.codes == [2, 2] and "run.dir run is another folder on rank 1" in world.output, (
        world.output
    )
    assert not (folder / "rank-0" / "run").exists()


@pytest.mark.parametrize(
    ("fault", "expected_text"),
    [
        ("shorter", "train set, samples: 64 -> 60"),
        ("other", "train set, hash of 16 samples: "),
        pytest.param(
            "wider",
            ("embedding.weight: (13, 8) torch.float32 -> embedding.weight: (13, 9) torch.float32"),
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.parametrize("config", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_ranks_that_see_other_things_are_rejected(folder, config, fault, expected_text):
    world = faulty(folder, "--task.unlike", fault, config=config, ranks=2)
    assert world.codes == [2, 2] and expected_text in world.output, world.output
    assert not (folder / "run").exists()


# --- no false alarm
# --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        [
            "--task.compute_pause",
            "8",
            "--task.held_out",
            "40",
            "--eval.every",
            "15",
            "--duration",
            "20",
        ],
        ["--task.epoch_pause", "8", "--task.samples", "400", "--duration", "70"],
    ],
    ids=["compute", "epoch"],
)
def test_what_a_task_does_once_per_evaluation_or_epoch_has_its_own_limit(folder, words):
    faulty(
        folder, *words, "--machine.patience", "0.2", "--eval.micro", "4", "--batch.micro", "8"
    ).ok()
    assert summary(folder)["exit_reason"] == "done"


@pytest.mark.slow
def test_garbage_on_the_supervisors_port_does_not_end_supervision(folder):
    words = ["--task.fault", "garbage", "--task.at", "170", "--machine.patience", "0.3"]
    world = faulty(folder, *words, config="ddp", ranks=2)
    assert world.codes == [1, 1] and "rank 0 hangs in training" in summary(folder)["exit_reason"], (
        world.output
    )


@pytest.mark.slow
def test_a_killed_supervisor_is_reported(folder):
    command = [
        *LAUNCHERS["oneloop"],
        "--config_file",
        "single",
        "f.yaml",
        "--duration",
        "20000",
        "--task.pause",
        "0.02",
    ]
    process = subprocess.Popen(
        command, cwd=folder, env=_environment(), stderr=subprocess.PIPE, text=True
    )
    _until(lambda: (folder / "run" / "checkpoints" / "step-00000010").exists())
    (supervisor,) = supervisors(process.pid)
    supervisor.kill()
    output = process.communicate(timeout=120)[1]
    assert (
        process.returncode == 1
        and "oneloop: error: a process of this run was killed from outside" in output
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        [
            "--task.compute_pause",
            "40",
            "--task.held_out",
            "40",
            "--eval.every",
            "15",
            "--duration",
            "20",
        ],
        ["--task.fault", "sleep:60", "--task.at", "4", "--task.once", "once", "--duration", "60"],
    ],
    ids=["compute of 40 s", "a first step of 60 s"],
)
def test_slow_work_is_no_hang_at_the_default(folder, words):
    run(train, ["f.yaml", *words, "--eval.micro", "4"], folder=folder, watch=True, timeout=400).ok()
    assert summary(folder)["exit_reason"] == "done"


@pytest.mark.slow
def test_processes_that_are_all_stopped_for_a_minute_go_on(folder):
    command = [
        *LAUNCHERS["oneloop"],
        "--config_file",
        str(CONFIGS / "ddp.yaml"),
        "f.yaml",
        "--task.pause",
        "0.02",
    ]
    process = subprocess.Popen([*command, "--duration", "600"], cwd=folder, env=_environment())
    _until(lambda: (folder / "run" / "checkpoints" / "step-00000010").exists())
    family = psutil.Process(process.pid).children(recursive=True)
    for name in ("SIGSTOP", "SIGCONT"):
        for one in family:
            one.send_signal(getattr(signal, name))
        time.sleep(60 if name == "SIGSTOP" else 0)
    assert process.wait(120) == 0 and summary(folder)["exit_reason"] == "done"


@pytest.mark.slow
@pytest.mark.parametrize(("config", "ranks"), LAYOUTS)
@pytest.mark.parametrize(
    "words",
    [
        [
            "--task.eval_pause",
            "30",
            "--duration",
            "20",
            "--eval.every",
            "20",
        ],  # two batches: an evaluation of 60 s
        ["--task.fault", "sleep:30", "--task.at", "4", "--task.once", "once", "--duration", "60"],
        [
            "--task.pause",
            "0.02",
            "--task.slow",
            "0.03",
            "--duration",
            "300",
        ],  # 100 times slower, at random
    ],
    ids=["a long evaluation", "a slow first step", "steps at random 100x slower"],
)
def test_a_run_that_gets_on_is_left_alone(folder, words, config, ranks):
    world = run(
        train,
        ["f.yaml", *words],
        config=config,
        ranks=ranks,
        folder=folder,
        watch=True,
        timeout=300,
    )
    world.ok()
    assert "hangs" not in world.output and summary(folder)["exit_reason"] == "done"
