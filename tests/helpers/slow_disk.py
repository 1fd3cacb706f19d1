"""A slow disk for checkpoints and ``base/``; as a program, a writing process with such a disk."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from oneloop.basics.bucket import Bucket
from oneloop.checkpoint import writer

RATE = "TEST_DISK_RATE"  # variable with its bytes per second
UPLOAD_RATE = "TEST_UPLOAD_RATE"  # variable with the bytes per second of uploads; missing: no limit


class _SlowFile:
    """A file that takes its time to be written."""

    def __init__(self, file: Any, rate: float) -> None:
        self._file = file
        self._rate = rate

    def write(self, data: Any) -> int:
        time.sleep(len(data) / self._rate)
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _SlowFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def slow_down() -> None:
    """Let this process write files with tensors slowly."""
    rate = float(os.environ[RATE])
    opened = Path.open

    def slowly(self: Path, *given: Any, **more: Any) -> Any:
        file = opened(self, *given, **more)
        writes = self.suffix == ".safetensors" and given == ("wb",)
        return _SlowFile(file, rate) if writes else file

    Path.open = slowly
    if UPLOAD_RATE not in os.environ:
        return
    upload_rate = float(os.environ[UPLOAD_RATE])
    write = Bucket.write

    def upload_slowly(self: Bucket, name: str, pieces: Any, size: int = 0) -> dict[str, Any]:
        def in_time() -> Any:
            for piece in pieces:
                time.sleep(len(piece) / upload_rate)
                yield piece

        return write(self, name, in_time(), size)

    Bucket.write = upload_slowly


if __name__ == "__main__":
    slow_down()
    writer.main()
