"""Masked language modelling: masks, packing, models of transformers, and wrong inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from tokenizers import Tokenizer, models

from lessons import lessons
from oneloop.data.seeded_samples import SeededSamples
from oneloop.evaluation import evaluate
from oneloop.tasks.language.attention import check_apart
from oneloop.tasks.language.masked_tokens import MaskedTokens, Masks
from oneloop.tasks.language.sequences import IGNORE, Sample
from oneloop.tasks.language.tokens import MASK_SPECIAL, learn_bpe, mask_tokenizer
from oneloop.tasks.masked_lm import MaskedLM
from own_files import rows
from small_models import bert, llama
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.tasks.language.masked_tokens",
    "oneloop.tasks.language.raw_texts",
    "oneloop.tasks.language.sequences",
    "oneloop.tasks.language.tokens",
    "oneloop.tasks.masked_lm",
    "oneloop.tasks.model_limits",
)

TEXTS = [
    message["content"]
    for chat in lessons("train")[:150]
    for message in chat
]  # fmt: skip
TINY: dict[str, Any] = {"layers": 2, "width": 32, "vocab": 400, "block": 48}
SIZES: dict[str, Any] = {
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
DISTILBERT: dict[str, Any] = {
    "vocab_size": 400,
    "dim": 32,
    "hidden_dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": 64,
}
MODERNBERT = {**SIZES, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
DEBERTA = {**SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
BART: dict[str, Any] = {
    "vocab_size": 400,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", SIZES),
    "roberta": ("RobertaConfig", {**SIZES, "max_position_embeddings": 65}),
    "distilbert": ("DistilBertConfig", DISTILBERT),
    "electra": ("ElectraConfig", {**SIZES, "embedding_size": 16}),
    "modernbert": ("ModernBertConfig", {**MODERNBERT, "local_attention": 256}),
    "windows": ("ModernBertConfig", {**MODERNBERT, "local_attention": 16}),
    "deberta": ("DebertaV2Config", DEBERTA),
    "decoder": ("BertConfig", {**SIZES, "is_decoder": True}),
    "narrow": ("BertConfig", {**SIZES, "vocab_size": 300}),
    "bart": ("BartConfig", BART),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return mask_tokenizer(learn_bpe(TEXTS, 400, MASK_SPECIAL), 64)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("data")
    for name, texts in (("train", TEXTS[:240]), ("validation", TEXTS[240:280])):
        lines = [json.dumps({"text": text}) for text in texts]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return str(folder)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def saved(tmp_path, tokenizer):
    """Return a function that saves a small model with its tokenizer, and returns its folder."""

    def save(name: str) -> str:
        kind, sizes = MODELS[name]
        config = getattr(transformers, kind)(**sizes)
        torch.manual_seed(1)
        transformers.AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return save


# Masks.


def drawn(tokens: MaskedTokens, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the stored tokens of samples without the special ones around them, and the samples."""
    torch.manual_seed(0)
    spans = [tokens.encode(text) for text in texts]
    samples = [tokens.draw(span)[:, 1:-1] for span in spans]
    stored = torch.cat([torch.from_numpy(span[1:]) for span in spans])
    return stored, torch.cat(samples, dim=1)


def is_near(count: torch.Tensor, trials: int, share: float) -> bool:
    """Return whether a count is within five standard deviations of a binomial distribution."""
    deviation = (trials * share * (1 - share)) ** 0.5
    return abs(int(count) - trials * share) <= 5 * deviation + 1e-9


