"""Reward models: the loss in closed form, the same run on every layout, and the same rewards in
transformers and peft."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from oneloop.tasks.language.sequences import Sample
from oneloop.tasks.reward import METRICS, Reward, RewardSums
from preference_rows import a_llama, rows, write
from silent_cases import unfinished
from worlds import after, apply, each_message, run, timeless, train

pytestmark = pytest.mark.covers(
    "oneloop.tasks.language.answer_rows",
    "oneloop.tasks.language.lora",
    "oneloop.tasks.language.models",
    "oneloop.tasks.language.pair_rows",
    "oneloop.tasks.reward",
)

SMALL = ["reward.yaml", "--track", "none", "--run.dir", "run"]
RECIPE = """
task:
  name: reward
  data: data
  layers: 1
  width: 32
  heads: 4
  length: 48
  margin: margin
  centering: 0.01
duration: 6
batch: {size: 16}
optimizer: {name: sgd, lr: 0.02}
log: {every: 1}
eval: {every: 3, samples: 4}
save: {every: 3}
"""


def the_data(folder: Path) -> Path:
    for number, part in enumerate(("train", "validation")):
        write(folder / "data" / f"{part}.jsonl", rows(90, seed=number))
    (folder / "reward.yaml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> Path:
    folder = the_data(tmp_path_factory.mktemp("single"))
    world = run(train, SMALL, folder=folder)
    world.ok()
    (folder / "output").write_text(world.output)
    return folder


def metrics(folder: Path, prefix: str = "train/") -> list[dict[str, float]]:
    """Return the lines of a loss, without what depends on time or on the micro-batches."""
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    found = []
    for line in lines:
        if f"{prefix}loss" in line:
            line.pop("train/padding", None)
            found.append(timeless(line))
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "run" / "final" / "model.safetensors")


class Given(torch.nn.Module):
    """A model whose rewards are given: a table of the first token of each text."""

    def __init__(self, rewards: torch.Tensor) -> None:
        super().__init__()
        self.rewards = torch.nn.Parameter(rewards)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return transformers.modeling_outputs.SequenceClassifierOutputWithPast(
            logits=self.rewards[input_ids[:, 0]][:, None]
        )


def a_task(folder: Path, **keys: Any) -> Reward:
    small: dict[str, Any] = {"layers": 1, "width": 32, "heads": 2, "length": 48}
    return Reward(str(the_data(folder) / "data"), **{**small, **keys})


def test_the_loss_its_gradient_and_the_metrics_in_closed_form(tmp_path):
    task = a_task(tmp_path, margin="margin", centering=0.1)
    table = torch.tensor([0.5, -1.0, 2.0, 2.0], dtype=torch.float64)
    model = Given(table)
    spans = [np.array([~number, 7, 9], np.int32) for number in range(4)]
    batch = task.collate(
        [Sample(spans[:2], number=int(np.float32(0.25).view(np.int32))), Sample(spans[2:])]
    )
    batch["margin"] = batch["margin"].double()
    assert batch["input"].shape == (2, 2, 3) and task.weight(batch) == 2

    # -log s(r - r' - m) + c (r + r')^2, summed over the pairs
    loss, outputs = task.loss(model, batch)
    first = math.log1p(math.exp(-(1.5 - 0.25))) + 0.1 * 0.5**2
    second = math.log(2) + 0.1 * 4.0**2
    assert loss.item() == pytest.approx(first + second, rel=1e-12)
    loss.backward()
    slope = -1 / (1 + math.exp(1.25))
    expected = [slope - 0.1, -slope - 0.1, -0.5 + 0.8, 0.5 + 0.8]
    assert model.rewards.grad.tolist() == pytest.approx(expected, rel=1e-12)

    # An equal pair counts half. In training the outputs are means over the pairs.
    assert outputs["reward_accuracy"] == 0.75 and outputs["reward_margin"] == 0.75
    assert outputs["chosen_reward"] == 1.25 and outputs["rejected_reward"] == 0.5
    model.eval()
    sums = RewardSums()
    task.update(sums, batch, task.loss(model, batch)[1])
    found = sums.compute()
    assert found["reward_mean"] == pytest.approx(0.875)
    assert found["reward_std"] == pytest.approx(float(table.std(correction=0)))
    assert found.keys() == sums.higher_is_better.keys()


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        pytest.param("single", 1, marks=pytest.mark.slow),
        ("ddp", 2),
        pytest.param("fsdp2", 2, marks=pytest.mark.slow),
    ],
)
def test_the_same_run_on_every_layout(single, tmp_path, config, ranks):
    the_data(tmp_path)
    micro = ["--batch.micro", "4"]
    run(train, [*SMALL, *micro], config=config, ranks=ranks, folder=tmp_path).ok()
    for prefix in ("train/", "eval/"):
        for one, other in zip(metrics(single, prefix), metrics(tmp_path, prefix), strict=True):
            for name in [f"{prefix}loss", *(f"{prefix}{name}" for name in METRICS)]:
                assert one[name] == pytest.approx(other[name], rel=1e-6, abs=1e-6)
    for name, tensor in weights(single).items():
        assert (tensor - weights(tmp_path)[name]).abs().max() < 1e-6


@pytest.mark.slow
def test_with_a_grain_it_is_bit_identical_also_after_a_kill(tmp_path):
    found = []
    for number, (config, ranks) in enumerate([("single", 1), ("fsdp2", 2), ("ddp", 2)]):
        folder = the_data(tmp_path / str(number))
        words = [*SMALL, "--batch.grain", "4"]
        if config == "ddp":
            # Begin on one process, and resume on two.
            run(train, words, folder=folder).ok()
            unfinished(folder / "run", 3)
        run(train, words, config=config, ranks=ranks, folder=folder).ok()
        found.append((weights(folder), metrics(folder)[3:]))
    for other, last in found[1:]:
        assert all(torch.equal(tensor, other[name]) for name, tensor in found[0][0].items())
        assert last == found[0][1]


def alone(folder: Path, texts: list[str]) -> list[float]:
    """Return the rewards of transformers, each text alone and without padding."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert model.config.num_labels == 1 and model.config.id2label == {0: "reward"}
    found = []
    for text in texts:
        tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            found.append(model(tokens["input_ids"]).logits.item())
    return found


