"""Groups of metrics that differ only in a class: they are curves of one chart."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence


def grouped(
    names: Sequence[str],
    *,
    classes: Collection[str] = (),
) -> dict[str, dict[str, str]]:
    """Return the metrics of each chart, with the class of each.

    >>> grouped(["eval/loss", "eval/f1_cat", "eval/f1_dog"], classes=["cat", "dog"])
    {'eval/loss': {'eval/loss': ''}, 'eval/f1': {'eval/f1_cat': 'cat', 'eval/f1_dog': 'dog'}}

    Args:
        names: of all metrics, each of the form ``SET/NAME``.
        classes: known names of classes.
    """
    stems = Counter[str]()
    for name in names:
        stems.update(stem for stem, _ in _splits(name, classes))

    # The stem of the most metrics is the best; of equal ones, the longest.
    groups: dict[str, dict[str, str]] = {}
    for name in names:
        title = name
        label = ""
        most = 2  # a chart of its own is better for a single class
        for stem, ending in _splits(name, classes):
            if stems[stem] >= most:
                title = stem
                label = ending
                most = stems[stem]
        groups.setdefault(title, {})[name] = label
    return groups


def _splits(name: str, classes: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield beginnings and endings of a metric which may be a measure and a class."""
    start = name.find("/") + 1
    for at in range(start + 1, len(name) - 1):
        stem = name[:at]
        ending = name[at + 1 :]
        # The loss of each part of a mixture of data sets is SET/loss/PART.
        if name[at] in "_/" and (ending in classes or stem.endswith("/loss")):
            yield stem, ending
