"""Write what the schema states: ``python docs/reference/make_keys.py``.

These are keys.md (all keys), why-these-keys.md (their reasons, from reasons.txt), and
packaged_keys.json (the keys of the packaged tasks, optimizers and schedules).
"""

import json
from collections.abc import Iterator
from pathlib import Path

from oneloop.recipe.key_parser import parser
from oneloop.recipe.synonyms import GONE

PACKAGED_KEYS = Path(__file__).parents[2] / "src" / "oneloop" / "recipe" / "packaged_keys.json"
PAGE = Path(__file__).with_name("keys.md")
WHY = Path(__file__).with_name("why-these-keys.md")
REASONS = Path(__file__).with_name("reasons.txt")
TASKS = (
    "image_classification",
    "causal_lm",
    "masked_lm",
    "sft",
    "reward",
    "seq2seq",
    "text_classification",
    "text_regression",
    "token_classification",
)
TASKS += ("text_pairs", "preference", "distil")
OPTIMIZERS = ("adamw", "sgd", "muon")
SCHEDULES = ("cosine", "linear", "wsd", "constant", "plateau")
HEAD = """# All keys

Every key of a recipe. A DURATION: steps (`500`), `20ep`, `1M samples`, `2B tokens`, or a share \
(`10%`). `batch.size` is
`batch: {size: 128}` in YAML and `--batch.size 128` in a command. An empty last cell repeats the \
one above.
"""
WHY_HEAD = """# Why these keys

A key of a recipe has a reason: an article on training names it, or two of Trainer, Lightning, \
timm, torchtitan and nanoGPT
have it (their names are in the table), or a public program that oneloop reproduces needs it, or \
it is part of oneloop's
contract: bit-identical runs and resumes, exit codes, and one message for bad input. The \
arguments of a task (`task.*`) and of a
class by path are those of the class. [All keys](keys.md) says what each key means.

| key | reason |
|---|---|
"""
GONE_HEAD = """
## Keys that are gone

A recipe with such a key, or with a name from another program, is rejected with this sentence.

| name | instead |
|---|---|
"""
ROW = tuple[str, str, str, str]
CHOICES = {"task": TASKS, "optimizer": OPTIMIZERS, "schedule": SCHEDULES}
CHOSEN = {group: choices[0] for group, choices in CHOICES.items()}


def rows(**chosen: str) -> Iterator[ROW]:
    """Yield key, type, default and meaning of each key of these choices."""
    for action in parser(**CHOSEN | chosen)._actions:
        if action.dest != "help" and action.default != "==SUPPRESS==":
            cells = (action.dest, str(action.metavar or ""), str(action.default), action.help or "")
            key, kind, default, meaning = (
                " ".join(cell.split()).replace("|", "\\|") for cell in cells
            )
            yield key, "`" + kind.replace("\\|", "` or `") + "`", f"`{default}`", meaning


def merged(group: str) -> Iterator[str]:
    """Yield table rows of a group whose keys depend on its name; if a key has several meanings,
    with their choices."""
    found: dict[str, dict[str, tuple[str, str, str]]] = {}
    for choice in CHOICES[group]:
        for key, *cells in rows(**{group: choice}):
            if key.startswith(f"{group}."):
                found.setdefault(key, {})[choice] = (cells[0], cells[1], cells[2])
    above: list[str] = []
    for key, by in sorted(
        found.items(), key=lambda row: (-len(row[1]), CHOICES[group].index(next(iter(row[1]))))
    ):
        kinds, defaults, meanings = (
            [*dict.fromkeys(values)] for values in zip(*by.values(), strict=True)
        )
        meaning = meanings[0]
        if len(meanings) > 1:
            choices = {
                text: [choice for choice, cells in by.items() if cells[2] == text]
                for text in meanings
            }
            meaning = "<br>".join(f"{', '.join(choices[text])}: {text}" for text in meanings)
        names = "" if [*by] == above else "all" if len(by) == len(CHOICES[group]) else ", ".join(by)
        above = [*by]
        yield f"| `{key}` | {' / '.join(kinds)} | {' / '.join(defaults)} | {meaning} | {names} |"


def page() -> str:
    """Return the whole page."""
    lines = [HEAD]
    for group in CHOICES:
        lines += [
            f"## {group}",
            "",
            f"| key | type | default | meaning | {group}.name |",
            "|---|---|---|---|---|",
        ]
        lines += [*merged(group), ""]
    lines += ["## All other keys", "", "| key | type | default | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{key}` | {kind} | {default} | {text} |"
        for key, kind, default, text in rows()
        if key.partition(".")[0] not in CHOICES
    ]
    return "\n".join(lines) + "\n"


def reasons() -> dict[str, str]:
    """Return the reasons by key, of which reasons.txt has one per line."""
    lines = REASONS.read_text(encoding="utf-8").splitlines()
    return {key: reason for key, _, reason in (line.partition(": ") for line in lines)}


def why_page() -> str:
    """Return the page of the reasons, with what to do instead of keys that are gone."""
    why = [f"| `{key}` | {reason} |" for key, reason in reasons().items()]
    instead: dict[str, list[str]] = {}
    for name, sentence in GONE.items():
        instead.setdefault(sentence, []).append(f"`{name}`")
    gone = [f"| {', '.join(names)} | {sentence} |" for sentence, names in instead.items()]
    return WHY_HEAD + "\n".join(why) + "\n" + GONE_HEAD + "\n".join(gone) + "\n"


def packaged_keys() -> str:
    """Return the keys of each task, optimizer and schedule as JSON, for a check without imports."""
    keys = {
        group: {
            choice: sorted(
                key for key, *_ in rows(**{group: choice}) if key.startswith(f"{group}.")
            )
            for choice in choices
        }
        for group, choices in CHOICES.items()
    }
    return json.dumps(keys, indent=0) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    WHY.write_text(why_page())
    PACKAGED_KEYS.write_text(packaged_keys())
