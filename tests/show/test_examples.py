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
from oneloop.task_protocol.evaluation_metrics import directions
from oneloop.tasks.causal_lm import CausalLM
from oneloop.tasks.image_classification import ImageClassification
from oneloop.tools.report.examples import Examples, plain
from oneloop.tools.report.pictures import data_url, log_samples
from worlds import ROOT, run, train

pytestmark = pytest.mark.covers(
    "oneloop.evaluation",
    "oneloop.tools.report.examples",
    "oneloop.show.tracking",
    "oneloop.task_protocol.evaluation_metrics",
    "oneloop.tasks.causal_lm",
    "oneloop.tools.report.page",
    "oneloop.tools.report.pictures",
)


def looked_at() -> dict:
    """Return the examples of an untrained CNN on the validation digits."""
    world, task, examples = start(), ImageClassification(width=8), Examples(5)
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
    return examples.as_json(0)


def written() -> list[tuple[str, str]]:
    """Return prompts and continuations of an untrained language model."""
    world, task, examples = (
        start(),
        CausalLM(data=str(ROOT / "src/oneloop/checkpoint"), layers=1, width=16, heads=2, block=32),
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
            len(labels) // 5,
            2 * len(labels) // 5,
            3 * len(labels) // 5,
            4 * len(labels) // 5,
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
    task = CausalLM(
        data=str(ROOT / "src/oneloop/checkpoint"), layers=1, width=16, heads=2, block=32
    )
    first, second = (task.eval_sets()["validation"][number] for number in range(2))
    samples = [first, second._replace(documents=[second.documents[0][:9]])]
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
        assert shown["prompt"] == bytes(sample.documents[0][: length // 2].tolist()).decode()
        last = ord(shown["prompt"][-1])
        written = [(last + 1 + n) % 257 for n in range(16)]
        assert shown["continuation"] == bytes(token for token in written if token < 256).decode(
            errors="replace"
        )
        assert (
            "".join(text for text, _ in shown["tokens"])
            == bytes(sample.documents[0].tolist()).decode()
        )


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
    assert {"examples/fixed/image", "examples/worst/image"} == set(tags["images"])
    images = events.Images("examples/worst/image")
    assert [(image.step, image.height, image.width) for image in images] == [
        (4, 8, 64),
        (8, 8, 64),
    ]
    texts = {
        name: events.Tensors(f"examples/{name}/text_summary")[-1]
        .tensor_proto.string_val[0]
        .decode()
        for name in ("fixed", "worst", "confusion")
    }
    assert texts["worst"].count("**sample ") == texts["fixed"].count("prediction") == 8
    counts = found["matrices"]["confusion"]["counts"]
    rows = [line.split(" | ")[1:] for line in texts["confusion"].splitlines()[2:]]
    assert [[int(count.removesuffix(" |")) for count in row] for row in rows] == counts
    assert {"train/loss", "train/lr", "eval/accuracy"} <= set(tags["scalars"])
    assert tags["graph"]
    nodes = {node.name: node for node in events.Graph().node}
    (head,) = [node for name, node in nodes.items() if "head" in name and node.op == "aten::linear"]
    assert any("head]/bias" in source for source in head.input)
    assert "input/target" in nodes
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
        str(ROOT / "src/oneloop/checkpoint"),
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
    fixed, worst = (texts[f"examples/{name}/text_summary"] for name in ("fixed", "worst"))
    assert fixed.count("generated text after the arrow") == fixed.count("\N{RIGHTWARDS ARROW}") == 8
    assert worst.count("**sample ") == 8 and "loss " in worst


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
    assert found["samples"] == [] and found["matrices"]["confusion"]
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
    shown = json.loads(json.dumps(examples.as_json(0)))["samples"]
    assert [one["worst"] for one in shown] == [True] * worst + [False] * fixed
    assert all(one["prediction"] == "3" for one in shown)
    assert ("cannot be shown (Odd.show" in examples.problem) == (how in ("raises", "nothing"))


def test_a_model_gone_bad_still_writes():
    world, task, examples = (
        start(),
        CausalLM(data=str(ROOT / "src/oneloop/checkpoint"), layers=1, width=16, heads=2, block=32),
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


def drawn(image: object, **how: bool) -> np.ndarray:
    """Return the pixels of what data_url() draws."""
    url = data_url(image, **how)
    assert url.startswith("data:image/png;base64,")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))


def test_pictures():
    image = torch.linspace(-1, 1, 64).reshape(1, 8, 8)
    grey = (255 * torch.arange(64) / 63).round().reshape(8, 8, 1).expand(-1, -1, 3)
    assert np.array_equal(drawn(image), grey.numpy())
    assert drawn(torch.rand(3, 400, 200)).shape == (320, 160, 3)
    assert drawn(torch.rand(28, 28)).shape == (28, 28, 3)
    assert drawn(torch.rand(100, 1000)).shape == (48, 480, 3)
    with pytest.raises(ValueError, match=r"an image of shape \(2, 3, 8, 8\)"):
        data_url(torch.rand(2, 3, 8, 8))


def test_a_class_of_a_mask_has_the_same_colour_in_each_picture():
    classes = torch.arange(30).reshape(5, 6)
    colours = drawn(classes, mask=True).reshape(-1, 3)
    assert not colours[0].any() and len({tuple(colour) for colour in colours}) == 30
    assert (drawn(torch.full((5, 6), 7), mask=True) == colours[7]).all()
    assert (drawn(np.full((5, 6), 7, np.uint8), mask=True) == colours[7]).all()
    assert drawn(torch.ones(4, 4, dtype=torch.bool), mask=True).any()


class Tracker:
    """A tracker of accelerate that keeps what it gets."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.images: dict[str, np.ndarray] = {}
        self.rows: list[list[str]] = []

    def log_images(self, values: dict[str, np.ndarray], step: int) -> None:
        self.images |= values

    def log_table(self, name: str, columns: list[str], data: list[list[str]], step: int) -> None:
        self.rows = data


def test_wandb_gets_pictures_of_one_size_and_a_table_of_texts():
    sizes = ((8, 8), (4, 12))
    samples = [
        {
            "index": index,
            "worst": False,
            "loss": None,
            "target": "cat",
            "parts": {"image": data_url(torch.rand(size)), "mask": data_url(torch.rand(4, 4))},
        }
        for index, size in enumerate(sizes)
    ]
    content = {"step": 3, "weights": "ema", "samples": samples, "matrices": {}}
    wandb, other = Tracker("wandb"), Tracker("clearml")
    for tracker in (wandb, other):
        log_samples(tracker, content)
        assert tracker.rows == [
            ["ema/examples/fixed", "**sample 0**, label cat\n\n\n**sample 1**, label cat\n"]
        ]
    assert not other.images
    assert {name: sheet.shape for name, sheet in wandb.images.items()} == {
        "ema/examples/fixed/image": (2, 8, 12, 3),
        "ema/examples/fixed/mask": (2, 4, 4, 3),
    }
    first, second = wandb.images["ema/examples/fixed/image"]
    assert (first[:, 8:] == 255).all() and (second[4:] == 255).all()


def test_what_is_written_of_a_sample_has_a_type_and_a_limit():
    shown = plain(
        {
            "text": "x" * 300_000,
            "tokens": [("a", None), ("b", 1.5)] * 9000,
            "target": torch.tensor(3),
            "prediction": 4,
            "right": torch.tensor(False),
            "confidence": 0.5,
            "image": torch.rand(3, 2000, 1000),
        }
    )
    assert len(shown["text"]) == 100_000 and len(shown["tokens"]) == 10_000
    assert (shown["target"], shown["prediction"]) == ("3", "4")
    assert (shown["right"], shown["confidence"]) == (False, 0.5)
    assert len(shown["parts"]["image"]) < 4 / 3 * 160 * 320 * 3 + 10_000
    json.dumps(shown)


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
            "parts": {"image": "data:image/png;base64,AAAA"},
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
        'alt="sample 3: image, is cat, predicted dog"' in page
        and "✗ prediction dog" in page
        and "is cat" in page
    )
    assert "say </span><mark>&lt;/pre&gt;</mark>" in page and "<b>" not in page.split("</style>")[
        1
    ].split("<script>")[0].replace("<b class", "")
    assert "<!--<script>" not in page.split('id="charts">')[1].split("</script>")[0]
