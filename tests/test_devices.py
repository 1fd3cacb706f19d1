"""One GPU for each process: which settings are rejected, and what is set before CUDA starts.

There is no GPU here: a recorder replaces torch.cuda.device_count and torch.cuda.set_device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from oneloop.basics.exit_codes import BadInput
from oneloop.launch import devices
from worlds import run, train

CUDA = torch.device("cuda")


def with_gpus(visible: int, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function while ``visible`` GPUs are counted; return a BadInput as its message."""
    torch.cuda.device_count = lambda: visible
    try:
        return function(*args, **options)
    except BadInput as error:
        return str(error)


def asked(variables: dict[str, str], visible: int, *, device: torch.device = CUDA) -> str | None:
    """Return the message for a host with so many visible GPUs, and these variables."""
    before = dict(os.environ), torch.cuda.device_count
    os.environ.update(variables)
    try:
        return with_gpus(visible, devices.reject_shared, device)
    finally:
        os.environ.clear()
        os.environ.update(before[0])
        torch.cuda.device_count = before[1]


def processes(number: int, **more: str) -> dict[str, str]:
    """Return the variables of the last of so many processes on one host."""
    return {
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
        "LOCAL_RANK": str(number - 1),
        **more,
    }


@pytest.mark.parametrize(
    ("variables", "visible"),
    [
        ({}, 1),
        ({}, 8),
        (processes(2), 2),
        (processes(2), 8),
        (processes(2, CUDA_VISIBLE_DEVICES="3,5"), 2),
        # one process on each of four hosts, which have one GPU or one MIG slice each
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, 1),
        # the launcher does not count the processes of a host, and there may be enough GPUs
        ({"WORLD_SIZE": "16", "LOCAL_RANK": "7"}, 8),
    ],
)
def test_one_gpu_for_each_process_is_accepted(variables, visible):
    assert asked(variables, visible) is None


@pytest.mark.parametrize(
    ("variables", "visible", "words"),
    [
        # README's second command on a host with one GPU
        (processes(2), 1, "starts 2 processes, and each sees 1; start at most 1"),
        (processes(8), 4, "starts 8 processes, and each sees 4; start at most 4"),
        # gpu_ids of accelerate set the same variable
        (processes(4, CUDA_VISIBLE_DEVICES="0,2"), 2, "sees 2 (CUDA_VISIBLE_DEVICES=0,2); start"),
        # srun --gpus-per-task 1, or torchrun --virtual-local-rank: each sees its own GPU
        (processes(8, CUDA_VISIBLE_DEVICES="0"), 1, "srun --gpus-per-node in place of"),
        # several MIG slices: CUDA shows one of them
        (processes(2, CUDA_VISIBLE_DEVICES="MIG-a,MIG-b"), 1, "one MIG slice at most"),
        # the same without the number of processes on the host: also rank 0 must notice
        ({"WORLD_SIZE": "8", "LOCAL_RANK": "0"}, 1, "LOCAL_WORLD_SIZE is not set"),
    ],
)
def test_processes_that_share_a_gpu_are_rejected(variables, visible, words):
    message = asked(variables, visible)
    assert message is not None and words in message
    # every rank raises the same message
    assert asked({**variables, "LOCAL_RANK": "0"}, visible) == message
    if "LOCAL_WORLD_SIZE" in variables:
        assert "--config_file single" in message and "CUDA_VISIBLE_DEVICES= (empty)" in message


def test_several_hosts_have_their_own_advice():
    message = asked({**processes(4), "WORLD_SIZE": "8"}, 2)
    assert message is not None and "start at most 2 on each host, or" in message
    assert "--num_processes" not in message


def on_one_gpu(argv: list[str]) -> None:
    """Train where one GPU is visible."""
    devices.kind = lambda: CUDA
    with_gpus(1, train, argv)


def test_all_ranks_end_with_one_message_before_they_connect(tmp_path):
    (tmp_path / "r.yaml").write_text("task: tiny.Ragged\n")
    world = run(on_one_gpu, ["r.yaml", "--run.dir", "a"], ranks=2, folder=tmp_path, timeout=60)
    assert world.codes == [2, 2], world.output
    assert world.output.count("oneloop: NCCL requires one GPU per process") == 1
    assert not (tmp_path / "a").exists()


def test_a_cpu_needs_no_gpu():
    for visible in (0, 1):
        assert asked(processes(2), visible, device=torch.device("cpu")) is None
    assert asked(processes(2, CUDA_VISIBLE_DEVICES=""), 0, device=devices.kind()) is None


def started(variables: dict[str, str], options: dict[str, Any]) -> dict[str, Any]:
    """Set up a process with these variables, and return what it has set."""
    selected = []
    os.environ.update(variables)
    torch.cuda.set_device = selected.append
    given = dict(os.environ)
    device = options.pop("device", CUDA)
    devices.set_allocator(device)
    cores = devices.set_up(device, **options)
    return {
        "cores": cores,
        "new": {name: value for name, value in os.environ.items() if given.get(name) != value},
        "allocator": torch._C._accelerator_getAllocatorSettings(),
        "selected": selected,
        "cpus": len(os.sched_getaffinity(0)),
    }


