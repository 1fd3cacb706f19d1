"""A hub on this machine, as far as ``datasets`` asks it: one data set, and its commits."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet


class Hub:
    """Serves parquet files of a data set by commit, until its end.

    >>> with Hub(folder, "someone/texts") as hub:
    ...     hub.commit({"train.parquet": rows})
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.head = folder, name, ""
        self.asked: list[str] = []

    def __enter__(self) -> Hub:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *of: Any) -> None: ...

            def do_HEAD(self) -> None:
                self.do_GET(body=False)

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                outer.answer(self, self.path, self.rfile.read(length))

            def do_GET(self, body: bool = True) -> None:
                outer.answer(self, self.path, None, body=body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *of: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def variables(self, cache: Path) -> dict[str, str]:
        """What a process needs to ask this hub and no other."""
        return {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.server.server_port}",
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
        }

    def commit(self, files: dict[str, list[dict[str, Any]]]) -> str:
        """A new commit with these files; returns its name."""
        self.head = hashlib.sha1(json.dumps([self.head, sorted(files)]).encode()).hexdigest()
        (self.folder / self.head).mkdir(parents=True)
        for name, rows in files.items():
            parquet.write_table(pa.Table.from_pylist(rows), self.folder / self.head / name)
        return self.head

    def answer(self, request: BaseHTTPRequestHandler, path: str, sent: bytes | None, *, body: bool = True) -> None:
        path = path.partition("?")[0].replace("%40", "@")
        self.asked.append(path)
        api, files = f"/api/datasets/{self.name}", f"/datasets/{self.name}/resolve/"
        if path.startswith(files):
            commit, _, name = path.removeprefix(files).partition("/")
            file = self.folder / self._commit(commit) / name
            if not file.is_file():
                return self._send(request, 404, b"{}", {"X-Error-Code": "EntryNotFound"}, body=body)
            content = file.read_bytes()
            more = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": self._commit(commit)}
            return self._send(request, 200, content, more, body=body)
        if path == api or path.startswith(f"{api}/revision/"):
            commit = self._commit(path.rpartition("/")[2] if path != api else "main")
            siblings = [{"rfilename": file.name} for file in sorted((self.folder / commit).iterdir())]
            about = {"id": self.name, "sha": commit, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
            return self._send(request, 200, json.dumps(about).encode(), body=body)
        if path.startswith((f"{api}/tree/", f"{api}/paths-info/")):
            commit, _, inside = path.split("/", 6)[6].partition("/")
            folder = self.folder / self._commit(commit)
            wanted = None
            if sent is not None and "paths-info" in path:
                wanted = json.loads(sent).get("paths", []) if sent[:1] == b"{" else None
            entries = [
                {
                    "type": "file",
                    "path": file.name,
                    "size": file.stat().st_size,
                    "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
                }
                for file in sorted(folder.iterdir())
                if wanted is None or file.name in wanted
            ]
            return self._send(request, 200, json.dumps(entries).encode(), body=body)
        return self._send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"}, body=body)

    def _commit(self, name: str) -> str:
        return self.head if name == "main" else name

    @staticmethod
    def _send(
        request: BaseHTTPRequestHandler, code: int, content: bytes, more: dict[str, str] | None = None, *, body: bool
    ) -> None:
        request.send_response(code)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(content)),
            **(more or {}),
        }.items():
            request.send_header(name, value)
        request.end_headers()
        if body:
            request.wfile.write(content)
