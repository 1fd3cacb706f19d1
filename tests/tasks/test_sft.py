"""Supervised fine-tuning from the command line: the same answers on every layout, and how they are
displayed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lessons import lessons
from oneloop.tasks.sft import SFT
from oneloop.tools.report.page import report
from silent_cases import unfinished
from worlds import apply, run, train

pytestmark = pytest.mark.covers(
    "oneloop.recipe.parse",
    "oneloop.tools.report.examples",
    "oneloop.tasks.language.chat",
    "oneloop.tasks.language.completions",
    "oneloop.tasks.language.generation",
    "oneloop.tasks.language.sequences",
    "oneloop.tasks.packaged_rows",
    "oneloop.tasks.language.tokens",
    "oneloop.tasks.sft",
    "oneloop.tools.report.example_pages",
    "oneloop.tools.report.page",
)

SMALL = [
    "sft",
    "--task.layers",
    "1",
    "--task.width",
    "32",
    "--optimizer.name",
    "sgd",
    "--optimizer.lr",
    "0.1",
]
SMALL += ["--eval.samples", "4", "--track", "none", "--log.every", "1", "--run.dir", "run"]


def written(folder: Path) -> list[dict]:
    found = json.loads((folder / "run" / "examples.json").read_text())
    return [one for one in found["samples"] if "continuation" in one]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    world = run(
        train, [*SMALL, "--duration", "12", "--eval.every", "4", "--save.every", "6"], folder=folder
    )
    world.ok()
    (folder / "output").write_text(world.output)
    return folder


def test_the_start_shows_what_is_trained(alone):
    said = (alone / "output").read_text()
    assert "documents packed into" in said and "none attends to another" in said
    assert "the template's {% generation %} tags mark the assistant's tokens" in said
    [line] = [line for line in said.splitlines() if "a sample, with the trained text in «»" in line]
    first = [one["content"] for one in lessons("train")[0] if one["role"] == "assistant"]
    assert [piece.partition("»")[0] for piece in line.split("«")[2:]] == [
        f"{said}<|im_end|>" for said in first
    ]


def test_answers_are_kept_as_training_continues(alone):
    samples = written(alone)
    assert len(samples) == 4
    for one in samples:
        assert one["prompt"].endswith("<|im_start|>assistant\n")
        assert [text for text, loss in one["tokens"] if loss is not None]
    page = report([alone / "run"])
    assert page.count("Trained tokens of a sample") == 1 and '<span class="soft">' in page


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp", "fsdp2"])
def test_the_same_weights_and_answers_on_two_processes(alone, tmp_path, config):
    words = [
        *SMALL,
        "--duration",
        "12",
        "--eval.every",
        "4",
        "--save.every",
        "6",
        "--batch.micro",
        "2",
    ]
    run(train, words, ranks=2, config=config, folder=tmp_path).ok()
    final = [
        load_file(folder / "run" / "final" / "model.safetensors") for folder in (alone, tmp_path)
    ]
    for name, tensor in final[0].items():
        assert (tensor - final[1][name]).abs().max() < 1e-5
    assert [one["continuation"] for one in written(alone)] == [
        one["continuation"] for one in written(tmp_path)
    ]
    unfinished(tmp_path / "run", 6)
    run(train, words, ranks=2, config=config, folder=tmp_path).ok()
    again = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert all((tensor == final[1][name]).all() for name, tensor in again.items())


def test_a_mixture_of_conversations_and_prompts(tmp_path):
    chats = [{"messages": one} for one in lessons("train")[:60]]
    texts = [
        {"question": f"{number} and one is", "completion": f" {number + 1}"} for number in range(60)
    ]
    for name, rows in {"chats": chats, "texts": texts}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    prompts = {"data": "texts.jsonl", "weight": 1, "prompt": "question"}
    data = json.dumps([{"data": "chats.jsonl", "weight": 3}, prompts])
    words = [
        *SMALL,
        "--task.data",
        data,
        "--task.held_out",
        "0.2",
        "--task.pack",
        "padded",
        "--duration",
        "4",
    ]
    run(train, words, folder=tmp_path).ok()
    ended = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {
        "eval/loss/chats",
        "eval/loss/texts",
        "eval/perplexity",
        "eval/accuracy",
        "eval/exact",
    } <= ended.keys()
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert all(0 <= line["train/padding"] < 0.8 for line in lines if "train/loss" in line)


def questions(folder: Path) -> list[dict]:
    """Return questions: with an answer, without one, with a prompt that is too long, and with
    earlier turns."""
    long = [{"role": "user", "content": "so " * 200 + "What comes after monday?"}]
    told = [
        {"role": "user", "content": "What is 3 plus 4?"},
        {"role": "assistant", "content": "seven"},
    ]
    made = [told, told[:1], long, [*told, {"role": "user", "content": "And 1 plus 1?"}], told]
    rows = [{"messages": one} for one in made]
    (folder / "asked.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp", "fsdp2"])
def test_every_question_is_answered(alone, tmp_path, config):
    import transformers

    rows = questions(tmp_path)
    made = []
    for ranks, kind in ((1, "single"), (3 if config == "ddp" else 2, config)):
        words = ["predict", str(alone / "run"), "--data", "asked.jsonl", "--to", f"{kind}.jsonl"]
        run(apply, words, ranks=ranks, config=kind, folder=tmp_path).ok()
        made.append(
            [json.loads(line) for line in (tmp_path / f"{kind}.jsonl").read_text().splitlines()]
        )
    said, other = made
    assert [one["row"] for one in said] == list(range(5)) == [one["row"] for one in other]
    assert [one["answer"] for one in said] == [one["answer"] for one in other]
    assert [one["loss"] is None for one in said] == [False, True, True, True, False] and said[0][
        "tokens"
    ] > 1
    assert said[0]["answer"] == said[1]["answer"] == said[4]["answer"]

    final = alone / "run" / "final"
    model = transformers.AutoModelForCausalLM.from_pretrained(final).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(final)
    for one, row in list(zip(said, rows, strict=True))[1:4]:
        given = tokenizer.apply_chat_template(
            row["messages"], add_generation_prompt=True, return_tensors="pt"
        )
        tokens = given["input_ids"][:, -64:]  # half of the positions are reserved for the answer
        whole = model.generate(tokens, max_new_tokens=64, do_sample=False, pad_token_id=1)
        assert one["answer"] == tokenizer.decode(
            whole[0, tokens.shape[1] :], skip_special_tokens=True
        )


def a_model(folder: Path, *, end: str = "<|im_end|>") -> Path:
    """Save a small new Llama, whose tokenizer ends texts with ``end`` and turns with <|im_end|>."""
    import torch
    import transformers

    from oneloop.tasks.language.tokens import chat_tokenizer

    tokenizer = chat_tokenizer(["what is it? yes or no, a b c"] * 3, 300)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]}
    )
    tokenizer.eos_token = end
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=128, **sizes
    )
    config.eos_token_id = tokenizer.eos_token_id
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.temperature = 0.6
    model.generation_config.do_sample = True
    model.save_pretrained(folder)
    return folder


def lines(file: Path, rows: list[dict]) -> str:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(file)


PAIRS = [
    {"prompt": f"what is {number}? ", "completion": "yes " * (1 + number % 3)}
    for number in range(40)
]


def test_another_end_token_is_another_data_set(tmp_path):
    data = lines(tmp_path / "pairs.jsonl", PAIRS)
    made = {}
    for end in ("<|im_end|>", "<|endoftext|>"):
        task = SFT(data, model=str(a_model(tmp_path / "model", end=end)), length=64, pack="padded")
        last = {task.decode([int(task.train_set().document(index)[-1])]) for index in range(5)}
        assert last == {end} and task.ends == [task.tokenizer.eos_token_id]
        made[end] = task.train_set().fingerprint()
    assert made["<|im_end|>"] != made["<|endoftext|>"]
    (tmp_path / "model" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    with pytest.raises(ValueError, match="the tokenizer has no end token"):
        SFT(data, model=str(tmp_path / "model"), length=64)


def test_a_model_that_ends_its_turns_otherwise_stops_in_transformers(tmp_path):
    import transformers

    a_model(tmp_path / "model", end="<|endoftext|>")
    lines(
        tmp_path / "chats.jsonl",
        [{"messages": one} for one in lessons("train")[:40]],
    )
    words = [
        "sft",
        "--task.model",
        "model",
        "--task.data",
        "chats.jsonl",
        "--task.held_out",
        "0.2",
        "--duration",
        "2",
    ]
    world = run(
        train, [*words, "--batch.size", "2", "--track", "none", "--run.dir", "run"], folder=tmp_path
    )
    world.ok()
    assert (
        "answers end with '<|im_end|>', and the tokenizer's end token is '<|endoftext|>'"
        in world.output
    )
    assert "adamw, learning rate 0.003 at most; schedule cosine" in world.output
    assert "evaluation data: val" in world.output
    final = tmp_path / "run" / "final"
    found = transformers.GenerationConfig.from_pretrained(final)
    tokenizer = transformers.AutoTokenizer.from_pretrained(final)
    assert found.eos_token_id == [
        tokenizer.eos_token_id,
        tokenizer.convert_tokens_to_ids("<|im_end|>"),
    ]
    assert found.temperature == 0.6 and found.do_sample


def test_the_ends_of_answers_are_those_of_whole_texts(tmp_path):
    model = str(a_model(tmp_path / "model", end="<|endoftext|>"))
    data = lines(
        tmp_path / "a.jsonl",
        [{"prompt": f"{one}?", "completion": "yes " * 60} for one in range(20)],
    )
    task = SFT(data, model=model, length=16)  # cuts off all ends
    assert task.ends == [task.tokenizer.eos_token_id]
    said = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "<|im_start|>" + "yes " * 60},
    ]
    data = lines(
        tmp_path / "b.jsonl",
        [{"messages": [{**said[0], "content": f"{n}?"}, said[1]]} for n in range(20)],
    )
    task = SFT(data, model=model, length=32)
    assert set(task.ends) == {
        task.tokenizer.eos_token_id,
        task.tokenizer.convert_tokens_to_ids("<|im_end|>"),
    }


def test_questions_that_do_not_fit_keep_their_end_and_have_no_metrics(tmp_path):
    lines(tmp_path / "pairs.jsonl", PAIRS)
    a_model(tmp_path / "model")
    words = [
        "sft",
        "--task.model",
        "model",
        "--task.data",
        "pairs.jsonl",
        "--task.length",
        "32",
        "--duration",
        "2",
    ]
    words += [
        "--task.held_out",
        "0.2",
        "--task.answer",
        "4",
        "--batch.size",
        "2",
        "--track",
        "none",
    ]
    run(train, [*words, "--run.dir", "run"], folder=tmp_path).ok()
    rows = [
        {"prompt": "what is 1? ", "completion": "yes " * 60},
        {"prompt": "so " * 60 + "what is 2? "},
    ]
    rows += [{"prompt": "what is 3? ", "completion": "yes "}]
    lines(tmp_path / "asked.jsonl", [{"completion": None, **row} for row in rows])
    world = run(
        apply, ["predict", "run", "--data", "asked.jsonl", "--to", "said.jsonl"], folder=tmp_path
    )
    world.ok()
    assert "2 of 3 rows are longer than 32 tokens" in world.output
    said = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    assert said[0]["prompt"] == "what is 1?" and said[1]["prompt"].endswith("so what is 2? ")
    assert (
        [one["loss"] is None for one in said]
        == [True, True, False]
        == [one["target"] is None for one in said]
    )
    assert said[2]["target"].strip() == "yes"
    lines(tmp_path / "empty.jsonl", [{"prompt": "what?"}, {"prompt": ""}])
    world = run(
        apply, ["predict", "run", "--data", "empty.jsonl", "--to", "none.jsonl"], folder=tmp_path
    )
    assert world.codes == [2] and "empty.jsonl, row 1: the prompt is empty" in world.output
    assert not list(tmp_path.glob("*none*"))


def test_a_recipe_that_is_a_task_is_reported(tmp_path):
    world = run(train, ["causal_lm", "--task.data", "texts"], folder=tmp_path)
    assert world.codes == [2] and "'causal_lm' is a task, not a recipe" in world.output
