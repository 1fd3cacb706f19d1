"""``oneloop new``: a task, or config files, to start from."""

from collections.abc import Sequence
from pathlib import Path

from oneloop.basics.command_options import Options
from oneloop.basics.exit_codes import DONE, BadInput
from oneloop.basics.files import printable, reject_run_folder, writing
from oneloop.basics.houses import required
from oneloop.launch.config_files import config_files


def new(words: Sequence[str]) -> int:
    """Write a task to start from, or the accelerate config files of oneloop for editing.

    The task trains as it is: oneloop launch --config_file single FILE.py:MyTask
    """
    options = Options("new", new.__doc__)
    options.add_argument(
        "file", nargs="?", type=Path, help="the file to write (my_task.py); with --configs a folder"
    )
    options.add_argument("--configs", action="store_true", help="write the config files")
    given = options.parse_args(words)
    # Collect the texts by file; write them only if no file exists.
    if given.configs:
        folder = given.file or Path("accelerate_configs")
        texts = {
            folder / path.name: path.read_text(encoding="utf-8") for path in config_files().values()
        }
    elif given.file is None:
        raise BadInput(
            "oneloop new takes the file to write (oneloop new my_task.py), or --configs and a "
            "folder"
        )
    else:
        texts = {given.file: required("a new task").task_template(given.file)}
    for path in texts:
        reject_run_folder(path)
    there = [str(path) for path in texts if path.exists()]
    if there:
        raise BadInput(
            f"oneloop new: {', '.join(there)} already exists; choose another name, or remove it"
        )

    first = next(iter(texts))
    with writing(first, "choose another name"):
        first.parent.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
    lines = [str(path) for path in texts]
    if not given.configs:
        lines.append(f"train it with: oneloop launch --config_file single {given.file}:MyTask")
    print(printable("\n".join(lines)))
    return DONE
