"""``eval.generate``: texts and their metrics are those of a hand-written loop, on every layout."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import writers
from planning import SOURCE, few_chats
from worlds import after, each_message, run, train

pytestmark = pytest.mark.covers("oneloop.task_protocol.generated", "oneloop.basics.generation")


def words(folder: Path, task: str, *more: str) -> list[str]:
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"task: writers.{task}\n")
    settings = {
        "task.layers": "1",
        "duration": "4",
        "batch.size": "12",
        "eval.every": "2",
        "eval.micro": "3",
        "eval.generate": "all",
        "eval.samples": "2",
        "optimizer.lr": "0.01",
        "machine.dtype": "float64",
        "machine.workers": "0",
        "track": "none",
        "run.dir": str(folder / "run"),
    }
    flags = [part for key, value in settings.items() for part in (f"--{key}", value)]
    return [str(recipe), *flags, *more]


def texts_of(folder: Path) -> dict[int, str]:
    """Return the text of each sample in the last evaluation; all ranks wrote the same of one."""
    found: dict[int, str] = {}
    for file in sorted(folder.glob("texts-*.jsonl")):
        own = {}
        for line in file.read_text().splitlines():
            index, text = json.loads(line)
            own[index] = text  # the last evaluation comes last
        for index, text in own.items():
            assert found.setdefault(index, text) == text, (index, file)
    return found


def evaluations(folder: Path) -> list[dict]:
    lines = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    kept = []
    for line in lines:
        if "eval/loss" in line:
            kept.append({name: value for name, value in line.items() if name != "time"})
    return kept


def trained(folder: Path, task: str, *more: str, ranks: int = 1, config: str | None = None):
    folder.mkdir()
    world = run(
        train,
        words(folder, task, *more),
        ranks=ranks,
        config=config,
        variables={"WRITERS_FOLDER": str(folder)},
    )
    world.ok()
    return world


def by_hand(
    folder: Path, task: writers.Writes, chosen: list[int] | None = None
) -> tuple[list[str], float]:
    """Return the texts and chrF of a plain loop of ``generate`` with the weights of a run, for the
    chosen samples (None: all)."""
    from torchmetrics.text import CHRFScore

    model = task.model().double().eval()
    model.load_state_dict(load_file(folder / "run/final/model.safetensors"), strict=False)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    data = task.eval_sets()["validation"]
    metric = CHRFScore()
    texts = []
    indices = [*range(len(data))] if chosen is None else chosen
    for start in range(0, len(indices), 3):
        rows = [data[index] for index in indices[start : start + 3]]
        batch = task.collate(rows)
        made = task.generate(model, batch)
        metric.update(made, [[" ".join(f"w{t}" for t in row.tolist())] for row in rows])
        texts += made
    return texts, float(metric.compute())


SHORT = ["--eval.every", "4"]  # one evaluation, at the end
FEW = ["--task.length", "4"]  # tokens, where any text shows the claim
LAYOUTS = [
    pytest.param("Careless", [(2, "ddp")], id="encoder-decoder"),
    pytest.param("Copies", [(2, "fsdp2"), (3, "ddp")], id="three", marks=pytest.mark.slow),
    pytest.param(
        "Continues", [(2, "ddp"), (3, "ddp"), (2, "fsdp2")], id="decoder", marks=pytest.mark.slow
    ),
]


EIGHT = ["--task.length", "8"]  # tokens, so that texts of one batch have different lengths


@pytest.fixture(scope="module")
def careless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train one task on one process and on two, in the folders ``one`` and ``ddp2``."""
    top = tmp_path_factory.mktemp("careless")
    trained(top / "one", "Careless", *EIGHT)
    trained(top / "ddp2", "Careless", *EIGHT, ranks=2, config="ddp")
    return top


@pytest.mark.parametrize(("task", "layouts"), LAYOUTS)
def test_texts_and_metrics_are_equal_on_every_layout(
    request: pytest.FixtureRequest, tmp_path: Path, task: str, layouts: list[tuple[int, str]]
) -> None:
    top, writer = tmp_path, task
    if task == "Careless":
        top, writer = request.getfixturevalue("careless"), "Copies"  # it writes the same
    else:
        trained(top / "one", task, *SHORT, *EIGHT)
    one = top / "one"
    texts, score = by_hand(one, getattr(writers, writer)(length=8, layers=1))
    assert texts_of(one) == dict(enumerate(texts))
    assert len(set(texts)) > 3 and len({len(text.split()) for text in texts}) > 2
    (*_, last) = evaluations(one)
    assert last["eval/chrf"] == pytest.approx(score, rel=1e-6)

    # Five micro-batches on two or three ranks: the last one repeats the first, and does not count.
    for ranks, config in layouts:
        folder = top / f"{config}{ranks}"
        if task != "Careless":
            trained(folder, task, *SHORT, *EIGHT, ranks=ranks, config=config)
        assert texts_of(folder) == texts_of(one), (ranks, config)
        for before, now in zip(evaluations(one), evaluations(folder), strict=True):
            assert now["eval/chrf"] == before["eval/chrf"], (ranks, config)


