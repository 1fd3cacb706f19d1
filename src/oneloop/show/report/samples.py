"""Samples on the page: pictures with what was predicted, texts shaded by their loss, what a language model writes."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

_DARKEST = 8.0
"""loss (nats) of a token with the full shade"""


def sections(examples: Mapping[str, Any], *, of: str = "") -> list[str]:
    """HTML sections of what the last evaluation left to look at."""
    samples = examples.get("samples") or []
    at = f"at step {examples.get('step')}"
    worst = [one for one in samples if one.get("worst")]
    fixed = [one for one in samples if not one.get("worst")]
    written = [one for one in fixed if "continuation" in one]
    found = []
    if written:
        found.append(_section(f"What the model writes{of}, {at}", [_written(one) for one in written], "texts"))
        fixed = []
    if fixed:
        found.append(_section(f"Predictions{of}, {at}", [_card(one) for one in fixed], _kind(fixed)))
    if worst:
        found.append(_section(f"The largest losses{of}, {at}", [_card(one) for one in worst], _kind(worst)))
    return found


def _kind(samples: Sequence[Mapping[str, Any]]) -> str:
    return "pictures" if "image" in samples[0] else "texts"


def _section(title: str, cards: Sequence[str], kind: str) -> str:
    items = "".join(f"<li>{card}</li>" for card in cards)
    return f'<section><h2>{html.escape(title)}</h2><ul class="samples {kind}">{items}</ul></section>'


def _card(one: Mapping[str, Any]) -> str:
    return _body(one) + f'<p class="verdict">{_verdict(one)}</p>'


def _verdict(one: Mapping[str, Any]) -> str:
    words = []
    if "prediction" in one:
        right = one.get("right", one["prediction"] == one.get("target"))
        sure = f", {100 * one['confidence']:.0f} %" if "confidence" in one else ""
        words.append(
            f'<b class="{"right" if right else "wrong"}">{"✓" if right else "✗"} {_safe(one["prediction"])}{sure}</b>'
        )
        if not right:
            words.append(f"is {_safe(one.get('target', ''))}")
    elif "target" in one:
        words.append(_safe(one["target"]))
    if one.get("loss") is not None:
        words.append(f"loss {one['loss']:.3g}")
    return " · ".join([*words, f'<span class="soft">sample {one["index"]}</span>'])


def _body(one: Mapping[str, Any]) -> str:
    if "image" in one:
        said = f"sample {one['index']}: is {one.get('target', 'unknown')}, predicted {one.get('prediction', 'nothing')}"
        return f'<img src="{_safe(one["image"])}" alt="{_safe(said)}">'
    if "tokens" in one:
        return f'<pre tabindex="0">{"".join(_token(text, loss) for text, loss in one["tokens"])}</pre>'
    return f'<pre tabindex="0">{_safe(one.get("text", ""))}</pre>'


def _token(text: str, loss: float) -> str:
    shade = min(1.0, max(0.0, loss) / _DARKEST) if math.isfinite(loss) else 1.0
    return f'<span style="--s:{shade:.2f}" title="{loss:.2f}">{_safe(text)}</span>' if shade > 0.05 else _safe(text)


def _written(one: Mapping[str, Any]) -> str:
    return (
        f'<pre tabindex="0"><span class="soft">{_safe(one.get("prompt", ""))}</span><mark>{_safe(one["continuation"])}</mark></pre>'
        f'<p class="verdict"><span class="soft">given text, then the model\'s · sample {one["index"]}</span></p>'
    )


def _safe(text: Any) -> str:
    return html.escape(str(text))