def said(row: dict[str, Any], side: str, tokenizer: Any) -> str:
    if isinstance(row[side], str):
        return row["prompt"] + row[side] + tokenizer.eos_token
    return tokenizer.apply_chat_template([*row["prompt"], *row[side]], tokenize=False)


def predicted(folder: Path, *data: str) -> list[list[dict[str, Any]]]:
    """Return the predictions of the run for each of these files. One process makes all of them."""
    several = []
    for file in data:
        several.append(["predict", "run", "--data", file, "--to", f"out-{file}"])
    run(each_applied, several, folder=folder).ok()
    found = []
    for file in data:
        lines = (folder / f"out-{file}").read_text().splitlines()
        (folder / f"out-{file}").unlink()
        found.append([json.loads(line) for line in lines])
    return found


def each_applied(several: list[list[str]]) -> None:
    for words in several:
        with suppress_success():
            apply(words)


@contextmanager
def suppress_success() -> Iterator[None]:
    """Continue after a command that has ended with the code 0."""
    try:
        yield
    except SystemExit as end:
        if end.code:
            raise


def test_rewards_are_those_of_transformers(single):
    tokenizer = transformers.AutoTokenizer.from_pretrained(single / "run" / "final")
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    some = rows(20, seed=5)
    conversations = [{"messages": [*row["prompt"], *row["chosen"]]} for row in some]
    answers = [{"prompt": row["prompt"], "completion": row["rejected"]} for row in some]
    files = {"new": some, "conversations": conversations, "answers": answers}
    for name, made in files.items():
        write(single / f"{name}.jsonl", made)
    found, *alone_found = predicted(single, *(f"{name}.jsonl" for name in files))
    for side in ("chosen", "rejected"):
        expected = alone(single / "run" / "final", [said(row, side, tokenizer) for row in some])
        assert [row[f"{side}_reward"] for row in found] == pytest.approx(expected, abs=1e-5)
    assert found[3]["reward_margin"] == pytest.approx(
        found[3]["chosen_reward"] - found[3]["rejected_reward"], abs=1e-6
    )

    # A single answer has the same reward, as a conversation or after its prompt.
    for side, other in zip(("chosen", "rejected"), alone_found, strict=True):
        rewards = [row["reward"] for row in other]
        assert rewards == pytest.approx([row[f"{side}_reward"] for row in found], abs=1e-5)

    # The report shows the pairs, and which answer the model prefers.
    shown = json.loads((single / "run" / "examples.json").read_text())["samples"]
    assert all("[rejected]" in sample["text"] for sample in shown)
    assert {sample["prediction"] for sample in shown} <= {"chosen", "rejected"}


