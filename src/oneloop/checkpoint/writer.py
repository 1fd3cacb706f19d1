"""Writes one rank's part of a checkpoint, in a process without torch; rank 0 waits for the others, and seals.

A part is one safetensors file, its data section being the staged bytes as they are. Ranks tell each other through the
draft folder, on the storage they share anyway: ``rank-00001.json`` says a part is done, ``rank-00001.failed`` that it
will not be.
"""

import json
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from oneloop.basics.launcher import die_with, on_stops
from oneloop.checkpoint.store import Keep, Store, flush, write_file

_CHUNK = 1 << 22


@dataclass(frozen=True)
class SaveRequest:
    """What to write: all that a writer needs to know."""

    root: str  # the run's checkpoints folder
    step: int
    attempt: int  # how many saves were begun before; no two drafts share a name
    rank: int
    ranks: int
    header: str  # the safetensors header: name, type, shape and place of every tensor, as JSON
    size: int  # bytes of tensor data
    state: dict[str, Any] = field(default_factory=dict)  # what is no tensor; rank 0 writes it
    about: dict[str, Any] = field(default_factory=dict)  # for the manifest
    keep: dict[str, Any] = field(default_factory=dict)  # fields of :class:`Keep`
    tensors: dict[str, Any] = field(default_factory=dict)
    """type and global shape of all tensors by name, for the manifest"""
    flush: list[str] = field(default_factory=list)  # files beside it that have to be on disk before it is sealed


class Gone(Exception):
    """Another rank's part failed, or this save was called off."""


def write(request: SaveRequest, data: memoryview, called_off: Callable[[], bool] = lambda: False) -> None:
    """Write this rank's files; rank 0 then completes the checkpoint and deletes older ones. Raises OSError, or Gone if
    another rank failed."""
    store = Store(Path(request.root))
    draft = store.draft(request.step, request.attempt)
    part = f"rank-{request.rank:05d}"
    try:
        entry = write_tensors(draft / f"{part}.safetensors", request.header, data)
        if request.rank != 0:
            write_file(draft / f"{part}.draft", json.dumps(entry).encode())
            (draft / f"{part}.draft").rename(draft / f"{part}.json")
            return
        files = {f"{part}.safetensors": entry}
        files["state.json"] = write_file(draft / "state.json", json.dumps(request.state, indent=1).encode())
        files |= gathered(draft, request.ranks, called_off)
    except OSError:
        try:
            (draft / f"{part}.failed").touch()
        finally:
            raise
    for file in request.flush:
        with suppress(OSError):  # it may not be there
            flush(Path(file))
    store.seal(draft, request.step, files, request.about, request.tensors)
    store.prune(Keep(**request.keep))


def write_tensors(file: Path, header: str, data: memoryview) -> dict[str, Any]:
    """One flushed safetensors file from its header and its data section; returns its manifest entry."""
    head = header.encode()
    head += b" " * (-len(head) % 8)
    state = xxh3_128()
    with file.open("wb", buffering=0) as stream:
        for piece in _pieces(memoryview(len(head).to_bytes(8, "little") + head)) + _pieces(data):
            state.update(piece)
            written = 0
            while written < len(piece):
                written += stream.write(piece[written:])
        os.fsync(stream.fileno())
    return {"size": 8 + len(head) + len(data), "xxh3": state.hexdigest()}


def _pieces(data: memoryview) -> list[Any]:
    return [data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK)]


def gathered(draft: Path, ranks: int, called_off: Callable[[], bool]) -> dict[str, Any]:
    """Wait for the manifest entries of the other ranks. Raises Gone if one failed, or the save was cancelled."""
    entries: dict[str, Any] = {}
    while len(entries) < ranks - 1:
        for rank in range(1, ranks):
            part, done = f"rank-{rank:05d}", draft / f"rank-{rank:05d}.json"
            if f"{part}.safetensors" not in entries and done.exists():
                entries[f"{part}.safetensors"] = json.loads(done.read_text())
                done.unlink()
            if (draft / f"{part}.failed").exists():
                raise Gone(f"rank {rank} could not write its part")
        if called_off():
            raise Gone("another rank could not write its part")
        if len(entries) < ranks - 1:
            time.sleep(0.01)
    return entries


# --- the process ----------------------------------------------------------------------------------------------------


def main() -> None:
    """Takes requests from standard input, one JSON object a line; answers each on standard output."""
    die_with(int(sys.argv[1]))
    on_stops(signal.SIG_IGN)  # the trainer decides when to stop
    shared, size = int(sys.argv[2]), int(sys.argv[3])
    data = memoryview(mmap.mmap(shared, size, prot=mmap.PROT_READ)) if size else memoryview(b"")
    while line := sys.stdin.buffer.readline():
        decoded = json.loads(line)
        if decoded is None:
            continue  # called off too late: it had ended already
        request = SaveRequest(**decoded)
        began = time.perf_counter()
        try:
            write(request, data[: request.size], called_off=_waiting)
            answer: dict[str, Any] = {"step": request.step, "seconds": time.perf_counter() - began}
        except Exception as error:
            answer = {"step": request.step, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


def _waiting() -> bool:
    """Whether the trainer has something to say; while a save is under way, that can only be to call it off."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


def as_line(request: SaveRequest | None) -> bytes:
    return json.dumps(None if request is None else asdict(request)).encode() + b"\n"


if __name__ == "__main__":
    main()
