"""The run's own folder: its owner, the resolved recipe, the environment, the summary and the final weights."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from oneloop.duration import Duration
from oneloop.errors import BadInput
from oneloop.plain import dumps

_MATHEMATICS = ("task", "seed", "duration", "init", "optimizer", "schedule", "ema", "guard")

_NOT_MATHEMATICS = ("ema.device",)


def mathematics(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a resolved recipe that says what is learned, flattened to {"group.key": value}."""
    flat: dict[str, Any] = {}
    for group, value in resolved.items():
        inside = value.items() if isinstance(value, Mapping) else ((None, value),)
        for name, given in inside:
            dotted = f"{group}.{name}" if name else group
            if (group in _MATHEMATICS and dotted not in _NOT_MATHEMATICS) or dotted in ("batch.size", "debug.overfit"):
                flat[dotted] = given
    return flat


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One line for every key of the mathematics in which two resolved recipes differ."""
    before, after = mathematics(old), mathematics(new)
    keys = sorted(before.keys() | after.keys())
    return [f"{k}: {before.get(k)!r} -> {after.get(k)!r}" for k in keys if before.get(k) != after.get(k)]


def goes_on(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether only the duration differs, is longer, and no schedule depends on it."""
    keys = [line.partition(":")[0] for line in difference(old, new)]
    schedule = new["schedule"]
    endless = schedule["name"] in ("constant", "plateau") and "%" not in str(schedule["warmup"])
    if keys != ["duration"] or not endless:
        return False
    before, after = Duration(old["duration"]), Duration(new["duration"])
    return before.unit == after.unit and after.amount > before.amount


_OWN = {".lock", "owner.json", ".recipe.yaml.draft"}
"""what a start leaves that was killed before it had written its recipe"""


class Folder:
    """The folder of one run; only rank 0 opens and writes it.

    Raises:
        BadInput: by :meth:`inspect` and :meth:`open`: in use, unfinished, of another recipe, or not writable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path / ".lock", blocking=False)

    def inspect(self, resolved: Mapping[str, Any], *, resume: str = "auto", accept_changes: bool = False) -> str | None:
        """Looks without touching: the line of a finished run of the same recipe, None where there is work to do."""
        if not self.path.exists():
            return None
        if not self.path.is_dir():
            raise BadInput(f"run.dir {self.path} is a file; choose another run.dir")
        if self._in_use():
            raise BadInput(f"run.dir {self.path} is in use by {self._owner()}; wait for it, or choose another run.dir")
        recipe = self.path / "recipe.yaml"
        if not recipe.exists():
            if any(path.name not in _OWN for path in self.path.iterdir()):
                raise BadInput(f"run.dir {self.path} holds files that are no run of oneloop; choose another run.dir")
            return None
        if resume == "never":
            raise BadInput(f"run.dir {self.path} holds a run, and run.resume is never; choose another run.dir")
        old = yaml.safe_load(recipe.read_text())
        longer = goes_on(old, resolved)
        changed = [] if longer or accept_changes else difference(old, resolved)
        if changed:
            raise BadInput(f"run.dir {self.path} holds a run of another recipe ({'; '.join(changed)}); choose another"
                           " run.dir, give the same recipe, or go on with --run.accept_changes true")  # fmt: skip
        try:
            ended = json.loads((self.path / "summary.json").read_text())
        except (OSError, ValueError):
            return None
        if ended.get("exit_code") == 0 and not difference(old, resolved):
            return f"{self.path} holds this run, finished at step {ended['step']}: nothing to do"
        return None

    def _in_use(self) -> bool:
        if not (self.path / ".lock").exists():
            return False
        try:
            with FileLock(self.path / ".lock", blocking=False):
                return False
        except Timeout:
            return True

    def _owner(self) -> str:
        try:
            owner = json.loads((self.path / "owner.json").read_text())
        except (OSError, ValueError):
            return "another process"
        return f"process {owner['pid']} on {owner['host']}, since {owner['since']}"

    def open(self) -> None:
        """Makes the folder and takes its lock; the operating system lets go of it when this process ends."""
        made = [parent for parent in (self.path, *self.path.parents) if not parent.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            (self.path / "owner.json").write_text(json.dumps(owner))
        except Timeout:
            raise BadInput(f"run.dir {self.path} is in use by {self._owner()}; choose another run.dir") from None
        except OSError as error:
            for folder in made:
                shutil.rmtree(folder, ignore_errors=True)
            raise BadInput(f"run.dir {self.path} cannot be written: {error.strerror}; choose another run.dir") from None

    def close(self) -> None:
        (self.path / "owner.json").unlink(missing_ok=True)
        self._lock.release()

    def write(self, name: str, text: str) -> None:
        """Writes one file whole or not at all."""
        draft = self.path / f".{name}.draft"
        draft.write_text(text)
        draft.replace(self.path / name)

    def write_json(self, name: str, content: Any) -> None:
        self.write(name, dumps(content, indent=2) + "\n")


_PACKAGES = ("accelerate", "datasets", "numpy", "oneloop", "safetensors", "tokenizers", "torch", "torchmetrics",
             "torchvision", "transformers")  # fmt: skip


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


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
