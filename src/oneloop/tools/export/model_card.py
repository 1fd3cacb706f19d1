"""A model card for the Hugging Face hub: ``model_card.md`` is its template."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader

from oneloop.tools.run_reader import Record, entries, number, read_record
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
_ROWS = 20  # of the table of data, at most
_RECIPE = ("seed", "duration", "task", "batch", "optimizer", "schedule")  # keys that a card shows
_NEW_ENCODERS = ("bytes", "bpe")  # values of task.model that name no base model
_HUB = "hf:"


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

    record = read_record(run)
    task = entries(record.recipe.get("task"))
    kind = _KINDS.get(str(task.get("name")))  # None: the hub has no name of this task
    data = _sources(task.get("data"))
    metrics = _metrics(record)

    # Adapters record their base model; other weights may start from one that the recipe names.
    adapters = "base" in about
    details = about.get("base") or {}
    base = details.get("place") or task.get("model")
    if base in _NEW_ENCODERS:
        base = None

    # The library that the hub suggests for loading the weights.
    library = None
    if kind == "sentence-similarity":
        library = "sentence-transformers"
    elif language_model:
        library = "peft" if adapters else "transformers"

    # Describe the weights for the hub, which reads the card's head.
    head = ModelCardData(
        model_name=name.rpartition("/")[2],
        license=licence,
        library_name=library,
        pipeline_tag=kind,
        base_model=_repository_of(base),
        datasets=list(filter(None, map(_repository_of, data))) or None,
        tags=["oneloop", "lora"] if adapters else ["oneloop"],
        eval_results=_eval_results(kind, data, metrics) or None,
    )

    # Describe them for readers. HTML in texts is escaped, except in blocks of code.
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = _cell
    environment.filters["whole"] = lambda value: f"{number(value):,.0f}"
    inputs = entries(record.environment.get("inputs")).items()
    return environment.get_template("model_card.md").render(
        head=head.to_yaml(),
        name=name,
        adapters=adapters,
        base=base,
        summary=record.summary,
        weights=about.get("weights"),
        versions=entries(record.environment.get("versions")),
        metrics=metrics,
        inputs=[(input, text) for input, text in inputs if " set, " in input][:_ROWS],
        details=details,
        curves=[*_curves(record)],
        recipe=_recipe(record),
    )


def _sources(data: Any) -> list[str]:
    """Return the sources that task.data names: one, or those of a mixture."""
    if not isinstance(data, list):
        return [] if data is None else [str(data)]
    return [str(entry["data"]) for entry in data if entry.get("data") is not None]


def _metrics(record: Record) -> dict[str, float]:
    """Return the finite evaluation and test metrics of the summary."""
    metrics = {}
    for name, value in record.summary.items():
        if name.startswith(("eval/", "test/")) and math.isfinite(number(value)):
            metrics[name] = number(value)
    return metrics


def _eval_results(kind: str | None, data: list[str], metrics: Mapping[str, float]) -> list[Any]:
    """Return the metrics as results on the first data set."""
    from huggingface_hub import EvalResult

    if not data:
        return []
    # The hub reads the data set from each result; of a mixture, the first one is named.
    results = []
    for name, value in metrics.items():
        split, _, metric = name.partition("/")
        result = EvalResult(
            task_type=kind or "other",
            dataset_type=data[0].removeprefix(_HUB).partition("@")[0],
            dataset_name=data[0],
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


def _cell(value: Any) -> str:
    """Return a value in one cell of a table, cut after four items."""
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_cell(inside)}" for key, inside in list(value.items())[:4])
    if isinstance(value, list):
        return " ".join(map(str, value[:4]))
    return str(value).replace("|", "\\|").replace("\n", " ")


def _curves(record: Record) -> Iterator[str]:
    """Yield the loss curves as text, one chart for each metric and each set of weights."""
    for metric in ("train/loss", "eval/loss"):
        for weights, curve in record.curves.get(metric, {}).items():
            title = f"{metric} over steps"
            if weights not in ("", "raw"):
                title = f"{title} ({weights})"

            # plotille cannot draw NaN and Inf, nor a single point.
            points = [point for point in curve.points if math.isfinite(point[1])]
            if len(points) > 1:
                steps, values = zip(*points, strict=True)
                lines = plotted([(steps, values, None)], width=60, height=10)
                yield "\n".join([title, *map(str.rstrip, lines)])


def _recipe(record: Record) -> str:
    """Return the recipe's keys that decide what is trained, as YAML."""
    shown = {name: record.recipe[name] for name in _RECIPE if name in record.recipe}
    text: str = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
    return text.rstrip()
