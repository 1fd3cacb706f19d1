"""Record which functions run: files_on_a_way.py copies this file to a folder of PYTHONPATH, as
sitecustomize.py, so that each Python process of a command starts with it.

When a function of $RECORD_SOURCE begins for the first time in a process, the process appends a line
to $RECORD_TO: the path of the file, the line of the function, and its qualified name, divided by
tabs. The body of a module or class does not count. If $RECORD_STEPS is "4-7", only a process that
trains counts, from its fourth backward until its seventh: all work of three steps in its main
thread.
"""

import inspect
import os
import sys
import threading

SOURCE = os.environ["RECORD_SOURCE"]
FILE = os.environ["RECORD_TO"]
FIRST, _, LAST = os.environ["RECORD_STEPS"].partition("-")
BACKWARD = os.path.join("accelerate", "accelerator.py")
# These have code of their own, but run where they are written, which may be outside of functions.
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}

done = set()  # functions that are recorded: file, line, name
others = set()  # files that are not of the source
backwards = 0  # calls of Accelerator.backward: one per step, if each step has one micro-batch


def recording():
    return not FIRST or int(FIRST) <= backwards < int(LAST)


def record(frame, event, _):
    """Note a function that begins (an argument of sys.setprofile)."""
    global backwards
    if event != "call":
        return
    code = frame.f_code
    path = code.co_filename
    if FIRST and code.co_name == "backward" and path.endswith(BACKWARD):
        backwards += 1
    if path in others:
        return
    if not path.startswith(SOURCE):
        others.add(path)
        return
    is_function = code.co_flags & inspect.CO_NEWLOCALS and code.co_flags & inspect.CO_OPTIMIZED
    if not is_function or code.co_name in COMPREHENSIONS or not recording():
        return

    # Python 3.10 has no qualified name here; the line alone distinguishes functions of one name.
    function = (path, code.co_firstlineno, getattr(code, "co_qualname", code.co_name))
    if function in done:
        return
    done.add(function)

    # One write to a file that is open for appending is not divided by those of other processes.
    line = "\t".join(str(part) for part in function)
    file = os.open(FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{line}\n".encode())
    os.close(file)


# The steps of a batch are those of the main thread; heartbeats, in another, come at any time.
if not FIRST:
    threading.setprofile(record)  # of threads that begin from now on
sys.setprofile(record)
