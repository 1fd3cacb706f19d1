"""Write one rank's shard of a checkpoint in a process without torch.

Rank 0 waits for the others and completes the checkpoint. A shard is one safetensors file, whose
data section is the staged bytes. Ranks communicate through files in the draft, which is on shared
storage: ``rank-00001.json`` means that a shard is complete, ``rank-00001.failed`` that it failed.
The draft is on a disk (:class:`oneloop.checkpoint.store.Draft`) or in a bucket
(:class:`oneloop.checkpoint.uploads.RemoteDraft`).
"""

import json
import mmap
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from oneloop.basics.system.processes import die_with
from oneloop.basics.system.signals import on_stops
from oneloop.checkpoint.manifest import manifest_of
from oneloop.checkpoint.save_request import Answer, SaveRequest, padded
from oneloop.checkpoint.store import Draft, Store

_CHUNK = 1 << 22  # bytes
_PAUSE = 0.25  # seconds between two reports of progress


class Gone(Exception):
    """An error: another rank's shard failed, or this save was cancelled."""


def write(
    draft: Draft,
    request: SaveRequest,
    data: memoryview,
    cancelled: Callable[[], bool] = lambda: False,
    wrote: Callable[[], object] = lambda: None,
) -> None:
    """Write this rank's files; rank 0 then completes the checkpoint and deletes older ones.

    Args:
        draft: of the checkpoint, in which all ranks write.
        request: what to write.
        data: the bytes of its tensors.
        cancelled: returns whether rank 0 must not wait for the others any longer.
        wrote: called after every few megabytes.

    Raises:
        OSError: if a file cannot be written.
        Gone: if another rank failed, or the save was cancelled.
    """
    shard = f"rank-{request.rank:05d}"
    try:
        entry = write_tensors(draft, f"{shard}.safetensors", request.header, data, wrote)
        if request.rank != 0:
            draft.put(f"{shard}.json", json.dumps(entry).encode())
            return

        # Wait for the other ranks.
        state = json.dumps(request.state, indent=1).encode()
        files = {f"{shard}.safetensors": entry, "state.json": draft.put("state.json", state)}
        files |= _gathered(draft, request.ranks, cancelled)
    except OSError:
        # Rank 0, which waits for the shard, then gives up.
        with suppress(OSError):
            draft.put(f"{shard}.failed", b"failed")
        raise

    manifest = manifest_of(request.step, files, request.about, request.tensors)
    draft.seal(manifest, request.flush)
    draft.store.prune(request.keep)


def write_tensors(
    draft: Draft, name: str, header: str, data: memoryview, wrote: Callable[[], object]
) -> dict[str, Any]:
    """Write a safetensors file; return its manifest entry.

    Args:
        draft: gets the file.
        name: of the file.
        header: of the tensors, as JSON.
        data: the bytes of the tensors.
        wrote: called after every few megabytes.
    """

    def pieces() -> Iterable[memoryview]:
        yield memoryview(padded(header))
        for start in range(0, len(data), _CHUNK):
            yield data[start : start + _CHUNK]
            wrote()

    return draft.write(name, pieces(), len(data))


def _gathered(draft: Draft, ranks: int, cancelled: Callable[[], bool]) -> dict[str, Any]:
    """Wait for the shards of the other ranks; return their manifest entries by file name."""
    entries: dict[str, Any] = {}
    while len(entries) < ranks - 1:
        names = set(draft.names())
        for rank in range(1, ranks):
            shard = f"rank-{rank:05d}"
            if f"{shard}.safetensors" not in entries and f"{shard}.json" in names:
                entries[f"{shard}.safetensors"] = json.loads(draft.read(f"{shard}.json"))
            if f"{shard}.failed" in names:
                raise Gone(f"rank {rank} could not write its shard")
        if cancelled():
            raise Gone("another rank could not write its shard")
        if len(entries) < ranks - 1:
            time.sleep(draft.pause)
    return entries


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

        uploads = Uploads(**settings, news=_answer)
    data = memoryview(b"")

    while line := sys.stdin.buffer.readline():
        decoded = json.loads(line)
        if decoded is None:
            continue  # cancelled too late: the save has already ended

        # The end of the run: upload what the mirror lacks.
        if "end" in decoded:
            assert uploads is not None
            _answer(uploads.end(**decoded["end"]))
            continue

        # Map the shared memory again if it has grown.
        request = SaveRequest.parsed(decoded)
        if request.size > len(data):
            data = memoryview(mmap.mmap(shared, request.size, prot=mmap.PROT_READ))

        # Write to the disk, or to the mirror if checkpoints count only there.
        error = None
        try:
            storage: Any = Store(Path(request.root))
            if uploads is not None:
                uploads.request = request
                storage = uploads if uploads.counts else storage
            draft: Draft = storage.draft(request.step, request.attempt)
            write(draft, request, data[: request.size], _input_waiting, _progress())
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        _answer(Answer(request.step, error))

        # Copy to the mirror in the background, after the answer.
        if uploads is not None and not uploads.counts and error is None:
            uploads.wanted.set()


def _progress() -> Callable[[], None]:
    """Return a function that reports to the trainer that bytes were written.

    It does so at most four times a second.
    """
    last = 0.0

    def wrote() -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > _PAUSE:
            last = now
            _print({"wrote": True})

    return wrote


def _answer(answer: Answer) -> None:
    _print(asdict(answer))


def _print(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")  # one write: several threads print
    sys.stdout.flush()


def _input_waiting() -> bool:
    """Return whether standard input has data; during a save, that can only be its cancellation."""
    return bool(wait([sys.stdin.fileno()], 0))


if __name__ == "__main__":
    main()
