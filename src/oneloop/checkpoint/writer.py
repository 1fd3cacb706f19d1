"""Write one rank's shard of a checkpoint in a process without torch.

Rank 0 waits for the others and completes the checkpoint. A shard is one safetensors file, whose
data section is the staged bytes. Ranks communicate through files in the draft folder, which is on
shared storage: ``rank-00001.json`` means that a shard is complete, ``rank-00001.failed`` that it
failed.
"""

import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from oneloop.basics.system.files import readable_within
from oneloop.basics.system.processes import die_with
from oneloop.basics.system.signals import on_stops
from oneloop.checkpoint.save_request import (
    Answer,
    News,
    SaveRequest,
    UploadSettings,
    gathered,
    padded,
)
from oneloop.checkpoint.store import Store, flush, write_file

_CHUNK = 1 << 22  # bytes
_FLUSHED = 1 << 28  # bytes between two flushes, so that the last one does not take long
_PAUSE = 0.25  # seconds between two reports of progress


def write(
    request: SaveRequest,
    data: memoryview,
    cancelled: Callable[[], bool] = lambda: False,
    wrote: Callable[[], object] = lambda: None,
) -> None:
    """Write this rank's files; rank 0 then completes the checkpoint and deletes older ones.

    Args:
        request: what to write.
        data: the bytes of its tensors.
        cancelled: returns whether rank 0 must not wait for the others any longer.
        wrote: called after every few megabytes.

    Raises:
        OSError: if a file cannot be written.
        Gone: if another rank failed, or the save was cancelled.
    """
    store = Store(Path(request.root))
    draft = store.draft(request.step, request.attempt)
    shard = f"rank-{request.rank:05d}"
    try:
        entry = write_tensors(draft / f"{shard}.safetensors", request.header, data, wrote)

        # Publish the entry by a rename, so that rank 0 never reads half of it.
        if request.rank != 0:
            write_file(draft / f"{shard}.draft", json.dumps(entry).encode())
            (draft / f"{shard}.draft").rename(draft / f"{shard}.json")
            return

        # Wait for the other ranks.
        state = json.dumps(request.state, indent=1).encode()
        files = {
            f"{shard}.safetensors": entry,
            "state.json": write_file(draft / "state.json", state),
        }
        files |= gathered(
            names=lambda: os.listdir(draft),
            read=lambda name: (draft / name).read_bytes(),
            ranks=request.ranks,
            cancelled=cancelled,
        )
        for other in range(1, request.ranks):
            (draft / f"rank-{other:05d}.json").unlink()
    except OSError:
        try:
            (draft / f"{shard}.failed").touch()
        finally:
            raise

    # Complete the checkpoint: what its state refers to must be on disk before.
    for file in request.flush:
        with suppress(OSError):  # it may not exist
            flush(Path(file))
    store.seal(draft, request.step, files, request.about, request.tensors)
    store.prune(request.keep)


def write_tensors(
    file: Path, header: str, data: memoryview, wrote: Callable[[], object]
) -> dict[str, Any]:
    """Write and flush a safetensors file; return its manifest entry.

    Args:
        file: to write.
        header: of the tensors, as JSON.
        data: the bytes of the tensors.
        wrote: called after every few megabytes.
    """
    head = padded(header)
    state = xxh3_128()
    with file.open("wb", buffering=0) as stream:
        append(stream, state, memoryview(head), wrote)
        append(stream, state, data, wrote)
        os.fsync(stream.fileno())
    return {"size": len(head) + len(data), "xxh3": state.hexdigest()}


def append(
    stream: FileIO, checksum: xxh3_128, data: memoryview, wrote: Callable[[], object]
) -> None:
    """Write bytes to a file without a buffer, a few megabytes at a time.

    Args:
        stream: the file.
        checksum: is updated.
        data: the bytes.
        wrote: called after every few megabytes.
    """
    for start in range(0, len(data), _CHUNK):
        piece = data[start : start + _CHUNK]
        checksum.update(piece)
        written = 0
        while written < len(piece):
            written += stream.write(piece[written:])
        if stream.tell() % _FLUSHED < len(piece):
            os.fsync(stream.fileno())
        wrote()


def main() -> None:
    """Read requests from standard input, and answer each on standard output, in lines of JSON."""
    trainer = int(sys.argv[1])  # process id
    shared = int(sys.argv[2])  # file descriptor of the memory
    settings = json.loads(sys.argv[3])  # of the mirror; None: there is none
    die_with(trainer)
    on_stops(signal.SIG_IGN)  # the trainer decides when to stop
    uploads = None
    if settings is not None:
        # Only with a mirror: it takes as long as all other imports.
        from oneloop.checkpoint.uploads import Uploads

        uploads = Uploads(UploadSettings(**settings), _report)
    data = memoryview(b"")

    while line := sys.stdin.buffer.readline():
        decoded = json.loads(line)
        if decoded is None:
            continue  # cancelled too late: the save has already ended

        # The end of the run: upload what the mirror lacks.
        if "end" in decoded:
            assert uploads is not None
            _print(asdict(uploads.end(**decoded["end"])))
            continue

        # Map the shared memory again if it has grown.
        request = SaveRequest.parsed(decoded)
        if request.size > len(data):
            data = memoryview(mmap.mmap(shared, request.size, prot=mmap.PROT_READ))

        # Write to the disk, or to the mirror if checkpoints count only there.
        try:
            save: Callable[..., None] = partial(write, wrote=_Progress())
            if uploads is not None and uploads.counts:
                save = uploads.save
            save(request, data[: request.size], cancelled=_input_waiting)
            answer = Answer(request.step)
        except Exception as error:
            answer = Answer(request.step, error=f"{type(error).__name__}: {error}")
        _print(asdict(answer))

        # Copy to the mirror in the background, after the answer.
        if uploads is not None and not uploads.counts and answer.error is None:
            uploads.wanted(request)


class _Progress:
    """Reports to the trainer that bytes were written, at most four times a second."""

    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._last > _PAUSE:
            self._last = now
            _print({"wrote": True})


def _report(news: News) -> None:
    _print({"news": asdict(news)})


def _print(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")  # one write: several threads print
    sys.stdout.flush()


def _input_waiting() -> bool:
    """Return whether standard input has data; during a save, that can only be its cancellation."""
    return readable_within(sys.stdin.fileno(), 0)


if __name__ == "__main__":
    main()
