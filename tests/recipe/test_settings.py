"""Settings without effect, and files that cannot be trusted, are rejected with one message."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from oneloop.basics.duration import Duration, Scale
from oneloop.basics.exit_codes import BadInput
from oneloop.data.batch_layout import BatchLayout
from oneloop.launch import processes
from oneloop.recipe.comparison import only_extends, training_configuration
from oneloop.recipe.parse import parser, read, recipe
from oneloop.tasks.image_classification import ImageClassification
from oneloop.tasks.rows import csv_json_lines
from oneloop.tasks.rows import text_tables as tables
from oneloop.tasks.rows.arrow_tables import table_of
from oneloop.tasks.rows.cache import content_of
from oneloop.tasks.rows.find_files import found
from oneloop.tools.after_training.trained_model import recipe_of
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.basics.duration",
    "oneloop.launch.processes",
    "oneloop.recipe.parse",
    "oneloop.recipe.schema",
    "oneloop.tasks.image_classification",
    "oneloop.tasks.language.chat",
    "oneloop.tasks.language.conversations",
    "oneloop.tasks.rows.arrow_tables",
    "oneloop.tasks.rows.cache",
    "oneloop.tasks.rows.text_tables",
    "oneloop.tasks.rows.csv_json_lines",
    "oneloop.tasks.rows.find_files",
    "oneloop.tasks.rows.images",
    "oneloop.tasks.text_classification",
    "oneloop.tasks.text_regression",
    "oneloop.tools.after_training.trained_model",
)


@pytest.mark.parametrize(
    ("words", "expected_text"),
    [
        (
            ["--schedule.final", "0.1"],
            "schedule.final 0.1 has no effect with schedule.name constant",
        ),
        (
            ["--init.weights", "ema"],
            (
                "init.weights ema has no effect with init.from null; remove init.weights, or "
                "change init.from"
            ),
        ),
        (
            ["--task.model", "resnet18", "--task.dropout", "0.1"],
            "task.dropout 0.1 has no effect with task.model resnet18",
        ),
        (
            ["--task.name", "causal_lm", "--task.dropout", "0.1", "--task.architecture", "llama"],
            "architecture llama",
        ),
        (
            ["--task.name", "causal_lm", "--task.vocab", "512"],
            "task.vocab 512 has no effect with task.tokenizer bytes",
        ),
        (
            ["--task.name", "sft", "--task.width", "64", "--task.model", "here"],
            "task.width 64 has no effect",
        ),
        (
            ["--task.name", "text_classification", "--task.data", "x", "--task.lines", "3"],
            "task.lines 3 has no effect",
        ),
        (
            [
                "--task.name",
                "text_regression",
                "--task.data",
                "x",
                "--task.model",
                "y",
                "--task.width",
                "8",
            ],
            "task.width 8",
        ),
        (["--ema.every", "4"], "ema.every 4 has no effect with ema.half_life 0"),
        (["--ema.start", "2"], "ema.start 2 has no effect with ema.decay 0"),
        (
            ["--schedule.warmup", "0%", "--schedule.warmup_start", "0.5"],
            "schedule.warmup_start 0.5 has no effect with schedule.warmup 0",
        ),
        (["--guard.patience", "0"], "guard.patience must be at least 1"),
        (
            ["--schedule.name", "plateau", "--schedule.final", "0.1"],
            "schedule.final 0.1 has no effect with schedule.name plateau",
        ),
        (
            ["--stop.patience", "3", "--eval.every", "0"],
            "stop.patience 3 has no effect with eval.every 0",
        ),
        (["--ema.device", "cpu"], "ema.device cpu has no effect with ema.half_life 0"),
    ],
)
def test_a_setting_without_effect_is_rejected(tmp_path, words, expected_text):
    (tmp_path / "plain.yaml").write_text("task: {name: image_classification}\n")
    with pytest.raises(BadInput, match=expected_text):
        read([str(tmp_path / "plain.yaml"), *words])


def test_a_recipes_own_value_gives_way_to_what_is_typed():
    assert read(["gpt"]).schedule.final == 0.1
    assert read(["gpt", "--schedule.name", "constant"]).schedule.final == 0.0
    assert read(["gpt", "--schedule.name", "linear"]).schedule.final == 0.1
    with pytest.raises(BadInput, match="has no effect"):
        read(["gpt", "--schedule.name", "constant", "--schedule.final", "0.2"])


def test_a_packaged_models_size_gives_way_to_a_model_by_name():
    assert read(["sft"]).task.options["width"] == 96
    # the default, which nothing uses
    assert read(["sft", "--task.model", "hf:a/b"]).task.options["width"] == 128


class Fewer(ImageClassification):
    """Inherit the conditions of arguments that it does not have."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(width=width)


