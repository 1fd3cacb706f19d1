"""``oneloop verify``: are the checkpoints of a run intact, and are two runs bit-identical?"""

from collections.abc import Sequence

from oneloop.basics.command_options import Options
from oneloop.basics.exit_codes import DONE, ERROR, BadInput
from oneloop.basics.files import printable
from oneloop.basics.houses import required
from oneloop.checkpoint.manifest import MANIFEST
from oneloop.checkpoint.mirror import local_run
from oneloop.checkpoint.named_checkpoint import problems_at
from oneloop.checkpoint.store import Store


def verify(words: Sequence[str]) -> int:
    """Check every checkpoint of a run, or whether two runs are bit-identical.

    The exit code is 1 if a checkpoint is damaged, or if the runs differ.
    """
    options = Options("verify", verify.__doc__)
    options.add_argument("run", type=local_run, metavar="RUN")
    same = (
        "report whether both runs (with batch.grain) are bit-identical, or the first step and "
        "tensor that differ"
    )
    options.add_argument("--same", type=local_run, metavar="RUN", help=same)
    given = options.parse_args(words)
    if given.same:
        parted, lines = required("verify --same").parting(given.same, given.run)
        print(printable("\n".join(lines)))
        return ERROR if parted else DONE

    # Check every file of every checkpoint, and of the final weights.
    store = Store(given.run / "checkpoints")
    paths = [*store.sealed()]
    if not paths:
        raise BadInput(f"{given.run} holds no checkpoint (looked for {store.root}/step-…)")
    final = given.run / "final"
    if (final / MANIFEST).exists():
        paths.append(final)
    wrong = {path.name: problems_at(path) for path in paths}
    lines = [f"{name}: {'; '.join(found) or 'good'}" for name, found in wrong.items()]
    print(printable("\n".join(lines)))
    return ERROR if any(wrong.values()) else DONE
