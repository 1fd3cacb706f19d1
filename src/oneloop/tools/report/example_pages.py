"""The samples of the report page, as its template shows them."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from oneloop.tools.run_reader import entries, number

_PICTURE = re.compile(r"data:image/png;base64,[A-Za-z0-9+/=]*")
_DARKEST = 8.0  # loss (nats) of a token with the full shade

Token = tuple[str, str | None, str]
"""a text, its loss (None: not trained), and its shade (empty: none)"""


def sample_cards(examples: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cards of the last evaluation's samples, in groups.

    Args:
        examples: the content of examples.json.
    """
    listed = examples.get("samples")
    cards = []
    for sample in listed if isinstance(listed, list) else ():
        if isinstance(sample, Mapping):
            cards.append(_card(sample))
    worst = [card for card in cards if card.get("worst")]
    fixed = [card for card in cards if not card.get("worst")]

    # A language model writes texts. Others predict.
    written = [card for card in fixed if "continuation" in card]
    partly = [card for card in written if _has_untrained(card["tokens"] or [])]
    if written:
        fixed = []
    what = "Pictures for" if _widest(fixed) else "Some"
    if any("prediction" in (*card, *dict(card["pictures"])) for card in fixed):
        what = "Predictions for"
    return {
        "any": cards,
        "step": examples.get("step"),
        "weights": examples.get("weights"),
        "written": written,
        "partly": partly[:1],
        "what": what,
        "fixed": fixed,
        "fixed_pictures": _widest(fixed),
        "worst": worst,
        "worst_pictures": _widest(worst),
    }


def _widest(cards: Sequence[Mapping[str, Any]]) -> int:
    """Return the largest number of pictures of a card; 0: the samples are texts."""
    return max((len(card["pictures"]) for card in cards), default=0)


def _has_untrained(tokens: Sequence[Token]) -> bool:
    """Return whether some tokens after the first one are not trained."""
    return any(loss is None for _, loss, _ in tokens[1:])


def _card(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample with what its card shows: pictures or tokens, and the verdict."""
    pictures = []
    for part, url in entries(sample.get("parts")).items():
        # A run writes only data URLs. Another URL might be fetched.
        pictures.append((part, url if _PICTURE.fullmatch(str(url)) else ""))
    tokens = sample.get("tokens")
    sure = sample.get("confidence")
    loss = sample.get("loss")
    return {
        **sample,
        "pictures": pictures,
        "tokens": _tokens(tokens) if isinstance(tokens, list | tuple) else None,
        "kind": _kind(sample),
        "sure": None if sure is None else f"{100 * number(sure):.0f}",
        "loss": None if loss is None else f"{number(loss):.3g}",
    }


def _kind(sample: Mapping[str, Any]) -> str:
    """Return whether a prediction is right, wrong, or can be neither (soft)."""
    prediction = sample.get("prediction")
    right = sample.get("right")
    if right is None:
        if "target" not in sample or _is_measured(prediction):
            return "soft"
        right = prediction == sample["target"]
    return "right" if right else "wrong"


def _is_measured(text: Any) -> bool:
    """Return whether the text is a non-integer number (regression)."""
    try:
        return not float(text).is_integer()
    except (TypeError, ValueError):
        return False


def _tokens(pairs: Sequence[Any]) -> list[Token]:
    """Return tokens, shaded by their loss (nats). Skip what is not a pair of text and loss."""
    tokens: list[Token] = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            continue
        text, loss = pair
        if loss is None:
            tokens.append((str(text), None, ""))
            continue
        loss = number(loss)
        shade = 1.0
        if math.isfinite(loss):
            shade = min(1.0, max(0.0, loss) / _DARKEST)
        tokens.append((str(text), f"{loss:.2f}", f"{shade:.2f}" if shade > 0.05 else ""))
    return tokens
