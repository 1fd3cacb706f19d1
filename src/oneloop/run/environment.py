"""The environment of a run: versions, machine, git revision, accelerate's settings."""

import os
import platform
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from oneloop.basics.system.processes import cpu_name, usable_cores
from oneloop.recipe.schema import Recipe

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
_PACKAGES = (*_COMPUTE, "accelerate", "datasets", "safetensors", "tokenizers", "torchmetrics")


def versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Return the versions of the installed ones of these packages."""
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _git_revision() -> str | None:
    words = ["git", "rev-parse", "HEAD"]
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    return None


def environment(**more: Any) -> dict[str, Any]:
    """Return versions, machine, git revision and accelerate's settings, for environment.json."""
    prefixes = ("ACCELERATE_", "FSDP_")
    variables = sorted(os.environ.items())
    settings = {name: value for name, value in variables if name.startswith(prefixes)}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions(),
        "host": socket.gethostname(),
        "cpus": usable_cores(),
        "git": _git_revision(),
        "accelerate": settings,
        **more,
    }


def computed_by(recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """Return what bit-identical results require besides the recipe.

    They require device, versions, matmul and compile settings.
    """
    found = versions(_COMPUTE)
    if device.type == "cuda":
        found["CUDA"] = str(torch.version.cuda)
        found["cuDNN"] = str(torch.backends.cudnn.version())
    return {
        "device": _kind(device),
        "versions": found,
        "machine.matmul": recipe.machine.matmul,
        "machine.compile": f"{recipe.machine.compile}, {recipe.machine.compile_mode}",
    }


def _kind(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
    if device.type != "cpu":
        return device.type
    return f"cpu, {cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"