@pytest.mark.parametrize(
    ("share", "kept", "replaced"), [(0.15, 0.1, 0.1), (0.4, 0, 0), (1, 0.3, 0.7), (0.3, 1, 0)]
)
def test_masks_have_their_shares(tokenizer, share, kept, replaced):
    tokens = MaskedTokens(tokenizer, Masks(share, kept, replaced, False), "null")
    # One long text: in a short one, at least one token is always predicted.
    span = tokens.encode(" ".join(TEXTS))
    torch.manual_seed(0)
    inputs, targets = tokens.draw(span)[:, 1:-1]
    ids = torch.from_numpy(span[1:]).long() >> 1
    chosen = targets != IGNORE
    number = int(chosen.sum())
    assert is_near(chosen.sum(), len(ids), share)
    assert torch.equal(targets[chosen], ids[chosen]) and torch.equal(inputs[~chosen], ids[~chosen])
    masked = chosen & (inputs == tokens.mask)
    assert is_near(masked.sum(), number, 1 - kept - replaced)
    # A random token may be the right one.
    random_and_same = replaced / len(tokens.ordinary)
    assert is_near((chosen & (inputs == ids)).sum(), number, kept + random_and_same)
    others = inputs[chosen & ~masked & (inputs != ids)]
    assert not set(others.tolist()) & {*tokenizer.all_special_ids}


def test_special_tokens_are_never_predicted_and_one_token_always_is(tokenizer):
    tokens = MaskedTokens(tokenizer, Masks(0.01, 0.1, 0.1, False), "null")
    torch.manual_seed(0)
    found = torch.zeros(6)
    span = tokens.encode("a[SEP]b[MASK]cd")
    assert len(span) == 1 + 6 or len(span) == 1 + 5
    for _ in range(600):
        inputs, targets = tokens.draw(span)
        chosen = targets != IGNORE
        assert 1 <= chosen.sum() <= 2
        assert inputs[0] == tokenizer.cls_token_id and inputs[-1] == tokenizer.sep_token_id
        assert not set(targets[chosen].tolist()) & {*tokenizer.all_special_ids}
        found[: len(span) - 1] += chosen[1:-1]
    # Each of the others is as likely.
    counts = found[: len(span) - 1][[0, 2, 4]]
    assert counts.min() > 100 and found[1] == found[3] == 0


def test_a_word_is_masked_as_a_whole(tokenizer, tmp_path):
    of_bert = transformers.AutoTokenizer.from_pretrained(bert(tmp_path / "bert"))
    for one, texts in ((tokenizer, TEXTS), (of_bert, [row["text"] for row in rows(120)] * 3)):
        tokens = MaskedTokens(one, Masks(0.3, 0.1, 0.1, True), "null")
        stored, (_, targets) = drawn(tokens, texts)
        chosen = targets != IGNORE
        continues = (torch.where(stored < 0, ~stored, stored) & 1).bool()
        assert continues.any()
        for position in continues.nonzero()[:, 0].tolist():
            assert chosen[position] == chosen[position - 1]
        special = stored < 0
        assert not chosen[special].any()

    # The share is that of the words.
    tokens = MaskedTokens(tokenizer, Masks(0.3, 0.1, 0.1, True), "null")
    stored, (_, targets) = drawn(tokens, [" ".join(TEXTS)])
    words = (stored >= 0) & (stored % 2 == 0)
    assert is_near((targets[words] != IGNORE).sum(), int(words.sum()), 0.3)


def test_masks_depend_on_seed_epoch_and_index_only(data):
    task = MaskedLM(data, **TINY)
    samples = SeededSamples(task.train_set(), seed=0)
    first = samples[0, 3][1].documents[0]
    torch.rand(7)
    assert torch.equal(samples[0, 3][1].documents[0], first)
    later = samples[1, 3][1].documents[0]
    assert not torch.equal(later, first)
    assert not torch.equal(SeededSamples(task.train_set(), seed=1)[0, 3][1].documents[0], first)


def test_all_evaluations_have_the_same_masks(data):
    task = MaskedLM(data, **TINY)
    torch.manual_seed(0)
    model = task.model()
    results = []
    for seed in range(2):
        torch.manual_seed(seed)
        results.append(
            evaluate(
                task, model, task.eval_sets()["validation"], accelerator=Accelerator(), micro=8
            )
        )
    assert results[0] == results[1]


# Packing.


