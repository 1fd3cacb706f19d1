"""The examples of an evaluation: fixed samples, worst mistakes, confusion matrix, generated
text."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from oneloop.evaluation import evaluate
from oneloop.launch.processes import start
from oneloop.show.examples import Examples
from oneloop.show.pictures import data_url, matrix, picture, tiles
from oneloop.task_protocol.evaluation_metrics import directions
from oneloop.tasks.causal_lm import CausalLM
from oneloop.tasks.image_classification import ImageClassification
from worlds import ROOT, run, train

pytestmark = pytest.mark.covers(
    "oneloop.evaluation",
    "oneloop.show.examples",
    "oneloop.show.pictures",
    "oneloop.show.tracking",
    "oneloop.task_protocol.evaluation_metrics",
    "oneloop.tasks.causal_lm",
    "oneloop.tools.report.page",
)


def looked_at() -> dict:
    """Return the examples of an untrained CNN on the validation digits."""
    world, task, examples = start(), ImageClassification(width=8), Examples(fixed=4, worst=5)
    torch.manual_seed(0)
    model = world.prepare(task.model())
    evaluate(
        task,
        model,
        task.eval_sets()["validation"],
        accelerator=world.accelerator,
        micro=7,
        examples=examples,
    )
    return examples.plain()


def written() -> list[tuple[str, str]]:
    """Return prompts and continuations of an untrained language model."""
    world, task, examples = (
        start(),
        CausalLM(data=str(ROOT / "src/oneloop/loop"), layers=1, width=16, heads=2, block=32),
        Examples(),
    )
    torch.manual_seed(0)
    model = world.prepare(task.model())
    evaluate(
        task,
        model,
        task.eval_sets()["validation"],
        accelerator=world.accelerator,
        micro=16,
        examples=examples,
    )
    return [(one["prompt"], one["continuation"]) for one in examples.samples if "prompt" in one]


def by_hand() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return loss, prediction and label of every validation digit, computed in plain PyTorch."""
    task = ImageClassification(width=8)
    torch.manual_seed(0)
    model = task.model().eval()
    samples = task.eval_sets()["validation"]
    images, labels = zip(*[samples[index] for index in range(len(samples))], strict=True)
    with torch.no_grad():
        logits = model(torch.stack(images))
    return (
        F.cross_entropy(logits, torch.tensor(labels), reduction="none"),
        logits.argmax(-1),
        torch.tensor(labels),
    )


@pytest.mark.parametrize(
    ("ranks", "config"),
    [(1, "single"), (2, "ddp"), pytest.param(2, "fsdp2", marks=pytest.mark.slow)],
)
def test_the_worst_are_the_worst_and_the_confusion_is_counted(ranks, config):
    losses, predictions, labels = by_hand()
    for found in run(looked_at, ranks=ranks, config=config).ok():
        worst, fixed = (
            [one for one in found["samples"] if one["worst"] == kind] for kind in (True, False)
        )
        assert [one["index"] for one in worst] == losses.topk(5).indices.tolist()
        assert [one["loss"] for one in worst] == pytest.approx(
            losses.topk(5).values.tolist(), rel=1e-5
        )
        assert [one["index"] for one in fixed] == [
            0,
            len(labels) // 4,
            len(labels) // 2,
            3 * len(labels) // 4,
        ]
        for one in (*worst, *fixed):
            assert one["target"] == str(labels[one["index"]].item())
            assert one["prediction"] == str(predictions[one["index"]].item())
            assert one["right"] == (one["target"] == one["prediction"])
        counts = torch.zeros(10, 10, dtype=torch.int64)
        for label, prediction in zip(labels, predictions, strict=True):
            counts[label, prediction] += 1
        digits = [str(digit) for digit in range(10)]
        matrix = {"rows": digits, "columns": digits, "counts": counts.tolist()}
        assert found["matrices"] == {"confusion": matrix}


