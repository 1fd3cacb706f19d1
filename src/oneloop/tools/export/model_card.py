"""A model card for the Hugging Face hub: base model, training data and results."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from oneloop.tools.run_reader import Curve, Record, read_record
from oneloop.tools.terminal_charts import plotted

_KINDS = {
    "image_classification": "image-classification",
    "token_classification": "token-classification",
    "text_classification": "text-classification",
    "text_regression": "text-classification",
    "text_pairs": "sentence-similarity",
    "causal_lm": "text-generation",
    "masked_lm": "fill-mask",
    "sft": "text-generation",
    "preference": "text-generation",
    "distil": "text-generation",
    "reward": "text-classification",
    "seq2seq": "text2text-generation",
}
"""the hub's task names (pipeline tags) by oneloop's"""
_LIBRARIES = ("oneloop", "torch", "transformers", "peft")  # whose versions a card names
_ROWS = 20  # of the table of data, at most
_RECIPE_KEYS = ("seed", "duration")  # keys of the recipe that a card shows, before the groups
_RECIPE_GROUPS = ("task", "batch", "optimizer", "schedule")
_NEW_ENCODERS = ("bytes", "bpe")  # values of task.model that name no base model
_HUB = "hf:"


@dataclass(frozen=True)
class _Trained:
    """What a card reports: a run, and the weights of it that are published."""

    record: Record
    kind: str | None  # pipeline tag; None: the hub has none for this task
    data: list[str]  # sources of the training data
    metrics: dict[str, float]  # finite evaluation and test metrics

    adapters: bool  # whether the weights are adapters
    weights: str | None  # name of the EMA; None: the raw weights
    base: str | None  # the base model: path, or name on the hub
    base_details: Mapping[str, Any]  # its entry in the manifest, if the weights are adapters


def model_card(
    run: Path, name: str, about: Mapping[str, Any], *, licence: str | None, language_model: bool
) -> str:
    """Return the card of a run's weights, as Markdown.

    Args:
        run: the run folder.
        name: the repository on the hub.
        about: the manifest's entry of the weights; its ``base`` is the base model of adapters.
        licence: the hub's identifier of a license, or None.
        language_model: whether transformers, or peft, can load the weights.
    """
    from huggingface_hub import ModelCardData

    # Describe the weights for the hub, which reads the card's head.
    trained = _trained(run, about)
    datasets = list(filter(None, map(_repository_of, trained.data)))
    tags = ["oneloop"]
    if trained.adapters:
        tags.append("lora")
    head = ModelCardData(
        model_name=name.rpartition("/")[2],
        license=licence,
        library_name=_library(trained, language_model=language_model),
        pipeline_tag=trained.kind,
        base_model=_repository_of(trained.base),
        datasets=datasets or None,
        tags=tags,
        eval_results=_eval_results(trained) or None,
    )

    # Describe them for readers; leave out sections without content.
    sections = [
        f"# {name}",
        _sentence(trained),
        _results(trained.metrics),
        _content(trained),
        _curves(trained.record),
        "## Recipe\n\nAs `recipe.yaml` in this repository, in full.\n\n" + _recipe(trained.record),
    ]
    body = "\n\n".join(filter(None, sections))
    return f"---\n{head.to_yaml()}\n---\n\n{body}\n"


def _trained(run: Path, about: Mapping[str, Any]) -> _Trained:
    """Read what the card reports from the run folder and the weights' entry in the manifest."""
    record = read_record(run)
    task = record.recipe.get("task", {})

    # Adapters record their base model; other weights may start from one that the recipe names.
    base_details = about.get("base") or {}
    base = base_details.get("place") or task.get("model")
    if base in _NEW_ENCODERS:
        base = None

    weights = about.get("weights")
    if weights == "raw":
        weights = None
    return _Trained(
        record=record,
        kind=_KINDS.get(str(task.get("name"))),
        data=_sources(task.get("data")),
        metrics=_metrics(record),
        adapters="base" in about,
        weights=weights,
        base=base,
        base_details=base_details,
    )


def _sources(data: Any) -> list[str]:
    """Return the sources that task.data names: one, or those of a mixture."""
    if data is None:
        return []
    if not isinstance(data, list):
        return [str(data)]
    sources = []
    for entry in data:
        if entry.get("data") is not None:
            sources.append(str(entry["data"]))
    return sources


def _metrics(record: Record) -> dict[str, float]:
    """Return the finite evaluation and test metrics of the summary."""
    metrics = {}
    for name, value in record.summary.items():
        if not name.startswith(("eval/", "test/")):
            continue
        if isinstance(value, int | float) and math.isfinite(value):
            metrics[name] = value
    return metrics