def test_a_subclass_may_have_fewer_arguments():
    assert read(["digits", "--task", "test_settings.Fewer", "--task.width", "8"]).task.options == {
        "width": 8
    }


@pytest.mark.parametrize(
    ("variables", "precision", "expected_text"),
    [
        (
            {"FSDP_OFFLOAD_PARAMS": "true", "FSDP_VERSION": "2"},
            "no",
            "fsdp_offload_params true is not supported",
        ),
        (
            {"PARALLELISM_CONFIG_TP_SIZE": "two", "FSDP_VERSION": "2"},
            "no",
            "tensor, context or sequence parallelism is set",
        ),
        ({}, "bf8", "mixed_precision 'bf8' does not exist"),
        ({"ACCELERATE_USE_FSDP": "true"}, "fp8", "fp8 with FSDP2 is not supported"),
        ({"ACCELERATE_FP8_BACKEND": "msamp"}, "fp8", "fp8_backend MSAMP is not supported"),
    ],
)
def test_accelerates_settings_are_one_message(monkeypatch, variables, precision, expected_text):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def reject() -> None:
        processes.reject_strategy(sharding="FSDP_VERSION" in variables)
        processes._reject_precision(precision, torch.device("cpu"))

    with pytest.raises(BadInput, match=expected_text):
        reject()


def time_outs() -> list[float]:
    """Return the time-outs in seconds of the groups of a sharded model."""
    from oneloop.launch.processes import start

    there = start()
    model = there.prepare(torch.nn.Linear(8, 8))
    groups = [there.host, *next(model.parameters()).device_mesh.get_all_groups()]
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return [backend.options._timeout.total_seconds() for backend in backends]


@pytest.mark.parametrize(
    ("config", "ranks", "groups"),
    [("fsdp2", 2, 1), pytest.param("hsdp", 4, 2, marks=pytest.mark.slow)],
)
def test_the_time_out_of_collectives_reaches_all_groups(config, ranks, groups):
    found = run(time_outs, ranks=ranks, config=config).ok()
    assert found == [[7200.0] * (1 + groups)] * ranks


def test_an_unknown_layer_to_wrap_is_one_message(tmp_path):
    options = ["--fsdp_transformer_layer_cls_to_wrap", "Nowhere"]
    world = run(
        train,
        ["digits", "--track", "none"],
        ranks=2,
        config="fsdp2",
        options=options,
        folder=tmp_path,
    )
    assert world.codes == [2, 2] and "Nowhere" in world.output and "Traceback" not in world.output
    assert not (tmp_path / "runs").exists()


def test_settings_that_are_ignored_are_one_line_at_the_start(tmp_path):
    words = ["digits", "--duration", "2", "--eval.every", "0", "--track", "none"]
    world = run(
        train, words, variables={"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, folder=tmp_path
    )
    world.ok()
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4 has no effect" in world.output


def test_help_offers_only_what_there_is():
    assert ".help" not in parser("image_classification", "adamw", "constant").format_help()


def test_steps_are_whole_and_a_micro_batch_is_proposed_before_another_batch():
    with pytest.raises(ValueError, match="duration '3.5' is not a whole number of steps"):
        Duration("3.5").steps(Scale(8, 64))
    assert Duration("2.5ep").steps(Scale(8, 64)) == 20
    with pytest.raises(ValueError, match="nearest: 8"):
        BatchLayout(64, 1, 7)
    with pytest.raises(ValueError, match="nearest size: 63"):
        BatchLayout(64, 3, 7)


# --- files
# --------------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_the_cache_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows.csv").write_text(
        "text,label\n" + "".join(f"some words {n},{n % 2}\n" for n in range(200))
    )
    there = found(str(tmp_path / "rows.csv"), ["csv"])

    def made() -> list[str]:
        content = content_of(there.files, there.root)
        return tables.converted(there, "", there.files, content).dataset["text"][:]

    before = made()
    (table,) = (tmp_path / "cache" / "tables").glob("*.arrow")
    data = bytearray(table.read_bytes())
    at = data.index(b"some words 77")
    data[at + 5] ^= 1
    table.write_bytes(bytes(data))
    monkeypatch.setattr(tables, "_STARTED", os.stat(table).st_mtime + 60)  # as in a later start
    assert made() == before


