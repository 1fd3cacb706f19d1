"""Image models of other libraries: fine-tuned with frozen layers and layer-wise rates, and loaded
there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers import ViTForImageClassification

from oneloop.basics.parameter_names import matches
from oneloop.tasks.image_classification import ImageClassification
from oneloop.tasks.image_models import fitted, image_model
from own_files import images
from silent_cases import unfinished
from small_models import vit
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.basics.parameter_names",
    "oneloop.tasks.augmentation",
    "oneloop.tasks.image_classification",
    "oneloop.tasks.image_models",
)

LAYOUTS = [("single", 1), ("ddp", 2), ("fsdp2", 2)]
COMMON = [
    "--duration",
    "6",
    "--batch.size",
    "8",
    "--save.every",
    "3",
    "--eval.every",
    "0",
    "--track",
    "none",
]
COMMON += [
    "--task.augment",
    "false",
    "--task.held_out",
    "0.2",
    "--optimizer.lr",
    "1e-3",
    "--ema.half_life",
    "16",
]


def made_by_transformers(where: Path):
    from transformers import AutoModelForImageClassification

    model = AutoModelForImageClassification.from_pretrained(where)
    return lambda batch: model(batch).logits, model.eval()


def made_by_timm(where: Path):
    import timm

    model = timm.create_model(
        "test_resnet", num_classes=3, checkpoint_path=str(where / "model.safetensors")
    ).eval()
    return model, model


def made_by_torchvision(where: Path):
    from torchvision.models import get_model

    model = get_model("mobilenet_v3_small", num_classes=3).eval()
    model.load_state_dict(load_file(where / "model.safetensors"))
    return model, model


def weights_of(name: str, folder: Path) -> list[str]:
    """Return the options for a pretrained model of five classes."""
    if name == "transformers":
        return ["--task.model", str(vit(folder / "vit", 5)), "--task.image_size", "16"]
    torch.manual_seed(1)
    named = {"timm": "timm:test_resnet", "torchvision": "mobilenet_v3_small"}[name]
    model, _ = image_model(named, list("abcde"))
    save_file(model.state_dict(), folder / "five.safetensors")
    return [
        "--task.model",
        named,
        "--task.pretrained",
        str(folder / "five.safetensors"),
        "--task.image_size",
        "32",
    ]


FROZEN = {
    "transformers": ({"vit.embeddings": {"freeze": True}}, "0.5", made_by_transformers),
    "timm": (
        {"conv1": {"freeze": True}, "bn1": {"freeze": True}, "layer1": {"freeze": True}},
        "1",
        made_by_timm,
    ),
    "torchvision": (
        {"features.[0-3]": {"freeze": True}, "*.bias": {"lr_factor": 2}},
        "1",
        made_by_torchvision,
    ),
}


BOTH = [(name, *split) for name in FROZEN for split in LAYOUTS]


# By default, test_own_texts.py does the same with a language model.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "config", "ranks"), BOTH)
def test_a_pretrained_model_is_fine_tuned_gone_on_with_and_loaded_where_it_is_from(
    tmp_path, name, config, ranks
):
    groups, decay, load = FROZEN[name]
    images(tmp_path / "data", "folders", each=20)
    words = ["digits", "--task.data", str(tmp_path / "data"), *weights_of(name, tmp_path), *COMMON]
    words += [
        "--optimizer.groups",
        json.dumps(groups),
        "--optimizer.layer_decay",
        decay,
        "--run.dir",
        "run",
    ]
    world = run(train, words, ranks=ranks, config=config, folder=tmp_path)
    world.ok()
    assert "is re-initialized: the classes differ" in world.output
    printed = json.loads((tmp_path / "run" / "summary.json").read_text())
    last = load_file(tmp_path / "run" / "final" / "model.safetensors")
    unfinished(tmp_path / "run", 3)
    world = run(train, words, ranks=ranks, config=config, folder=tmp_path)
    world.ok()
    assert "resuming from run/checkpoints/step-00000003" in world.output
    again = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert {tensor for tensor in last if not torch.equal(last[tensor], again[tensor])} == set()

    named, size = (words[words.index(f"--task.{key}") + 1] for key in ("model", "image_size"))
    task = ImageClassification(
        str(tmp_path / "data"), named, augment=False, held_out=0.2, image_size=int(size)
    )
    forward, model = load(tmp_path / "run" / "final")
    validation = task.eval_sets()["validation"]
    batch = task.collate([validation[index] for index in range(len(validation))])
    with torch.no_grad():
        loss = F.cross_entropy(forward(batch["image"]), batch["label"]).item()
    assert loss == pytest.approx(printed["eval/loss"], abs=1e-5)

    if name == "transformers":
        first = ViTForImageClassification.from_pretrained(tmp_path / "vit").state_dict()
    else:
        first = load_file(tmp_path / "five.safetensors")
    frozen = {
        tensor
        for tensor in last
        if any(matches(pattern, tensor) for pattern, own in groups.items() if own.get("freeze"))
    }
    # BatchNorm statistics, too
    assert frozen and all(torch.equal(first[tensor], last[tensor]) for tensor in frozen)
    for tensor in {tensor for tensor in last if tensor.endswith(".weight")} - frozen:
        assert first[tensor].shape != last[tensor].shape or not torch.equal(
            first[tensor], last[tensor]
        ), tensor


BAD = {
    "an unknown timm name": (
        ["timm:resnet19"],
        "timm:resnet19 is not one of timm's .* similar names: .*resnet",
    ),
    "an unknown name": (["resnet19"], "'resnet19' is unknown; use cnn, a folder"),
    "pickled weights": (
        ["mobilenet_v3_small", "PICKLE"],
        "weights.pth is not a .safetensors file; oneloop never loads pickled weights",
    ),
    "public weights of torchvision": (
        ["mobilenet_v3_small", True],
        "are pickles, which are never loaded",
    ),
    "weights of another model": (
        ["timm:test_resnet", "OTHER"],
        "the weights do not fit this model \\(missing: ",
    ),
    "no weights": (["timm:test_resnet", "NOWHERE"], "no .*model.safetensors"),
    "a class of the standard library": (["json.JSONDecoder"], "is in Python's standard library"),
    "a class that is no model": (["own_files.bulk"], "cannot be built with num_classes=3"),
}


@pytest.mark.parametrize("name", BAD)
def test_models_that_are_none_are_reported(tmp_path, name):
    (model, *pretrained), expected_text = BAD[name]
    torch.save({}, tmp_path / "weights.pth")
    save_file({"a": torch.zeros(2)}, tmp_path / "other.safetensors")
    places = {
        "PICKLE": tmp_path / "weights.pth",
        "OTHER": tmp_path / "other.safetensors",
        "NOWHERE": tmp_path,
    }
    given = [str(places[one]) if isinstance(one, str) else one for one in pretrained]
    with pytest.raises(ValueError, match=expected_text):
        image_model(model, list("abc"), pretrained=given[0] if given else None)


def test_a_head_that_does_not_fit_is_new_and_nothing_else_may_be():
    model, _ = image_model("timm:test_resnet", list("abc"))
    other, _ = image_model("timm:test_resnet", list("abcde"))
    weights = other.state_dict()
    before = model.get_classifier().weight.clone()
    assert fitted(model, weights, 3) == [
        "the last layer (fc) is re-initialized: the classes differ"
    ]
    assert torch.equal(model.get_classifier().weight, before)
    own = model.state_dict()
    assert all(
        torch.equal(own[tensor], weights[tensor]) for tensor in own if not tensor.startswith("fc.")
    )
    spoiled = {**weights, next(iter(weights)): torch.zeros(1)}
    with pytest.raises(ValueError, match="shape mismatch"):
        fitted(model, spoiled, 3)


def test_pixels_are_as_the_model_wants_them(tmp_path):
    images(tmp_path / "data", "folders", each=8)
    own = {"data": str(tmp_path / "data"), "augment": False, "held_out": 0.2, "image_size": 16}
    plain = ImageClassification(**own).train_set()[0][0]
    by_model = ImageClassification(**own, model=str(vit(tmp_path / "vit", 3))).train_set()[0][0]
    raw = ImageClassification(**own, mean=[0.0] * 3, std=[1.0] * 3).train_set()[0][0]
    assert torch.allclose(plain, raw * 2 - 1) and torch.allclose(
        by_model, (raw - 0.4) / 0.3, atol=1e-6
    )


class HeadFirst(nn.Module):
    """Its head comes first; its last parameter has one element per class but is not the head."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.head = nn.Linear(3, num_classes)
        self.body = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
        self.scale = nn.Parameter(torch.ones(num_classes))


