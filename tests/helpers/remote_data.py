"""Servers for data that is elsewhere: a bucket that counts its reads, and files with ranges."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from stores import Proxy, Request, s3_server

BUCKET = "bucket"


@dataclass
class S3:
    """moto's server in its own process, and a proxy before it, which trainers use."""

    proxy: Proxy
    server: str  # address of moto's server, for tests that write objects

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables with which a process reads through the proxy."""
        return {**self._keys, "AWS_ENDPOINT_URL": self.proxy.address}

    _keys: dict[str, str] = field(default_factory=dict)

    def _files(self) -> Any:
        import fsspec

        keys = {
            "key": self._keys["AWS_ACCESS_KEY_ID"],
            "secret": self._keys["AWS_SECRET_ACCESS_KEY"],
            "endpoint_url": self.server,
        }
        return fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False, **keys)

    def copy(self, folder: Path, address: str) -> str:
        """Copy the files of a folder (or one file) to ``s3://bucket/…``; return the address."""
        files, below = self._files(), address.partition("://")[2]
        files.makedirs(below.partition("/")[0], exist_ok=True)
        for file in [folder] if folder.is_file() else sorted(folder.rglob("*")):
            if file.is_file():
                name = file.name if file == folder else file.relative_to(folder).as_posix()
                files.pipe_file(f"{below}/{name}", file.read_bytes())
        return address

    def write(self, address: str, content: bytes) -> None:
        """Write one object."""
        self._files().pipe_file(address, content)

    def fetch(self, address: str, folder: Path) -> Path:
        """Copy the objects below an address to a folder."""
        files, below = self._files(), address.partition("://")[2]
        for name in files.find(below):
            path = folder / name[len(below) + 1 :]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(files.cat_file(name))
        return folder


@contextmanager
def counted_s3() -> Iterator[S3]:
    """Start moto's server behind a proxy, with one empty bucket (``s3://bucket``)."""
    with s3_server() as variables:
        proxy = Proxy(variables["AWS_ENDPOINT_URL"])
        keys = {name: value for name, value in variables.items() if name != "AWS_ENDPOINT_URL"}
        store = S3(proxy, variables["AWS_ENDPOINT_URL"], keys)
        store._files().makedirs(BUCKET, exist_ok=True)
        try:
            yield store
        finally:
            proxy.hangs = ""
            proxy.shutdown()
            proxy.server_close()


class Files(ThreadingHTTPServer):
    """Serves the files of a folder by ranges, with ETags and ``If-Match``, on 127.0.0.1.

    Put a :class:`stores.Proxy` before it for a slow or failing network.

    Attributes:
        same: file by further names: one object under many names.
        redirects: address by path, which a request for it is sent to (302).
        whole: answer a range with the whole object and the status 200.
        shifted: bytes that are added to the Content-Range of each answer.
        etag: send ETags; the time of the last change is always sent, unless ``dated`` is off.
        dated: send Last-Modified.
        weak: ETags are weak (``W/"…"``).
        seen: the answered requests.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path, *, same: Mapping[str, Path] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Serve)
        self.folder = folder
        self.same = dict(same or {})
        self.redirects = dict[str, str]()
        self.whole = False
        self.shifted = 0
        self.etag = True
        self.dated = True
        self.weak = False
        self.seen = list[Request]()
        self._etags = dict[tuple[Path, int, int], str]()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def list(self, name: str = "list.txt") -> str:
        """Write a text file with the names of all Parquet files; return its address."""
        names = [
            file.relative_to(self.folder).as_posix() for file in self.folder.rglob("*.parquet")
        ]
        lines = [f"{one}\n" for one in sorted({*names, *self.same})]
        (self.folder / name).write_text("".join(lines))
        return f"{self.address}/{name}"

    def file(self, path: str) -> Path | None:
        """Return the file of a path, if there is one."""
        name = path.lstrip("/")
        file = self.same.get(name, self.folder / name)
        return file if file.is_file() else None

    def etag_of(self, file: Path) -> str:
        """Return the ETag: a checksum of the content."""
        about = file.stat()
        key = (file, about.st_size, about.st_mtime_ns)
        if key not in self._etags:
            self._etags[key] = f'"{hashlib.sha1(file.read_bytes()).hexdigest()}"'
        return f"W/{self._etags[key]}" if self.weak else self._etags[key]

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *of: object) -> None:
        self.close()

    def handle_error(self, request, client_address) -> None:
        """Print nothing."""


class _Serve(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Files
    disable_nagle_algorithm = True

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        server = self.server
        path = unquote(self.path.partition("?")[0])
        if path in server.redirects:
            return self._send(302, {"Location": server.redirects[path]}, None, 0, 0)
        file = server.file(path)
        if file is None:
            return self._send(404, {}, None, 0, 0)
        size = file.stat().st_size
        headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
        if server.etag:
            headers["ETag"] = server.etag_of(file)
        if server.dated:
            headers["Last-Modified"] = self.date_time_string(int(file.stat().st_mtime))
        matched = self.headers.get("If-Match")
        if server.etag and matched not in (None, "*", headers["ETag"]):
            return self._send(412, headers, None, 0, 0)
        unmodified = self.headers.get("If-Unmodified-Since")
        if server.dated and unmodified not in (None, headers["Last-Modified"]):
            return self._send(412, headers, None, 0, 0)

        wanted = range_of(self.headers.get("Range"), size)
        if wanted is None or server.whole:
            return self._send(200, headers, file, 0, size)
        start, end = wanted
        if start >= size:
            return self._send(416, {"Content-Range": f"bytes */{size}"}, None, 0, 0)
        first, last = start + server.shifted, end - 1 + server.shifted
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        self._send(206, headers, file, start, end)
        return None

    def _send(
        self, status: int, headers: Mapping[str, str], file: Path | None, start: int, end: int
    ) -> None:
        """Send an answer with these bytes of a file, and record it."""
        body = 0 if self.command == "HEAD" else end - start
        path = unquote(self.path.partition("?")[0])
        self.server.seen.append(Request(self.command, path, start, end, status, body))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if body and file is not None:
            # The kernel copies the bytes.
            self.wfile.flush()
            with file.open("rb") as stream:
                self.connection.sendfile(stream, start, body)

    def log_message(self, *words) -> None:
        """Print nothing."""


def range_of(header: str | None, size: int) -> tuple[int, int] | None:
    """Return the first byte and the byte after the last one of a Range header; None: the whole."""
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "")
    if found is None or found[0] == "bytes=-":
        return None
    if not found[1]:
        return max(0, size - int(found[2])), size
    return int(found[1]), min(size, int(found[2]) + 1) if found[2] else size
