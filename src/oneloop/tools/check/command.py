"""The options of ``oneloop check``."""

from collections.abc import Sequence

from oneloop.basics.command_options import Options
from oneloop.basics.exit_codes import DONE, ERROR, BadInput
from oneloop.basics.files import dumps
from oneloop.tools.check.asked import is_recipe


def check(words: Sequence[str]) -> int:
    """Read all data of a recipe, or a data set, and list everything that cannot be used.

      oneloop check photos          oneloop check my_task.py:MyTask --task.data photos

    A later run does not check the same files again. The exit code is 1 if something cannot be used.
    """
    options = Options(
        "check", check.__doc__, usage="oneloop check DATA|RECIPE [--key value …] [--json]"
    )
    options.add_argument("--json", action="store_true", help="print one JSON object")
    given, training = options.parse_known_args(words)
    if not training:
        raise BadInput("oneloop check takes a data set (a path, or hf:NAME) or a recipe")
    if is_recipe(training[0]):
        from oneloop.recipe.parse import check_keys  # 0.3 s

        check_keys(training)

    # The slow imports follow the checks.
    from oneloop.show.terminal import Display
    from oneloop.tools.check.check_data import as_json, as_lines, check_data

    with Display(output="quiet" if given.json else "progress") as display:
        found = check_data(training[0], training[1:])
        display.lines(as_lines(training[0], found))
    if given.json:
        print(dumps(as_json(found)))
    return ERROR if found.unusable or found.empty else DONE