def test_a_long_answer_to_predict_is_cut_with_a_warning(single):
    row = rows(1)[0]
    long = [{"role": "assistant", "content": "7" * 60}]
    write(single / "long.jsonl", [{"messages": [*row["prompt"], *long]}])
    world = after(single, "predict", "run", "--data", "long.jsonl", "--to", "out.jsonl")
    world.ok()
    assert (
        "1 of 1 rows are longer than task.length (48 tokens): only the beginnings have"
        in world.output
    )


@pytest.mark.slow
def test_evaluate_repeats_the_evaluation_of_the_run(single):
    """On two processes, while the run was on one."""
    last = metrics(single, "eval/")[-1]
    world = after(single, "evaluate", "run", "--json", ranks=2, config="ddp")
    world.ok()
    text = world.output[world.output.index("{") : world.output.rindex("}") + 1]
    found = json.loads(text)
    for name in RewardSums().higher_is_better:
        assert found[f"eval/{name}"] == pytest.approx(last[f"eval/{name}"], abs=1e-6)


@pytest.mark.parametrize("pad", [pytest.param("<|pad|>", marks=pytest.mark.slow), "<|im_end|>"])
def test_padding_and_the_end_token_do_not_change_rewards(tmp_path, pad):
    """Texts end with the end token, which may also be the padding token."""
    some = rows(40, texts=True)
    data = write(tmp_path / "pairs.jsonl", some)
    task = Reward(data, model=str(a_llama(tmp_path / "model", pad=pad)), length=64, held_out=0.2)
    assert ("is also the end token" in " ".join(task.notes)) == (pad == "<|im_end|>")
    model = task.model().eval()
    assert any("score" in note and "re-initialized" in note for note in task.notes)
    samples = task.samples_of(data, labelled=False)
    batch = task.collate([samples[index] for index in range(len(samples))])
    assert (batch["input"] == task.padding).any()
    with torch.no_grad():
        _, outputs = task.loss(model, batch)
    model.save_pretrained(tmp_path / "saved")
    task.tokenizer.save_pretrained(tmp_path / "saved")
    for side in ("chosen", "rejected"):
        texts = [said(row, side, task.tokenizer) for row in some]
        rewards = outputs[f"{side}_reward"].tolist()
        assert rewards == pytest.approx(alone(tmp_path / "saved", texts), abs=1e-6)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_adapters_and_the_head_are_trained_and_load_in_peft(tmp_path, dtype):
    from peft import AutoPeftModelForSequenceClassification

    base = a_llama(tmp_path / "base", num_hidden_layers=1)
    if dtype == "bfloat16":
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        model.save_pretrained(base)
    the_data(tmp_path)
    words = ["reward.yaml", "--track", "none", "--task.model", "base", "--task.lora.rank", "4"]
    words += ["--task.layers", "4", "--task.heads", "4", "--task.width", "128"]
    words += ["--duration", "4", "--eval.every", "0", "--save.every", "0"]
    run(train, [*words, "--run.dir", "run"], folder=tmp_path).ok()
    saved = load_file(tmp_path / "run" / "final" / "adapter_model.safetensors")
    assert saved["base_model.model.score.weight"].dtype is torch.float32
    some = rows(5, seed=3)
    write(tmp_path / "new.jsonl", some)
    (found,) = predicted(tmp_path, "new.jsonl")

    # peft loads adapters and head, with the base model's dtype.
    final = tmp_path / "run" / "final"
    tokenizer = transformers.AutoTokenizer.from_pretrained(final)
    theirs = AutoPeftModelForSequenceClassification.from_pretrained(
        final, num_labels=1, dtype=getattr(torch, dtype)
    )
    theirs.config.pad_token_id = tokenizer.pad_token_id
    for row, ours in zip(some, found, strict=True):
        tokens = tokenizer(said(row, "chosen", tokenizer), return_tensors="pt")["input_ids"]
        with torch.no_grad():
            reward = theirs.eval()(tokens).logits.item()
        assert reward == pytest.approx(
            ours["chosen_reward"], abs=1e-5 if dtype == "float32" else 0.05
        )

    # Training continues from the adapters with their head.
    if dtype == "float32":
        task = Reward(str(tmp_path / "data"), model=str(final), length=48)
        head = task.model().get_submodule("score")
        assert torch.equal(head.weight, saved["base_model.model.score.weight"])
        assert head.weight.requires_grad


