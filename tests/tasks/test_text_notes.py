"""Log lines about texts: what is cut, what a tokenizer does not know, and what it cannot give back.

Generated texts are compared with the text of the row, and not with what its tokens give back.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oneloop.tasks.distil import Distil
from oneloop.tasks.language.token_rows import RowSettings, open_sources
from oneloop.tasks.masked_lm import MaskedLM
from oneloop.tasks.preference import Preference
from oneloop.tasks.rows.cached_arrays import ragged, remark
from oneloop.tasks.seq2seq import Seq2Seq
from oneloop.tasks.sft import SFT
from oneloop.tasks.text_classification import TextClassification
from oneloop.tasks.text_pairs import TextPairs
from oneloop.tasks.token_classification import TokenClassification

pytestmark = pytest.mark.covers(
    "oneloop.tasks.text_notes",
    "oneloop.tasks.language.kept_texts",
    "oneloop.tasks.text_rows",
    "oneloop.tasks.token_classification",
)

WORDS = ["the", "cat", "sat", "on", "mat", "yes", "no", "say", "a"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|> ' + m['role'] + ' ' + m['content'] + ' <|im_end|> ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
)


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file.parent)


def words_model(folder: Path, config: Any, *, special: list[str], around: str, **roles: str) -> str:
    """Save a configuration, and a tokenizer of lower-case words with an unknown token."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = [*special, *WORDS, *"0123456789", "user", "assistant", "▁"]
    numbers = {word: number for number, word in enumerate(vocabulary)}
    made = Tokenizer(models.WordLevel(numbers, unk_token=roles["unk_token"]))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.WordPiece()
    ends = [(token, numbers[token]) for token in special if token in around]
    if ends:
        made.post_processor = processors.TemplateProcessing(single=around, special_tokens=ends)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, **roles)
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    config.vocab_size = len(vocabulary)
    config.save_pretrained(folder)
    return str(folder)


