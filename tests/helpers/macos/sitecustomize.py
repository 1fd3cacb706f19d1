"""Emulate macOS for oneloop's files, in every Python process with this folder in PYTHONPATH.

An import of ``os``, ``sys``, ``ctypes`` or ``resource`` by a file of oneloop returns a view of that
module as on macOS. Python, torch and psutil see the real modules. New processes of multiprocessing
are spawned, torch shares tensors by name, and at most 256 files can be open, as is usual there.
"""

import builtins
import multiprocessing
import os
import resource
import sys
from types import ModuleType

_SHARES = os.environ.get("ONELOOP_EMULATION_SHARES", "file_system")  # how torch sends tensors
_FILES = "ONELOOP_EMULATION_FILES"  # variable with the number of files that can be open
_LOG = "ONELOOP_EMULATION_LOG"  # variable with the file in which each process notes its id
_KERNEL = ("/proc/", "/sys/")  # folders that macOS does not have
_MISSING = {
    "os": {
        "memfd_create",
        "sched_getaffinity",
        "sched_setaffinity",
        "posix_fadvise",
        "posix_fallocate",
        "copy_file_range",
        "sendfile",
        "splice",
        "eventfd",
        "pidfd_open",
        "fork",  # is there, but unsafe
    },
    "ctypes": set(),
    "resource": {"prlimit"},
    "sys": set(),
}


class _View(ModuleType):
    """A module as oneloop's files see it."""

    def __init__(self, real, missing, **other):
        super().__init__(real.__name__)
        self.__dict__.update(_real=real, _missing=missing, _other=other)

    def __getattr__(self, name):
        if name in self._missing:
            raise AttributeError(f"module {self._real.__name__!r} has no attribute {name!r}")
        return self._other[name] if name in self._other else getattr(self._real, name)

    def __setattr__(self, name, value):
        setattr(self._real, name, value)

    def __delattr__(self, name):
        delattr(self._real, name)


class _Library:
    """The C library without what only Linux has."""

    def __init__(self, name, *given, **more):
        import ctypes

        self.__dict__["_real"] = ctypes.CDLL(name, *given, **more)

    def __getattr__(self, name):
        if name in ("prctl", "tgkill"):
            raise AttributeError(name)
        return getattr(self._real, name)


def _getrusage(who):
    found = list(resource.getrusage(who))
    found[2] *= 1024  # ru_maxrss: macOS counts bytes
    return resource.struct_rusage(found)


def _is_ours(frame):
    return frame.f_globals.get("__name__", "").split(".")[0] == "oneloop"


def _view(module):
    other = {}
    if module.__name__ == "sys":
        other["platform"] = "darwin"
    elif module.__name__ == "ctypes":
        other["CDLL"] = _Library
    elif module.__name__ == "resource":
        other["getrusage"] = _getrusage
    return _View(module, _MISSING[module.__name__], **other)


_views = {}
_import = builtins.__import__


def _imported(name, globals=None, locals=None, fromlist=(), level=0):
    module = _import(name, globals, locals, fromlist, level)
    importer = (globals or {}).get("__name__", "")
    if importer.split(".")[0] != "oneloop":
        return module
    if name == "torch.utils.data":
        _import("torch.multiprocessing").multiprocessing.set_sharing_strategy(_SHARES)
    if name not in _MISSING:
        return module
    if name not in _views:
        _views[name] = _view(module)
    return _views[name]


def _no_kernel_files(event, given):
    """Let a file of oneloop that opens a file of Linux's kernel find none."""
    if event != "open" or not str(given[0]).startswith(_KERNEL):
        return
    frame = sys._getframe(1)
    library = os.path.dirname(os.__file__)
    while frame is not None and frame.f_code.co_filename.startswith((library, "<frozen")):
        if "site-packages" in frame.f_code.co_filename:
            return
        frame = frame.f_back
    if frame is not None and _is_ours(frame):
        raise FileNotFoundError(2, "No such file or directory", str(given[0]))


builtins.__import__ = _imported
sys.addaudithook(_no_kernel_files)
multiprocessing.set_start_method("spawn")
_most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (int(os.environ.get(_FILES, "256")), _most))
if _LOG in os.environ:
    with open(os.environ[_LOG], "a", encoding="utf-8") as _log:
        _log.write(f"{os.getpid()} {sys.orig_argv}\n")
