"""Train three steps with each tool deleted alone: python one_tool_less.py FOLDER

FOLDER has a whole copy of oneloop, and the task (core_copies.py). Print, as JSON, the exit code and
output of each run by the name of the tool's file or folder.
"""

import json
import os
import sys
from pathlib import Path

# Import the libraries once; each run is a fork that imports oneloop.
import accelerate.utils
import jsonargparse
import plotly.graph_objects
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.utils.tensorboard
import torchmetrics

LIBRARIES = (accelerate, jsonargparse, plotly, torch, torchmetrics)
WORDS = ["line.py:Line", "--duration", "3", "--track", "[tensorboard]"]


def train(folder: Path, run: str, output: Path) -> None:
    """Train in this process, which ends."""
    handle = os.open(output, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    code = 1
    try:
        from oneloop.launch import before_imports
        from oneloop.train import main

        assert Path(before_imports.__file__).is_relative_to(folder)
        words = [*WORDS, "--run.dir", run]
        before_imports.report(words)
        main(words)
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # to end the interpreter would take longer than the run


def main() -> None:
    folder = Path(sys.argv[1])
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    tools = folder / "oneloop" / "tools"
    ended = {}
    for tool in sorted(tools.iterdir()):
        if tool.name in ("__init__.py", "__pycache__"):
            continue
        tool.rename(folder / "deleted")
        output = folder / "output"
        child = os.fork()
        if child == 0:
            train(folder, f"run-{tool.name}", output)
        _, status = os.waitpid(child, 0)
        (folder / "deleted").rename(tool)
        ended[tool.name] = (os.waitstatus_to_exitcode(status), output.read_text())
    print(json.dumps(ended))


if __name__ == "__main__":
    main()
