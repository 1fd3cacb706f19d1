"""``oneloop worth``, as typed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from oneloop.basics.errors import BadInput
from oneloop.basics.files import replacing
from oneloop.basics.plain_json import dumps
from oneloop.plan.worth import worth as measured
from oneloop.recipe.parse import read
from oneloop.show.worth import as_page, as_table, sentences


def worth(words: Sequence[str]) -> int:
    """Run ``oneloop worth RECIPE …``: measure, print a table, write worth.json and worth.html; return the exit code.
    Raises BadInput."""
    own, training = {"--only": "", "--rounds": "5", "--seconds": "1", "--to": ""}, []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name not in own:
            training.append(word)
        elif not equals and not rest:
            raise BadInput(f"oneloop worth: {name} needs a value")
        else:
            own[name] = value if equals else rest.pop(0)
    if read(training).batch.grain is not None:
        raise BadInput("oneloop worth tries other ways to compute a recipe, and batch.grain fixes them; leave it out")
    rounds, seconds = _number("--rounds", own["--rounds"], int), _number("--seconds", own["--seconds"], float)
    results = measured(
        training, only=[name for name in own["--only"].split(",") if name], rounds=int(rounds), seconds=seconds
    )
    folder = Path(own["--to"] or f"runs/worth-{results['recipe']}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in (("worth.json", dumps(results, indent=1) + "\n"), ("worth.html", as_page(results))):
            with replacing(folder / file) as draft:
                draft.write_text(content)
    except OSError as error:
        raise BadInput(f"--to {folder} cannot be written: {error.strerror}") from error
    console = Console()
    console.print(as_table(results))
    for line in [*sentences(results), f"results in {folder}"]:
        console.print(line, highlight=False, soft_wrap=True)
    return 0


def _number(name: str, given: str, kind: Callable[[str], float]) -> float:
    try:
        number = kind(given)
    except ValueError:
        number = 0
    if not number > 0:
        raise BadInput(f"oneloop worth: {name} {given} is no number above 0")
    return number