def losses_of(task: MaskedLM, model: Any, samples: list[Any]) -> torch.Tensor:
    """Return the summed loss; the gradients of the model are those of it."""
    model.zero_grad()
    loss, _ = task.loss(model, task.collate(samples))
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "electra", "modernbert"])
def test_packed_gradients_are_the_padded_ones(data, saved, name):
    task = MaskedLM(data, model=saved(name), block=64, pack="packed")
    model = task.model().eval()
    torch.manual_seed(0)
    samples = map(task.train_set().__getitem__, range(9))
    sample = next(sample for sample in samples if len(sample.documents) > 1)
    row = [*sample.documents]
    packed = losses_of(task, model, [sample])
    gradients = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    padded = losses_of(task, model, [Sample([document]) for document in row])
    assert torch.allclose(packed, padded, rtol=1e-6)
    others = [one.grad for one in model.parameters() if one.grad is not None]
    for one, other in zip(gradients, others, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)

    # As transformers computes them for each document alone.
    alone = 0.0
    for document in row:
        logits = model(input_ids=document[:1]).logits[0]
        loss = torch.nn.functional.cross_entropy(logits, document[1], reduction="sum")
        alone += float(loss.detach())
    assert float(packed) == pytest.approx(alone, rel=1e-5)

    # Other tokens in the first document change nothing in the others.
    _, before = task.loss(model, task.collate([sample]))
    row[0] = row[0].clone()
    row[0][0, 1:-1] = row[0][0, 1:-1].flip(0)
    _, after = task.loss(model, task.collate([sample._replace(documents=row)]))
    first = row[0].shape[1]
    assert torch.equal(before["loss"][:, first:], after["loss"][:, first:])
    assert not torch.equal(before["loss"][:, :first], after["loss"][:, :first])


def test_documents_are_split_packed_and_counted(tmp_path):
    texts = ["a b " * 60, "", "c d e", "f"]
    lines = "\n".join(json.dumps({"text": text}) for text in texts)
    (tmp_path / "train.jsonl").write_text(lines)
    (tmp_path / "validation.jsonl").write_text(lines)
    for pack in ("padded", "packed", "concat"):
        task = MaskedLM(str(tmp_path), vocab=300, block=16, pack=pack, share=1, kept=1, replaced=0)
        samples = [task.train_set()[number] for number in range(len(task.train_set()))]
        rows = [sample.documents for sample in samples]
        assert max(sum(one.shape[1] for one in row) for row in rows) <= 16
        written = "".join(task.decode(one[0, 1:-1].tolist()) for row in rows for one in row)
        assert sorted(written.replace("[SEP]", "")) == sorted("".join(texts))
        batch = task.collate(samples)
        assert (batch["document"] < 0).sum() == (batch["input"] == 0).sum()
        assert task.weight(batch) == sum(
            int((one[1] != IGNORE).sum()) for row in rows for one in row
        )
        lines_of_log = [line for line in task.notes if "dropped" in line]
        assert len(lines_of_log) == (0 if pack == "concat" else 2)


# Models of transformers.


def test_windows_and_own_attention_train_padded_with_a_padding_mask(data, saved):
    for name in ("windows", "deberta"):
        folder = saved(name)
        with pytest.raises(ValueError, match="task.pack packed: .*; use task.pack padded"):
            MaskedLM(data, model=folder, block=64, pack="packed").model()
        task = MaskedLM(data, model=folder, block=64, pack="padded")
        model = task.model().eval()
        samples = [task.train_set()[number] for number in range(4)]
        loss, outputs = task.loss(model, task.collate(samples))
        alone = sum(float(task.loss(model, task.collate([one]))[0].detach()) for one in samples)
        assert float(loss) == pytest.approx(alone, rel=1e-5)
        shown = task.show(samples[0], {"likeliest": task.collate(samples)["input"][0]})
        assert "[MASK]" in shown["text"] or shown["target"]


def test_a_model_that_leaks_is_found(data, saved):
    model = MaskedLM(data, model=saved("bert"), block=64).model()
    tokens = torch.arange(10, 74)
    check_apart(model, tokens)
    attention = model.bert.encoder.layer[0].attention.self
    inner = attention.forward
    attention.forward = lambda states, *_, **named: inner(states)
    with pytest.raises(ValueError, match="carry state from one document to the next"):
        check_apart(model, tokens)


