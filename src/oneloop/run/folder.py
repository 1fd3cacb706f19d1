"""The run's own folder: its owner, and what a start finds in it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from oneloop.basics.errors import BadInput
from oneloop.basics.files import replacing
from oneloop.basics.plain_json import dumps
from oneloop.recipe.comparison import difference, goes_on

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
            raise BadInput(
                f"run.dir {self.path} holds a run of another recipe ({'; '.join(changed)}); choose another"
                " run.dir, give the same recipe, or go on with --run.accept_changes true"
            )
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
        with replacing(self.path / name) as draft:
            draft.write_text(text)

    def write_json(self, name: str, content: Any) -> None:
        self.write(name, dumps(content, indent=2) + "\n")
