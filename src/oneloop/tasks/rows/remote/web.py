"""Remote files on a web server or on the Hugging Face hub, read by ranges."""

import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

from oneloop.basics.bucket import StoreDeniedError, StoreError, StoreNotFoundError
from oneloop.basics.untrusted import MOST_BYTES
from oneloop.tasks.rows.remote.addresses import Address, address_of, is_local
from oneloop.tasks.rows.remote.store import (
    CONNECTIONS,
    TIMEOUTS,
    RemoteObject,
    RemoteStore,
    changed,
)

_REDIRECTS = 5
_PROBES = 16  # requests for sizes at the same time
_SPAN = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_TEMPORARY = (408, 425, 429, 500, 502, 503, 504)  # status: the same request may work later


class _WebStore(RemoteStore):
    """Base class of stores that are read by HTTP."""

    def __init__(self, address: Address) -> None:
        import urllib3

        super().__init__(address)
        connect, answer = TIMEOUTS
        self._pool: Any = urllib3.PoolManager(
            maxsize=CONNECTIONS,
            retries=False,
            timeout=urllib3.Timeout(connect=connect, read=answer),
        )

    def _get(
        self, where: str, url: str, headers: Mapping[str, str], most: int
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Return status, headers and body of an answer; follow redirects to the same scheme.

        Raises StoreError for the statuses of :func:`_check_status`.

        Args:
            where: the address for messages; that of a redirect may hold a secret.
            url: of the request.
            headers: of the request.
            most: bytes of a body.
        """
        import urllib3

        sent = {"Accept-Encoding": "identity", **headers}
        for _ in range(_REDIRECTS + 1):
            try:
                answer = self._pool.request(
                    "GET", url, headers=sent, redirect=False, preload_content=False
                )
                with answer:
                    body = answer.read(most + 1)
            except urllib3.exceptions.HTTPError as error:
                # Its text may hold the address of a redirect.
                raise StoreError(f"{where}: {type(error).__name__}") from None
            target = answer.headers.get("Location")
            if answer.status not in (301, 302, 303, 307, 308) or not target:
                _check_status(where, answer.status)
                return answer.status, answer.headers, body
            url, before = urljoin(url, target), urlsplit(url)
            after = urlsplit(url)
            if after.scheme != before.scheme or (after.scheme == "http" and not is_local(url)):
                raise _rejected(f"{where} redirects to {after.scheme}://, which is not followed")
            if after.netloc != before.netloc:
                sent.pop("Authorization", None)
        raise _rejected(f"{where} redirects more than {_REDIRECTS} times")

    def _span(
        self, where: str, url: str, span: tuple[int, int], headers: Mapping[str, str]
    ) -> tuple[bytes, int, Mapping[str, str]]:
        """Return a range of bytes, the size of the whole file, and the headers of the answer."""
        start, end = span
        wanted = {"Range": f"bytes={start}-{end - 1}", **headers}
        status, found, body = self._get(where, url, wanted, end - start)
        if status != 206:
            raise _rejected(
                f"{where}: status {status} in place of 206: the server does not send ranges of a "
                "file; use another server, or download the files"
            )
        sizes = _SPAN.fullmatch(found.get("Content-Range", ""))
        if not sizes or (int(sizes[1]), int(sizes[2])) != (start, end - 1):
            raise _rejected(f"{where}: the server sent other bytes than those that were requested")
        return body, int(sizes[3]), found


class HttpsStore(_WebStore):
    """A file on a web server, or the files that a text file lists."""

    def _listed(self) -> list[RemoteObject]:
        names = [self.pattern]
        if self.pattern.endswith(".txt"):
            names = self._names()
        with ThreadPoolExecutor(_PROBES) as threads:
            return list(threads.map(self._probe, names))

    def _names(self) -> list[str]:
        """Return the names in the list; each is below the folder of the list."""
        status, _, body = self._get(self.address, self.address, {}, MOST_BYTES)
        if status != 200:
            raise StoreError(f"{self.address}: status {status}")
        if len(body) > MOST_BYTES:
            raise ValueError(f"{self.address} is longer than {MOST_BYTES:,} bytes")
        names = []
        for number, line in enumerate(body.decode(errors="replace").splitlines(), start=1):
            if not line.strip():
                continue
            name = line.strip().removeprefix(f"{self.root}/")
            try:
                # Also a relative name must make an address that is allowed.
                given = address_of(f"{self.root}/{name}")
            except ValueError:
                given = None
            if "://" in name or given is None or not name.endswith(".parquet"):
                raise ValueError(
                    f"{self.address}, line {number}: expected the name of a .parquet file, or its "
                    f"address below {self.root}/; remove this line"
                )
            names.append(name)
        if not names or len({*names}) < len(names):
            raise ValueError(f"{self.address} lists no file, or one file twice; correct it")
        return names

    def _probe(self, name: str) -> RemoteObject:
        """Return a file with its size and version, from an answer with its first byte."""
        where = f"{self.root}/{name}"
        _, size, headers = self._span(where, where, (0, 1), {})
        version = _version(headers)
        if not version:
            raise ValueError(
                f"{where}: the server sends no ETag and no Last-Modified, so that a change of the "
                "file would not be found; use another server, or download the files"
            )
        return RemoteObject(name, size, version)

    def _range(self, item: RemoteObject, start: int, end: int) -> bytes:
        where = self.where(item)
        body, size, headers = self._span(where, where, (start, end), {})
        if (size, _version(headers)) != (item.size, item.version):
            raise changed(where)
        return body


class HubStore(_WebStore):
    """Files of a data set on the Hugging Face hub, at one commit, which is their version.

    A token comes from HF_TOKEN, or from the file that ``hf auth login`` writes.
    """

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self._matches = address.matches
        _, owner, name, *folders = address.root.partition("://")[2].split("/")
        self._repository, _, revision = f"{owner}/{name}".partition("@")
        self._revision = unquote(revision) or None
        self._folder = "/".join(folders)

    def _listed(self) -> list[RemoteObject]:
        files = hub_files(self._repository, self._revision, self._folder)
        found = []
        for path, size in files.sizes.items():
            name = path.removeprefix(f"{self._folder}/")
            if self._matches(name):
                found.append(RemoteObject(name, size, files.commit))
        return found

    def _range(self, item: RemoteObject, start: int, end: int) -> bytes:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        path = f"{self._folder}/{item.name}".lstrip("/")
        url = hf_hub_url(
            self._repository,
            path,
            repo_type="dataset",
            revision=item.version,
            endpoint=_hub(),
        )
        where = self.where(item)
        body, size, _ = self._span(where, url, (start, end), build_hf_headers())
        if size != item.size:
            raise changed(where)
        return body


class HubFiles(NamedTuple):
    """Files of a data set on the hub."""

    repository: str  # its name with its owner: of ``squad``, ``rajpurkar/squad``
    commit: str
    sizes: dict[str, int]  # bytes by path


def hub_files(repository: str, revision: str | None, folder: str = "") -> HubFiles:
    """Return the files of a data set on the hub.

    Args:
        repository: name of the data set.
        revision: branch, tag or commit; None: the main branch.
        folder: only files below it; empty: all.

    Raises:
        StoreError: the data set, revision or folder does not exist or cannot be read.
        ValueError: it has no owner.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=_hub())
    with _hub_errors(repository, revision, folder):
        about = api.dataset_info(repository, revision=revision)
    if "/" not in about.id:
        raise ValueError(
            f"hf:{repository} has no owner, and is read in place only by hf:OWNER/NAME; name a "
            "copy that has one, or set task.stream false to download it"
        )
    with _hub_errors(repository, revision, folder):
        tree = api.list_repo_tree(
            about.id, folder or None, recursive=True, revision=about.sha, repo_type="dataset"
        )
        sizes = {item.path: item.size for item in tree if hasattr(item, "size")}
    return HubFiles(about.id, str(about.sha), sizes)


