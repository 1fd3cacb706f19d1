"""A model card for the Hugging Face hub: base model, training data and results."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from oneloop.show.run_reader import Record, read_record
from oneloop.show.watch import PlotCurve, plotted

_KINDS = {
    "image_classification": "image-classification",
    "token_classification": "token-classification",
}
_KINDS |= dict.fromkeys(("causal_lm", "sft"), "text-generation") | {
    "text_pairs": "sentence-similarity"
}
_KINDS |= dict.fromkeys(("text_classification", "text_regression"), "text-classification")
"""the hub's task names (pipeline tags) by oneloop's"""
_HUB = "hf:"


def model_card(
    run: Path, name: str, about: Mapping[str, Any], *, licence: str | None, language_model: bool
) -> str:
    """Return the card of a run's weights in the repository ``name``.

    ``about`` is the manifest's entry of the weights; its ``base`` is the base model of adapters.
    ``licence`` is the hub's identifier, or None. ``language_model``: whether transformers, or peft,
    can load the weights."""
    from huggingface_hub import EvalResult, ModelCardData

    record = read_record(run)
    task = record.recipe.get("task", {})
    base = (about.get("base") or {}).get("place") or task.get("model")
    base = None if base in ("bytes", "bpe") else base  # new encoders
    kind = _KINDS.get(str(task.get("name")))
    metrics = {
        key: value for key, value in record.summary.items() if key.startswith(("eval/", "test/"))
    }
    metrics = {
        key: value
        for key, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    named = task.get("data")
    sources = [entry.get("data") for entry in named] if isinstance(named, list) else [named]
    data = [str(source) for source in sources if source is not None]
    library: str | None = (
        ("peft" if "base" in about else "transformers") if language_model else None
    )
    library = "sentence-transformers" if kind == "sentence-similarity" else library
    results = [
        EvalResult(
            task_type=kind or "other",
            dataset_type=source.removeprefix(_HUB).partition("@")[0],
            dataset_name=source,
            dataset_split=key.partition("/")[0].replace("eval", "validation"),
            metric_type=key.partition("/")[2],
            metric_value=value,
        )
        for key, value in metrics.items()
        for source in data[:1]
    ]
    fields: dict[str, Any] = {
        "datasets": [found for source in data if (found := _repository_of(source))] or None
    }
    fields |= {
        "tags": ["oneloop", *(["lora"] if "base" in about else [])],
        "base_model": _repository_of(base),
    }
    fields |= {
        "license": licence,
        "library_name": library,
        "pipeline_tag": kind,
        "eval_results": results or None,
    }
    head = ModelCardData(model_name=name.rpartition("/")[2], **fields)
    parts = [
        f"# {name}",
        _sentence(record, about, base),
        _results(metrics),
        _content(record, base, about),
    ]
    parts += [
        _curves(record),
        "## Recipe\n\nAs `recipe.yaml` in this repository, in full.\n\n" + _recipe(record),
    ]
    return f"---\n{head.to_yaml()}\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def _repository_of(source: Any) -> str | None:
    """Return the hub repository of a source; None for a local path."""
    return (
        source.removeprefix(_HUB).partition("@")[0]
        if isinstance(source, str) and source.startswith(_HUB)
        else None
    )


def _sentence(record: Record, about: Mapping[str, Any], base: str | None) -> str:
    summary = record.summary
    what = "Low-rank adapters (LoRA)" if "base" in about else "A model"
    stands = f" based on {base}" if base else ""
    weights = {"raw": "", None: ""}.get(about.get("weights"), f" Weights: {about.get('weights')}.")
    length = (
        f"{summary['step']:,} steps, {summary['samples']:,} samples"
        if "step" in summary
        else "a run in progress"
    )
    versions = record.environment.get("versions", {})
    known = ", ".join(
        f"{k} {versions[k]}" for k in ("oneloop", "torch", "transformers", "peft") if k in versions
    )
    return f"{what}{stands}, trained with oneloop: {length}.{weights} Versions: {known}."


def _results(metrics: Mapping[str, float]) -> str:
    if not metrics:
        return ""
    rows = [f"| {key} | {value:.6g} |" for key, value in metrics.items()]
    return "\n".join(["## Results", "", "| metric | value |", "|---|---|", *rows])


def _content(record: Record, base: str | None, about: Mapping[str, Any]) -> str:
    rows = []
    for part, entry in record.environment.get("data", {}).items():
        if isinstance(entry, Mapping):
            what = ", ".join(
                f"{key} {_short(value)}" for key, value in entry.items() if key != "made by"
            )
            rows.append(f"| data, {part} | {what} |")
    if stands := about.get("base"):
        what = ", ".join(f"{key} {_short(value)}" for key, value in stands.items())
        rows.append(f"| base | {what} |")
    elif base:
        rows.append(f"| base | {base} |")
    return "\n".join(["## Data and revisions", "", "| | |", "|---|---|", *rows]) if rows else ""


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_short(inside)}" for key, inside in list(value.items())[:4])
    if isinstance(value, list):
        return " ".join(str(inside) for inside in value[:4])
    return str(value).replace("|", "\\|").replace("\n", " ")


def _curves(record: Record) -> str:
    charts = []
    for metric in ("train/loss", "eval/loss"):
        for weights, curve in record.curves.get(metric, {}).items():
            points = [
                (step, value)
                for step, value in zip(*curve.points(), strict=True)
                if math.isfinite(value)
            ]
            if len(points) < 2:
                continue
            steps, values = zip(*points, strict=True)
            drawn: list[PlotCurve] = [(steps, values, None)]
            title = f"{metric} over steps{f' ({weights})' if weights not in ('', 'raw') else ''}"
            charts.append(
                "\n".join([title, *(line.rstrip() for line in plotted(drawn, width=60, height=10))])
            )
    return "## Curves\n\n```text\n" + "\n\n".join(charts) + "\n```" if charts else ""


def _recipe(record: Record) -> str:
    groups = {
        key: value
        for key, value in record.recipe.items()
        if key in ("task", "batch", "optimizer", "schedule")
    }
    more: dict[str, Any] = {
        key: record.recipe[key] for key in ("seed", "duration") if key in record.recipe
    }
    more |= groups
    return f"```yaml\n{yaml.safe_dump(more, sort_keys=False, allow_unicode=True).rstrip()}\n```"
