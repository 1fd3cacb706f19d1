"""The checkpoints of a run on disk: written atomically, with a manifest of sizes and checksums.

Needs no torch.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

from xxhash import xxh3_128

from oneloop.basics.exit_codes import Unavailable
from oneloop.basics.untrusted import damaged, delete, read_json
from oneloop.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    read_manifest,
    signed,
)

STATE = "state.json"  # file of a checkpoint with its state that is not tensors
MOST_STATE = 1 << 28  # bytes; a task may save much
_NAME = re.compile(r"step-([0-9]{8,15})")
_COPY = re.compile(r"\.step-([0-9]{8,15})\.[0-9]+\.fetched")
_CHUNK = 1 << 22  # bytes
_FLUSHED = 1 << 28  # bytes between two flushes, so that the last one does not take long


def name_of(step: int) -> str:
    """Return the folder name of a step's checkpoint, such as ``step-00000500``."""
    return f"step-{step:08d}"


def step_in(name: str) -> int | None:
    """Return the step of the name of a checkpoint, or of a fetched copy; None for another name."""
    match = _NAME.fullmatch(name) or _COPY.fullmatch(name)
    return int(match[1]) if match else None


def step_of(folder: Path) -> int:
    """Return the step of a committed checkpoint."""
    step = step_in(folder.name)
    assert step is not None, folder
    return step


def checksum(file: Path) -> str:
    """Return the file's xxh3-128, as hexadecimal."""
    state = xxh3_128()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            state.update(chunk)
    return state.hexdigest()