def test_the_tokenizer_comes_with_the_weights(data, tmp_path):
    task = MaskedLM(data, **TINY)
    torch.manual_seed(0)
    model = task.model()
    task.save(model, tmp_path)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.mask_token == "[MASK]" and loaded.model_max_length == TINY["block"]
    encoded = loaded("one two", "three")
    assert loaded.decode(encoded["input_ids"]) == "[CLS]one two[SEP]three[SEP]"
    again = MaskedLM(data, model=str(tmp_path), block=TINY["block"])
    assert np.array_equal(again.train_set().tokens, task.train_set().tokens)


# Wrong inputs.


def words_in(folder: Path, kind: Any) -> str:
    """Save a small BERT with a tokenizer of one word, or without a mask token."""
    bert(folder)
    vocabulary = {word: number for number, word in enumerate([*MASK_SPECIAL, "one", "two"])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    names = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    if kind != "no mask":
        names["mask_token"] = "[MASK]"
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 0}, "task.share 0 must be above 0 and at most 1"),
        ({"share": 1.5}, "task.share 1.5 must be above 0"),
        ({"share": float("nan")}, "task.share nan must be above 0"),
        ({"kept": 0.6, "replaced": 0.5}, "task.kept 0.6 and task.replaced 0.5 must be shares"),
        ({"kept": -0.1}, "task.kept -0.1"),
        ({"block": 2}, "task.block 2 has no room for text next to the 2 special tokens; raise it"),
        ({"vocab": 260}, "task.vocab 260 is too small: a byte-level BPE needs at least 261"),
        ({"width": 30}, "task.width 30 is not divisible by task.heads 4"),
        ({"model": "nothing"}, "task.model 'nothing' is not a folder saved by transformers"),
    ],
)
def test_wrong_arguments_are_rejected(data, options, message):
    with pytest.raises(ValueError, match=message):
        MaskedLM(data, **{**TINY, **options}).model()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bart", {}, "is a bart model; masked_lm needs an encoder with a head for masked tokens"),
        ("decoder", {}, "does not attend to later tokens"),
        ("narrow", {}, "its tokenizer has 400 entries, and the model 300"),
        ("bert", {"block": 65}, "task.block 65 exceeds the 64 positions of"),
        ("roberta", {"block": 65}, "task.block 65 exceeds the 64 positions of"),
    ],
)
def test_models_that_do_not_fit_are_rejected(data, saved, name, options, message):
    with pytest.raises(ValueError, match=message):
        MaskedLM(data, model=saved(name), **options).model()


def test_tokenizers_that_do_not_fit_are_rejected(data, tmp_path):
    with pytest.raises(ValueError, match="its tokenizer has no mask token"):
        MaskedLM(data, model=words_in(tmp_path / "a", "no mask"), block=16)
    with pytest.raises(ValueError, match=r"task.whole_words: the tokenizer of .* does not divide"):
        MaskedLM(data, model=words_in(tmp_path / "b", "one word"), block=16, whole_words=True)
    llama(tmp_path / "llama")
    with pytest.raises(ValueError, match="is a llama model; masked_lm needs an encoder"):
        MaskedLM(data, model=str(tmp_path / "llama"))


def test_texts_without_tokens_are_rejected(tmp_path):
    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": ""}\n{"text": ""}')
    with pytest.raises(ValueError, match="no text of the train split has a token to predict"):
        MaskedLM(str(tmp_path), vocab=300)


# Runs.


WORDS = ["masked.yaml", "--optimizer.lr", "2e-3", "--log.every", "1", "--track", "none"]
WORDS += ["--batch.size", "16", "--machine.workers", "0"]
WORDS += ["--schedule.name", "constant", "--schedule.warmup", "0"]


