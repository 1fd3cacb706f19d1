"""Addresses of remote data: which forms exist, and what each one names."""

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from oneloop.basics.untrusted import is_plain

SCHEMES = ("s3", "gs", "hf", "https", "http")
"""schemes of remote data; ``file://`` is a path"""

_WILDCARDS = re.compile(r"[*\[]")  # "?" would look like a query
_MOST_PARTS = 64  # folders in a name
_HERE = ("127.0.0.1", "localhost")  # hosts that may be read without TLS
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_REPOSITORY = re.compile(r"datasets/[\w.-]+/[\w.-]+(@[\w.%-]+)?", re.ASCII)


@dataclass(frozen=True)
class Address:
    """What an address names.

    Args:
        text: the address.
        scheme: of :data:`SCHEMES`.
        root: the address of the folder, to which names are relative.
        pattern: the names in it: a name, or a glob; empty: all.
    """

    text: str
    scheme: str
    root: str
    pattern: str = ""

    @property
    def is_glob(self) -> bool:
        """Return whether the pattern has wildcards."""
        return bool(_WILDCARDS.search(self.pattern))

    @property
    def prefix(self) -> str:
        """Return the beginning of the pattern that has no wildcards."""
        return _WILDCARDS.split(self.pattern)[0]

    def matches(self, name: str) -> bool:
        """Return whether a name fits the pattern; ``*`` stays in a folder, ``**`` does not."""
        from fsspec.utils import glob_translate

        return not self.pattern or re.fullmatch(glob_translate(self.pattern), name) is not None


def address_of(text: str) -> Address:
    """Return what an address of remote data names.

    Raises:
        ValueError: it is not one. A message never contains an address that may hold a secret.
    """
    scheme, rest = text.split("://", 1)
    host, _, path = rest.partition("/")
    if "@" in host or "?" in text or "#" in text or "::" in text:
        raise ValueError(
            "the address contains a user, a password, a query, a fragment or '::'; remove it, and "
            "take credentials from the environment (AWS_ACCESS_KEY_ID, HF_TOKEN, …) or the "
            "provider's files"
        )
    if scheme not in SCHEMES:
        raise ValueError(
            f"{text!r}: {scheme}:// cannot be read; use s3://, gs://, hf://datasets/, https:// or "
            "a path"
        )
    path = path.rstrip("/")
    if not text.isprintable() or (path and not is_safe(path)):
        raise ValueError(
            f"{text!r} is not a plain address; write it without '..', '//', backslashes and "
            "control characters"
        )
    if scheme in ("https", "http"):
        return _of_web(text, scheme, host, path)
    if scheme == "hf":
        host, path = _repository_of(text)
    elif not _BUCKET.fullmatch(host):
        raise ValueError(f"{text!r} has no valid bucket; write {scheme}://BUCKET/FOLDER")
    return _in_folder(text, scheme, f"{scheme}://{host}", path)


def is_safe(name: str) -> bool:
    """Return whether a name stays below its folder, and can be printed."""
    # A server may decode what is encoded, such as %2e%2e.
    plain = unquote(name)
    return is_plain(plain, _MOST_PARTS) and "\\" not in plain and plain.isprintable()


def is_local(url: str) -> bool:
    """Return whether the host of a URL is this machine, so that it needs no TLS."""
    return urlsplit(url).hostname in _HERE


def _repository_of(text: str) -> tuple[str, str]:
    """Return the repository (``datasets/NAME[@REVISION]``) and the path in it."""
    words = text.rstrip("/").split("/")[2:]
    repository = "/".join(words[:3])
    if not _REPOSITORY.fullmatch(repository):
        raise ValueError(
            f"{text!r} does not name a data set of the hub; write "
            "hf://datasets/OWNER/NAME[@REVISION]/FOLDER"
        )
    return repository, "/".join(words[3:])


def _in_folder(text: str, scheme: str, root: str, path: str) -> Address:
    """Return the address of a folder, a glob or a file in a bucket or on the hub."""
    parts = path.split("/") if path else []
    plain = 0
    while plain < len(parts) and not _WILDCARDS.search(parts[plain]):
        plain += 1
    # An object is named by its ending; a slash at the end makes it the name of a folder.
    if plain == len(parts) and parts and text.endswith(".parquet"):
        plain -= 1
    folder = "/".join([root, *parts[:plain]])
    return Address(text, scheme, folder, "/".join(parts[plain:]))


def _of_web(text: str, scheme: str, host: str, path: str) -> Address:
    """Return the address of a file on a web server, or of a list of files."""
    if scheme == "http" and not is_local(text):
        raise ValueError(f"{text!r} is not encrypted; use https://")
    folder, _, name = path.rpartition("/")
    if not host or not name.endswith((".parquet", ".txt")) or _WILDCARDS.search(path):
        raise ValueError(
            f"{text!r} is not the address of one file; a web server has no folders or globs: give "
            "a .parquet file, or a .txt file with one address per line"
        )
    return Address(text, scheme, f"{scheme}://{host}/{folder}".rstrip("/"), name)