EXPANDABLE = "expandable_segments:True"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_allocators_settings_are_those_of_the_user(name):
    [found] = run(started, {name: "max_split_size_mb:64"}, {}).ok()
    assert found["new"] == {} and EXPANDABLE not in found["allocator"]


def test_the_allocator_gets_segments_that_grow_but_not_on_a_cpu():
    [found] = run(started, {}, {}).ok()
    assert found["new"] == {"PYTORCH_ALLOC_CONF": EXPANDABLE}
    assert found["allocator"] == EXPANDABLE  # torch has read it, although it was imported before
    [found] = run(started, {}, {"device": torch.device("cpu")}).ok()
    assert found["new"] == {} and found["allocator"] == ""


def narrow(variables: dict[str, str], options: dict[str, Any]) -> set[int]:
    """Set up a process that may use the second CPU only; return the CPUs that it may use then."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[1:2])
    started(variables, options)
    return os.sched_getaffinity(0)


_CPUS = len(os.sched_getaffinity(0))


@pytest.mark.skipif(_CPUS < 2 or os.cpu_count() > _CPUS, reason="needs all CPUs of a host")
def test_several_processes_use_the_cpus_next_to_their_gpu(tmp_path):
    cpus = sorted(os.sched_getaffinity(0))
    (tmp_path / "local_cpulist").write_text(f"{cpus[0]},4000-4003\n")  # without a driver: any GPU
    rank = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    affinity = {"ACCELERATE_CPU_AFFINITY": "0"}

    def left(variables: dict[str, str], pci: Path = tmp_path) -> int:
        [found] = run(started, variables, {"pci": pci}).ok()
        share = len(cpus) // int(variables["LOCAL_WORLD_SIZE"])
        assert found["cores"] == share  # whatever is left
        return found["cpus"]

    assert left(rank) == 1
    assert left(alone) == len(cpus)
    assert left(rank | affinity) == len(cpus)  # the user has decided
    assert left(rank, tmp_path / "unknown") == len(cpus)
    # a launcher has divided the CPUs already
    if len(cpus) > 1:
        [found] = run(narrow, rank, {"pci": tmp_path}).ok()
        assert found == {cpus[1]}
    for text in ("4000-4003\n", "\n"):  # fewer than its share; the system does not know
        (tmp_path / "local_cpulist").write_text(text)
        assert left(rank) == len(cpus)


def current_device() -> tuple[list[str], str]:
    from oneloop.launch.processes import start

    selected: list[str] = []
    torch.cuda.set_device = lambda device: selected.append(str(device))
    return selected, str(start().device)


def test_the_named_gpu_is_the_current_one():
    variables = {"ACCELERATE_TORCH_DEVICE": "cuda:3"}
    assert run(current_device, variables=variables).ok() == [(["cuda:3"], "cuda:3")]
    assert run(current_device).ok() == [([], "cpu")]


def test_unused_gpus_are_reported_in_one_line():
    begins = "GPUs of this host in use: 2 of 8; to use all: "
    assert with_gpus_of_two(8) == [f"{begins}--num_processes 8"]
    assert with_gpus_of_two(8, ranks=4) == [f"{begins}8 processes on each host"]
    assert with_gpus_of_two(2) == [] == with_gpus_of_two(8, device=torch.device("cpu"))
    unknown = run(with_gpus, 4, devices.unused, CUDA, variables={"WORLD_SIZE": "8"})
    assert unknown.ok() == [[]]  # the processes of this host are not counted
    alone = with_gpus_of_two(8, ranks=1, here=1)
    assert alone == [
        "GPUs of this host in use: 1 of 8; to use all: --config_file ddp --num_processes 8"
    ]


def with_gpus_of_two(
    visible: int, *, ranks: int = 2, here: int = 2, device: torch.device = CUDA
) -> list[str]:
    """Return the line of a run of ``ranks`` processes, with ``here`` on this host."""
    variables = {"LOCAL_WORLD_SIZE": str(here), "WORLD_SIZE": str(ranks)}
    return run(with_gpus, visible, devices.unused, device, variables=variables).ok()[0]


def allocator_at_a_check() -> str | None:
    """Return the allocator's settings when the check of fp8 asks for the GPU, and starts CUDA."""
    from oneloop.launch import processes

    devices.kind = lambda: CUDA

    def asked_for(*_: Any) -> None:
        raise BadInput(os.environ.get("PYTORCH_ALLOC_CONF", "nothing"))

    processes._reject_precision = asked_for
    try:
        processes.start()
    except BadInput as error:
        return str(error)
    return None


def test_the_allocator_is_set_before_a_check_starts_cuda():
    assert run(allocator_at_a_check).ok() == [EXPANDABLE]