def written(folder: Path, data: str, **options: Any) -> Path:
    """Write a recipe of a tiny BERT."""
    task = {"name": "masked_lm", "data": data, **TINY, **options}
    (folder / "masked.yaml").write_text(json.dumps({"task": task}))
    return folder


def losses(folder: Path, name: str = "train/loss") -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


@pytest.mark.parametrize(
    "words", [["--task.share", "0"], ["--task.kept", "0.9", "--task.replaced", "0.2"]]
)
def test_a_wrong_input_ends_with_code_2_and_writes_nothing(data, tmp_path, words):
    written(tmp_path, data)
    ended = run(train, [*WORDS, *words, "--run.dir", "run"], folder=tmp_path)
    assert ended.codes == [2] and f"{words[0]} {words[1]}"[2:] in ended.output
    assert not (tmp_path / "run").exists()


def test_fsdp2_trains_an_output_layer_that_shares_the_weight_of_the_embedding(data, tmp_path):
    """A class that FSDP2 would gather alone holds the embedding: it stays with the output layer."""
    written(tmp_path, data)
    words = [*WORDS, "--duration", "2", "--eval.every", "0", "--run.dir", "run"]
    run(train, words, ranks=2, config="fsdp2", folder=tmp_path).ok()


@pytest.mark.slow
@pytest.mark.parametrize("pack", ["concat", "packed", "padded"])
def test_every_layout_trains_the_same(data, tmp_path, pack):
    written(tmp_path, data, pack=pack)
    ways = {
        "single": ("single", 1, []),
        "accumulated": ("single", 1, ["--batch.micro", "4"]),
        "ddp": ("ddp", 2, []),
        "fsdp2": ("fsdp2", 2, ["--batch.micro", "4"]),
    }
    found = {}
    for way, (config, ranks, words) in ways.items():
        words = [*WORDS, "--duration", "20", "--eval.every", "0", *words, "--run.dir", way]
        run(train, words, ranks=ranks, config=config, folder=tmp_path).ok()
        found[way] = losses(tmp_path / way)
    for way, values in found.items():
        assert values == pytest.approx(found["single"], rel=1e-6), way
    assert found["single"][-1] < found["single"][0]


@pytest.mark.slow
@pytest.mark.parametrize("pack", ["packed", "padded"])
def test_with_a_grain_every_layout_trains_the_same_bits(data, tmp_path, pack):
    written(tmp_path, data, pack=pack, dropout=0.1, whole_words=True)
    found = []
    for ranks, config in ((1, "single"), (2, "ddp"), (2, "fsdp2")):
        words = [*WORDS, "--batch.grain", "4", "--duration", "10", "--run.dir", f"{config}"]
        run(train, words, ranks=ranks, config=config, folder=tmp_path).ok()
        folder = tmp_path / config
        weights = (folder / "final" / "model.safetensors").read_bytes()
        found.append((losses(folder), losses(folder, "eval/loss"), weights))
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_a_resumed_run_has_the_same_masks(data, tmp_path):
    written(tmp_path, data, dropout=0.1)
    words = [*WORDS, "--duration", "12", "--eval.every", "3"]
    run(train, [*words, "--run.dir", "whole"], folder=tmp_path).ok()
    stopped = run(train, [*words, "--stop.after", "0.01s", "--run.dir", "two"], folder=tmp_path)
    assert stopped.codes == [75] and len(losses(tmp_path / "two")) < 12
    run(train, [*words, "--run.dir", "two"], folder=tmp_path).ok()
    for name in ("train/loss", "eval/loss"):
        assert losses(tmp_path / "two", name)[-4:] == losses(tmp_path / "whole", name)[-4:]


