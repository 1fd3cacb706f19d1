"""What a run stood on: versions, machine, git revision, accelerate's settings."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PACKAGES = (
    "accelerate",
    "bitsandbytes",
    "datasets",
    "numpy",
    "oneloop",
    "peft",
    "safetensors",
    "tokenizers",
    "torch",
    "torchmetrics",
    "torchvision",
    "transformers",
)


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def _git_revision() -> str | None:
    if not shutil.which("git"):
        return None
    asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() if asked.returncode == 0 else None


def environment(**more: Any) -> dict[str, Any]:
    """What a run stood on: versions, machine, git revision, command, accelerate's settings."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpus": len(os.sched_getaffinity(0)),
        "versions": _versions(),
        "git": _git_revision(),
        "accelerate": {
            key: value for key, value in sorted(os.environ.items()) if key.startswith(("ACCELERATE_", "FSDP_"))
        },
        **more,
    }
