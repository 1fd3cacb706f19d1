"""What a training process is doing, told by its main thread's stack: whether it waits for others, and in which line."""

from __future__ import annotations

import sys
import sysconfig
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_OURS = str(Path(__file__).parents[1])
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OF_OTHERS = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/", "/accelerate/")
"""where a process waits for the others, or for a device that waits for them"""
_DOING = ("data", "checkpoint", "show", "tasks", "evaluate.py", "predict.py")
"""rooms of oneloop in which a process that stands still does so by itself"""
_COMPILERS = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/")
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/pydevd", "/debugpy/", "/ipdb/")


@dataclass(frozen=True)
class Stance:
    """One look at the main thread."""

    where: str
    """``file:line in function``: the innermost line of someone's own code, or of any"""
    waits: bool
    """it waits for other processes"""
    compiles: bool
    debugged: bool
    """a person is looking at it"""


def stance() -> Stance:
    """Of this process, now; to be asked from another thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    files = [frame.f_code.co_filename for frame in frames]
    own = [frame for frame, file in zip(frames, files, strict=True) if not file.startswith((_OURS, *_LIBRARIES, "<"))]
    inner = (own or frames)[0] if frames else None
    return Stance(
        where=f"{inner.f_code.co_filename}:{inner.f_lineno} in {inner.f_code.co_name}" if inner else "",
        waits=bool(files) and _waits(files[0]),
        compiles=any(part in file for file in files for part in _COMPILERS),
        debugged=any(part in file for file in files for part in _DEBUGGERS),
    )


def _waits(file: str) -> bool:
    if any(part in file for part in _OF_OTHERS):
        return True
    return file.startswith(_OURS) and not file.removeprefix(_OURS).lstrip("/").startswith(_DOING)