def test_the_head_is_what_differs_and_nothing_else_may():
    model = HeadFirst(3)
    weights = {
        name: tensor + 1 for name, tensor in HeadFirst(5).state_dict().items() if name != "scale"
    }
    weights["scale"] = torch.zeros(3)
    assert fitted(model, weights, 3) == [
        "the last layer (head) is re-initialized: the classes differ"
    ]
    assert torch.equal(model.body[1].weight, weights["body.1.weight"])
    for wrong in ("body.1.weight", "scale"):
        with pytest.raises(ValueError, match=f"missing: {wrong}"):
            fitted(model, {name: tensor for name, tensor in weights.items() if name != wrong}, 3)
    with pytest.raises(ValueError, match="shape mismatch: scale"):
        fitted(model, {**weights, "scale": torch.zeros(5)}, 3)


def test_several_heads_and_tied_weights_are_known():
    for name in ("timm:deit_tiny_distilled_patch16_224", "googlenet"):
        model, _ = image_model(name, list("abc"))
        other, _ = image_model(name, list("abcde"))
        (note,) = fitted(model, other.state_dict(), 3)
        assert note.count(",") == (1 if name.startswith("timm") else 2), note
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 3))
    model[1].weight = model[0].weight
    weights = {
        name: tensor + 1 for name, tensor in model.state_dict().items() if name != "1.weight"
    }
    assert fitted(model, weights, 3) == [] and torch.equal(model[1].weight, weights["0.weight"])


def test_a_layer_of_the_base_is_no_head_whatever_the_base_is_called(tmp_path):
    from transformers import SiglipConfig, SiglipForImageClassification

    shape = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    config = SiglipConfig(vision_config={**shape, "image_size": 16, "patch_size": 8}, num_labels=3)
    SiglipForImageClassification(config).save_pretrained(tmp_path / "siglip")
    weights = load_file(tmp_path / "siglip" / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "layers.1." not in name}
    save_file(kept, tmp_path / "siglip" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="the weights do not fit this model"):
        image_model(str(tmp_path / "siglip"), list("abc"))


def test_weights_for_the_small_network_and_odd_statistics_are_rejected(tmp_path):
    with pytest.raises(ValueError, match="does not work with task.model cnn"):
        ImageClassification(pretrained="weights.safetensors").model()
    images(tmp_path / "data", "folders", each=8)
    with pytest.raises(ValueError, match="must both have 3 channels, or both 1"):
        ImageClassification(str(tmp_path / "data"), mean=[0.5], held_out=0.2)
    with pytest.raises(
        ValueError, match="is not a folder saved by transformers: ./nothere/config.json is missing"
    ):
        image_model("./nothere", list("abc"))
