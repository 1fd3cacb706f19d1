"""The samples and classes of the report page."""

import html
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from oneloop.show.run_reader import number


def of_classes(confusion: Mapping[str, Any]) -> list[tuple[str, int, str, str, str]]:
    """Return for each class its name, its samples, precision, recall and F1; a dash if there is
    nothing to divide by.

    The rows of ``counts`` are the true classes."""
    counts = confusion["counts"]
    found = []
    for index, name in enumerate(confusion["classes"]):
        right, there = counts[index][index], sum(counts[index])
        shown = sum(row[index] for row in counts)
        found.append(
            (
                name,
                there,
                _share(right, shown),
                _share(right, there),
                _share(2 * right, shown + there),
            )
        )
    return found


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.4f}" if whole else "–"


_PICTURE = re.compile(r"data:image/png;base64,[A-Za-z0-9+/=]*")
_DARKEST = 8.0  # loss (nats) of a token with the full shade


def sections(examples: Mapping[str, Any], *, of: str = "") -> list[str]:
    """Return the HTML sections of the last evaluation's samples."""
    given = examples.get("samples")
    samples = (
        [sample for sample in given if isinstance(sample, Mapping)]
        if isinstance(given, list)
        else []
    )
    at = f"at step {examples.get('step')}"
    worst = [sample for sample in samples if sample.get("worst")]
    fixed = [sample for sample in samples if not sample.get("worst")]
    written = [sample for sample in fixed if "continuation" in sample]
    shown = []
    if written:
        shown.append(
            _section(
                f"Generated texts{of}, {at}", [_written(sample) for sample in written], "texts"
            )
        )
        part = [
            sample
            for sample in written
            if any(loss is None for _, loss in _pairs(sample.get("tokens"))[1:])
        ]
        if part:
            shown.append(
                _section(f"Trained tokens of a sample{of}, {at}", [_card(part[0])], "texts")
            )
        fixed = []
    if fixed:
        shown.append(
            _section(
                f"Predictions for validation samples{of}, {at}",
                [_card(sample) for sample in fixed],
                _kind(fixed),
            )
        )
    if worst:
        shown.append(
            _section(
                f"Validation samples with the largest losses{of}, {at}",
                [_card(sample) for sample in worst],
                _kind(worst),
            )
        )
    return shown


def _kind(samples: Sequence[Mapping[str, Any]]) -> str:
    return "pictures" if "image" in samples[0] else "texts"


def _section(title: str, cards: Sequence[str], kind: str) -> str:
    items = "".join(f"<li>{card}</li>" for card in cards)
    return (
        f'<section><h2>{html.escape(title)}</h2><ul class="samples {kind}">{items}</ul></section>'
    )


def _card(sample: Mapping[str, Any]) -> str:
    return _body(sample) + f'<p class="verdict">{_verdict(sample)}</p>'


def _verdict(sample: Mapping[str, Any]) -> str:
    words = []
    if "prediction" in sample:
        right = sample["prediction"] == sample.get("target")
        sure = (
            f", confidence {100 * number(sample['confidence']):.0f} %"
            if "confidence" in sample
            else ""
        )
        mark, kind = "", "soft"
        if "right" in sample or not (_measured(sample["prediction"]) or "target" not in sample):
            right = bool(sample.get("right", right))
            mark, kind = ("✓ ", "right") if right else ("✗ ", "wrong")
        words.append(f'<b class="{kind}">{mark}prediction {_safe(sample["prediction"])}{sure}</b>')
        if not right and "target" in sample:
            words.append(f"label {_safe(sample['target'])}")
    elif "target" in sample:
        words.append(_safe(sample["target"]))
    if sample.get("loss") is not None:
        words.append(f"loss {number(sample['loss']):.3g}")
    return " · ".join([*words, f'<span class="soft">sample {_safe(sample.get("index"))}</span>'])


def _measured(text: Any) -> bool:
    """Return whether the text is a non-integer number (regression), which is neither right nor
    wrong."""
    try:
        return not float(text).is_integer()
    except (TypeError, ValueError):
        return False


def _body(sample: Mapping[str, Any]) -> str:
    if "image" in sample:
        parts = [f"is {sample['target']}"] if "target" in sample else []
        parts += [f"predicted {sample['prediction']}"] if "prediction" in sample else []
        shown = _safe(
            ": ".join([f"sample {sample.get('index')}", *([", ".join(parts)] if parts else [])])
        )
        picture = str(sample["image"])
        # a run writes only data URLs; another URL might be fetched
        if not _PICTURE.fullmatch(picture):
            return f'<pre tabindex="0">{shown}</pre>'
        text = f"<p>{_safe(sample['text'])}</p>" if sample.get("text") else ""
        return f'<img src="{picture}" alt="{shown}">{text}'
    if isinstance(sample.get("tokens"), list | tuple):
        pairs = _pairs(sample["tokens"])
        tokens = [_token(str(text), None if loss is None else number(loss)) for text, loss in pairs]
        return f'<pre tabindex="0">{"".join(tokens)}</pre>'
    return f'<pre tabindex="0">{_safe(sample.get("text", ""))}</pre>'


def _pairs(given: Any) -> list[Any]:
    """Return the pairs in a list: tokens and their losses (None: not trained), or steps and
    texts."""
    items = given if isinstance(given, list | tuple) else ()
    return [pair for pair in items if isinstance(pair, list | tuple) and len(pair) == 2]


def _token(text: str, loss: float | None) -> str:
    if loss is None:
        return f'<span class="soft">{_safe(text)}</span>'
    shade = min(1.0, max(0.0, loss) / _DARKEST) if math.isfinite(loss) else 1.0
    return (
        f'<span style="--s:{shade:.2f}" title="{loss:.2f}">{_safe(text)}</span>'
        if shade > 0.05
        else _safe(text)
    )


def _written(sample: Mapping[str, Any]) -> str:
    return (
        f'<pre tabindex="0"><span class="soft">{_safe(sample.get("prompt", ""))}</span>'
        f"<mark>{_safe(sample['continuation'])}</mark></pre>{_earlier(sample.get('earlier'))}"
        f'<p class="verdict"><span class="soft">given text, then the model\'s · sample'
        f" {_safe(sample.get('index'))}</span></p>"
    )


def _earlier(given: Any) -> str:
    lines = "".join(
        f"<li>step {_safe(step)}: <code>{_safe(text)}</code></li>" for step, text in _pairs(given)
    )
    return (
        f"<details><summary>As training went on</summary><ul>{lines}</ul></details>"
        if lines
        else ""
    )


def _safe(text: Any) -> str:
    return html.escape(str(text))