@contextmanager
def _hub_errors(repository: str, revision: str | None, folder: str) -> Iterator[None]:
    """Raise errors of the hub's client as StoreError."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = f"hf:{repository}" + (f"@{revision}" if revision else "")
    try:
        yield
    except GatedRepoError:
        raise StoreDeniedError(f"{where} is gated; request access, and set HF_TOKEN") from None
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError):
        raise StoreNotFoundError(
            f"{where} is not a data set of the hub that this token can read; check name, revision "
            "and HF_TOKEN"
        ) from None
    except EntryNotFoundError:
        raise StoreNotFoundError(f"{where} has no folder {folder!r}") from None
    except Exception as error:  # those of the hub's client are of many classes
        raise StoreError(f"{where}: {type(error).__name__}") from None


def _hub() -> str | None:
    """Return the address of a hub other than huggingface.co, if there is one."""
    return os.environ.get("HF_ENDPOINT")


def _check_status(where: str, status: int) -> None:
    """Raise StoreError for a status that says what is wrong."""
    if status in (401, 403):
        raise StoreDeniedError(f"{where}: status {status}; check address and credentials")
    if status in (404, 410):
        raise StoreNotFoundError(f"{where}: status {status}: the file does not exist")
    if status in (412, 416):
        raise changed(where)
    if status in _TEMPORARY:
        raise StoreError(f"{where}: status {status}")


def _version(headers: Mapping[str, str]) -> str:
    """Return the ETag of an answer, else the time of the last change."""
    return headers.get("ETag") or headers.get("Last-Modified") or ""


def _rejected(message: str) -> StoreError:
    """Return an error that another try does not avoid."""
    error = StoreError(message)
    error.temporary = False
    return error
