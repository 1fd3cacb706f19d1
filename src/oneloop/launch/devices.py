"""The devices of a run's processes: one GPU for each process, set up before CUDA starts."""

import os
import platform

import torch
from accelerate.utils import parse_flag_from_env

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.launcher import local_ranks, ranks

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""variables with the settings of torch's allocator: the new name, and the old one"""
_NOT_EXPANDABLE = ("microsoft", "tegra")
"""parts of the names of kernels (WSL, Jetson) under which expandable segments fail"""


def use_cpu() -> None:
    """Let this process, and those that it starts, train on the CPU: accelerate's use_cpu."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    os.environ.pop("ACCELERATE_TORCH_DEVICE", None)  # it would take precedence


def kind() -> torch.device:
    """Return the device type that trains: the CPU if accelerate's variables ask for it."""
    cpu = torch.device("cpu")
    named = os.environ.get("ACCELERATE_TORCH_DEVICE")
    if named == "cpu" or parse_flag_from_env("ACCELERATE_USE_CPU"):
        return cpu
    return torch.accelerator.current_accelerator(check_available=True) or cpu


def reject_shared(device: torch.device) -> None:
    """Raise BadInput if the processes of this host share a GPU, which NCCL does not allow.

    All ranks raise it, before any of them connects. accelerate counts GPUs by local rank, so a
    process that sees only its own GPU cannot be used either.

    Args:
        device: its type is that of all processes.
    """
    if device.type != "cuda":
        return
    count = torch.cuda.device_count()
    if count == 1 and ranks() > 1 and "LOCAL_WORLD_SIZE" not in os.environ:
        raise BadInput(
            "LOCAL_WORLD_SIZE is not set, so the processes of this host cannot be counted; set it, "
            "or start the run with oneloop launch"
        )
    if local_ranks() <= count:
        return

    # Name the setting that hides GPUs.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = f" (CUDA_VISIBLE_DEVICES={visible})" if visible else ""
    fewer = f"(--num_processes {count}, or --config_file single for one)"
    if ranks() > local_ranks():
        fewer = "on each host"
    raise BadInput(
        f"NCCL requires one GPU per process: this host starts {local_ranks()} processes, and each "
        f"sees {count}{hidden}; start at most {count} {fewer}, or train on the CPU "
        "(--machine.device cpu); a process must see all GPUs of its host (srun --gpus-per-node in "
        "place of --gpus-per-task), and sees one MIG slice at most"
    )


def set_allocator(device: torch.device) -> None:
    """Let the segments of torch's allocator grow, unless the user has set it. CUDA reads it once.

    Args:
        device: its type is that of all processes.
    """
    # Batches of changing lengths fragment segments of a fixed size.
    kernel = platform.release().lower()
    fixed = torch.version.hip or any(name in kernel for name in _NOT_EXPANDABLE)
    given = any(name in os.environ for name in _ALLOCATOR)
    if device.type == "cuda" and not fixed and not given:
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"


def unused(device: torch.device) -> list[str]:
    """Return the line of the start-up log about GPUs of this host that no process uses.

    Args:
        device: of this process.
    """
    count = torch.cuda.device_count()
    known = ranks() == 1 or "LOCAL_WORLD_SIZE" in os.environ
    if device.type != "cuda" or not known or local_ranks() >= count:
        return []
    more = f"--num_processes {count}"
    if ranks() == 1:
        more = f"--config_file ddp {more}"
    elif ranks() > local_ranks():
        more = f"{count} processes on each host"
    return [f"GPUs of this host in use: {local_ranks()} of {count}; to use all: {more}"]