WRONG = {
    "--task.centering -1": "task.centering -1.0 must be a number of at least 0",
    "--task.margin gap": "cannot find 'gap'",
    "--task.margin prompt": "the margin is [{'role'",
    "--task.overlong split": "task.overlong",
    "--task.pack packed": "unknown key 'task.pack'",
    "--task.fused_loss true": "unknown key 'task.fused_loss'",
}


@pytest.fixture(scope="module")
def messages(tmp_path_factory) -> dict[str, tuple[Path, Any, str]]:
    """Return the folder of the run, exit code and output of each wrong input.

    One process runs all of them on the same data.
    """
    top = the_data(tmp_path_factory.mktemp("wrong"))
    runs = [top / f"run-{number}" for number in range(len(WRONG))]
    several = []
    for words, folder in zip(WRONG, runs, strict=True):
        several.append([*SMALL, "--run.dir", str(folder), *words.split()])
    (found,) = run(each_message, several, folder=top).ok()
    by_words = {}
    for words, folder, (code, output) in zip(WRONG, runs, found, strict=True):
        by_words[words] = (folder, code, output)
    return by_words


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_input_is_one_message(messages, words):
    folder, code, output = messages[words]
    assert code == 2 and WRONG[words] in " ".join(output.split()), output
    assert not folder.exists()


def test_an_encoder_is_rejected(tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(a_llama(tmp_path / "model"))
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "model")
    task = Reward(str(the_data(tmp_path) / "data"), model=str(tmp_path / "model"), length=48)
    with pytest.raises(ValueError, match="has no linear layer score"):
        task.model()


class MeanPooled(torch.nn.Module):
    """A model whose reward depends on all tokens of a row, with the padding."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        hidden = self.model.model(input_ids).last_hidden_state.mean(1)
        return transformers.modeling_outputs.SequenceClassifierOutputWithPast(
            logits=self.model.score(hidden)
        )


def test_a_model_whose_rewards_depend_on_padding_is_rejected(tmp_path):
    task = a_task(tmp_path)
    model = task.bare_model()
    task._check_causal(model)
    with pytest.raises(ValueError, match="padding after a text changes its reward"):
        task._check_causal(MeanPooled(model))
