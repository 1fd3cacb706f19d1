"""``oneloop check``: read all data of a recipe, or of a data set, and list what cannot be used."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.extras import how_to_install
from oneloop.basics.progress import tracked
from oneloop.tasks.columns import check_images
from oneloop.tasks.rows.cached_arrays import in_order
from oneloop.tasks.rows.objects import NoColumn
from oneloop.tasks.rows.open_data import Source, whole
from oneloop.tasks.rows.rows import FINDINGS, Findings
from oneloop.tools.check.asked import is_recipe

_SAMPLES = 64  # samples per task of a process
_PIXEL_LIMIT = 89_478_485  # default of task.pixel_limit


def check_data(source: str, words: Sequence[str] = ()) -> Findings:
    """Read a data set, or all data of a recipe.

    Args:
        source: a path or ``hf:NAME``, or a recipe.
        words: keys of the recipe.

    Returns:
        What cannot be used.

    Raises:
        BadInput: the recipe is unknown, or keys come after a data set.
    """
    is_data = not is_recipe(source)
    if is_data and words:
        raise BadInput(
            f"oneloop check {source} is a data set and takes no keys ({words[0]}); check a "
            "recipe with keys"
        )

    # Readers of data report to FINDINGS what they find, in place of raising an error.
    findings = Findings()
    token = FINDINGS.set(findings)
    try:
        if is_data:
            _check_source(source, findings)
        else:
            _check_task([source, *words], findings)
    except BadInput:
        raise
    except (ValueError, ImportError) as error:
        findings.unusable.append((source, f"{error}{how_to_install(error)}"))
    finally:
        FINDINGS.reset(token)
    return findings


def as_lines(source: str, found: Findings) -> list[str]:
    """Return the findings as lines for a terminal."""
    lines = [f"{where}: {why}" for where, why in found.unusable]
    lines += [f"{folder}: a class folder without images" for folder in found.empty]
    if found.converted:
        kinds = [f"{count:,} {kind}" for kind, count in found.converted.items()]
        lines.append(f"converted to RGB: {', '.join(kinds)}")
    if not found.values:
        lines.append("the rows can be read; check a recipe to check the values of its columns, too")
    count = f"{found.rows:,} {found.unit}"
    return [*lines, f"{source}: {count}, {len(found.unusable):,} cannot be used"]


def as_json(found: Findings) -> dict[str, Any]:
    """Return the findings as plain values.

    They are ``path``, ``row`` and ``reason`` of each row that cannot be used, and the counts."""
    unusable = []
    for where, why in found.unusable:
        path, _, row = where.rpartition(", ")
        unusable.append({"path": path or where, "row": row if path else None, "reason": why})
    return {
        "rows": found.rows,
        "unit": found.unit,
        "values_checked": found.values,
        "unusable": unusable,
        "converted": found.converted,
        "empty": found.empty,
    }


def _check_source(source: str, findings: Findings) -> None:
    """Read a data set: images or texts by the columns that it has, else only its rows."""
    for columns in ({"image": "image"}, {"text": "text"}, {"messages": "messages"}, {}):
        try:
            opened = whole(Source(source, columns), window=1 << 20)
        except ValueError as error:
            if isinstance(error.__cause__, NoColumn):
                continue
            raise
        if "image" in columns:
            check_images([opened], limit=_PIXEL_LIMIT)
        else:
            findings.rows = len(opened.parts["all"]) + findings.left_out
            findings.values = False
        return


def _check_task(words: Sequence[str], findings: Findings) -> None:
    from oneloop.job.task import make_task
    from oneloop.recipe.parse import read

    task = make_task(read(words))
    sets: Mapping[str, Any] = {"train": task.train_set(), **task.eval_sets()}

    # A packaged task has checked its rows. Its images are not decoded twice.
    if type(task).__module__.startswith("oneloop."):
        if not findings.rows:
            findings.rows = sum(map(len, sets.values())) + findings.left_out
            findings.unit = "samples"
        return

    # Load all samples of the user's task.
    for name, dataset in sets.items():
        findings.rows += len(dataset)
        findings.unusable += _unusable_samples(name, dataset)


def _unusable_samples(name: str, dataset: Any) -> Iterator[tuple[str, str]]:
    """Load every sample of a data set, on all cores; yield those that fail."""
    loaded = in_order(range(len(dataset)), partial(_load, dataset), _SAMPLES)
    checked = tracked(loaded, f"checking {name}", total=len(dataset))
    for index, (_, why, _) in enumerate(checked):
        if why:
            yield f"{name}, sample {index}", why


def _load(dataset: Any, index: int) -> None:
    """Load a sample. Raise ValueError if that fails."""
    try:
        dataset[index]
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
