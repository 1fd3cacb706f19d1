"""oneloop launch: one process is started without accelerate's launcher, with the same
environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env

from oneloop.basics.exit_codes import BadInput
from oneloop.cli import main
from oneloop.launch.command import _of_one_process, split_words
from oneloop.launch.config_files import config_file

pytestmark = pytest.mark.covers("oneloop.launch.config_files", "oneloop.launch.command")

PROGRAM = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"
SET_BY_IMPORTS = {
    "TORCHINDUCTOR_CACHE_DIR",
    "LC_CTYPE",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
}


def launch_words(precision: str) -> list[str]:
    """Return the words that accelerate's launcher gets."""
    words = ["--mixed_precision", precision, "--config_file", config_file("single")]
    return [*words, "program.py", "found.json"]


def check_variables(precision: str, own: dict[str, str], found: dict[str, str]) -> None:
    """Compare the variables that oneloop sets with those that accelerate adds.

    Args:
        own: the environment of the launcher.
        found: the environment of the process that it starts.
    """
    added = {key: value for key, value in found.items() if own.get(key) != value}
    expected = {key: value for key, value in added.items() if key not in SET_BY_IMPORTS}
    ours = _of_one_process({"config_file": "single", "mixed_precision": precision})
    assert ours == expected | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def test_one_process_gets_the_variables_that_accelerate_sets(monkeypatch):
    # These two functions of accelerate's launcher make the environment of one process.
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    args = launch_command_parser().parse_args(launch_words("no"))
    args, _, _ = _validate_launch_command(args)
    _, found = prepare_simple_launcher_cmd_env(args)
    own = dict(os.environ)
    monkeypatch.undo()
    assert own != found
    check_variables("no", own, found)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_process_of_accelerate_gets_the_same_variables(tmp_path, precision):
    (tmp_path / "program.py").write_text(PROGRAM)
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    own = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    words = [*launcher, *launch_words(precision)]
    subprocess.run(words, check=True, cwd=tmp_path, env=own, capture_output=True)
    check_variables(precision, own, json.loads((tmp_path / "found.json").read_text()))


def test_only_plain_settings_of_one_process_do_without_accelerate(tmp_path):
    assert _of_one_process({"config_file": "single"})
    assert _of_one_process({"config_file": "single", "num_processes": "1"})
    assert not _of_one_process({"config_file": "single", "num_processes": "2"})
    assert not _of_one_process({"config_file": "ddp"}) and not _of_one_process({})
    assert not _of_one_process({"config_file": "single", "mixed_precision": "fp8"})
    for line in (
        "dynamo_config: {dynamo_backend: INDUCTOR}",
        "use_cpu: true",
        "gpu_ids: '1'",
        "debug: true",
    ):
        file = tmp_path / "own.yaml"
        file.write_text(f"distributed_type: 'NO'\n{line}\n")
        assert not _of_one_process({"config_file": str(file)})
    file.write_text("- a")
    with pytest.raises(BadInput, match="is not an accelerate config file"):
        _of_one_process({"config_file": str(file)})


def test_options_of_the_launcher_end_at_the_recipe():
    words = ["--config_file", "single", "--mixed_precision=bf16", "digits", "--batch.size", "8"]
    options = {"config_file": "single", "mixed_precision": "bf16"}
    assert split_words(words) == (options, ["digits", "--batch.size", "8"])
    assert split_words(["--gpu_ids", "0", "digits"]) is None  # accelerate reads it
    after = ["digits", "--config-file", "single", "--batch.size", "8", "--mixed_precision=bf16"]
    assert split_words(after) == (options, ["digits", "--batch.size", "8"])
    for words in ([], ["--config_file"], ["--config_file", "single"]):
        with pytest.raises(BadInput, match="no recipe given|needs a value"):
            split_words(words)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ([], "the following arguments are required: RUN"),
        (["nowhere"], "nowhere holds no run"),
        (["nowhere", "--bogus"], "unrecognized arguments: --bogus"),
    ],
)
def test_the_words_of_a_command_in_place_of_a_recipe_are_checked_first(more, reason, capsys):
    for command in ("evaluate", "predict"):
        assert main(["launch", "--config_file", "ddp", command, *more]) == 2
        assert reason in capsys.readouterr().err
