"""A local hub: one data set and its commits, with the requests that ``datasets`` makes; or models,
which ``huggingface_hub`` writes and reads."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet


class Hub:
    """Serve Parquet files of a data set by commit, until the block ends.

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
        """Return the environment variables that make a process use only this hub."""
        return {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.server.server_port}",
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
        }

    def commit(self, files: dict[str, list[dict[str, Any]]]) -> str:
        """Add a commit with these files; return its name."""
        self.head = hashlib.sha1(json.dumps([self.head, sorted(files)]).encode()).hexdigest()
        (self.folder / self.head).mkdir(parents=True)
        for name, rows in files.items():
            parquet.write_table(pa.Table.from_pylist(rows), self.folder / self.head / name)
        return self.head

    def answer(
        self, request: BaseHTTPRequestHandler, path: str, sent: bytes | None, *, body: bool = True
    ) -> None:
        path = path.partition("?")[0].replace("%40", "@")
        self.asked.append(path)
        api, files = f"/api/datasets/{self.name}", f"/datasets/{self.name}/resolve/"
        if path.startswith(files):
            commit, _, name = path.removeprefix(files).partition("/")
            file = self.folder / self._commit(commit) / name
            if not file.is_file():
                return self._send(request, 404, b"{}", {"X-Error-Code": "EntryNotFound"}, body=body)
            content = file.read_bytes()
            more = {
                "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
                "X-Repo-Commit": self._commit(commit),
            }
            return self._send(request, 200, content, more, body=body)
        if path == api or path.startswith(f"{api}/revision/"):
            commit = self._commit(path.rpartition("/")[2] if path != api else "main")
            siblings = [
                {"rfilename": file.name} for file in sorted((self.folder / commit).iterdir())
            ]
            about = {
                "id": self.name,
                "sha": commit,
                "siblings": siblings,
                "private": False,
                "tags": [],
                "downloads": 0,
            }
            return self._send(request, 200, json.dumps(about).encode(), body=body)
        if path.startswith((f"{api}/tree/", f"{api}/paths-info/")):
            commit, _, inside = path.split("/", 6)[6].partition("/")
            folder = self.folder / self._commit(commit)
            paths = None
            if sent is not None and "paths-info" in path:
                paths = json.loads(sent).get("paths", []) if sent[:1] == b"{" else None
            entries = [
                {
                    "type": "file",
                    "path": file.name,
                    "size": file.stat().st_size,
                    "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
                }
                for file in sorted(folder.iterdir())
                if paths is None or file.name in paths
            ]
            return self._send(request, 200, json.dumps(entries).encode(), body=body)
        return self._send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"}, body=body)

    def _commit(self, name: str) -> str:
        return self.head if name == "main" else name

    @staticmethod
    def _send(
        request: BaseHTTPRequestHandler,
        code: int,
        content: bytes,
        more: dict[str, str] | None = None,
        *,
        body: bool,
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


class Models(Hub):
    """Model repositories that can be created, committed to and read with the token ``secret``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "")
        self.heads: dict[str, str] = {}
        self.made: dict[str, dict[str, Any]] = {}
        self.private: dict[str, bool] = {}

    def variables(self, cache: Path) -> dict[str, str]:
        return super().variables(cache) | {"HF_TOKEN": "secret"}

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """Return the files of a repository at a commit."""
        folder = self.folder / (self.heads[name] if revision == "main" else revision)
        return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}

    def answer(
        self, request: BaseHTTPRequestHandler, path: str, sent: bytes | None, *, body: bool = True
    ) -> None:
        path = path.partition("?")[0].replace("%40", "@").replace("%2F", "/")
        self.asked.append(path)

        def say(code: int, content: Any, more: dict[str, str] | None = None) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self._send(request, code, data, more, body=body)

        if sent is not None and request.headers.get("Authorization") != "Bearer secret":
            return say(401, {"error": "Invalid username or password."})
        if path == "/api/repos/create":
            message = json.loads(sent or b"{}")
            name = f"{message['organization']}/{message['name']}"
            if name in self.heads:
                return say(409, {"error": "You already created this model repo", "url": f"/{name}"})
            self.heads[name] = self._write(name, {".gitattributes": b""})
            self.private[name] = (
                bool(message.get("private")) or message.get("visibility") == "private"
            )
            return say(200, {"url": f"http://127.0.0.1/{name}", "name": name})
        if path.startswith("/api/validate-yaml"):
            return say(200, {"errors": [], "warnings": []})
        name = "/".join(path.removeprefix("/api/models/").strip("/").split("/")[:2])
        if name not in self.heads:
            return say(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        rest = path.partition(name)[2].strip("/").split("/")
        if rest[0] == "preupload":
            files = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(sent or b"")["files"]
            ]
            return say(200, {"files": files})
        if rest[0] == "commit":
            return say(200, self._committed(name, sent or b""))
        if rest[0] == "resolve":
            commit = self.heads[name] if rest[1] == "main" else rest[1]
            file = self.folder / commit / "/".join(rest[2:])
            if not file.is_file():
                return say(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            content = file.read_bytes()
            return say(
                200,
                content,
                {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit},
            )
        commit = self.heads[name] if rest in ([""], ["revision", "main"]) else rest[1]
        if rest[0] == "tree":
            commit = self.heads[name] if commit == "main" else commit
            entries = [
                {
                    "type": "file",
                    "path": file,
                    "size": len(content),
                    "oid": hashlib.sha1(content).hexdigest(),
                }
                for file, content in self.files(name, commit).items()
            ]
            return say(200, entries)
        siblings = [{"rfilename": file} for file in self.files(name, commit)]
        return say(
            200,
            {
                "id": name,
                "sha": commit,
                "siblings": siblings,
                "private": self.private[name],
                "tags": [],
            },
        )

    def _committed(self, name: str, sent: bytes) -> dict[str, Any]:
        files = self.files(name)
        for line in sent.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            elif entry["key"] == "deletedFile":
                del files[entry["value"]["path"]]
        self.heads[name] = self._write(name, files)
        return {
            "commitOid": self.heads[name],
            "commitUrl": f"http://127.0.0.1/{name}/commit/{self.heads[name]}",
            "success": True,
        }

    def _write(self, name: str, files: dict[str, bytes]) -> str:
        before = self.heads.get(name, name)
        commit = hashlib.sha1(
            before.encode() + b"".join(key.encode() + value for key, value in sorted(files.items()))
        ).hexdigest()
        folder = self.folder / commit
        folder.mkdir(parents=True)
        for file, content in files.items():
            (folder / file).write_bytes(content)
        return commit