def _library(trained: _Trained, *, language_model: bool) -> str | None:
    """Return the library that the hub suggests for loading the weights."""
    if trained.kind == "sentence-similarity":
        return "sentence-transformers"
    if not language_model:
        return None
    return "peft" if trained.adapters else "transformers"


def _eval_results(trained: _Trained) -> list[Any]:
    """Return the metrics as results on the first data set."""
    from huggingface_hub import EvalResult

    if not trained.data:
        return []
    # The hub reads the data set from each result; of a mixture, the first one is named.
    source = trained.data[0]
    results = []
    for name, value in trained.metrics.items():
        split, _, metric = name.partition("/")
        result = EvalResult(
            task_type=trained.kind or "other",
            dataset_type=source.removeprefix(_HUB).partition("@")[0],
            dataset_name=source,
            dataset_split=split.replace("eval", "validation"),
            metric_type=metric,
            metric_value=value,
        )
        results.append(result)
    return results


def _repository_of(source: Any) -> str | None:
    """Return the hub repository of a source; None for a local path."""
    if not isinstance(source, str) or not source.startswith(_HUB):
        return None
    return source.removeprefix(_HUB).partition("@")[0]


def _sentence(trained: _Trained) -> str:
    """Return what was trained, for how long, and with which versions."""
    what = "Low-rank adapters (LoRA)" if trained.adapters else "A model"
    if trained.base:
        what = f"{what} based on {trained.base}"

    # A run in progress has no summary yet.
    summary = trained.record.summary
    length = "a run in progress"
    if "step" in summary:
        length = f"{summary['step']:,} steps, {summary['samples']:,} samples"

    weights = ""
    if trained.weights is not None:
        weights = f" Weights: {trained.weights}."

    installed = trained.record.environment.get("versions", {})
    versions = ", ".join(f"{name} {installed[name]}" for name in _LIBRARIES if name in installed)
    return f"{what}, trained with oneloop: {length}.{weights} Versions: {versions}."


def _results(metrics: Mapping[str, float]) -> str:
    if not metrics:
        return ""
    lines = ["## Results", "", "| metric | value |", "|---|---|"]
    for name, value in metrics.items():
        lines.append(f"| {name} | {value:.6g} |")
    return "\n".join(lines)


def _content(trained: _Trained) -> str:
    """Return a table of what identifies the data, and of the base model."""
    rows = []
    inputs = dict(trained.record.environment.get("inputs", {}))
    data = [(name, text) for name, text in inputs.items() if " set, " in name]
    for name, text in data[:_ROWS]:
        rows.append(f"| {name} | {_short(text)} |")
    if trained.base_details:
        rows.append(f"| base | {_details(trained.base_details)} |")
    elif trained.base:
        rows.append(f"| base | {trained.base} |")

    if not rows:
        return ""
    return "\n".join(["## Data and revisions", "", "| | |", "|---|---|", *rows])


def _details(entry: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_short(value)}" for key, value in entry.items())


def _short(value: Any) -> str:
    """Return a value in one cell of a table, cut after four items."""
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_short(inside)}" for key, inside in list(value.items())[:4])
    if isinstance(value, list):
        return " ".join(map(str, value[:4]))
    return str(value).replace("|", "\\|").replace("\n", " ")


def _curves(record: Record) -> str:
    """Return the loss curves as text, one chart for each metric and each set of weights."""
    charts = []
    for metric in ("train/loss", "eval/loss"):
        for weights, curve in record.curves.get(metric, {}).items():
            title = f"{metric} over steps"
            if weights not in ("", "raw"):
                title = f"{title} ({weights})"
            charts += _chart(title, curve)
    if not charts:
        return ""
    return "## Curves\n\n```text\n" + "\n\n".join(charts) + "\n```"


def _chart(title: str, curve: Curve) -> list[str]:
    """Return the chart of a curve; nothing if it has fewer than two finite points."""
    # plotille cannot draw NaN and Inf.
    steps = []
    values = []
    for step, value in curve.points():
        if math.isfinite(value):
            steps.append(step)
            values.append(value)
    if len(steps) < 2:
        return []
    lines = plotted([(steps, values, None)], width=60, height=10)
    return ["\n".join([title, *map(str.rstrip, lines)])]


def _recipe(record: Record) -> str:
    """Return the recipe's keys that decide what is trained, as YAML."""
    shown = {}
    for name in _RECIPE_KEYS:
        if name in record.recipe:
            shown[name] = record.recipe[name]
    for name, group in record.recipe.items():
        if name in _RECIPE_GROUPS:
            shown[name] = group
    return f"```yaml\n{yaml.safe_dump(shown, sort_keys=False, allow_unicode=True).rstrip()}\n```"
