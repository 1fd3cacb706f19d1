"""The environment of a run: versions, machine, git revision, accelerate's settings."""

import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from oneloop.recipe.schema import Recipe

_PACKAGES = [
    "accelerate",
    "bitsandbytes",
    "datasets",
    "numpy",
    "oneloop",
    "peft",
    "safetensors",
    "tokenizers",
    "torch",
]
_PACKAGES += ["torchmetrics", "torchvision", "transformers"]


_COMPUTE = (
    "bitsandbytes",
    "numpy",
    "oneloop",
    "peft",
    "timm",
    "torch",
    "torchvision",
    "transformers",
)
"""packages whose version may change computed values"""


def versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Return the versions of the installed ones of these packages."""
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _git_revision() -> str | None:
    if not shutil.which("git"):
        return None
    asked = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() if asked.returncode == 0 else None


def environment(**more: Any) -> dict[str, Any]:
    """Return versions, machine, git revision and accelerate's settings, for environment.json."""
    settings = {
        k: v for k, v in sorted(os.environ.items()) if k.startswith(("ACCELERATE_", "FSDP_"))
    }
    host = {
        "host": socket.gethostname(),
        "cpus": len(os.sched_getaffinity(0)),
        "git": _git_revision(),
    }
    system = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions(),
    }
    return {**system, **host, "accelerate": settings, **more}


def computed_by(recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """Return what bit-identical results require besides the recipe: device, versions, matmul and
    compile settings."""
    machine, found = recipe.machine, versions(_COMPUTE)
    if device.type == "cuda":
        found |= {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}
    compiled = f"{machine.compile}, {machine.compile_mode}" if machine.compile != "none" else "none"
    about = {"device": _kind(device), "versions": found}
    return {**about, "machine.matmul": machine.matmul, "machine.compile": compiled}


def _kind(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
    if device.type != "cpu":
        return device.type
    name = platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(
            line.partition(":")[2].strip() for line in lines if line.startswith("model name")
        )
    return f"cpu, {name}, {torch.backends.cpu.get_cpu_capability()}"
