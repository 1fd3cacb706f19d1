"""Images are resized, cropped and changed as torchvision, timm and transformers do it, and the
pictures of a step are the same on every layout, with copies of each image, too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from torchvision import transforms
from torchvision.transforms import InterpolationMode, v2

from oneloop.data.batch_layout import BatchLayout
from oneloop.data.order import Order, order_of
from oneloop.data.seeded_samples import SeededSamples
from oneloop.data.step_batches import CollateWithWeight, groups
from oneloop.tasks.augmentation import Repeated, RepeatedOrder, Transform
from oneloop.tasks.image_classification import ImageClassification
from oneloop.tasks.image_models import described
from oneloop.tasks.image_settings import PLAIN, Resizing
from oneloop.tasks.rows.mixture import Mixture
from own_files import images
from worlds import after, back_to, each_message, run, train

pytestmark = pytest.mark.covers(
    "oneloop.data.order",
    "oneloop.job.build",
    "oneloop.job.task",
    "oneloop.recipe.comparison",
    "oneloop.tasks.augmentation",
    "oneloop.tasks.image_classification",
    "oneloop.tasks.image_models",
    "oneloop.tasks.image_settings",
    "oneloop.tasks.packaged_images",
)

MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.3, 0.25]
MODES = ("nearest", "bilinear", "bicubic")
SIZES = [(37, 21), (36, 47), (50, 81), (20, 31)]  # with margins of odd and of even width


def picture(height: int, width: int) -> Image.Image:
    draw = np.random.default_rng(height)
    return Image.fromarray(draw.integers(0, 255, (height, width, 3), dtype=np.uint8))


NORMALIZED = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]


def cropped(mode: str, area=(0.3, 1.0), ratio=(3 / 4, 4 / 3)):
    interpolation = InterpolationMode(mode)
    return transforms.RandomResizedCrop((16, 16), area, ratio, interpolation)


# how an image is changed, and the transforms of torchvision; the older ones, if they draw the same
SAME = {
    **{f"crop, {mode}": (mode, replace(PLAIN, crop=0.3), [cropped(mode)]) for mode in MODES},
    "part of the crops": (
        "bilinear",
        replace(PLAIN, crop=0.2, crop_max=0.5, crop_ratio=[0.5, 3.0]),
        [cropped("bilinear", (0.2, 0.5), (0.5, 3.0))],
    ),
    "one jitter": (
        "bilinear",
        replace(PLAIN, color_jitter=0.4),
        [transforms.Resize((16, 16)), transforms.ColorJitter(0.4, 0.4, 0.4)],
    ),
    "four jitters after a crop": (
        "bicubic",
        replace(PLAIN, crop=0.3, color_jitter=[0.1, 0.2, 0.3, 0.5]),
        [cropped("bicubic"), transforms.ColorJitter(0.1, 0.2, 0.3, 0.5)],
    ),
    "TrivialAugment": (
        "bilinear",
        replace(PLAIN, trivialaugment=True),
        [v2.Resize((16, 16)), v2.TrivialAugmentWide()],
    ),
    "TrivialAugment and jitter": (
        "nearest",
        replace(PLAIN, crop=0.3, trivialaugment=True, color_jitter=[0, 0, 0.4]),
        [cropped("nearest"), v2.TrivialAugmentWide(), transforms.ColorJitter(0, 0, 0.4)],
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_pictures_are_those_of_torchvision_with_the_same_random_numbers(name):
    mode, how, steps = SAME[name]
    make, expected = Transform(Resizing(16, mode), MEAN, STD, how), transforms.Compose(steps)
    made = []
    for number in range(40):
        image = picture(*SIZES[number % 4])
        torch.manual_seed(number)
        one = make(image)
        torch.manual_seed(number)
        other = transforms.Compose(NORMALIZED)(expected(image))
        assert torch.allclose(one, other, rtol=0, atol=1e-6), number
        made.append(one)
    assert len({tuple(one.flatten().tolist()) for one in made[::4]}) == 10


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("crop", [0.0, 0.875, 1.0, 0.7])
def test_evaluation_images_are_those_of_timm_and_transformers(tmp_path, mode, crop):
    import timm
    from transformers import AutoImageProcessor

    about = described("timm:resnet18", ["a"], MEAN, STD, Resizing(32, mode, crop))
    config = timm.data.resolve_data_config(about["config.json"]["pretrained_cfg"])
    by_timm = timm.data.create_transform(**config)

    # Processors of transformers round the position of the middle down.
    resizing = Resizing(32, mode, crop, rounds_down=True)
    about = described("hf:some/vit", ["a"], MEAN, STD, resizing)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(about[file.name]))
    by_transformers = AutoImageProcessor.from_pretrained(tmp_path)
    for size in SIZES:
        image = picture(*size)
        own = Transform(Resizing(32, mode, crop), MEAN, STD)(image)
        assert torch.allclose(own, by_timm(image), rtol=0, atol=1e-6), size

        # They resize tensors, where Pillow rounds intermediate values to bytes.
        own = Transform(resizing, MEAN, STD)(image)
        other = by_transformers(image, return_tensors="pt")["pixel_values"][0]
        bytes_apart = (own - other).abs().mul(torch.tensor(STD)[:, None, None]).mul(255)
        if mode == "nearest":  # they may choose the other of two pixels at the same distance
            assert (bytes_apart < 1e-3).float().mean() > 0.9, size
        else:
            assert bytes_apart.mean() < 0.5, size


class Numbers:
    """Samples that are their index and a random number."""

    def __len__(self):
        return 37

    def __getitem__(self, index):
        return index, float(torch.rand(()))


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_a_step_has_its_images_so_often_and_never_the_same_picture_twice(copies):
    batch = 12
    numbers = Repeated(Numbers(), copies)
    order = order_of(numbers, seed=5, batch=batch)
    single = Order(37, seed=5)
    samples, drawn = SeededSamples(numbers, seed=3), set()
    each = batch // copies
    for step in range(40):
        epochs, indices = order[step * batch : (step + 1) * batch]
        expected = single[step * each : (step + 1) * each][1].tolist()
        assert indices.tolist() == expected * copies
        for place in zip(epochs.tolist(), indices.tolist(), strict=True):
            drawn.add(samples[place][1][1])
    assert len(drawn) == 40 * batch

    # Any part of the order, and places in any shape.
    positions = np.arange(7, 99).reshape(4, 23)
    for part, whole in zip(order.at(positions), order[0:99], strict=True):
        assert part.shape == (4, 23) and (part.reshape(-1) == whole[7:]).all()
    if copies == 1:
        assert (order[0:99][0] == single[0:99][0]).all()

    # Without shuffling, the images come in the order of the files.
    stored = order_of(numbers, seed=5, batch=batch, shuffle=False)
    assert stored[batch : 2 * batch][1].tolist() == [*range(each, 2 * each)] * copies


def test_steps_have_as_many_copies_as_with_the_sampler_of_timm():
    from timm.data.distributed_sampler import RepeatAugSampler

    sampler = RepeatAugSampler(range(600), num_replicas=1, rank=0, num_repeats=3)
    order = RepeatedOrder(Order(600, seed=0), 3, batch=48)
    one = np.array(list(sampler)[:480]).reshape(10, 48)
    other = order[0:480][1].reshape(10, 48)
    for step in (*one, *other):
        assert np.unique(step, return_counts=True)[1].tolist() == [3] * 16
    assert len(np.unique(one)) == len(np.unique(other)) == 160


def test_copies_of_a_mixture_and_of_row_groups(tmp_path):
    mixed = Repeated(Mixture({"a": Numbers(), "b": Numbers()}, [0.75, 0.25]), 3)
    order = order_of(mixed, seed=0, batch=24)
    assert (np.unique(order[0:24][1], return_counts=True)[1] == 3).all()
    assert (order[0:24][1] >= 37).sum() == 6 and mixed.where(40) == "b, sample 3"

    # A mixed-in image is of the row group; each copy has another one.
    images(tmp_path / "data", "parquet", each=60)
    keys = {"mixup": 0.4, "image_size": 8, "augment": False}
    one = ImageClassification(str(tmp_path / "data"), **keys).train_set()
    repeated = ImageClassification(str(tmp_path / "data"), **keys, repeats=2).train_set()
    assert repeated.near(70) == one.near(70) and len(repeated) == len(one)
    epochs, indices = order_of(repeated, seed=0, batch=8)[0:8]
    expected = order_of(one, seed=0, batch=4)[0:4]
    assert indices.tolist() == expected[1].tolist() * 2
    samples = SeededSamples(repeated, seed=0)
    first, second = (samples[int(epochs[at]), int(indices[at])][1] for at in (0, 4))
    assert not torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])


WORDS = ["digits", "--task.crop", "0.4", "--task.crop_ratio", "[0.5, 2.0]", "--task.mixup", "0.4"]
WORDS += ["--task.trivialaugment", "true", "--task.color_jitter", "[0.4, 0.3, 0.2, 0.1]"]
WORDS += ["--task.interpolation", "bicubic", "--task.test_crop", "0.8", "--task.repeats", "4"]
SHORT = ["--task.width", "8", "--batch.size", "16", "--duration", "6", "--save.every", "2"]
SHORT += ["--eval.every", "0", "--track", "none"]


def pictures(words: list[str], ranks: int, workers: int, start: int = 0) -> list[dict[int, list]]:
    """Return the pictures of two steps, as a run loads them, by the index of their image."""
    keys = yaml.safe_load("\n".join(f"{key[7:]}: {value}" for key, value in _pairs(words)))
    task = ImageClassification(**keys)
    dataset, layout = task.train_set(), BatchLayout(16, ranks, 2)
    order = order_of(dataset, seed=0, batch=16)
    collate = CollateWithWeight(task.collate, task.weight, sample_weight=None, dtype=torch.float32)
    steps: list[dict[int, list]] = [{}, {}]
    for rank in range(ranks):
        made = groups(
            dataset,
            collate,
            order,
            layout,
            rank=rank,
            seed=0,
            start=start,
            device=torch.device("cpu"),
            workers=workers,
        )
        for seen in steps:
            for batch in next(made).batches:
                for index, image in zip(batch["index"].tolist(), batch["image"], strict=True):
                    seen.setdefault(index, []).append(image)
        made.close()
    return steps


def _pairs(words: list[str]) -> list[tuple[str, str]]:
    pairs = zip(words[1::2], words[2::2], strict=True)
    return [(key, value) for key, value in pairs if key.startswith("--task.")]


def test_each_process_and_worker_makes_the_same_pictures():
    whole = pictures(WORDS, 1, 0)
    assert [len(images) for step in whole for images in step.values()] == [4] * 8
    later = pictures(WORDS, 1, 0, start=16)
    for ranks, workers in ((2, 0), (1, 2)):
        for one, other in zip(whole, pictures(WORDS, ranks, workers), strict=True):
            assert one.keys() == other.keys()
            for index in one:
                assert torch.equal(torch.stack(one[index]), torch.stack(other[index]))
    for index, copies in whole[1].items():  # the second step, begun there
        assert torch.equal(torch.stack(copies), torch.stack(later[0][index]))
        assert len({tuple(image.flatten().tolist()) for image in copies}) == 4


def ended(folder: Path) -> tuple[dict, dict]:
    """Return the weights and the summary of a run."""
    weights = load_file(folder / "final" / "model.safetensors")
    return weights, json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
def test_a_run_is_bit_identical_on_two_processes_with_workers_and_after_a_resume(tmp_path):
    words = [*WORDS, *SHORT, "--batch.grain", "4"]
    run(train, [*words, "--run.dir", "one"], folder=tmp_path).ok()
    more = ["--machine.workers", "1", "--run.dir", "two"]
    run(train, [*words, *more], ranks=2, config="ddp", folder=tmp_path).ok()
    weights, _ = ended(tmp_path / "one")
    back_to(tmp_path / "two", 4)
    resumed = run(train, [*words, "--run.dir", "two"], folder=tmp_path)
    resumed.ok()
    assert "resuming from two/checkpoints/step-00000004" in resumed.output
    for name, tensor in ended(tmp_path / "two")[0].items():
        assert torch.equal(tensor, weights[name]), name


def test_evaluations_after_a_run_see_the_same_images(tmp_path):
    words = [*WORDS, *SHORT, "--duration", "2", "--run.dir", "one"]
    run(train, words, folder=tmp_path).ok()
    _, summary = ended(tmp_path / "one")
    # A step has copies of samples, so the noise scale cannot be measured.
    assert "noise_scale" not in (tmp_path / "one" / "metrics.jsonl").read_text()
    found = after(tmp_path, "evaluate", "one", "--json")
    found.ok()
    values = json.loads(found.output[found.output.index("{") :])
    assert values["eval/loss"] == pytest.approx(summary["eval/loss"], rel=1e-6)
    file = json.loads((tmp_path / "one" / "final" / "config.json").read_text())
    assert (file["crop_pct"], file["crop_mode"], file["interpolation"]) == (
        0.8,
        "center",
        "bicubic",
    )


def test_another_batch_size_must_not_part_the_copies(tmp_path):
    words = ["digits", "--task.repeats", "4", "--track", "none", "--run.dir", "run"]
    words += ["--eval.every", "0", "--run.accept_changes", "true"]
    again = [*words, "--duration", "4", "--batch.size"]
    several = [[*words, "--duration", "2"], [*again, "96"], [*again, "32"]]
    ((first, wrong, last),) = run(each_message, several, folder=tmp_path).ok()
    assert first[0] == 0, first
    assert wrong[0] == 2 and "128 samples are not a multiple of batch.size 96" in wrong[1], wrong
    assert last[0] == 0, last


BAD = {
    "two policies": (
        {"randaugment": 9, "trivialaugment": True},
        "task.randaugment 9 and task.trivialaugment true exclude each other",
    ),
    "a negative strength": ({"color_jitter": -0.1}, "task.color_jitter -0.1 must be one number"),
    "two strengths": ({"color_jitter": [0.1, 0.2]}, r"color_jitter \[0.1, 0.2\] must be one"),
    "too much hue": ({"color_jitter": [0, 0, 0, 0.6]}, "of hue must be between 0 and 0.5"),
    "crops": ({"crop": 0.5, "crop_max": 0.4}, "task.crop_max 0.4 must be above 0, at least task"),
    "a large crop": ({"crop": 0.5, "crop_max": 1.1}, "and at most 1"),
    "one ratio": (
        {"crop": 0.5, "crop_ratio": [1.0]},
        r"task.crop_ratio \[1.0\] must be the smallest",
    ),
    "ratios": ({"crop": 0.5, "crop_ratio": [2.0, 1.0]}, "must be the smallest and the largest"),
    "a central crop": ({"test_crop": 1.2}, "task.test_crop 1.2 must be between 0.1 and 1"),
    "a tiny central crop": ({"test_crop": 0.001}, "task.test_crop 0.001 must be between 0.1"),
    "no ratios": ({"crop": 0.5, "crop_ratio": []}, r"task.crop_ratio \[\] must be"),
    "no copies": ({"repeats": 0}, "task.repeats 0 must be 1 or more"),
    "equal copies": (
        {"repeats": 2, "augment": False},
        "task.repeats 2 would repeat equal images, because no augmentation is on",
    ),
    "no resize": ({"interpolation": "bicubic"}, "task.interpolation bicubic has no effect"),
    "no resize of evaluation images": (
        {"crop": 0.5, "test_interpolation": "nearest"},
        "task.test_interpolation nearest has no effect",
    ),
    "a resize of other images": (
        {"interpolation": "bicubic", "test_interpolation": "nearest", "test_size": 16},
        "task.interpolation bicubic has no effect",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_value_is_one_message(name):
    options, expected_text = BAD[name]
    with pytest.raises(ValueError, match=expected_text):
        ImageClassification(**options)


REJECTED = {
    "copies that do not divide a step": (
        ["--task.repeats", "3"],
        "batch.size 16 must be a multiple of task.repeats 3",
    ),
    "a few samples": (
        ["--task.repeats", "2", "--debug.overfit", "32"],
        "debug.overfit 32 cannot be combined with repeated samples: a step has 2 copies of each",
    ),
    "a ratio without a crop": (
        ["--task.crop_ratio", "[0.5, 2.0]"],
        "task.crop_ratio [0.5, 2.0] has no effect with task.crop 0",
    ),
    "another interpolation": (["--task.interpolation", "lanczos"], "bilinear"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_a_wrong_combination_ends_a_run_before_it_writes(tmp_path, name):
    words, expected_text = REJECTED[name]
    world = run(train, ["digits", *SHORT, *words, "--run.dir", "run"], folder=tmp_path)
    assert world.codes == [2] and expected_text in world.output, world.output
    assert not (tmp_path / "run").exists()
