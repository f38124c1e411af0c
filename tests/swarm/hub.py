"""A local stand-in for the Hugging Face hub, which answers the libraries' requests from a folder."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "a" * 40


class Hub:
    """A context manager that serves `repo` as a data set and as a model. It can stop, and start again on its port."""

    def __init__(self, folder: Path, repo: str, host: str = "127.0.0.1") -> None:
        self.folder, self._repo, self.host = folder, repo, host
        self._server: ThreadingHTTPServer | None = None
        self.port = 0
        self.requests = 0
        self.commit = COMMIT
        """The commit to which all branches point. The same files are served for every commit."""
        self.read_at: set[str] = set()
        """The revisions at which clients have requested files."""

    def __enter__(self) -> Hub:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that make a process use this hub."""
        return {"HF_ENDPOINT": f"http://{self.host}:{self.port}", "NO_PROXY": self.host, "no_proxy": self.host}

    def open(self) -> None:
        hub = self

        class Handler(_Handler):
            def answer(self) -> None:
                hub.requests += 1
                self.answer_for(hub)

        self._server = ThreadingHTTPServer((self.host, self.port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self._server = None


class HubHandler(BaseHTTPRequestHandler):
    """Answers requests of the hub's library."""

    protocol_version = "HTTP/1.0"
    """With HTTP 1.0 each connection ends after its answer, so no connection is open when the hub stops."""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        raise NotImplementedError

    def send(self, content: Any, code: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Answer with JSON."""
        self.send_bytes(code, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})

    def send_bytes(self, code: int, data: bytes, headers: Mapping[str, str]) -> None:
        with suppress(ConnectionError):  # Clients are killed on purpose.
            self.send_response(code)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)


class _Handler(HubHandler):
    def answer_for(self, hub: Hub) -> None:
        folder, repo, self._commit = hub.folder, hub._repo, hub.commit
        path = self.path.partition("?")[0]
        about, files = f"/api/datasets/{repo}", f"/datasets/{repo}/resolve/"
        path = path.replace(f"/api/models/{repo}", about)
        if path.startswith(f"/{repo}/resolve/"):
            path = f"/datasets{path}"
        if path.startswith(files):
            commit, _, name = path.removeprefix(files).partition("/")
            hub.read_at.add(commit)
            self._file(folder / name)
        elif (revision := self._revision(path, about)) is not None:
            found = [{"rfilename": p.relative_to(folder).as_posix()} for p in sorted(folder.rglob("*")) if p.is_file()]
            at = "2024-01-01T00:00:00.000Z"
            self.send({"id": repo, "sha": revision, "siblings": found, "private": False, "gated": False,
                        "disabled": False, "tags": [], "downloads": 0, "likes": 0, "lastModified": at,
                        "createdAt": at})  # fmt: skip
        elif path.startswith(f"{about}/tree/"):
            here = folder / "/".join(path.removeprefix(f"{about}/tree/").split("/")[1:])
            self.send([self._entry(folder, entry) for entry in sorted(here.iterdir())] if here.is_dir() else [])
        else:
            self.send({"error": "Repository not found"}, 404)

    def _revision(self, path: str, about: str) -> str | None:
        """The commit of the revision that the request names, or None if there is no such revision."""
        if path in (about, f"{about}/revision/main"):
            return self._commit
        asked = path.removeprefix(f"{about}/revision/")
        return asked if re.fullmatch("[0-9a-f]{40}", asked) else None

    def _entry(self, folder: Path, path: Path) -> dict[str, Any]:
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            return {"type": "directory", "oid": "0", "size": 0, "path": name}
        return {"type": "file", "oid": hashlib.sha1(path.read_bytes()).hexdigest(), "size": path.stat().st_size,
                "path": name}  # fmt: skip

    def _file(self, path: Path) -> None:
        if not path.is_file():
            self.send_bytes(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        data = path.read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range")
        if not wanted:
            self.send_bytes(200, data, headers)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last) + 1 if last else None]
        headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
        self.send_bytes(206, part, headers)

    def send_bytes(self, code: int, data: bytes, headers: Mapping[str, str]) -> None:
        super().send_bytes(code, data, {**headers, "X-Repo-Commit": self._commit})