@pytest.mark.slow
def test_the_losses_are_those_of_trainer(data, tmp_path, saved, monkeypatch):
    from oneloop.data.order import order_of

    steps, batch = 40, 16
    folder = saved("bert")
    words = ["--task.model", folder, "--duration", str(steps), "--eval.every", "0"]
    words += ["--optimizer.weight_decay", "0", "--optimizer.betas", "[0.9,0.999]"]
    config = json.loads((Path(folder) / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (Path(folder) / "config.json").write_text(json.dumps(config))
    task = {"name": "masked_lm", "data": data, "block": 48, "pack": "padded"}
    (tmp_path / "masked.yaml").write_text(json.dumps({"task": task}))
    run(train, [*WORDS, *words, "--run.dir", "ours"], folder=tmp_path).ok()
    ours = losses(tmp_path / "ours")

    # The same samples, with the same masks.
    made = MaskedLM(data, block=48, pack="padded", model=folder)
    train_set = made.train_set()
    epochs, ids = order_of(train_set, seed=0, batch=batch)[0 : steps * batch]
    seeded = SeededSamples(train_set, seed=0)
    places = zip(epochs.tolist(), ids.tolist(), strict=True)
    samples = [seeded[place][1] for place in places]

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        collated = made.collate([samples[row["number"]] for row in rows])
        return {
            "input_ids": collated["input"],
            "attention_mask": (collated["document"] >= 0).long(),
            "labels": collated["target"],
        }

    theirs = []

    class Noting(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            theirs.append(float(loss[0] if isinstance(loss, tuple) else loss))
            return loss

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    monkeypatch.chdir(tmp_path)
    trainer = Noting(
        model=transformers.AutoModelForMaskedLM.from_pretrained(folder),
        args=transformers.TrainingArguments(
            str(tmp_path / "theirs"),
            per_device_train_batch_size=batch,
            max_steps=steps,
            learning_rate=2e-3,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        train_dataset=[{"number": number} for number in range(len(samples))],
        data_collator=collate,
    )
    trainer.train()
    assert len(ours) == len(theirs) == steps and ours[-1] < 0.9 * ours[0]
    worst = max(abs(one - other) for one, other in zip(ours, theirs, strict=True))
    print(f"largest difference {worst:.1e}, losses {ours[0]:.4f} to {ours[-1]:.4f}")
    assert worst < 1e-5


@pytest.mark.slow
def test_final_is_a_model_of_transformers_and_trains_a_classifier(data, tmp_path):
    written(tmp_path, data)
    run(train, [*WORDS, "--duration", "6", "--run.dir", "run"], folder=tmp_path).ok()
    final = tmp_path / "run" / "final"
    tokenizer = transformers.AutoTokenizer.from_pretrained(final)
    model = transformers.AutoModelForMaskedLM.from_pretrained(final)
    encoded = tokenizer(f"one {tokenizer.mask_token} three", return_tensors="pt")
    assert model(**encoded).logits.shape[-1] == len(tokenizer)

    lines = [json.dumps({"text": text, "label": str(len(text) % 2)}) for text in TEXTS[:120]]
    (tmp_path / "classes.jsonl").write_text("\n".join(lines))
    task = {"name": "text_classification", "data": "classes.jsonl", "model": str(final)}
    (tmp_path / "masked.yaml").write_text(json.dumps({"task": task}))
    ended = run(train, [*WORDS, "--duration", "4", "--run.dir", "after"], folder=tmp_path)
    ended.ok()
    assert "left out of the weights: cls" in ended.output
    assert (tmp_path / "after" / "final" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_mixture_with_rows_that_cannot_be_read_trains(data, tmp_path):
    (tmp_path / "other").mkdir()
    lines = [json.dumps({"body": text}) for text in TEXTS[:60]]
    (tmp_path / "other" / "rows.jsonl").write_text("\n".join([*lines, '{"body": ']))
    mixture = [
        {"data": data, "weight": 0.7, "name": "one"},
        {"data": str(tmp_path / "other"), "weight": 0.3, "column": "body", "name": "two"},
    ]
    for pack in ("concat", "packed", "padded"):
        written(tmp_path, mixture, pack=pack, held_out=0.1, unreadable="skip")  # type: ignore[arg-type]
        run(train, [*WORDS, "--duration", "3", "--run.dir", pack], folder=tmp_path).ok()
        assert losses(tmp_path / pack, "eval/loss/two")
