"""The samples of the report page."""

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from oneloop.tools.run_reader import number

_PICTURE = re.compile(r"data:image/png;base64,[A-Za-z0-9+/=]*")
_TEXTS = 4  # texts of a section that are not folded
_DARKEST = 8.0  # loss (nats) of a token with the full shade


def sections(examples: Mapping[str, Any], *, of: str = "") -> list[str]:
    """Return the HTML sections of the last evaluation's samples.

    Args:
        examples: the content of examples.json.
        of: follows the titles; names the run if there are several.
    """
    given = examples.get("samples")
    samples = []
    if isinstance(given, list):
        samples = [sample for sample in given if isinstance(sample, Mapping)]
    at = f"at step {examples.get('step')}"
    weights = examples.get("weights")
    if weights is not None:
        at += f", {weights} weights"
    worst = [sample for sample in samples if sample.get("worst")]
    fixed = [sample for sample in samples if not sample.get("worst")]
    written = [sample for sample in fixed if "continuation" in sample]

    # A language model writes texts. Others predict.
    shown = []
    if written:
        shown.append(_section(f"Generated texts{of}, {at}", map(_written, written)))
        partly = [sample for sample in written if _has_untrained(sample)]
        if partly:
            title = f"Trained tokens of a sample{of}, {at}"
            shown.append(_section(title, [_card(partly[0])]))
    elif fixed:
        title = f"{_what(fixed)} validation samples{of}, {at}"
        shown.append(_section(title, map(_card, fixed), _widest(fixed)))
    if worst:
        title = f"Validation samples with the largest losses{of}, {at}"
        shown.append(_section(title, map(_card, worst), _widest(worst)))
    return shown


def _what(samples: Sequence[Mapping[str, Any]]) -> str:
    """Return how a title begins, by what the samples show."""
    if any("prediction" in sample or "prediction" in _parts(sample) for sample in samples):
        return "Predictions for"
    return "Pictures for" if _widest(samples) else "Some"


def _has_untrained(sample: Mapping[str, Any]) -> bool:
    """Return whether some tokens after the first one are not trained."""
    return any(loss is None for _, loss in _pairs(sample.get("tokens"))[1:])


def _widest(samples: Sequence[Mapping[str, Any]]) -> int:
    """Return the largest number of pictures of a sample; 0: the samples are texts."""
    return max(len(_parts(sample)) for sample in samples)


def _parts(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the pictures of a sample by name."""
    parts = sample.get("parts")
    return parts if isinstance(parts, Mapping) else {}


def _section(title: str, cards: Iterable[str], pictures: int = 0) -> str:
    """Return the HTML of a section; ``pictures`` is their number in a card, 0 for texts."""
    items = [f"<li>{card}</li>" for card in cards]
    head = f"<section><h2>{html.escape(title)}</h2>"
    if pictures:
        style = f'class="samples pictures" style="--parts:{pictures}"'
        return f"{head}<ul {style}>{''.join(items)}</ul></section>"

    # Fold the texts after the first ones.
    texts = f'<ul class="samples texts">{"".join(items[:_TEXTS])}</ul>'
    more = items[_TEXTS:]
    if more:
        texts += f"<details><summary>{len(more)} more</summary>"
        texts += f'<ul class="samples texts">{"".join(more)}</ul></details>'
    return f"{head}{texts}</section>"


def _card(sample: Mapping[str, Any]) -> str:
    return _body(sample) + f'<p class="verdict">{_verdict(sample)}</p>'


def _verdict(sample: Mapping[str, Any]) -> str:
    words = []
    if "prediction" in sample:
        prediction = sample["prediction"]
        right = prediction == sample.get("target")
        sure = ""
        if "confidence" in sample:
            sure = f", confidence {100 * number(sample['confidence']):.0f} %"

        # Mark the prediction, unless it can be neither right nor wrong.
        mark, kind = "", "soft"
        if "right" in sample or ("target" in sample and not _measured(prediction)):
            right = bool(sample.get("right", right))
            mark, kind = ("✓ ", "right") if right else ("✗ ", "wrong")
        words.append(f'<b class="{kind}">{mark}prediction {_safe(prediction)}{sure}</b>')
        if not right and "target" in sample:
            words.append(f"label {_safe(sample['target'])}")
    elif "target" in sample:
        words.append(_safe(sample["target"]))
    if sample.get("loss") is not None:
        words.append(f"loss {number(sample['loss']):.3g}")
    return " · ".join([*words, f'<span class="soft">sample {_safe(sample.get("index"))}</span>'])


def _measured(text: Any) -> bool:
    """Return whether the text is a non-integer number (regression)."""
    try:
        return not float(text).is_integer()
    except (TypeError, ValueError):
        return False


def _body(sample: Mapping[str, Any]) -> str:
    parts = _parts(sample)
    if parts:
        figures = ""
        for part, picture in parts.items():
            words = [part]
            if "target" in sample:
                words.append(f"is {sample['target']}")
            if "prediction" in sample:
                words.append(f"predicted {sample['prediction']}")
            drawn = _image(picture, f"sample {sample.get('index')}: {', '.join(words)}")
            name = f"<figcaption>{_safe(part)}</figcaption>" if len(parts) > 1 else ""
            figures += f"<figure>{drawn}{name}</figure>"
        return f'<div class="parts">{figures}</div>{_caption(sample)}'
    if isinstance(sample.get("tokens"), list | tuple):
        tokens = "".join(_token(str(text), loss) for text, loss in _pairs(sample["tokens"]))
        return f'<pre tabindex="0">{tokens}</pre>'
    return f'<pre tabindex="0">{_safe(sample.get("text", ""))}</pre>'


def _image(picture: Any, text: str) -> str:
    """Return an image with a text for screen readers; only the text if it is not a picture."""
    # A run writes only data URLs. Another URL might be fetched.
    if not _PICTURE.fullmatch(str(picture)):
        return f'<pre tabindex="0">{_safe(text)}</pre>'
    return f'<img src="{picture}" alt="{_safe(text)}">'


def _caption(sample: Mapping[str, Any]) -> str:
    return f"<p>{_safe(sample['text'])}</p>" if sample.get("text") else ""


def _pairs(given: Any) -> list[Any]:
    """Return the pairs in a list, tokens and their losses (None: not trained); skip the rest."""
    items = given if isinstance(given, list | tuple) else ()
    return [pair for pair in items if isinstance(pair, list | tuple) and len(pair) == 2]


def _token(text: str, loss: Any) -> str:
    """Return a token, shaded by its loss (nats); None: not trained."""
    if loss is None:
        return f'<span class="soft">{_safe(text)}</span>'
    loss = number(loss)
    shade = 1.0
    if math.isfinite(loss):
        shade = min(1.0, max(0.0, loss) / _DARKEST)
    if shade <= 0.05:
        return _safe(text)
    return f'<span style="--s:{shade:.2f}" title="{loss:.2f}">{_safe(text)}</span>'


def _written(sample: Mapping[str, Any]) -> str:
    reference = ""
    if "target" in sample:
        reference = f" · reference: {_safe(sample['target'])}"
    return (
        f'<pre tabindex="0"><span class="soft">{_safe(sample.get("prompt", ""))}</span>'
        f"<mark>{_safe(sample['continuation'])}</mark></pre>"
        f'<p class="verdict"><span class="soft">given text, then the model\'s · sample'
        f" {_safe(sample.get('index'))}</span>{reference}</p>"
    )


def _safe(text: Any) -> str:
    return html.escape(str(text))