def test_other_content_of_the_same_size_and_time_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "a.txt"
    file.write_text("one")
    first, times = content_of([file], tmp_path), file.stat()
    (tmp_path / "b.txt").write_text("two")
    os.utime(tmp_path / "b.txt", ns=(times.st_atime_ns, times.st_mtime_ns))
    (tmp_path / "b.txt").replace(file)
    assert file.stat().st_mtime_ns == times.st_mtime_ns and content_of([file], tmp_path) != first


@pytest.mark.parametrize("rows", ['a,"b\nc,d\ne,f\n', 'a,b\nc,"d\n', 'a,b\nc,"d'])
def test_a_quote_that_is_not_closed_is_an_error(tmp_path, monkeypatch, rows):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows.csv").write_text("x,y\n" + rows)
    there = found(str(tmp_path / "rows.csv"), ["csv"])
    with pytest.raises(ValueError, match=r"rows\.csv, line \d: the file ends within a quoted text"):
        table_of(there, "", ["x", "y"])


@pytest.mark.parametrize(
    "rows", ['a,"b"\n', 'a,"b""c"\n', 'a,""\n', '"a",b\n', ',"b"', 'a,5" pipe\n', 'a,"b\nc"\nd,e\n']
)
def test_quotes_that_are_closed_are_read(tmp_path, monkeypatch, rows):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows.csv").write_text("x,y\n" + rows)
    there = found(str(tmp_path / "rows.csv"), ["csv"])
    assert len(table_of(there, "", ["x", "y"]))


@pytest.mark.parametrize(("ending", "between"), [("csv", ","), ("tsv", "\t")])
def test_a_last_block_of_blank_lines_is_no_error(tmp_path, monkeypatch, ending, between):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(csv_json_lines, "_BUFFER", 64)
    rows = "".join(f"text {number}{between}{number}\n" for number in range(10))
    file = tmp_path / f"rows.{ending}"
    file.write_text(f"text{between}label\n{rows}" + "\n" * 400)
    assert len(table_of(found(str(file), [ending]), "", ["text", "label"])) == 10


def test_an_image_with_too_many_pixels_is_not_decoded():
    from oneloop.tasks.rows.images import decoded

    file = io.BytesIO()
    Image.new("1", (12_000, 12_000)).save(file, "png")
    with pytest.raises(
        ValueError,
        match="12,000 x 12,000 = 144,000,000 pixels, more than task.pixel_limit 89,478,485",
    ):
        decoded(file.getvalue(), 89_478_485)


def test_pearson_of_predictions_that_hardly_vary():
    from oneloop.tasks.text_regression import TextRegression

    drawn = torch.Generator().manual_seed(0)
    predicted = (3 + 1e-4 * torch.randn(500, generator=drawn)).float()
    numbers = predicted - 3 + 1e-4 * torch.randn(500, generator=drawn)
    task = TextRegression.__new__(TextRegression)
    metrics = task.metrics()
    for part in range(0, 500, 50):
        batch = {"label": numbers[part : part + 50]}
        task.update(metrics, batch, {"prediction": predicted[part : part + 50]})
    expected = np.corrcoef(predicted.double().numpy(), numbers.double().numpy())[0, 1]
    assert abs(float(metrics.compute()["pearson"]) - expected) < 1e-7


@pytest.mark.parametrize("name", ["run/evil.py:Evil", "../evil.py:Evil", "recorded"])
def test_a_task_that_came_with_a_run_folder_is_not_imported(tmp_path, monkeypatch, name):
    here, elsewhere = tmp_path / "here", tmp_path / "evil.py"
    (here / "run").mkdir(parents=True)
    text = (
        "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\nclass Evil: pass\n"
    )
    for file in (elsewhere, here / "run" / "evil.py"):
        file.write_text(text)
    task = "evil.Evil" if name == "recorded" else name
    (here / "run" / "recipe.yaml").write_text(f"task: {{name: '{task}'}}\n")
    (here / "run" / "environment.json").write_text(
        json.dumps({"task": str(here / "run" / "evil.py")})
    )
    monkeypatch.chdir(here)
    with pytest.raises(BadInput, match=r"would be imported from|is unknown|no module|evil"):
        recipe_of(Path("run"), command="evaluate")
    assert not list(tmp_path.rglob("*.ran"))