def test_beams_and_a_rank_without_samples(tmp_path: Path) -> None:
    more = [*SHORT, "--task.beams", "2", "--eval.generate", "3"]
    two = tmp_path / "two"
    trained(two, "Copies", *more, ranks=2, config="fsdp2")
    chosen = [0, 4, 8]
    texts, score = by_hand(two, writers.Copies(beams=2, layers=1), chosen)
    assert len(set(texts)) > 1
    assert texts_of(two) == dict(zip(chosen, texts, strict=True))
    assert evaluations(two)[-1]["eval/chrf"] == pytest.approx(score, rel=1e-6)


def test_only_the_first_ema_generates(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    emas = [*SHORT, *FEW, "--ema.half_life", "[24 samples, 12 samples]", "--eval.best"]
    trained(folder, "Copies", *emas, "max:ema-24samples/eval/chrf")
    for line in evaluations(folder):
        assert ("eval/chrf" in line) == (line["weights"] == "ema-24samples"), line
    summary = json.loads((folder / "run/summary.json").read_text())
    assert summary["best"]["metric"] == "ema-24samples/eval/chrf"

    # The same after the run, with another number of samples.
    found = after(folder, "evaluate", "run", "--weights", "ema-24samples", "--json")
    found.ok()
    metrics = json.loads(found.output.splitlines()[-1])
    (*_, last, _) = evaluations(folder)
    assert metrics["eval/chrf"] == last["eval/chrf"]


WRONG = [
    ("digits", [], "the task ImageClassification has no generate, generated_metrics"),
    ("gpt", [], "the task CausalLM has no generated_metrics, update_generated"),
    ("sft", ["--eval.generate", "some"], "eval.generate"),
    ("sft", ["--eval.generate", "-2"], "eval.generate"),
    ("sft", ["--task.text_metrics", "[]"], "task.text_metrics is empty"),
    ("sft", ["--task.length", "24"], "samples are cut; raise task.length"),
    ("numbers", ["--task.target_length", "4"], "samples are cut; raise task"),
]


def long_answers(folder: Path) -> list[str]:
    """Write chats with long answers; return the keys of a recipe that trains on them."""
    lines = []
    for number in range(100):
        question = {"role": "user", "content": f"{number}?"}
        answer = {"role": "assistant", "content": " ".join(f"{number + 7 * k}" for k in range(40))}
        lines.append(json.dumps({"messages": [question, answer]}) + "\n")
    (folder / "long.jsonl").write_text("".join(lines))
    return ["--task.data", str(folder / "long.jsonl")]


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Any, str]]:
    """Return the folder of the run, exit code and output of each wrong input.

    One process runs all of them.
    """
    top = tmp_path_factory.mktemp("wrong")
    common = ["--duration", "2", "--track", "none", "--eval.generate", "4"]
    folders = [top / f"run-{number}" for number in range(len(WRONG))]
    # The packaged texts and chats would take seconds.
    data_of = {"sft": few_chats(top), "gpt": ["--task.data", str(SOURCE)]}
    long = long_answers(top)
    several = []
    for (recipe, more, _), folder in zip(WRONG, folders, strict=True):
        data = long if "--task.length" in more else data_of.get(recipe, [])
        several.append([recipe, *common, *data, "--run.dir", str(folder), *more])
    (found,) = run(each_message, several, folder=top).ok()
    return [(folder, *ended) for folder, ended in zip(folders, found, strict=True)]


@pytest.mark.parametrize(("recipe", "more", "message"), WRONG)
def test_wrong_inputs(
    messages: list[tuple[Path, Any, str]], recipe: str, more: list[str], message: str
) -> None:
    folder, code, output = messages[WRONG.index((recipe, more, message))]
    assert code == 2, output
    assert message in output and "Traceback" not in output, output
    assert not folder.exists()


