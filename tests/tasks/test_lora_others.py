"""Adapters and models that others made or changed are used as given, or rejected."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from adapters import WORDS, a_base, of_words
from oneloop.cli import main
from oneloop.tasks.language.lora_settings import adapters
from oneloop.tasks.sft import SFT
from oneloop.tools.after_training.trained_model import round_frozen
from planning import few_chats
from silent_cases import unfinished
from worlds import after, run, train

pytestmark = pytest.mark.covers(
    "oneloop.basics.base_models",
    "oneloop.machine.frozen_dtype",
    "oneloop.tools.after_training.trained_model",
    "oneloop.tasks.language.lora",
    "oneloop.tasks.language.lora_settings",
    "oneloop.tasks.language.models",
    "oneloop.tasks.sft",
)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return a_base(tmp_path_factory.mktemp("others") / "base")


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> str:
    """A file of a few chats."""
    _, file = few_chats(tmp_path_factory.mktemp("chats"))
    return file


@pytest.fixture(scope="module")
def trained(base, chats, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    of_words(
        folder,
        "--task.data",
        chats,
        "--task.model",
        str(base),
        "--task.lora.rank",
        "4",
        "--task.lora.alpha",
        "8",
        "--duration",
        "2",
    ).ok()
    return folder / "run"


def the_task(model: Path, chats: str, **lora) -> SFT:
    return SFT(chats, model=str(model), length=96, pack="padded", lora=lora)


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_transposed_layers_are_merged(base, chats, tmp_path, quantize):
    shutil.copytree(
        base, tmp_path / "gpt2", ignore=shutil.ignore_patterns("*.safetensors", "config.json")
    )
    entries = json.loads((base / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
    transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=entries, **sizes)
    ).save_pretrained(tmp_path / "gpt2")
    task = the_task(
        tmp_path / "gpt2", chats, rank=4, **({"quantize": quantize} if quantize else {})
    )
    model = task.model().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
        tokens = torch.randint(0, entries, (2, 9))
        before = model(tokens).logits
        task.merge(model).save_pretrained(tmp_path / "merged")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "merged", dtype=torch.float32
        ).eval()
        assert (loaded(tokens).logits - before).abs().max() < 1e-5 * before.abs().max()
    assert loaded.transformer.h[0].attn.c_attn.weight.shape == (64, 192)


OTHER = [
    ({"init_lora_weights": "pissa"}, "(init_lora_weights pissa)"),
    ({"alora_invocation_tokens": [1, 2]}, "(alora_invocation_tokens [1, 2])"),
    ({"trainable_token_indices": [3]}, "(trainable_token_indices [3])"),
    ({"layer_replication": [[0, 1]]}, "(layer_replication [[0, 1]])"),
    ({"what_comes_next": True}, "(what_comes_next True)"),
    ({"peft_type": "IA3"}, "(peft_type IA3)"),
    ({"lora_alpha": None}, "must set lora_alpha"),
    ({"base_model_name_or_path": None}, "must set base_model_name_or_path"),
    (
        {"base_model_name_or_path": "/gone/base"},
        "its adapters are for /gone/base, which is missing; restore it",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "expected_text"), OTHER, ids=[str(changed) for changed, _ in OTHER]
)
def test_adapters_of_other_kinds_are_rejected(trained, tmp_path, changed, expected_text):
    folder = shutil.copytree(trained / "final", tmp_path / "given")
    file = folder / "adapter_config.json"
    assert adapters(str(folder), {}, pretrained=True).settings.alpha == 8
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(ValueError) as rejected:
        adapters(str(folder), {}, pretrained=True)
    assert f"task.model {str(folder)!r}" in str(rejected.value) and expected_text in str(
        rejected.value
    )


@pytest.mark.slow
def test_adapters_that_are_damaged_are_reported(trained, tmp_path):
    folder = shutil.copytree(trained / "final", tmp_path / "given")
    (folder / "adapter_model.safetensors").write_bytes(
        (folder / "adapter_model.safetensors").read_bytes()[:100]
    )
    with pytest.raises(ValueError, match="its adapters cannot be read"):
        adapters(str(folder), {}, pretrained=True)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match="its adapters cannot be read"):
        adapters(str(folder), {}, pretrained=True)


def test_targets_as_a_pattern_are_those_of_the_file(trained, chats, tmp_path):
    folder = shutil.copytree(trained / "final", tmp_path / "given")
    file = folder / "adapter_config.json"
    file.write_text(
        json.dumps(
            json.loads(file.read_text()) | {"target_modules": r".*\.(q|k|v|o|gate|up|down)_proj"}
        )
    )
    assert the_task(folder, chats).model() is not None


def test_a_model_that_is_changed_underfoot(base, chats, tmp_path):
    own = shutil.copytree(base, tmp_path / "base")
    task = the_task(own, chats, rank=4)
    task.model()
    (own / "model.safetensors").write_bytes((own / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match="changed since the start; restore the original files"):
        task.origin.unchanged()
    with pytest.raises(ValueError, match="changed since the start"):
        _ = task.origin.content
    task = the_task(own, chats, rank=4)
    task.model()
    task.origin.unchanged()
    assert task.origin.content["files"]  # from here on, its content is recorded
    before = (own / "model.safetensors").read_bytes()
    (own / "model.safetensors").write_bytes(before)
    task.origin.unchanged()
    (own / "config.json").rename(tmp_path / "config.json")
    with pytest.raises(ValueError, match="config.json cannot be read"):
        task.origin.unchanged()
    (tmp_path / "config.json").rename(own / "config.json")
    task.origin.unchanged()
    (own / "model.safetensors").write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    with pytest.raises(ValueError, match="changed since the start"):
        task.origin.unchanged()


@pytest.mark.slow
def test_adapters_on_a_model_that_has_changed(chats, tmp_path):
    own = a_base(tmp_path / "base")
    of_words(tmp_path, "--task.model", str(own), "--task.lora.rank", "4", "--duration", "1").ok()
    final = tmp_path / "run" / "final"
    the_task(final, chats).model()
    a_base(own, seed=1)
    with pytest.raises(
        ValueError, match="its adapters were trained on .*; restore that base model"
    ):
        the_task(final, chats).model()


@pytest.mark.slow
def test_adapters_that_are_scaled_otherwise_since(base, trained, tmp_path):
    given = shutil.copytree(trained / "final", tmp_path / "given")
    words = [*WORDS, "--task.model", str(given), "--duration", "4", "--save.every", "2"]
    run(train, words, folder=tmp_path).ok()
    file = given / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 64}))
    for checkpoint in ("newest", "final"):
        world = after(tmp_path, "evaluate", "run", "--checkpoint", checkpoint)
        assert world.codes == [2] and "lora_alpha 8, expected 64" in world.output, world.output
    unfinished(tmp_path / "run", 2)
    world = run(train, words, folder=tmp_path)
    assert world.codes == [2] and "lora_alpha 8, expected 64" in world.output, world.output


def test_adapters_and_a_merged_model_do_not_share_a_folder(trained, tmp_path, capsys):
    assert main(["export", str(trained), "--to", str(tmp_path / "one")]) == 0
    assert main(["export", str(trained), "--to", str(tmp_path / "two"), "--merged"]) == 0
    for to, more, there in (
        ("one", ["--merged"], "holds adapters"),
        ("two", [], "holds a whole model"),
    ):
        files = sorted(file.name for file in (tmp_path / to).iterdir())
        assert main(["export", str(trained), "--to", str(tmp_path / to), *more]) == 2
        assert there in capsys.readouterr().err
        assert files == sorted(file.name for file in (tmp_path / to).iterdir())


def test_a_model_saved_in_four_bits(base, chats, tmp_path):
    how = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    four = shutil.copytree(
        base, tmp_path / "four", ignore=shutil.ignore_patterns("*.safetensors", "config.json")
    )
    made = transformers.AutoModelForCausalLM.from_pretrained(
        base, quantization_config=how, device_map={"": "cpu"}
    )
    made.save_pretrained(four)
    model = the_task(four, chats, rank=4).model()
    layers = [module for module in model.modules() if hasattr(module, "quant_state")]
    assert layers and not any(layer.support_avx512bf16_for_cpu for layer in layers)
    with pytest.raises(
        ValueError, match=r"task.lora.quantize fp4: .* is in 4 bits \(nf4\) already; remove it"
    ):
        the_task(four, chats, rank=4, quantize="fp4").model()
    with pytest.raises(
        ValueError, match=r"is in 4 bits \(nf4\), which cannot be trained; give task.lora.rank 16"
    ):
        the_task(four, chats).model()


def test_matrices_that_training_does_not_round_are_not_rounded_afterwards():
    model = torch.nn.Linear(4, 4).half().requires_grad_(False)
    before = model.weight.clone()
    round_frozen(model, "bfloat16")
    assert torch.equal(model.weight, before)
    model = model.float()
    round_frozen(model, "bfloat16")
    assert torch.equal(model.weight, before.float().bfloat16().float())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "more"),
    [
        (torch.bfloat16, ["--task.lora.rank", "4", "--machine.base_dtype", "float32"]),
        (torch.float16, ["--task.lora.rank", "4", "--machine.base_dtype", "float32"]),
        (torch.bfloat16, []),
    ],
)
def test_metrics_afterwards_on_a_model_in_half(tmp_path, dtype, more):
    own = a_base(tmp_path / "half", dtype=dtype)
    of_words(tmp_path, "--task.model", str(own), "--duration", "4", *more).ok()
    printed = json.loads((tmp_path / "run" / "summary.json").read_text())["eval/loss"]
    world = after(tmp_path, "evaluate", "run", "--json")
    world.ok()
    [line] = [line for line in world.output.splitlines() if line.startswith("{")]
    assert json.loads(line)["eval/loss"] == printed