def t5(folder: Path) -> str:
    from transformers import T5Config

    special = ["<pad>", "</s>", "<unk>"]
    roles = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    config = T5Config(
        d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return words_model(folder, config, special=special, around="$A </s>", **roles)


def bart(folder: Path) -> str:
    from transformers import BartConfig

    special = ["<s>", "<pad>", "</s>", "<unk>"]
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    config = BartConfig(d_model=8, encoder_layers=1, decoder_layers=1)
    return words_model(folder, config, special=special, around="<s> $A </s>", **roles)


def bert(folder: Path) -> str:
    from transformers import BertConfig

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    roles = dict(zip(names, special, strict=True))
    config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    return words_model(folder, config, special=special, around="[CLS] $A [SEP]", **roles)


def llama(folder: Path) -> str:
    from transformers import LlamaConfig

    special = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>"]
    roles = {"eos_token": "<|im_end|>", "pad_token": "<pad>", "unk_token": "<unk>"}
    config = LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    return words_model(folder, config, special=special, around="$A", **roles)


def lines_about(task: Any, split: str = "train") -> list[str]:
    return [line.removeprefix(f"{split}: ") for line in task.notes if line.startswith(f"{split}: ")]


def exact_matches(task: Any, batch: dict[str, Any], texts: list[str]) -> float:
    metrics = task.generated_metrics()
    near_ties = torch.zeros(len(texts))
    task.update_generated(metrics, {**batch, "near_ties": near_ties}, texts)
    return float(metrics.compute()["exact_match"])


def test_generated_texts_are_compared_with_the_targets_of_the_file(tmp_path):
    targets = ["{a}", "Yes", "no", " cat "]
    rows = [{"source": f"say {i % 10}", "target": targets[i % 4]} for i in range(8)]
    data = write(tmp_path / "data/train.jsonl", rows)
    write(tmp_path / "data/validation.jsonl", rows)
    known = {"model": t5(tmp_path / "t5"), "text_metrics": ["exact_match"]}

    # The same lines are logged if the tokens come from the cache.
    for _ in range(2):
        task = Seq2Seq(data, **known)  # type: ignore[arg-type]
        kept, unknown = lines_about(task)
        begin = "warning: 2 of 8 rows have text that is unknown to the tokenizer (first: "
        assert unknown.startswith(begin) and unknown.endswith("row 0: 'say 0 </s> <unk>')")
        begin = "warning: 4 of 8 rows have a target that the tokenizer does not give back (first: "
        assert kept.startswith(begin) and kept.endswith("row 0: '{a}' becomes '')")
    samples = task.eval_sets()["validation"]
    batch = task.collate([samples[index] for index in range(4)])
    assert exact_matches(task, batch, ["{a}", "Yes", "no", "cat"]) == 1
    rows = [[token for token in row if token >= 0] for row in batch["target"].tolist()]
    decoded = [task._answer(row) for row in rows]
    assert decoded == ["", "yes", "no", "cat"]
    assert exact_matches(task, batch, decoded) == 0.5

    # ``predict`` writes the targets of the file; the model is trained on tokens alone.
    outputs = {"loss": torch.zeros(4, 2), "right": torch.zeros(4, 2), "texts": decoded}
    outputs["right"] = outputs["right"].bool()
    assert task.predicted(batch, outputs)["target"] == ["{a}", "Yes", "no", "cat"]
    assert int(batch["target"].max()) < len(task.tokenizer)
    assert task.show(samples[0], {})["target"] == "{a}"


def test_generated_answers_are_compared_with_the_text_of_the_row(tmp_path):
    rows = []
    for number in range(8):
        answer = "Yes" if number % 2 else "no"
        rows.append(
            {"messages": [
                {"role": "user", "content": f"say {number}"},
                {"role": "assistant", "content": answer},
                {"role": "user", "content": "say mat"},
                {"role": "assistant", "content": "MAT"},
            ]}
        )  # fmt: skip
    data = write(tmp_path / "data/train.jsonl", rows)
    write(tmp_path / "data/validation.jsonl", rows)
    model = llama(tmp_path / "llama")
    for pack in ("packed", "padded"):
        task = SFT(data, model=model, length=16, pack=pack, text_metrics=["exact_match"])  # type: ignore[arg-type]
        line = lines_about(task)[0]
        begin = "warning: 4 of 8 rows have a target that the tokenizer does not give back (first: "
        assert line.startswith(begin) and line.endswith("row 1: 'Yes' becomes 'yes')")
    samples = task.eval_sets()["validation"]
    batch = task.collate([samples[index] for index in range(4)])
    assert batch["text"] == ["", "Yes", "", "Yes"]
    assert exact_matches(task, batch, ["no", "Yes", "no", "Yes"]) == 1
    assert exact_matches(task, batch, ["no", "yes", "no", "yes"]) == 0.5
    assert int(batch["input"].max()) < len(task.tokenizer)
    assert task.ends == [task.tokenizer.eos_token_id]

    # A cut second answer does not change this; of a split text, only the first piece has the text.
    cut = SFT(data, model=model, length=9, pack="padded", text_metrics=["exact_match"])
    assert "of 8 the answer loses its end" in lines_about(cut)[1]
    row = cut.eval_sets()["validation"][1]
    assert cut.collate([row])["text"] == ["Yes"]
    split = SFT(data, model=model, length=9, pack="padded", overlong="split")
    pieces = split.eval_sets()["validation"]
    texts = split.collate([pieces[index] for index in range(len(pieces))])["text"]
    assert len(texts) == 16 and [text for text in texts if text] == ["Yes"] * 4

    # A student's samples have records of the teacher, too.
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig.from_pretrained(model)).save_pretrained(model)
    student = Distil(data, model=model, teacher=model, length=16, pack="padded", top_k=4)
    samples = student.eval_sets()["validation"]
    counts = [int((samples.document(index)[1:] >= 0).sum()) for index in range(2)]
    samples.outputs = [np.zeros(count, student._record) for count in counts]
    batch = student.collate([samples[0], samples[1]])
    assert batch["text"] == ["", "Yes"] and "teacher" in batch

    # Prompts and completions, to predict.
    asked = [{"prompt": "say a", "completion": end} for end in (" Yes", "Yes")]
    prompts = task.samples_of(write(tmp_path / "asked/rows.jsonl", asked), labelled=False)
    assert task.collate([prompts[0]])["text"] == ["Yes"]
    # The text of a token that spans both begins in the prompt: the model writes it.
    assert task.collate([prompts[1]])["text"] == ["aYes"]


def test_kept_texts_are_those_of_their_arrays_in_all_shards(tmp_path):
    rows = [{"source": f"say {i % 10}", "target": f"no {i}"} for i in range(20)]
    data = write(tmp_path / "data/train.jsonl", rows)
    write(tmp_path / "data/validation.jsonl", rows)
    task = Seq2Seq(data, model=t5(tmp_path / "t5"))
    [source] = open_sources(data, RowSettings(), [task.columns], {})

    # Rows 4 and 13 are left out; each third row keeps its target, and has a longer array.
    def make(row: dict[str, Any]) -> Any:
        number = int(row["target"].split()[1])
        if number in (4, 13):
            remark("are not counted", "")
            raise ValueError("no")
        if number % 3 == 0:
            remark("have a text", row["target"], text=row["target"])
        return np.full(1 + number % 3, number, np.int32)

    for _ in range(2):
        made = ragged(source.parts["train"], make, made_by=1, what="a test", chunk=6, skip=True)
        found = {int(made.values[start]): text for start, text in made.texts.items()}
        assert found == {number: f"no {number}" for number in range(0, 20, 3)}
        [line] = made.notes
        assert line.startswith("warning: 7 of 18 rows have a text (first: ")
        assert line.endswith("row 0: no 0)")


