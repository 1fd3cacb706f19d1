"""Open the store of an address."""

from importlib.util import find_spec

from oneloop.basics.exit_codes import BadInput
from oneloop.tasks.rows.remote.addresses import address_of
from oneloop.tasks.rows.remote.buckets import GsStore, S3Store
from oneloop.tasks.rows.remote.store import RemoteStore
from oneloop.tasks.rows.remote.web import HttpsStore, HubStore

_STORES: dict[str, tuple[type[S3Store | GsStore | HubStore], str]] = {
    "s3": (S3Store, "s3fs"),
    "gs": (GsStore, "gcsfs"),
    "hf": (HubStore, "huggingface_hub"),
}
"""the store of each scheme but http and https, and the package that it needs"""


def open_store(address: str) -> RemoteStore:
    """Open the store of an address; no request is made yet.

    Raises:
        ValueError: the address is invalid.
        BadInput: a package is missing.
    """
    named = address_of(address)
    store, package = _STORES.get(named.scheme, (HttpsStore, "urllib3"))
    for name in (package, "pyarrow", "urllib3"):
        if find_spec(name) is None:
            raise BadInput(f"{address} needs {name}: pip install 'oneloop[text,buckets]'")
    return store(named)
