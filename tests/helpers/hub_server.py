"""A local hub: one data set and its commits, with the requests that ``datasets`` makes; or models,
which ``huggingface_hub`` writes and reads."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import pyarrow as pa
from pyarrow import parquet

from remote_data import range_of
from stores import Request


class Hub:
    """Serve Parquet files of a data set by commit, until the block ends.

    >>> with Hub(folder, "someone/texts") as hub:
    ...     hub.commit({"train.parquet": rows})
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.head = folder, name, ""
        self.short = ""  # an older name without an owner, such as squad, which is redirected
        self.heads: dict[str, str] = {}  # newest commit by branch
        self.asked: list[str] = []
        self.seen: list[Request] = []  # answered requests for files

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

    def commit(self, files: Mapping[str, Any], branch: str = "main") -> str:
        """Add a commit with these files; return its name.

        Args:
            files: rows, or the content in bytes, by name.
            branch: such as ``refs/convert/parquet``.
        """
        before = self.heads.get(branch, "" if branch == "main" else branch)
        commit = hashlib.sha1(json.dumps([before, sorted(files)]).encode()).hexdigest()
        for name, rows in files.items():
            path = self.folder / commit / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(rows, bytes):
                path.write_bytes(rows)
            else:
                parquet.write_table(pa.Table.from_pylist(rows), path)
        self.heads[branch] = commit
        self.head = self.heads.get("main", "")
        return commit

    def answer(
        self, request: BaseHTTPRequestHandler, path: str, sent: bytes | None, *, body: bool = True
    ) -> None:
        query = path.partition("?")[2]
        path = unquote(path.partition("?")[0])
        self.asked.append(path)
        # A branch such as refs/convert/parquet is one word here.
        for branch in self.heads:
            if "/" in branch:
                path = path.replace(branch, branch.replace("/", "%2F"))
        if self.short and f"{path}/".startswith(f"/api/datasets/{self.short}/"):
            place = request.path.replace(f"/{self.short}", f"/{self.name}", 1)
            return self._send(request, 307, b"", {"Location": place}, body=body)
        api, files = f"/api/datasets/{self.name}", f"/datasets/{self.name}/resolve/"
        if path.startswith(files):
            commit, _, name = path.removeprefix(files).partition("/")
            file = self.folder / self._commit(commit) / name
            if not file.is_file():
                return self._send(request, 404, b"{}", {"X-Error-Code": "EntryNotFound"}, body=body)
            return self._send_file(request, path, file, self._commit(commit), body=body)
        if path == api or path.startswith(f"{api}/revision/"):
            commit = self._commit(path.rpartition("/")[2] if path != api else "main")
            folder = self.folder / commit
            if not commit or not folder.is_dir():
                more = {"X-Error-Code": "RevisionNotFound"}
                return self._send(request, 404, b"{}", more, body=body)
            about = {
                "id": self.name,
                "sha": commit,
                "siblings": [{"rfilename": name} for name in _below(folder)],
                "private": False,
                "tags": [],
                "downloads": 0,
            }
            return self._send(request, 200, json.dumps(about).encode(), body=body)
        if path.startswith((f"{api}/tree/", f"{api}/paths-info/")):
            commit, _, inside = path.split("/", 6)[6].partition("/")
            folder = self.folder / self._commit(commit)
            if not (folder / inside).is_dir():
                more = {"X-Error-Code": "EntryNotFound"}
                return self._send(request, 404, b"{}", more, body=body)
            if "/paths-info/" in path:
                chosen = _paths_of(sent or b"")
                entries = [_entry(folder, name) for name in chosen if (folder / name).exists()]
            else:
                wanted = (folder / inside).rglob if "recursive=true" in query.lower() else None
                listed = wanted("*") if wanted else (folder / inside).iterdir()
                names = [file.relative_to(folder).as_posix() for file in sorted(listed)]
                entries = [_entry(folder, name) for name in names]
            return self._send(request, 200, json.dumps(entries).encode(), body=body)
        return self._send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"}, body=body)

    def _send_file(
        self, request: BaseHTTPRequestHandler, path: str, file: Path, commit: str, *, body: bool
    ) -> None:
        """Send a file, or a range of it; fail if it is not the one that ``If-Match`` names."""
        content = file.read_bytes()
        more = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}
        more["Accept-Ranges"] = "bytes"
        wanted = range_of(request.headers.get("Range"), len(content))
        start, end = wanted or (0, len(content))
        status = 206 if wanted else 200
        if request.headers.get("If-Match") not in (None, "*", more["ETag"]):
            status, start, end = 412, 0, 0
        elif wanted:
            more["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        size = end - start if body else 0
        self.seen.append(Request(request.command, path, start, end, status, size))
        self._send(request, status, content[start:end], more, body=body)

    def _commit(self, name: str) -> str:
        return self.heads.get(name.replace("%2F", "/"), name)

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


def _below(folder: Path) -> list[str]:
    """Return the names of all files below a folder."""
    names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    return sorted(names)


def _entry(folder: Path, name: str) -> dict[str, Any]:
    """Return the hub's description of a file or folder of a commit."""
    path = folder / name
    commit = {"id": folder.name, "title": "a commit", "date": "2026-11-01T00:00:00.000Z"}
    if path.is_dir():
        tree = hashlib.sha1(name.encode()).hexdigest()
        return {"type": "directory", "path": name, "oid": tree, "size": 0, "lastCommit": commit}
    oid = hashlib.sha1(path.read_bytes()).hexdigest()
    size = path.stat().st_size
    return {"type": "file", "path": name, "size": size, "oid": oid, "lastCommit": commit}


def _paths_of(sent: bytes) -> list[str]:
    """Return the paths that a request names, as JSON or as a form."""
    if sent[:1] == b"{":
        paths = json.loads(sent).get("paths", [])
        return [paths] if isinstance(paths, str) else paths
    return parse_qs(sent.decode()).get("paths", [])


class Models(Hub):
    """Model repositories that can be created, committed to and read with the token ``secret``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "")
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
