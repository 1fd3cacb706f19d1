"""Weights pushed to a hub and loaded again are bit-identical; the model card describes them; errors
are reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load, load_file

from adapters import WORDS, a_base, adapters_of, of_words
from hub_server import Models
from oneloop.cli import main

pytestmark = pytest.mark.covers(
    "oneloop.tools.export.command",
    "oneloop.tools.export.model_card",
    "oneloop.tools.export.push",
)


def typed(words: list[str], folder: Path, variables: dict[str, str]) -> tuple[int, str]:
    """Run a command as typed."""
    given = {
        key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))
    }
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=given | {"OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Train a base model, full weights from it (whole/run), and adapters on it (run)."""
    folder = tmp_path_factory.mktemp("trained")
    a_base(folder / "base")
    words = [
        "--task.model",
        str(folder / "base"),
        "--duration",
        "4",
        "--ema.half_life",
        "16",
        "--eval.every",
        "2",
    ]
    (folder / "whole").mkdir()
    of_words(folder / "whole", *words).ok()
    of_words(folder, *words, "--task.lora.rank", "4").ok()
    return folder


def front_matter(card: bytes) -> dict:
    return yaml.safe_load(card.decode().split("---\n")[1])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pushed_and_taken_back(trained, tmp_path):
    with Models(tmp_path / "hub") as hub:
        variables = hub.variables(tmp_path / "cache")
        command = ["oneloop", "export", str(trained / "whole" / "run"), "--push", "some/model"]
        code, output = typed([*command, "--license", "apache-2.0"], tmp_path, variables)
        assert (
            code == 0
            and f"some/model: http://127.0.0.1/some/model/commit/{hub.heads['some/model']}"
            in output
        ), output
        assert hub.private["some/model"]
        files = hub.files("some/model")
        assert {
            "model.safetensors",
            "config.json",
            "tokenizer.json",
            "README.md",
            "recipe.yaml",
        } <= files.keys()
        assert any(
            b"im_start" in files.get(name, b"")
            for name in ("chat_template.jinja", "tokenizer_config.json")
        )
        assert (
            files["model.safetensors"]
            == (trained / "whole" / "run" / "final" / "model.safetensors").read_bytes()
        )
        card = front_matter(files["README.md"])
        assert card["license"] == "apache-2.0" and card["library_name"] == "transformers"
        metrics = {
            one["type"]: one["value"] for one in card["model-index"][0]["results"][0]["metrics"]
        }
        summary = json.loads((trained / "whole" / "run" / "summary.json").read_text())
        assert metrics["loss"] == pytest.approx(summary["eval/loss"])
        page = files["README.md"].decode()
        assert "train/loss over steps" in page and "## Recipe" in page and "lessons" in page

        # Adapters on the model that is now on the hub.
        words = [
            *WORDS,
            "--task.model",
            "hf:some/model",
            "--task.lora.rank",
            "4",
            "--duration",
            "3",
        ]
        code, output = typed(["oneloop.train", *words, "--run.dir", "on-it"], tmp_path, variables)
        assert code == 0, output
        origin = json.loads(next((tmp_path / "on-it" / "base").glob("*/origin.json")).read_text())
        first = hub.heads["some/model"]
        assert (
            origin["place"] == "hf:some/model"
            and origin["commit"] == first
            and "files" not in origin
        )
        code, output = typed(
            ["oneloop", "export", "on-it", "--push", "some/adapter", "--public"],
            tmp_path,
            variables,
        )
        assert code == 0 and not hub.private["some/adapter"], output
        files = hub.files("some/adapter")
        assert "config.json" not in files and "model.safetensors" not in files
        card = front_matter(files["README.md"])
        assert card["base_model"] == "some/model" and card["library_name"] == "peft"
        assert f"commit {first}" in files["README.md"].decode()
        expected = load_file(tmp_path / "on-it" / "final" / "adapter_model.safetensors")

        # Load both again after the model has changed: the adapters name its commit.
        code, output = typed([*command, "--weights", "ema"], tmp_path, variables)
        assert code == 0 and hub.heads["some/model"] != first, output
        still = ["--duration", "1", "--optimizer.lr", "0"]
        back = {
            "by model": ["--task.model", "hf:some/adapter"],
            "by init": [
                "--task.model",
                f"hf:some/model@{first}",
                "--task.lora.rank",
                "4",
                "--init.from",
                "hf:some/adapter",
            ],
        }
        for name, more in back.items():
            code, output = typed(
                ["oneloop.train", *WORDS, *more, *still, "--run.dir", name], tmp_path, variables
            )
            assert code == 0, output
            found = load_file(tmp_path / name / "final" / "adapter_model.safetensors")
            assert found.keys() == expected.keys() and all(
                torch.equal(found[key], expected[key]) for key in expected
            )
            assert (
                json.loads(next((tmp_path / name / "base").glob("*/origin.json")).read_text())[
                    "commit"
                ]
                == first
            )
        words = [
            *WORDS,
            "--task.model",
            "hf:some/model",
            "--task.lora.rank",
            "4",
            "--init.from",
            "hf:some/adapter",
        ]
        code, output = typed(["oneloop.train", *words, "--run.dir", "other"], tmp_path, variables)
        assert code == 2 and f"its adapters are for hf:some/model ({first}), expected" in output, (
            output
        )


