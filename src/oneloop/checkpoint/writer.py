"""Write one rank's shard of a checkpoint in a process without torch; rank 0 waits for the others and completes it.

A shard is one safetensors file, whose data section is the staged bytes. Ranks communicate through files in the draft
folder, which is on shared storage: ``rank-00001.json`` means that a shard is complete, ``rank-00001.failed`` that it
failed.
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
    """A request to write one rank's shard of a checkpoint."""

    root: str  # the run's checkpoints folder
    step: int
    attempt: int  # number of earlier saves; makes the names of drafts unique
    rank: int
    ranks: int
    header: str  # the safetensors header: name, dtype, shape and offset of every tensor, as JSON
    size: int  # bytes of tensor data
    state: dict[str, Any] = field(default_factory=dict)  # state other than tensors; rank 0 writes it
    about: dict[str, Any] = field(default_factory=dict)  # for the manifest
    keep: dict[str, Any] = field(default_factory=dict)  # fields of :class:`Keep`
    tensors: dict[str, Any] = field(default_factory=dict)  # their dtypes and global shapes, for the manifest
    flush: list[str] = field(default_factory=list)  # other files that must be on disk before it is complete


class Gone(Exception):
    """An error: another rank's shard failed, or this save was cancelled."""


def write(request: SaveRequest, data: memoryview, cancelled: Callable[[], bool] = lambda: False) -> None:
    """Write this rank's files; rank 0 then completes the checkpoint and deletes older ones. Raises OSError, or Gone if
    another rank failed."""
    store = Store(Path(request.root))
    draft = store.draft(request.step, request.attempt)
    shard = f"rank-{request.rank:05d}"
    try:
        entry = write_tensors(draft / f"{shard}.safetensors", request.header, data)
        if request.rank != 0:
            write_file(draft / f"{shard}.draft", json.dumps(entry).encode())
            (draft / f"{shard}.draft").rename(draft / f"{shard}.json")
            return
        files = {f"{shard}.safetensors": entry}
        files["state.json"] = write_file(draft / "state.json", json.dumps(request.state, indent=1).encode())
        files |= gathered(draft, request.ranks, cancelled)
    except OSError:
        try:
            (draft / f"{shard}.failed").touch()
        finally:
            raise
    for file in request.flush:
        with suppress(OSError):  # it may not exist
            flush(Path(file))
    store.seal(draft, request.step, files, request.about, request.tensors)
    store.prune(Keep(**request.keep))


def write_tensors(file: Path, header: str, data: memoryview) -> dict[str, Any]:
    """Write and flush a safetensors file from its header and its data section; return its manifest entry."""
    padded = header.encode()
    padded += b" " * (-len(padded) % 8)
    state = xxh3_128()
    with file.open("wb", buffering=0) as stream:
        for piece in _pieces(memoryview(len(padded).to_bytes(8, "little") + padded)) + _pieces(data):
            state.update(piece)
            written = 0
            while written < len(piece):
                written += stream.write(piece[written:])
        os.fsync(stream.fileno())
    return {"size": 8 + len(padded) + len(data), "xxh3": state.hexdigest()}


def _pieces(data: memoryview) -> list[Any]:
    return [data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK)]


def gathered(draft: Path, ranks: int, cancelled: Callable[[], bool]) -> dict[str, Any]:
    """Wait for the manifest entries of the other ranks. Raises Gone if one failed, or the save was cancelled."""
    entries: dict[str, Any] = {}
    while len(entries) < ranks - 1:
        for rank in range(1, ranks):
            shard, done = f"rank-{rank:05d}", draft / f"rank-{rank:05d}.json"
            if f"{shard}.safetensors" not in entries and done.exists():
                entries[f"{shard}.safetensors"] = json.loads(done.read_text())
                done.unlink()
            if (draft / f"{shard}.failed").exists():
                raise Gone(f"rank {rank} could not write its shard")
        if cancelled():
            raise Gone("another rank could not write its shard")
        if len(entries) < ranks - 1:
            time.sleep(0.01)
    return entries


# --- the process ----------------------------------------------------------------------------------------------------


def main() -> None:
    """Read requests from standard input, one JSON object per line; answer each on standard output."""
    die_with(int(sys.argv[1]))
    on_stops(signal.SIG_IGN)  # the trainer decides when to stop
    shared, size = int(sys.argv[2]), int(sys.argv[3])
    data = memoryview(mmap.mmap(shared, size, prot=mmap.PROT_READ)) if size else memoryview(b"")
    while line := sys.stdin.buffer.readline():
        decoded = json.loads(line)
        if decoded is None:
            continue  # cancelled too late: the save has already ended
        request = SaveRequest(**decoded)
        began = time.perf_counter()
        try:
            write(request, data[: request.size], cancelled=_input_waiting)
            answer: dict[str, Any] = {"step": request.step, "seconds": time.perf_counter() - began}
        except Exception as error:
            answer = {"step": request.step, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


def _input_waiting() -> bool:
    """Return whether standard input has data; during a save, that can only be its cancellation."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


def as_line(request: SaveRequest | None) -> bytes:
    return json.dumps(None if request is None else asdict(request)).encode() + b"\n"


if __name__ == "__main__":
    main()