@pytest.mark.parametrize("config", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_a_model_writes_the_same_on_every_split(config):
    alone = run(written).ok()[0]
    assert len(alone) == 8 and all(len(text) > 0 for _, text in alone)
    assert run(written, ranks=2, config=config).ok() == [alone, alone]


def test_a_model_continues_from_half_of_the_text():
    task = CausalLM(data=str(ROOT / "src/oneloop/loop"), layers=1, width=16, heads=2, block=32)
    samples = [task.eval_sets()["validation"][0], task.eval_sets()["validation"][1][:9]]
    batch = task.collate(samples)

    class Next(torch.nn.Module):
        """Predict the next letter of the alphabet, with certainty."""

        past_key_values = None

        def forward(self, input_ids: torch.Tensor, **given: object) -> torch.nn.Module:
            self.logits = F.one_hot((input_ids + 1) % 257, 257).float() * 1000
            return self

    outputs = task.generate(Next(), batch)
    for row, (sample, length) in enumerate(zip(samples, (32, 8), strict=True)):
        shown = task.show(
            sample,
            {"loss": torch.ones(32), **{name: value[row] for name, value in outputs.items()}},
        )
        assert shown["prompt"] == bytes(sample[: length // 2].tolist()).decode()
        last = ord(shown["prompt"][-1])
        written = [(last + 1 + n) % 257 for n in range(16)]
        assert shown["continuation"] == bytes(token for token in written if token < 256).decode(
            errors="replace"
        )
        assert "".join(text for text, _ in shown["tokens"]) == bytes(sample.tolist()).decode()


@pytest.mark.parametrize(
    ("config", "ranks"), [("single", 1), pytest.param("fsdp2", 2, marks=pytest.mark.slow)]
)
def test_a_run_leaves_them_in_its_folder_and_in_tensorboard(tmp_path, config, ranks):
    words = [
        "digits",
        "--duration",
        "8",
        "--task.width",
        "8",
        "--eval.every",
        "4",
        "--log.every",
        "4",
        "--run.dir",
        "run",
    ]
    run(train, words, ranks=ranks, config=config, folder=tmp_path).ok()
    found = json.loads((tmp_path / "run" / "examples.json").read_text())
    assert found["step"] == 8 and len(found["samples"]) == 16
    assert sum(map(sum, found["matrices"]["confusion"]["counts"])) == len(
        ImageClassification().eval_sets()["validation"]
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard" / "digits"))
    events.Reload()
    tags = events.Tags()
    assert {"examples/fixed", "examples/worst", "examples/confusion"} <= set(tags["images"])
    assert [event.step for event in events.Images("examples/worst")] == [4, 8]
    assert {"train/loss", "train/lr", "eval/accuracy"} <= set(tags["scalars"])
    assert tags["graph"]
    nodes = {node.name: node for node in events.Graph().node}
    head = nodes["CNN/head/addmm"]
    assert "CNN/head/bias" in head.input and nodes["CNN/head/weight"].op == "Parameter"
    assert all(name in nodes for node in nodes.values() for name in node.input)
    kept = [file for file in (tmp_path / "run" / "tensorboard").rglob("*") if file.is_file()]
    hparams = [
        EventAccumulator(str(file.parent)).Reload()
        for file in kept
        if "tfevents" in file.name and file.parent.name != "digits"
    ]
    assert any("_hparams_/session_start_info" in one.summary_metadata for one in hparams)
    assert any(
        "batch.size: '64'" in file.read_text() for file in kept if file.name == "hparams.yml"
    )


def test_texts_in_tensorboard(tmp_path):
    words = [
        "gpt",
        "--task.data",
        str(ROOT / "src/oneloop/loop"),
        "--task.layers",
        "1",
        "--task.width",
        "16",
        "--task.heads",
        "2",
        "--task.block",
        "32",
        "--duration",
        "4",
        "--batch.size",
        "8",
        "--eval.every",
        "4",
        "--run.dir",
        "run",
    ]
    run(train, words, folder=tmp_path).ok()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard" / "gpt"))
    events.Reload()
    texts = {
        tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
        for tag in events.Tags()["tensors"]
    }
    assert "generated text after the arrow" in texts["fixed/0/text_summary"]
    assert any(tag.startswith("worst/") for tag in texts)


def test_a_task_that_cannot_show_leaves_nothing(tmp_path):
    words = [
        "digits",
        "--task",
        "tiny.Ragged",
        "--duration",
        "3",
        "--batch.size",
        "6",
        "--eval.every",
        "3",
        "--run.dir",
        "run",
        "--track",
        "none",
    ]
    run(train, words, folder=tmp_path).ok()
    assert not (tmp_path / "run" / "examples.json").exists()


def test_none_are_shown_where_none_are_asked_for_and_few_at_once(tmp_path):
    words = [
        "digits",
        "--duration",
        "2",
        "--task.width",
        "8",
        "--track",
        "none",
        "--log.every",
        "1",
    ]
    run(train, [*words, "--eval.samples", "0", "--run.dir", "none"], folder=tmp_path).ok()
    found = json.loads((tmp_path / "none" / "examples.json").read_text())
    assert found["samples"] == [] and found["matrices"]["confusion"] and not found["generated"]
    run(
        train,
        [*words, "--eval.samples", "4", "--eval.micro", "3", "--run.dir", "few"],
        folder=tmp_path,
    ).ok()
    found = json.loads((tmp_path / "few" / "examples.json").read_text())["samples"]
    assert [one["worst"] for one in found] == [True] * 4 + [False] * 4
    assert [one["loss"] for one in found[:4]] == sorted(
        (one["loss"] for one in found[:4]), reverse=True
    )


class Odd(ImageClassification):
    """A task whose outputs or examples cannot be shown, for the reason in ``how``."""

    how = ""

    def loss(self, model, batch):
        loss, outputs = super().loss(model, batch)
        odd = {"scalar": {"loss": loss.detach()}, "number": {**outputs, "more": 3}, "none": None}
        return loss, odd.get(self.how, outputs)

    def metrics(self):
        from torchmetrics import MeanMetric, MetricCollection

        return MetricCollection({"mean": MeanMetric()})

    def update(self, metrics, batch, outputs):
        metrics.update(torch.tensor(1.0))

    def show(self, sample, outputs):
        if self.how == "raises":
            raise KeyError("no such thing")
        return None if self.how == "nothing" else {"prediction": torch.tensor(3)}


@pytest.mark.parametrize(
    ("how", "worst", "fixed"),
    [("scalar", 0, 8), ("number", 8, 8), ("none", 0, 8), ("raises", 0, 0), ("nothing", 0, 0)],
)
def test_what_cannot_be_shown_stops_nothing(how, worst, fixed):
    world, task, examples = start(), Odd(width=8), Examples()
    task.how = how
    found = evaluate(
        task,
        task.model(),
        task.eval_sets()["validation"],
        accelerator=world.accelerator,
        micro=64,
        examples=examples,
    )
    assert found["mean"] == 1.0
    shown = json.loads(json.dumps(examples.plain()))["samples"]
    assert [one["worst"] for one in shown] == [True] * worst + [False] * fixed
    assert all(one["prediction"] == "3" for one in shown)
    assert ("cannot be shown (Odd.show" in examples.problem) == (how in ("raises", "nothing"))


def test_a_model_gone_bad_still_writes():
    world, task, examples = (
        start(),
        CausalLM(data=str(ROOT / "src/oneloop/loop"), layers=1, width=16, heads=2, block=32),
        Examples(),
    )
    model = task.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    found = evaluate(
        task,
        model,
        task.eval_sets()["validation"],
        accelerator=world.accelerator,
        micro=64,
        examples=examples,
    )
    assert found["loss"] != found["loss"] and len(examples.samples) == 16


def test_a_matrix_is_no_metric_for_a_decision(tmp_path):
    assert directions(ImageClassification()) == {
        "loss": False,
        "accuracy": True,
        "macro_f1": True,
        "matthews": True,
    }


def test_pictures():
    image = torch.linspace(-1, 1, 64).reshape(1, 8, 8)
    drawn = picture(image)
    assert (
        drawn.size == (160, 160)
        and drawn.getpixel((0, 0)) == 0
        and drawn.getpixel((159, 159)) == 255
    )
    assert picture(torch.rand(3, 400, 200)).size == (160, 320)
    assert picture(torch.rand(28, 28)).size == (168, 168)
    assert picture(torch.rand(100, 1000)).size == (480, 48)
    red, black = torch.ones(4, 4, dtype=torch.int64), torch.zeros(4, 4, dtype=torch.int64)
    assert picture(red, mask=True).getpixel((0, 0)) != picture(black, mask=True).getpixel((0, 0))
    read = Image.open(io.BytesIO(base64.b64decode(data_url(image).partition(",")[2])))
    assert np.array_equal(np.asarray(read), np.asarray(drawn))
    samples = [{"image": image, "target": "4", "prediction": "9", "right": False}] * 9
    assert tiles(samples).shape == (2 * (160 + 40), 8 * 168, 3)
    grid = matrix({"rows": ["a", "b"], "columns": ["a", "b"], "counts": [[5, 0], [1, 1]]})
    good, half, none = grid[45, 84], grid[79, 118], grid[45, 118]
    assert none.tolist() == [255, 255, 255] and good[0] < half[0] < 255
    wide = matrix({"rows": ["a"], "columns": ["a", "b", "none"], "counts": [[1, 2, 3]]})
    assert wide.shape == (40 + 34, 80 + 3 * 34, 3)


def test_the_page_shows_them(tmp_path):
    from oneloop.tools.report.page import report

    folder = Path(tmp_path / "run")
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 4, "train/loss": 1.0}\n')
    samples = [
        {
            "index": 3,
            "worst": True,
            "loss": 2.0,
            "image": "data:image/png;base64,AAAA",
            "target": "cat",
            "prediction": "dog",
        },
        {
            "index": 4,
            "worst": False,
            "loss": None,
            "tokens": [["<b>", 8.0], ["x", 0.0]],
            "prompt": "say ",
            "continuation": "</pre>",
        },
    ]
    (folder / "examples.json").write_text(
        json.dumps(
            {
                "step": 4,
                "samples": samples,
                "confusion": {"classes": ["<!--<script>", "b"], "counts": [[1, 0], [0, 1]]},
            }
        )
    )
    page = report([folder])
    assert (
        'alt="sample 3: is cat, predicted dog"' in page
        and "✗ prediction dog" in page
        and "is cat" in page
    )
    assert "say </span><mark>&lt;/pre&gt;</mark>" in page and "<b>" not in page.split("</style>")[
        1
    ].split("<script>")[0].replace("<b class", "")
    assert "<!--<script>" not in page.split('id="charts">')[1].split("</script>")[0]
