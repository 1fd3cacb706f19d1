"""Windows, as oneloop's files see it; Python itself and other libraries still see this system.

Put this folder into PYTHONPATH. Windows lacks some modules of POSIX, and some names of others.
"""

import builtins
import sys
from types import ModuleType

MISSING_MODULES = {"fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"}
MISSING_NAMES = {
    "os": {
        *("fork", "forkpty", "getuid", "geteuid", "getpgid", "killpg", "kill", "mkfifo", "nice"),
        *("pread", "pwrite", "sched_getaffinity", "setsid", "statvfs", "uname", "memfd_create"),
        *("WNOHANG", "O_NONBLOCK", "O_DIRECTORY"),
    },
    "signal": {
        *("SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGSTOP", "SIGCONT", "SIGALRM"),
        *("SIGQUIT", "pthread_sigmask", "pthread_kill", "setitimer", "alarm"),
    },
}


class Seen(ModuleType):
    """A module as Windows has it."""

    def __init__(self, real):
        super().__init__(real.__name__)
        self.__dict__["real"] = real

    def __getattr__(self, name):
        real = self.__dict__["real"]
        if name in MISSING_NAMES.get(real.__name__, ()):
            raise AttributeError(f"module {real.__name__!r} has no attribute {name!r}")
        if (real.__name__, name) == ("sys", "platform"):
            return "win32"
        return getattr(real, name)


real_import = builtins.__import__


def seen_import(name, globals=None, locals=None, fromlist=(), level=0):
    """Import a module for oneloop as Windows would, and as usual for others."""
    spec = (globals or {}).get("__spec__")
    importer = getattr(spec, "name", None) or (globals or {}).get("__name__", "")
    if importer.partition(".")[0] != "oneloop":
        return real_import(name, globals, locals, fromlist, level)
    if name.partition(".")[0] in MISSING_MODULES:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    module = real_import(name, globals, locals, fromlist, level)
    return Seen(module) if name in {"sys", *MISSING_NAMES} else module


builtins.__import__ = seen_import
assert "oneloop" not in sys.modules