@pytest.mark.parametrize(
    ("content", "expected_text"),
    [
        (b'{"text": "one"}\n{"text": \n', r"b\.jsonl, line 2: not JSON"),
        (b'{"text": "\xff"}\n', r"b\.jsonl, line 1"),
    ],
)
def test_a_broken_line_is_named_by_file_and_line(tmp_path, monkeypatch, content, expected_text):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text('{"text": "whole"}\n')
    (tmp_path / "data" / "b.jsonl").write_bytes(content)
    there = found(str(tmp_path / "data"), ["json"])
    with pytest.raises(ValueError, match=expected_text):
        table_of(there, "", ["text"])


def rows_of(place, *lines):
    place.write_text(
        "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    )
    there = found(str(place), ["json"])
    columns = [name for name in ("text", "label", "words", "messages") if name in place.read_text()]
    return table_of(there, "", columns)


def test_strings_and_nulls_of_json_lines_stay_what_they_are(tmp_path, monkeypatch):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    call = {"function": {"name": "look", "arguments": {"a": None, "b": 1, "on": "2024-01-01"}}}
    chat = [{"role": "user", "content": "ü"}, {"role": "assistant", "tool_calls": [call]}]
    plain = {
        "text": "2024-01-01",
        "label": 1,
        "words": ["2024-01-01 10:00:00", "x"],
        "messages": [],
    }
    made = [plain] * 1000 + [
        {"text": "2024", "label": 1.5, "words": [], "messages": chat},
        {"messages": None},
    ]
    rows = rows_of(tmp_path / "rows.jsonl", *made)
    assert rows[0] == {
        "text": "2024-01-01",
        "label": 1.0,
        "words": plain["words"],
        "messages": [],
    }
    assert rows[1000]["label"] == 1.5 and rows[1000]["messages"] == chat
    assert rows[1001] == {"text": None, "label": None, "words": None, "messages": None}


@pytest.mark.parametrize(("text", "label"), [({"a": 1}, "x"), ("x", {"a": 1}), ("x", [{"a": 1}])])
def test_objects_are_neither_texts_nor_labels(tmp_path, monkeypatch, text, label):
    from oneloop.tasks.text_classification import TextClassification

    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    made = [{"text": f"{n}", "label": "ab"[n % 2]} for n in range(40)] + [
        {"text": text, "label": label}
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    column = "label" if text == "x" else "text"
    found = rf"row 40: \[?\{{\"a\": 1\}}\]? in '{column}' is an object or a list"
    why = rf"{found}; expected .*task.{column} {column}.FIELD"
    with pytest.raises(ValueError, match=why):
        TextClassification(str(tmp_path / "rows.jsonl"), held_out=0.2)


def test_one_list_is_read_and_mixed_types_are_rejected(tmp_path, monkeypatch):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    rows = rows_of(tmp_path / "list.json", '\ufeff[{"text": "a"},\n {"text": "2024-01-01"}]')
    assert [rows[0], rows[1]] == [{"text": "a"}, {"text": "2024-01-01"}]
    with pytest.raises(ValueError, match=r"b\.jsonl: column 'label' must hold values of one type"):
        rows_of(tmp_path / "b.jsonl", {"label": 1}, {"label": "x"})
    with pytest.raises(ValueError, match=r"c\.jsonl, line 2: expected a JSON object, got 7"):
        rows_of(tmp_path / "c.jsonl", {"label": 1}, "7\n")


def test_a_completion_that_is_a_list_of_objects_stays_a_text():
    from oneloop.tasks.language.conversations import is_text

    assert (
        is_text('[{"a": 1}]')
        and is_text("[]")
        and not is_text('[{"role": "user", "content": "x"}]')
    )


def test_a_null_in_the_arguments_of_a_call_is_kept():
    from oneloop.tasks.language.conversations import conversation

    call = {"function": {"name": "look", "arguments": {"a": None, "b": 1}}}
    (message,) = conversation(
        json.dumps([{"role": "assistant", "content": None, "tool_calls": [call]}])
    )
    assert (
        message["tool_calls"][0]["function"]["arguments"] == {"a": None, "b": 1}
        and message["content"] == ""
    )


def test_a_template_that_writes_the_date_has_a_fixed_day():
    from chats import CHATML, tokenizer_with, turns
    from oneloop.tasks.language.chat import Chat

    dated = (
        "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if "
        "m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content "
        "}}<|im_end|>{% endif %}\n"
        "{% endfor %}"
    )
    tokenizer = tokenizer_with(CHATML, dated)
    assert Chat(tokenizer, day="2020-02-03").render(turns("hello", "yo")).startswith("2020-02-03")
    assert Chat(tokenizer).render(turns("hello", "yo")).startswith("2025-01-01")
    with pytest.raises(ValueError, match=r"task\.day must be a date"):
        Chat(tokenizer, day="today")


TORCH = "torch.optim.lr_scheduler"
SCHEDULES = {
    f"{TORCH}.StepLR --schedule.step_size 30": {"step_size": 30, "gamma": 0.1},
    f"{TORCH}.StepLR --schedule.step_size 30ep --schedule.gamma 1": {
        "step_size": Duration("30ep"),
        "gamma": 1.0,
    },
    f"{TORCH}.MultiStepLR --schedule.milestones 30ep,5": {
        "milestones": [Duration("30ep"), 5],
        "gamma": 0.1,
    },
    f"{TORCH}.CosineAnnealingWarmRestarts": {"T_mult": 1, "eta_min": 0.0},
    "transformers.get_polynomial_decay_schedule_with_warmup --schedule.num_warmup_steps 10%": {
        "num_warmup_steps": Duration("10%"),
        "lr_end": 1e-7,
        "power": 1.0,
    },
}
WRONG_SCHEDULES = {
    f"{TORCH}.StepLR --schedule.step_size many": "schedule.step_size must be a whole number",
    f"{TORCH}.StepLR --schedule.gama 1": "'schedule.gama'; did you mean 'schedule.gamma'",
    f"{TORCH}.StepLR --schedule.last_epoch 1": "unknown key 'schedule.last_epoch'",
    "step --schedule.every 30ep": f"Use {TORCH}.StepLR with schedule.step_size \\(30ep\\)",
    "step --schedule.milestones [30ep,60ep] --schedule.factor 0.3": "MultiStepLR with "
    r"schedule.milestones \(\[30ep,60ep\]\); schedule.gamma is the factor",
    "exponential": r"schedule.gamma is factor \*\* \(1 / steps of schedule.every\)",
    "onecycle --schedule.pct_start 0.2": f"'onecycle' is unknown: Use {TORCH}.OneCycleLR",
    f"{TORCH}.ReduceLROnPlateau": "needs results of evaluations; use schedule.name plateau",
    "torch.nn.Linear": "is a class, but not a torch.optim.lr_scheduler.LRScheduler",
}


@pytest.mark.parametrize("words", SCHEDULES)
def test_a_schedule_of_torch_takes_its_own_arguments(words):
    made = read(["digits", "--schedule.name", *words.split()])
    assert made.schedule.options == SCHEDULES[words]
    assert recipe(made) == made  # what is left out stays left out


@pytest.mark.parametrize("words", WRONG_SCHEDULES)
def test_a_schedule_that_cannot_be_used_is_one_message(words):
    with pytest.raises(BadInput, match=WRONG_SCHEDULES[words]):
        read(["digits", "--schedule.name", *words.split()])


TINY = ["--task", "tiny.Ragged"]


@pytest.mark.parametrize(
    ("words", "extends"),
    [
        ("--schedule.name constant", True),
        (f"--schedule.name {TORCH}.StepLR --schedule.step_size 10", True),
        (f"--schedule.name {TORCH}.MultiStepLR --schedule.milestones [30%]", False),
        (f"--schedule.name {TORCH}.OneCycleLR", False),
        ("--schedule.name cosine", False),
        ("--schedule.name cosine --schedule.length 20", True),
        ("--schedule.name cosine --schedule.length 50%", False),
        ("--schedule.name constant --schedule.warmup 10%", False),
        ("--ema.half_life 10%", False),
        ("--ema.half_life 2ep", True),
        ("--ema.decay 0.9 --ema.start 5%", False),
    ],
)
def test_a_run_may_be_longer_if_nothing_else_would_change(words, extends):
    recipes = [read([*TINY, "--duration", text, *words.split()]) for text in ("20", "30")]
    short, longer = [training_configuration(recipe.resolved) for recipe in recipes]
    assert only_extends(short, longer) is extends
    assert not only_extends(longer, short)