@pytest.mark.slow
def test_whole_weights_replace_adapters_of_an_earlier_push(trained, tmp_path):
    with Models(tmp_path / "hub") as hub:
        variables = hub.variables(tmp_path / "cache")
        command = ["oneloop", "export", str(trained / "run"), "--push", "some/thing"]
        code, output = typed([*command, "--weights", "ema"], tmp_path, variables)
        assert code == 0, output
        held = load(hub.files("some/thing")["adapter_model.safetensors"])
        average = load_file(trained / "run" / "final" / "ema.safetensors")
        assert held.keys() == average.keys() == adapters_of(trained).keys()
        assert all(torch.equal(held[name], average[name]) for name in held)
        code, output = typed([*command, "--merged"], tmp_path, variables)
        assert code == 0, output
        files = hub.files("some/thing")
        assert {"model.safetensors", "config.json", ".gitattributes"} <= files.keys()
        assert not {"adapter_model.safetensors", "adapter_config.json"} & files.keys()


@pytest.mark.slow
def test_what_goes_wrong_on_the_way_is_reported(trained, tmp_path, capsys):
    run, whole = str(trained / "run"), str(trained / "whole" / "run")
    for words, expected_text in (
        ([run, "--push", "so me/thing"], "is not a repository name (ORG/NAME)"),
        (
            [run, "--to", str(tmp_path / "here"), "--public"],
            "--public and --license are of a repository of the hub",
        ),
        (
            [run, "--weights", "ema"],
            "needs a folder to write to (--to DIR), or a repository of the hub",
        ),
        ([whole, "--to", str(tmp_path / "here"), "--merged"], "the run trained no adapters"),
    ):
        assert main(["export", *words]) == 2 and expected_text in capsys.readouterr().err
    with Models(tmp_path / "hub") as hub:
        variables = hub.variables(tmp_path / "cache")
        wrong = [
            (
                [run, "--push", "some/thing"],
                {"HF_TOKEN": ""},
                "needs a token that may write to the hub",
            ),
            (
                [run, "--push", "some/thing"],
                {"HF_TOKEN": "guessed"},
                "--push some/thing: the hub rejects it",
            ),
            (
                [run, "--push", "some/thing"],
                {"HF_ENDPOINT": "http://127.0.0.1:9"},
                "the hub cannot be reached",
            ),
        ]
        for words, more, expected_text in wrong:
            code, output = typed(["oneloop", "export", *words], tmp_path, variables | more)
            assert code == 2 and expected_text in output and "Traceback" not in output, output
        assert not hub.heads and not (tmp_path / "here").exists()
