"""Open the store of an address."""

from importlib.util import find_spec

from oneloop.basics.exit_codes import BadInput
from oneloop.tasks.rows.remote.addresses import address_of
from oneloop.tasks.rows.remote.buckets import GsStore, S3Store
from oneloop.tasks.rows.remote.store import RemoteStore
from oneloop.tasks.rows.remote.web import HttpsStore, HubStore

_STORES: dict[str, type[S3Store | GsStore | HubStore]] = {
    "s3": S3Store,
    "gs": GsStore,
    "hf": HubStore,
}
"""the store of each scheme but http and https"""


def open_store(address: str) -> RemoteStore:
    """Open the store of an address; no request is made yet.

    Raises:
        ValueError: the address is invalid.
        BadInput: a package is missing.
    """
    given = address_of(address)
    package = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub"}.get(given.scheme, "urllib3")
    for name in (package, "pyarrow", "urllib3"):
        if find_spec(name) is None:
            raise BadInput(f"{address} needs {name}: pip install 'oneloop[text,buckets]'")
    return _STORES.get(given.scheme, HttpsStore)(given)
