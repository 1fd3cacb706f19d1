"""Exports of image models describe themselves: scripts without oneloop serve them as ``oneloop
predict`` does."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from own_files import images
from worlds import apply, run, train

pytestmark = pytest.mark.covers(
    "oneloop.tasks.image_models",
    "oneloop.tasks.transformers_models",
    "oneloop.tools.export.convert",
    "oneloop.tools.export.model_card",
)

WORDS = [
    "digits",
    "--task",
    "image_classification",
    "--task.data",
    "data",
    "--task.image_size",
    "40",
]
WORDS += [
    "--task.held_out",
    "0.2",
    "--duration",
    "4",
    "--batch.size",
    "8",
    "--track",
    "none",
    "--run.dir",
    "run",
]

TIMM = """
import sys, timm, torch
from PIL import Image
model = timm.create_model("local-dir:out", pretrained=True).eval()
config = timm.data.resolve_model_data_config(model)
transform = timm.data.create_transform(**config)
labels = model.pretrained_cfg["label_names"]
for file in sys.argv[1:]:
    logits = model(transform(Image.open(file).convert("RGB"))[None])
    confidence, index = logits.softmax(-1).max(-1)
    print(labels[int(index)], float(confidence))
"""

TORCHVISION = """
import json, sys, torch, torchvision
from PIL import Image
from safetensors.torch import load_file
from torchvision.transforms import v2
config = json.load(open("out/config.json"))
model = torchvision.models.get_model(config["model"], num_classes=len(config["classes"])).eval()
model.load_state_dict(load_file("out/model.safetensors"))
steps = [v2.Resize(config["input_size"][1:]), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
transform = v2.Compose([*steps, v2.Normalize(config["mean"], config["std"])])
for file in sys.argv[1:]:
    logits = model(transform(Image.open(file).convert("RGB"))[None])
    confidence, index = logits.softmax(-1).max(-1)
    print(config["classes"][int(index)], float(confidence))
"""


def export(words: list[str]) -> None:
    from oneloop.cli import main

    sys.exit(main(["export", *words]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "script", "more"),
    [
        ("timm:resnet10t", TIMM, []),
        ("timm:resnet10t", TIMM, ["--task.test_crop", "0.8", "--task.interpolation", "bicubic"]),
        ("mobilenet_v3_small", TORCHVISION, []),
    ],
)
def test_a_script_without_oneloop_gives_the_numbers_of_predict(tmp_path, model, script, more):
    images(tmp_path / "data", "folders", each=12)
    run(train, [*WORDS, "--task.model", model, *more], folder=tmp_path).ok()
    files = [
        str(file.relative_to(tmp_path)) for file in sorted((tmp_path / "data").rglob("*.png"))[:7]
    ]
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, file in enumerate(files):
        (flat / f"{number}.png").write_bytes((tmp_path / file).read_bytes())
    run(apply, ["predict", "run", "--data", "flat", "--to", "rows.csv"], folder=tmp_path).ok()
    expected = [
        (row["prediction"], float(row["confidence"]))
        for row in csv.DictReader((tmp_path / "rows.csv").open())
    ]
    subprocess.run(
        [sys.executable, "-m", "oneloop", "export", "run", "--to", "out"], cwd=tmp_path, check=True
    )
    served = subprocess.run(
        [sys.executable, "-c", script, *files],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    lines = [line.rsplit(" ", 1) for line in served.stdout.splitlines()]
    assert [(label, pytest.approx(float(value), abs=1e-5)) for label, value in lines] == expected
    assert "oneloop" not in script and len(script.strip().splitlines()) <= 15
    card = (tmp_path / "out" / "README.md").read_text()
    assert "accuracy" in card and (tmp_path / "run" / "final" / "config.json").is_file()


def test_an_export_replaces_no_file_of_the_user(tmp_path):
    run(
        train, ["digits", "--duration", "2", "--track", "none", "--run.dir", "run"], folder=tmp_path
    ).ok()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "README.md").write_text("my own")
    ended = run(export, ["run", "--to", "mine"], folder=tmp_path)
    assert ended.codes == [2] and "README.md, which an export would replace" in ended.output, (
        ended.output
    )
    assert (mine / "README.md").read_text() == "my own" and len(list(mine.iterdir())) == 1
    for _ in range(2):  # a second export replaces the first
        assert run(export, ["run", "--to", "out"], folder=tmp_path).codes == [0]


def test_files_of_transformers_and_of_the_packaged_cnn(tmp_path):
    from oneloop.tasks.image_models import described
    from oneloop.tasks.image_settings import Resizing
    from oneloop.tasks.transformers_models import is_transformers

    run(
        train, ["digits", "--duration", "2", "--track", "none", "--run.dir", "run"], folder=tmp_path
    ).ok()
    config = json.loads((tmp_path / "run" / "final" / "config.json").read_text())
    assert config["classes"] == [str(digit) for digit in range(10)] and config["input_size"] == [
        1,
        8,
        8,
    ]
    assert config["mean"] == [0.5] and config["model"] == "cnn"
    assert not is_transformers(str(tmp_path / "run" / "final"))
    about = described("hf:some/vit", ["a", "b"], [0.1, 0.2, 0.3], [0.4, 0.5, 0.6], Resizing(32))
    processor = about["preprocessor_config.json"]
    assert Path("preprocessor_config.json").name in about and processor["image_mean"] == [
        0.1,
        0.2,
        0.3,
    ]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    from transformers import AutoImageProcessor

    made = AutoImageProcessor.from_pretrained(tmp_path)
    assert made.size["height"] == 32 and list(made.image_std) == [0.4, 0.5, 0.6]
