"""Write one rank's shard of a checkpoint in a process without torch; rank 0 waits for the others
and completes it.

A shard is one safetensors file, whose data section is the staged bytes. Ranks communicate through
files in the draft folder, which is on shared storage: ``rank-00001.json`` means that a shard is
complete, ``rank-00001.failed`` that it failed.
"""

import json
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
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
    # state other than tensors; rank 0 writes it
    state: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)  # for the manifest
    bad: list[int] = field(default_factory=list)  # steps of damaged checkpoints in the mirror
    keep: dict[str, Any] = field(default_factory=dict)  # fields of :class:`Keep`
    # their dtypes and global shapes, for the manifest
    tensors: dict[str, Any] = field(default_factory=dict)
    # other files that must be on disk before it is complete
    flush: list[str] = field(default_factory=list)


class Gone(Exception):
    """An error: another rank's shard failed, or this save was cancelled."""


def write(
    request: SaveRequest, data: memoryview, cancelled: Callable[[], bool] = lambda: False
) -> None:
    """Write this rank's files; rank 0 then completes the checkpoint and deletes older ones. Raises
    OSError and Gone."""
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
        files["state.json"] = write_file(
            draft / "state.json", json.dumps(request.state, indent=1).encode()
        )
        done = lambda name: (draft / name).read_bytes()  # noqa: E731
        files |= gathered(lambda: os.listdir(draft), done, request.ranks, cancelled)
        for other in range(1, request.ranks):
            (draft / f"rank-{other:05d}.json").unlink()
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
    """Write and flush a safetensors file from its header and its data section; return its manifest
    entry."""
    head, state = padded(header), xxh3_128()
    with file.open("wb", buffering=0) as stream:
        for piece in _pieces(memoryview(head)) + _pieces(data):
            state.update(piece)
            written = 0
            while written < len(piece):
                written += stream.write(piece[written:])
        os.fsync(stream.fileno())
    return {"size": len(head) + len(data), "xxh3": state.hexdigest()}


def padded(header: str) -> bytes:
    """Return the beginning of a safetensors file: the length of its header, and the header."""
    text = header.encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces(data: memoryview) -> list[Any]:
    return [data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK)]


def gathered(
    names: Callable[[], Collection[str]],
    read: Callable[[str], bytes],
    ranks: int,
    cancelled: Callable[[], bool],
    pause: float = 0.01,
) -> dict[str, Any]:
    """Wait for the manifest entries of the other ranks, in the files ``names()`` of the draft.
    Raises Gone if one failed, or the save was cancelled."""
    entries: dict[str, Any] = {}
    while len(entries) < ranks - 1:
        there = names()
        for rank in range(1, ranks):
            shard = f"rank-{rank:05d}"
            if f"{shard}.safetensors" not in entries and f"{shard}.json" in there:
                entries[f"{shard}.safetensors"] = json.loads(read(f"{shard}.json"))
            if f"{shard}.failed" in there:
                raise Gone(f"rank {rank} could not write its shard")
        if cancelled():
            raise Gone("another rank could not write its shard")
        if len(entries) < ranks - 1:
            time.sleep(pause)
    return entries


def main() -> None:
    """Read requests from standard input, one JSON object per line; answer each on standard
    output."""
    die_with(int(sys.argv[1]))
    on_stops(signal.SIG_IGN)  # the trainer decides when to stop
    shared, data = int(sys.argv[2]), memoryview(b"")
    uploads: Any = None
    if (about := json.loads(sys.argv[3])) is not None:
        from oneloop.checkpoint.uploads import Uploads  # 1 s, and only with a mirror

        uploads = Uploads(about, news=lambda **news: _print({"news": news}))
    while line := sys.stdin.buffer.readline():
        decoded = json.loads(line)
        if decoded is None:
            continue  # cancelled too late: the save has already ended
        if "end" in decoded:
            _print(uploads.end(**decoded["end"]))
            continue
        request = SaveRequest(**decoded)
        if request.size > len(data):
            data = memoryview(mmap.mmap(shared, request.size, prot=mmap.PROT_READ))
        began = time.perf_counter()
        try:
            save = uploads.save if uploads is not None and uploads.counts else write
            save(request, data[: request.size], cancelled=_input_waiting)
            answer: dict[str, Any] = {"step": request.step, "seconds": time.perf_counter() - began}
        except Exception as error:
            answer = {"step": request.step, "error": f"{type(error).__name__}: {error}"}
        _print(answer)
        if uploads is not None and not uploads.counts and "error" not in answer:
            uploads.wanted(request)


def _print(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")  # one write: several threads print
    sys.stdout.flush()


def _input_waiting() -> bool:
    """Return whether standard input has data; during a save, that can only be its cancellation."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


if __name__ == "__main__":
    main()