@pytest.mark.parametrize("make", [t5, bart])
@pytest.mark.parametrize("target", ["yes</s>", "yes </s>", "yes</s> \n", "yes </s> </s>", "yes"])
def test_a_target_gets_one_end_token(make, target, tmp_path):
    rows = [{"source": f"say {i}", "target": target} for i in range(9)]
    task = Seq2Seq(write(tmp_path / "data/train.jsonl", rows), model=make(tmp_path / "model"))
    sample = task.train_set().document(1)
    assert sample.tolist() == task.tokenizer("yes")["input_ids"]
    assert not lines_about(task)


def test_a_target_that_is_only_an_end_token_is_rejected(tmp_path):
    rows = [{"source": f"say {i}", "target": "</s> "} for i in range(9)]
    with pytest.raises(ValueError, match="the target is empty; fill it, or remove the row"):
        Seq2Seq(write(tmp_path / "data/train.jsonl", rows), model=t5(tmp_path / "t5"))


def test_unknown_tokens_and_cut_texts_are_counted_in_all_tasks(tmp_path):
    encoder = bert(tmp_path / "bert")
    texts = ["the cat" + " ☃" * (i % 10 == 0) + " mat" * (i % 5 == 0) * 9 for i in range(40)]
    rows = [{"text": text, "label": i % 2, "index": i} for i, text in enumerate(texts)]
    data = write(tmp_path / "data/train.jsonl", rows)
    write(tmp_path / "data/validation.jsonl", rows[:2])
    unknown = "warning: 4 of 40 rows have text that is unknown to the tokenizer (first: "
    near = "the cat [UNK]')"
    left_out = 8 * (2 + 2 + 9 - 8) + 4
    for _ in range(2):
        task = TextClassification(data, model=encoder, length=8)
        limit = f"8 tokens (by {left_out} in all)"
        cut = f"warning: 8 of 40 texts are longer than {limit} and are truncated"
        cut_line, line = lines_about(task)
        assert cut_line == cut
        assert line.startswith(unknown) and line.endswith(f"row 0: '[CLS] {near}")
    assert lines_about(TextClassification(data, model=encoder, length=64)) == [line]
    sizes = np.array([len(text.encode()) for text in texts])
    longer = np.maximum(sizes - 40, 0)
    limit = f"40 bytes (by {longer.sum()} in all)"
    cut = f"warning: {(longer > 0).sum()} of 40 texts are longer than {limit} and are truncated"
    assert lines_about(TextClassification(data, length=40)) == [cut]
    for pack in ("concat", "padded"):
        task = MaskedLM(data, model=encoder, block=64, pack=pack)  # type: ignore[arg-type]
        assert lines_about(task) == [line.replace("[CLS] ", "")]
    files = tmp_path / "files"
    for split in ("train", "validation"):
        (files / split).mkdir(parents=True)
    for number, text in enumerate(texts):
        (files / "train" / f"{number}.txt").write_text(text)
    (files / "validation" / "0.txt").write_text(texts[1])
    task = MaskedLM(str(files), model=encoder, block=64)
    assert any(line.endswith(f"0.txt: '{near}") for line in lines_about(task))
    pairs = [{"anchor": text, "positive": "the mat"} for text in texts]
    data = write(tmp_path / "pairs/train.jsonl", pairs)
    write(tmp_path / "pairs/validation.jsonl", pairs[1:3])
    assert lines_about(TextPairs(data, model=encoder, length=64)) == [
        line.replace("data/train", "pairs/train")
    ]

    # Pairs of answers: the lines count rows, and not sides.
    rows = [
        {"prompt": "say ", "chosen": "yes ☃" if i < 3 else "yes", "rejected": f"no {i % 10}"}
        for i in range(40)
    ]
    data = write(tmp_path / "answers/train.jsonl", rows)
    write(tmp_path / "answers/validation.jsonl", rows[:2])
    task = Preference(data, model=llama(tmp_path / "llama"), length=2)
    found = [line.partition(" (first: ")[0] for line in lines_about(task)]
    assert found[:3] == [
        "3 of 40 rows have text that is unknown to the tokenizer",
        "3 of 40 rows have a target that the tokenizer does not give back",
        "warning: 40 of 40 rows are longer than task.length (3 tokens); task.overlong is cut",
    ]


