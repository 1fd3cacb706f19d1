"""oneloop launch: one process is started without accelerate's launcher, with the same
environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from oneloop.basics.exit_codes import BadInput
from oneloop.cli import main
from oneloop.launch.command import _of_one_process, split_words
from oneloop.launch.config_files import config_file

pytestmark = pytest.mark.covers("oneloop.launch.config_files", "oneloop.launch.command")

PROGRAM = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"


@pytest.mark.parametrize("precision", ["no", pytest.param("bf16", marks=pytest.mark.slow)])
def test_one_process_gets_the_variables_that_accelerate_sets(tmp_path, precision):
    (tmp_path / "program.py").write_text(PROGRAM)
    accelerate = [
        sys.executable,
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        "--mixed_precision",
        precision,
    ]
    own = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    words = [*accelerate, "--config_file", config_file("single"), "program.py", "found.json"]
    subprocess.run(words, check=True, cwd=tmp_path, env=own, capture_output=True)
    found = json.loads((tmp_path / "found.json").read_text())
    added = {key: value for key, value in found.items() if own.get(key) != value}
    set_by_imports = {
        "TORCHINDUCTOR_CACHE_DIR",
        "LC_CTYPE",
        "KMP_DUPLICATE_LIB_OK",
        "KMP_INIT_AT_FORK",
    }
    ours = _of_one_process({"config_file": "single", "mixed_precision": precision})
    assert ours == {key: value for key, value in added.items() if key not in set_by_imports} | {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")
    }


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
