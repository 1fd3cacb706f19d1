"""Image training: augmentation, mixup and cutmix are the same on every layout; class weights; soft
labels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from oneloop.data.seeded_samples import SeededSamples
from oneloop.tasks.augmentation import Blended, Transform
from oneloop.tasks.class_counts import ClassCounts
from oneloop.tasks.image_classification import ImageClassification
from oneloop.tasks.image_settings import PLAIN, Resizing
from own_files import images
from worlds import each_message, run, train

pytestmark = pytest.mark.covers(
    "oneloop.data.seeded_samples",
    "oneloop.task_protocol.evaluation_metrics",
    "oneloop.tasks.augmentation",
    "oneloop.tasks.image_classification",
    "oneloop.tasks.labels",
)

ALL = [
    "--task.mixup",
    "0.4",
    "--task.cutmix",
    "1.0",
    "--task.crop",
    "0.5",
    "--task.randaugment",
    "9",
]
ALL += [
    "--task.erasing",
    "0.5",
    "--task.smoothing",
    "0.1",
    "--task.class_weights",
    "balanced",
    "--task.top_k",
    "3",
]
LAYOUTS = [("single", 1, 4), ("ddp", 2, 2), ("fsdp2", 2, 1)]


def one_step(folder: Path, dtype: str, *, ranks: int = 1, accumulate: int = 1) -> list[str]:
    """Return the words of plain SGD with learning rate 1: one step subtracts the gradient."""
    words = [
        "digits",
        "--duration",
        "1",
        "--batch.size",
        "16",
        "--batch.micro",
        str(16 // ranks // accumulate),
    ]
    words += [
        "--optimizer.name",
        "sgd",
        "--optimizer.lr",
        "1",
        "--optimizer.clip",
        "1e9",
        "--schedule.name",
        "constant",
    ]
    words += [
        "--schedule.warmup",
        "0",
        "--optimizer.weight_decay",
        "0",
        "--eval.every",
        "0",
        "--track",
        "none",
    ]
    words += ["--eval.micro", "128", "--save.every", "0"]
    return [*words, "--machine.dtype", dtype, *ALL, "--run.dir", str(folder)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final" / "model.safetensors")


@pytest.mark.parametrize(
    ("dtype", "bound", "layouts"),
    [
        pytest.param("float32", 1e-6, LAYOUTS, marks=pytest.mark.slow, id="float32-1e-06"),
        pytest.param("float64", 1e-12, LAYOUTS[:2], id="float64-1e-12"),
        pytest.param(
            "float64", 1e-12, LAYOUTS[2:], marks=pytest.mark.slow, id="float64-1e-12-fsdp2"
        ),
    ],
)
def test_the_gradients_are_those_of_any_split(tmp_path, dtype, bound, layouts):
    from oneloop.basics.seeds import key

    task = ImageClassification(mixup=0.4)
    torch.manual_seed(key(0))
    first = task.model().state_dict()

    # One process trains the whole batch, and then its micro-batches.
    alone = [one_step(tmp_path / "whole", dtype)]
    for config, ranks, accumulate in layouts:
        words = one_step(tmp_path / config, dtype, ranks=ranks, accumulate=accumulate)
        if ranks == 1:
            alone.append(words)
        else:
            run(train, words, ranks=ranks, config=config).ok()
    (found,) = run(each_message, alone).ok()
    assert [code for code, _ in found] == [0] * len(alone), found

    whole = weights(tmp_path / "whole")
    largest = max((whole[name] - first[name]).abs().max() for name in whole)
    assert largest > 1e-3
    for config, _, _ in layouts:
        split = weights(tmp_path / config)
        worst = max((whole[name] - split[name]).abs().max() for name in whole)
        assert worst / largest < bound, (config, worst / largest)


class Flat:
    """Images of one colour, whose value is the index; the classes take turns."""

    def __init__(self, classes: int = 5):
        self.classes = classes

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return torch.full((1, 12, 12), float(index)), index % self.classes


def test_mixup_is_what_its_paper_states_and_a_function_of_the_place():
    mixed = SeededSamples(Blended(Flat(50), 50, mixup=0.4, cutmix=0.0), seed=3)
    for index in range(50):
        (_, (image, label)), (_, (again, label_again)) = mixed[2, index], mixed[2, index]
        assert torch.equal(image, again) and torch.equal(label, label_again)
        assert (
            label.sum() == pytest.approx(1, abs=1e-6)
            and (label > 0).sum() <= 2
            and image.std() < 1e-5
        )
        # each class is one image's value
        assert torch.allclose(image, label @ torch.arange(50.0), atol=1e-4)
    shares = torch.stack([mixed[epoch, 0][1][1][0] for epoch in range(400)])
    assert len(shares.unique()) > 300  # a different partner and share in every epoch
    assert not torch.equal(mixed[0, 7][1][0], SeededSamples(mixed.dataset, seed=4)[0, 7][1][0])


def test_cutmix_shares_are_those_of_the_areas():
    cut = SeededSamples(Blended(Flat(), 5, mixup=0.0, cutmix=1.0), seed=0)
    shares = []
    for index in range(50):
        _, (image, label) = cut[0, index]
        own = (image == index).float().mean().item()
        assert len(image.unique()) <= 2
        other = next((int(value) for value in image.unique() if value != index), index)
        expected = F.one_hot(torch.tensor(index % 5), 5) * own + F.one_hot(
            torch.tensor(other % 5), 5
        ) * (1 - own)
        assert torch.allclose(label, expected, atol=1e-6)
        shares.append(own)
    assert 0.4 < np.mean(shares) < 0.8 and min(shares) < 0.3


def test_both_are_drawn_at_even_odds_and_the_share_is_of_the_beta_distribution():
    both = SeededSamples(Blended(Flat(), 5, mixup=0.3, cutmix=1.0), seed=0)
    blends = [len(both[epoch, 1][1][0].unique()) == 1 for epoch in range(1000)]
    assert 0.45 < np.mean(blends) < 0.65  # a rectangle without area counts as a blend here
    mixed = SeededSamples(Blended(Flat(50), 50, mixup=0.3, cutmix=0.0), seed=0)
    shares = torch.stack([mixed[epoch, 1][1][1][1] for epoch in range(2000)]).double()
    assert shares.mean() == pytest.approx(0.51, abs=0.03)  # one partner in 50 is the image itself
    assert shares.var() == pytest.approx(1 / (4 * (2 * 0.3 + 1)), rel=0.1)


def test_partners_of_parquet_are_of_the_same_row_group(tmp_path):
    images(tmp_path / "data", "parquet", each=60)
    task = ImageClassification(str(tmp_path / "data"), mixup=0.4, image_size=8, augment=False)
    rows = task.train_set()
    seen = set()
    for index in range(len(rows)):
        near = rows.near(index)
        assert index in near
        seen.add((near.start, near.stop))
    assert sorted(seen)[0][0] == 0 and max(stop for _, stop in seen) == len(rows) and len(seen) > 1


def test_class_weights_are_those_of_torch():
    weights = [0.5, 1.0, 2.0, 1.5, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0]
    task = ImageClassification(class_weights=weights, smoothing=0.1, augment=False)
    batch = task.collate([task.train_set()[index] for index in range(64)])
    torch.manual_seed(0)
    model = task.model()
    loss, _ = task.loss(model, batch)
    expected = F.cross_entropy(
        model(batch["image"]), batch["label"], torch.tensor(weights), label_smoothing=0.1
    )
    assert (loss / task.weight(batch)).item() == pytest.approx(expected.item(), rel=1e-6)
    soft = {**batch, "label": F.one_hot(batch["label"], 10).float()}
    assert (task.loss(model, soft)[0] / task.weight(soft)).item() == pytest.approx(
        expected.item(), rel=1e-6
    )


def test_balanced_weights_make_all_classes_weigh_the_same(tmp_path):
    images(tmp_path / "data", "folders", each=20)
    for file in sorted((tmp_path / "data" / "alpha").iterdir())[5:]:
        file.unlink()
    task = ImageClassification(
        str(tmp_path / "data"), class_weights="balanced", image_size=8, held_out=0.1
    )
    train_set = task.train_set()
    labels = torch.tensor([train_set[index][1] for index in range(len(train_set))])
    totals = [float(task.class_weights[labels[labels == label]].sum()) for label in range(3)]
    assert totals == pytest.approx([len(labels) / 3] * 3)


def test_top_k_is_that_of_torchmetrics():
    torch.manual_seed(0)
    counts, expected = ClassCounts(10, top=3), MulticlassAccuracy(10, top_k=3, average="micro")
    for _ in range(3):
        logits, target = torch.randn(32, 10), torch.randint(10, (32,))
        counts.update(logits, target)
        expected.update(logits, target)
    assert counts.compute()["top3_accuracy"] == pytest.approx(float(expected.compute()))
    assert counts.higher_is_better["top3_accuracy"]


def test_the_test_size_and_what_is_random_are_of_their_parts(tmp_path):
    images(tmp_path / "data", "folders", each=12)
    how = {
        "crop": 0.3,
        "randaugment": 9,
        "erasing": 1.0,
        "image_size": 16,
        "test_size": 20,
        "held_out": 0.2,
    }
    task = ImageClassification(str(tmp_path / "data"), **how)
    trained = SeededSamples(task.train_set(), seed=0)
    assert trained[0, 0][1][0].shape == (3, 16, 16)
    assert torch.equal(trained[0, 0][1][0], trained[0, 0][1][0])
    assert not torch.equal(trained[0, 0][1][0], trained[1, 0][1][0])
    validation = SeededSamples(task.eval_sets()["validation"], seed=0)
    assert validation[0, 0][1][0].shape == (3, 20, 20)
    assert torch.equal(validation[0, 0][1][0], validation[1, 0][1][0])


def test_pixels_are_those_of_torchvisions_older_transforms():
    from torchvision import transforms

    draw = np.random.default_rng(0)
    image = Image.fromarray(draw.integers(0, 255, (37, 21, 3), dtype=np.uint8))
    mean, std = [0.4, 0.5, 0.6], [0.2, 0.3, 0.25]
    steps = [transforms.Resize((16, 16)), transforms.ToTensor(), transforms.Normalize(mean, std)]
    assert torch.allclose(
        Transform(Resizing(16), mean, std)(image),
        transforms.Compose(steps)(image),
        rtol=0,
        atol=1e-6,
    )
    grey = Transform(Resizing(16), [0.5], [0.5], replace(PLAIN, mirror=True))(image)
    assert grey.shape == (1, 16, 16)


def shares(folder: Path, count: int = 60, *, spoil: dict | None = None) -> Path:
    """Write pictures with soft labels over three classes."""
    images(folder.with_name("pictures"), "folders", each=count // 3)
    draw, made = np.random.default_rng(1), []
    for file in sorted(folder.with_name("pictures").rglob("*.png")):
        label = ["alpha", "beta", "gamma"].index(file.parent.name)
        soft = 0.7 * np.eye(3)[label] + 0.3 * draw.dirichlet([1, 1, 1])
        made.append({"image": {"bytes": file.read_bytes(), "path": None}, "label": soft.tolist()})
    if spoil:
        made[5] |= spoil
    folder.mkdir()
    parquet.write_table(pa.Table.from_pylist(made), folder / "all.parquet", row_group_size=16)
    return folder


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        ("single", 1),
        pytest.param("ddp", 2, marks=pytest.mark.slow),
        pytest.param("fsdp2", 2, marks=pytest.mark.slow),
    ],
)
def test_shares_of_classes_are_trained_on(tmp_path, config, ranks):
    shares(tmp_path / "data")
    words = [
        "images",
        "--task.data",
        "data",
        "--task.image_size",
        "8",
        "--task.crop",
        "0",
        "--duration",
        "60",
    ]
    words += [
        "--batch.size",
        "8",
        "--task.width",
        "8",
        "--eval.every",
        "0",
        "--track",
        "none",
        "--run.dir",
        "run",
    ]
    words += ["--log.every", "20", "--save.every", "0"]
    words += ["--eval.micro", "64"]
    run(train, words, ranks=ranks, config=config, folder=tmp_path).ok()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval/accuracy"] > 0.8
    least = -(np.array([0.8, 0.1, 0.1]) * np.log([0.8, 0.1, 0.1])).sum()
    # it cannot fall far below the entropy of the soft labels
    assert summary["eval/loss"] > 0.6 * least


BAD = {
    "a share below 0": (
        {"label": [1.2, -0.2, 0.0]},
        {},
        r"row 5: \[1.2, -0.2, 0.0\] in 'label' are not shares",
    ),
    "too few shares": ({"label": [0.5, 0.5]}, {}, "are not shares of 3 classes"),
    "shares above 1": ({"label": [0.5, 0.5, 0.5]}, {}, "which are 0 or more and sum to 1"),
    "balanced shares": (
        {},
        {"class_weights": "balanced"},
        "balanced needs one label for each sample",
    ),
    "two weights": ({}, {"class_weights": [1.0, 2.0]}, "3 weights > 0, for 0, 1, 2"),
    "a weight of 0": ({}, {"class_weights": [1.0, 2.0, 0.0]}, "weights > 0, for"),
    "as many as there are": (
        {},
        {"top_k": 3},
        "task.top_k 3 must be below the number of classes, 3",
    ),
    "a crop above 1": ({}, {"crop": 1.5}, "task.crop 1.5 must be between 0 and 1"),
    "a negative mixup": ({}, {"mixup": -0.1}, "task.mixup -0.1 must be between 0 and 100"),
    "a magnitude": ({}, {"randaugment": 31}, "task.randaugment 31 must be between 0 and 30"),
    "smoothing": ({}, {"smoothing": 1.0}, "task.smoothing 1.0 must be between 0 and 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_reported(tmp_path, name):
    spoil, options, expected_text = BAD[name]
    shares(tmp_path / "data", spoil=spoil)
    with pytest.raises(ValueError, match=expected_text):
        ImageClassification(str(tmp_path / "data"), image_size=8, **options)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_recipe_reaches_its_stated_accuracy(tmp_path):
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        file = tmp_path / "images" / str(label) / f"{number:04d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = Image.fromarray((pixels * 15.9).astype("uint8"))
        whole.resize((32, 32), Image.Resampling.BICUBIC).save(file)
    words = ["images", "--track", "none", "--run.dir", "run"]
    run(train, words, folder=tmp_path, timeout=1400, variables={"OMP_NUM_THREADS": "2"}).ok()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval/accuracy"] > 0.975 and summary["test/accuracy"] > 0.985