@pytest.mark.parametrize("config", ["single", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_a_failing_writer_is_found_before_the_run(tmp_path: Path, config: str) -> None:
    folder = tmp_path / "failing"
    folder.mkdir()
    ranks = 1 if config == "single" else 2
    more = ["--task.fails", "1"]
    world = run(train, words(folder, "Copies", *more), ranks=ranks, config=config)
    assert world.codes == [2] * ranks, world.output
    assert "Copies.generate failed: RuntimeError: the writer is out of ink" in world.output
    assert not (folder / "run").exists()


def test_a_mistake_is_found_before_the_run(tmp_path: Path) -> None:
    world = run(train, words(tmp_path, "Careless", "--task.mistake", "metrics"))
    assert world.codes == [2], world.output
    assert (
        "generated_metrics() returned a NoneType" in world.output
        and "Traceback" not in world.output
    ), world.output
    assert not (tmp_path / "run").exists()


MISTAKES = {
    "short": "rank 1: ValueError: .*Careless.generate must return a list of one text",
    "input": "rank 1: BadInput: found in the run",
}


@pytest.mark.parametrize(
    "mistake",
    ["short", pytest.param("input", marks=pytest.mark.slow)],
)
def test_a_mistake_in_an_evaluation_ends_all_ranks_and_is_named(
    tmp_path: Path, mistake: str
) -> None:
    given = words(tmp_path, "Careless", *FEW, "--task.mistake", mistake)
    world = run(train, given, ranks=2, config="ddp", watch=True)
    assert world.codes == [1, 1], world.output
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert re.search(MISTAKES[mistake], summary["exit_reason"]), summary


def test_near_ties_of_all_batches_are_counted(careless: Path) -> None:
    for folder in ("one", "ddp2"):
        ties = [line["eval/near_ties"] for line in evaluations(careless / folder)]
        assert ties == [13.0, 13.0], folder


@pytest.mark.slow
def test_a_stop_within_generation_is_resumed(tmp_path: Path) -> None:
    """A run that is stopped while it generates evaluates again, with the same results."""
    whole = tmp_path / "whole"
    trained(whole, "Copies", "--save.every", "2")
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    again = words(stopped, "Copies", "--save.every", "2")
    first = run(train, again, variables={"WRITERS_STOP": "4"})  # within the first evaluation
    assert first.codes == [75], first.output
    assert json.loads((stopped / "run/summary.json").read_text())["step"] < 4
    run(train, again).ok()
    assert evaluations(stopped) == evaluations(whole)


def _dtypes(task: str) -> list[torch.dtype]:
    """Return the dtypes in which the first linear layer computes while a text is generated."""
    from accelerate import Accelerator

    from oneloop.basics.generation import generated
    from oneloop.launch.processes import start

    own = getattr(writers, task)()
    run_ = start()
    assert isinstance(run_.accelerator, Accelerator)
    model = run_.prepare(own.model(), blocks=["T5Block"]).eval()
    seen = list[torch.dtype]()
    layer = next(m for m in model.modules() if isinstance(m, torch.nn.Linear))
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    data = own.eval_sets()["validation"]
    with torch.no_grad():
        generated(own, model, own.collate([data[0], data[1]]))
    return sorted(set(seen), key=str)


@pytest.mark.parametrize(
    ("config", "ranks"), [("single", 1), pytest.param("fsdp2", 2, marks=pytest.mark.slow)]
)
def test_an_encoder_generates_in_the_precision_of_the_run(config: str, ranks: int) -> None:
    """Outside of the model's forward, its encoder would compute in float32."""
    half = run(_dtypes, "Copies", ranks=ranks, config=config, options=["--mixed_precision", "bf16"])
    assert half.ok() == [[torch.bfloat16]] * ranks


def test_metrics_and_texts_are_checked_with_their_method() -> None:
    from oneloop.task_protocol.evaluation_metrics import directions
    from oneloop.task_protocol.generated import for_metrics

    class Clash(writers.Copies):
        name = "loss"

        def generated_metrics(self) -> Any:
            from torchmetrics import MeanMetric, MetricCollection

            return MetricCollection({self.name: MeanMetric()})

        def metrics(self) -> Any:
            from torchmetrics import MeanMetric, MetricCollection

            return MetricCollection({"accuracy": MeanMetric()})

    task = Clash()
    with pytest.raises(ValueError, match=r"rename it in generated_metrics\(\)"):
        directions(task, generated=True)
    task.name = "accuracy"
    with pytest.raises(ValueError, match="or of another metric; rename it"):
        directions(task, generated=True)
    for texts, message in (
        (["a"], r"it returned \['a'\] for 2 samples"),
        (["a", 2], r"it returned \['a', 2\] for 2 samples"),
        (None, "it returned None for 2 samples"),
    ):
        with pytest.raises(ValueError, match=message):
            for_metrics(task, {"index": [0, 1]}, {"texts": texts})

    # The metrics get the texts, and the batch with all else; without texts all that was generated.
    made = {"texts": ["a", "b"], "near_ties": torch.zeros(2)}
    batch, texts = for_metrics(task, {"index": [0, 1]}, made)
    assert texts == ["a", "b"] and batch == {"index": [0, 1], **made}
    assert for_metrics(task, {"index": [0, 1]}, {"image": 1}) == ({"index": [0, 1]}, {"image": 1})


def test_near_ties_are_relative_to_the_size_of_the_logits() -> None:
    from oneloop.tasks.language.generation import NearTies

    ties = NearTies([1])
    far = [[0.0, -1.0, -50.0]]  # no tie
    near = [[1e-7, 0.0, -50.0]]  # rounding of numbers near 50 is larger
    excluded = [[1e-7, 0.0, float("-inf")]]  # rounding of numbers near 1e-7 is smaller
    for logits, found in ((far, False), (near, True), (excluded, False)):
        ties = NearTies([1])
        ties(torch.zeros(1, 1), torch.tensor(logits))
        assert ties.found is not None and bool(ties.found) == found, logits