def flush(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(file: Path, content: bytes) -> dict[str, Any]:
    """Write and flush a file; return its manifest entry."""
    return write_pieces(file, [memoryview(content)])


def write_pieces(file: Path, pieces: Iterable[memoryview]) -> dict[str, Any]:
    """Write and flush a file, without a buffer; return its manifest entry.

    Args:
        file: to write.
        pieces: its content.
    """
    state = xxh3_128()
    with file.open("wb", buffering=0) as stream:
        for piece in pieces:
            state.update(piece)
            written = 0
            while written < len(piece):
                written += stream.write(piece[written:])
            if stream.tell() % _FLUSHED < len(piece):
                os.fsync(stream.fileno())
        os.fsync(stream.fileno())
        return {"size": stream.tell(), "xxh3": state.hexdigest()}


class Draft:
    """The files of a checkpoint that is not complete.

    Args:
        store: the checkpoints.
        path: of the folder with the files.
    """

    pause = 0.01  # seconds between two looks for the shards of other ranks

    def __init__(self, store: Any, path: Path) -> None:
        self.store = store
        self.path = path

    def names(self) -> list[str]:
        """Return the names of its files."""
        return os.listdir(self.path)

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""
        return (self.path / name).read_bytes()

    def put(self, name: str, content: bytes) -> dict[str, Any]:
        """Write a small file atomically; return its manifest entry."""
        draft = self.path / f".{name}"
        entry = write_file(draft, content)
        draft.rename(self.path / name)
        return entry

    def write(self, name: str, pieces: Iterable[memoryview], size: int = 0) -> dict[str, Any]:
        """Write and flush a file; return its manifest entry."""
        return write_pieces(self.path / name, pieces)

    def seal(self, manifest: dict[str, Any], flushed: Iterable[str] = ()) -> None:
        """Commit a checkpoint whose files are flushed.

        Write the manifest, flush, rename the folder, flush: after a crash at any moment, the
        checkpoint is complete or is not there.

        Args:
            manifest: of the checkpoint. Files that it does not list are deleted.
            flushed: other files, to which its state refers.
        """
        for file in flushed:
            with suppress(OSError):  # it may not exist
                flush(Path(file))
        for name in set(self.names()) - set(manifest["files"]):
            (self.path / name).unlink()
        write_file(self.path / MANIFEST, signed(manifest))
        flush(self.path)
        sealed = self.store.root / name_of(manifest["step"])
        if sealed.exists():  # an older one of the same step, which a resume skipped
            sealed.rename(self.store.root / f".{sealed.name}.replaced")
        self.path.rename(sealed)
        flush(self.store.root)


@dataclass(frozen=True)
class Keep:
    """The checkpoints that a prune keeps: the newest, those of every Mth step, and the best."""

    newest: int = 2  # how many, at least 1
    every: int = 0  # in steps; 0: none
    best: int | None = None  # step of the best checkpoint

    def among(self, steps: Sequence[int]) -> set[int]:
        """Return those of the steps, in ascending order, whose checkpoints are kept."""
        kept = {
            step for step in steps if (self.every and step % self.every == 0) or step == self.best
        }
        return kept | set(steps[-max(1, self.newest) :])


class Store:
    """The ``checkpoints/`` folder of one run.

    >>> store = Store(Path("runs/digits/checkpoints"))
    >>> draft = store.draft(500)
    >>> files = {"weights": draft.put("weights", b"…")}
    >>> draft.seal(manifest_of(500, files, {...}))
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def draft(self, step: int, attempt: int = 0) -> Draft:
        """Return the draft of a checkpoint; create its folder if it is missing."""
        path = self.root / f".{name_of(step)}.{attempt}.draft"
        path.mkdir(parents=True, exist_ok=True)
        return Draft(self, path)

    def sealed(self) -> list[Path]:
        """Return the committed checkpoints, oldest first; :func:`problems` verifies them."""
        paths = self.root.iterdir() if self.root.is_dir() else ()
        return sorted((path for path in paths if _NAME.fullmatch(path.name)), key=step_of)

    def newest_intact(self, say: Callable[[str], object]) -> tuple[Path | None, str | None]:
        """Return the newest intact checkpoint, and an error if all are damaged.

        Delete drafts. Report damaged checkpoints and set them aside, unless nothing would be left.
        """
        self.sweep(".draft")
        reports: dict[Path, str] = {}
        for path in reversed(self.sealed()):
            wrong = problems(path)
            if not wrong:
                for bad, report in reports.items():
                    say(f"{report}; kept as {self.set_aside(bad)}")
                return path, None
            reports[path] = f"checkpoint {path} is damaged and was skipped: {'; '.join(wrong)}"
        if not reports:
            return None, None
        every = "; ".join(reports.values())
        return None, f"{every}; no good one is left: restore one, or choose another run.dir"

    def prune(self, keep: Keep) -> list[Path]:
        """Delete the checkpoints that need not be kept; return their former paths.

        Rename them first, so that a kill leaves no partial checkpoint.
        """
        sealed = self.sealed()
        keeping = keep.among([step_of(path) for path in sealed])
        removed = [path for path in sealed if step_of(path) not in keeping]
        for path in removed:
            path.rename(self.root / f".{path.name}.removed")
        self.sweep()
        return removed

    def sweep(self, *more: str) -> None:
        """Delete the folders that a killed process left behind.

        ``more`` are further endings of their names. Use ``.draft`` only if no writer is active.
        """
        endings = (".removed", ".replaced", *more)
        for path in self.root.glob(".step-*") if self.root.is_dir() else ():
            if path.name.endswith(endings):
                delete(path, inside=self.root)

    def set_aside(self, path: Path) -> Path:
        """Rename a damaged checkpoint to ``bad-…`` for the user; return the new path.

        Raise Unavailable if that is impossible."""
        renamed = self.root / f"bad-{path.name}"
        delete(renamed, inside=self.root)
        try:
            path.rename(renamed)
        except OSError as error:
            raise Unavailable(
                f"the damaged {path} cannot be renamed ({error.strerror}); make its folder writable"
            ) from error
        return renamed


def vouch(folder: Path, about: Mapping[str, Any], files: Mapping[str, Any] | None = None) -> None:
    """Write a manifest for a folder that is not a checkpoint.

    :func:`problems` verifies it.

    Args:
        folder: with all its files.
        about: describes the content for readers.
        files: known manifest entries; None: of all files in the folder.
    """
    entries = dict(files or {})
    if not entries:
        # with the parts of a model of sentence-transformers
        for path in sorted([*folder.iterdir(), *folder.glob("[0-9]_*/*")]):
            if path.is_file() and path.name != MANIFEST:
                entry = {"size": path.stat().st_size, "xxh3": checksum(path)}
                entries[path.relative_to(folder).as_posix()] = entry
    manifest = {"format": FORMAT, "files": entries, "about": dict(about)}
    write_file(folder / MANIFEST, signed(manifest))


def changed(folder: Path, files: Mapping[str, Any]) -> list[str]:
    """Return the files whose size or checksum differs from their entry.

    Reads every file completely.
    """
    wrong = []
    for name, entry in files.items():
        file = folder / name
        try:
            found = file.stat()
            if not S_ISREG(found.st_mode):
                wrong.append(f"{name}: it is not a regular file")
            elif found.st_size != entry["size"]:
                wrong.append(f"{name}: expected {entry['size']} bytes, found {found.st_size}")
            elif (actual := checksum(file)) != entry["xxh3"]:
                wrong.append(f"{name}: expected checksum {entry['xxh3']}, found {actual}")
        except OSError as error:
            wrong.append(f"{name}: {error.strerror}")
    return wrong


def problems(folder: Path) -> list[str]:
    """Return the problems of a checkpoint, or of another folder with a manifest.

    They name file, expected and found value. Reads all files completely.
    """
    try:
        with damaged(MANIFEST):
            if not folder.exists():
                return ["it does not exist"]
            manifest = read_manifest(folder)
            step = step_in(folder.name)
            if step not in (None, manifest.get("step")):
                return [f"its manifest belongs to step {manifest.get('step')}"]
            wrong = changed(folder, manifest["files"])
            if "step" not in manifest:
                return wrong

            # The files of a checkpoint are those of its manifest, and its state can be read.
            names = {path.name for path in folder.iterdir()}
            unknown = names - set(manifest["files"]) - {MANIFEST}
            wrong += [f"{name}: not in the manifest" for name in sorted(unknown)]
            if not wrong and STATE in manifest["files"]:
                read_state(folder)
            return wrong
    except (ValueError, OSError) as error:
        return [str(error)]


def read_state(folder: Path) -> dict[str, Any]:
    """Return the state of a checkpoint that is not tensors.

    Raises ValueError if it is missing or damaged. Its values are not checked: use them inside
    :func:`oneloop.basics.untrusted.damaged`.
    """
    try:
        state: dict[str, Any] = read_json(folder / STATE, most=MOST_STATE)
    except (OSError, ValueError) as error:
        raise ValueError(f"{STATE} cannot be read ({type(error).__name__}: {error})") from error
    return state