def test_tags_of_minus_100_are_ignored_and_words_after_the_cut_are_counted(tmp_path):
    rows = [
        {"tokens": ["the", "cat", "sat"], "tags": [0, -100, 1]},
        {"tokens": ["the"] * 40, "tags": [0, -100] * 20},
        {"tokens": ["mat", "cat"], "tags": [-100, -100]},
        {"tokens": ["mat", "sat"], "tags": [1, 1]},
    ]
    data = write(tmp_path / "data/train.jsonl", rows)
    write(tmp_path / "data/validation.jsonl", rows)
    for model, start in ((bert(tmp_path / "bert"), 1), ("bytes", 0)):
        task = TokenClassification(data, model=model, length=32)
        assert task.classes == ["0", "1"]
        assert any("1 of 4 rows have no tag other than -100" in line for line in task.notes)
        samples = task.eval_sets()["validation"]
        assert len(samples) == 3
        batch = task.collate([samples[index] for index in range(3)])
        cut = 40 - (30 if start else 8)
        assert batch["words_cut"].tolist() == [0, cut, 0]
        assert int(task.weight(batch)) == 2 + (40 - cut) // 2 + 2

        # The loss and the metrics leave out these words; a prediction has one class per word.
        logits = torch.zeros(*batch["target"].shape, 2)
        logits[..., 1] = 1.0
        metrics = task.metrics()
        task.update(metrics, batch, {"logits": logits})
        found = metrics.compute()
        assert found["words_cut"] == cut
        assert found["accuracy"] == pytest.approx(3 / (4 + (40 - cut) // 2))
        predictions = task.predicted(batch, {"logits": logits})["prediction"]
        assert [len(one) for one in predictions] == [3, 40 - cut, 2]
        mean = float(
            torch.nn.functional.cross_entropy(torch.tensor([[0.0, 1.0]]), torch.tensor([0]))
        )
        task.reader.logits = lambda *_, logits=logits: logits
        total, _ = task.loss(torch.nn.Identity(), batch)
        zeros = 1 + (40 - cut) // 2
        assert float(total) == pytest.approx(zeros * mean + 3 * (mean - 1), rel=1e-5)


@pytest.mark.parametrize("how", ["text", "ClassLabel"])
def test_tags_of_minus_100_are_no_class_in_other_types(how, tmp_path):
    import pyarrow as pa
    from datasets import ClassLabel, Dataset, Features, List, Value
    from pyarrow import parquet

    tokens = [["a", str(number)] for number in range(30)]
    if how == "text":
        rows = [{"tokens": own, "tags": [f"T{i % 2}", "-100"]} for i, own in enumerate(tokens)]
        data = write(tmp_path / "data/train.jsonl", rows)
    else:
        features = Features(
            {"tokens": List(Value("string")), "tags": List(ClassLabel(names=["T0", "T1"]))}
        )
        columns = {"tokens": tokens, "tags": [[0, 0]] * 30}
        table = Dataset.from_dict(columns, features=features).data.table
        tags = pa.array([[i % 2, -100] for i in range(30)], table.schema.field("tags").type)
        (tmp_path / "data").mkdir()
        parquet.write_table(
            table.set_column(1, table.schema.field("tags"), tags), tmp_path / "data/train.parquet"
        )
        data = str(tmp_path / "data")
    task = TokenClassification(data)
    assert task.classes == ["T0", "T1"]
    target = task.train_set()[0][1]
    assert sorted(set(target.tolist()) - {-100}) in ([-1, 0], [-1, 1])


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            {"min_length": 9},
            "task.answer 8 lets no generated text end, because the model has min_len",
        ),
        ({"min_new_tokens": 8}, "has min_new_tokens 8; raise task.answer, or lower min_new_tokens"),
        ({"min_length": 8}, ""),
        ({}, ""),
    ],
)
def test_a_minimum_above_the_longest_answer_is_rejected(settings, why, tmp_path):
    from transformers import GenerationConfig

    from oneloop.tasks.language.generation import check_answer

    config = GenerationConfig(**settings)
    if why:
        with pytest.raises(ValueError, match=why):
            check_answer(8, config)
    else:
        check_answer(8, config)


def test_distinct_rows_and_texts_in_two_splits_are_counted(tmp_path):
    # 40 texts with two labels each, and 20 rows twice.
    rows = [{"text": f"t {i % 40}", "label": i // 40} for i in range(80)]
    data = write(tmp_path / "data/rows.jsonl", [*rows, *rows[:20]])
    task = TextClassification(data, held_out=0.2)
    sets = {"train": task.train_set(), **task.eval_sets()}
    texts = {
        name: {bytes(one[index][0]["input_ids"]) for index in range(len(one))}
        for name, one in sets.items()
    }
    shared = len(texts["train"] & (texts["validation"] | texts["test"]))
    assert shared
    line = (
        f"80 of 100 rows are distinct (equal rows share a split); {shared} different values of "
        "'text' are both in train and in a split drawn from it"
    )
    assert line in task.notes
    assert TextClassification(data, held_out=0.2).notes == task.notes
