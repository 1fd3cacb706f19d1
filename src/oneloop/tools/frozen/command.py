"""``oneloop frozen``: list the stored outputs of frozen models, and delete some."""

from collections.abc import Sequence

from oneloop.basics.command_options import Options, names
from oneloop.basics.exit_codes import DONE
from oneloop.frozen.listing import chosen, free_bytes, in_bucket, local_root, remove, stores


def frozen(words: Sequence[str]) -> int:
    """List the stored outputs of references and teachers, and delete some.

    Without an address: those in the cache of this host. A run that needs deleted outputs computes
    them again."""
    options = Options("frozen", frozen.__doc__)
    options.add_argument(
        "address", nargs="?", metavar="ADDRESS", help="value of task.store: a folder or a bucket"
    )
    options.add_argument("--delete", type=names, metavar="KEY,KEY", help="stores to delete, or all")
    given = options.parse_args(words)
    root = local_root(given.address)
    found = stores(given.address)
    where = given.address if in_bucket(given.address) else root
    if given.delete is not None:
        # Find all of them before the first is deleted.
        for store in [*chosen(found, given.delete, where)]:
            remove(store, given.address)
            print(f"deleted: {store.line}")
        return DONE
    for store in found:
        print(store.line)
    total = sum(store.size for store in found)
    line = f"{len(found)} stores in {where}, {total / 1e6:,.1f} MB"
    if not in_bucket(given.address):
        line += f"; {free_bytes(root) / 1e6:,.1f} MB are free"
    print(line)
    return DONE
