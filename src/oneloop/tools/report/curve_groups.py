"""Groups of metrics that differ only in a class: they are curves of one chart."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

_LEAST = 3  # metrics of a group whose classes are not known


def grouped(
    names: Sequence[str], *, classes: Collection[str] = (), shares: Collection[str] = ()
) -> dict[str, dict[str, str]]:
    """Return the metrics of each chart, with the class of each.

    >>> grouped(["eval/loss", "eval/f1_cat", "eval/f1_dog"], classes=["cat", "dog"])
    {'eval/loss': {'eval/loss': ''}, 'eval/f1': {'eval/f1_cat': 'cat', 'eval/f1_dog': 'dog'}}

    Args:
        names: of all metrics, each of the form ``SET/NAME``.
        classes: known names of classes.
        shares: metrics whose values are all from 0 to 1. Three of them with the same beginning form
            a group, although their endings are no known classes.
    """
    stems = Counter[str]()
    for name in names:
        stems.update(stem for stem, _ in _splits(name, classes, shares))

    # The stem of the most metrics is the best; of equal ones, the longest.
    groups: dict[str, dict[str, str]] = {}
    for name in names:
        title = name
        label = ""
        most = 0
        for stem, ending in _splits(name, classes, shares):
            least = 2 if _is_class(stem, ending, classes) else _LEAST
            if stems[stem] >= max(least, most):
                title = stem
                label = ending
                most = stems[stem]
        groups.setdefault(title, {})[name] = label
    return groups


def _splits(
    name: str, classes: Collection[str], shares: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield beginnings and endings of a metric which may be a measure and a class."""
    start = name.find("/") + 1
    for at in range(start + 1, len(name) - 1):
        stem = name[:at]
        ending = name[at + 1 :]
        possible = name in shares or _is_class(stem, ending, classes)
        if name[at] in "_/" and possible:
            yield stem, ending


def _is_class(stem: str, ending: str, classes: Collection[str]) -> bool:
    # The loss of each part of a mixture of data sets is SET/loss/PART.
    return ending in classes or stem.endswith("/loss")
