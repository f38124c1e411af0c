"""A local stand-in for the Hugging Face hub that takes commits, as far as the hub's library needs it to publish.

A commit is applied whole or not at all, and only if its parent is still the newest commit, as on the hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from urllib.parse import unquote

from tests.swarm.hub import HubHandler

AT = "2026-11-25T10:00:00.000Z"


@dataclass(slots=True)
class Commit:
    id: str
    title: str
    files: dict[str, bytes]


@dataclass(slots=True)
class Repository:
    commits: list[Commit] = field(default_factory=list)
    """Oldest first."""
    tags: dict[str, str] = field(default_factory=dict)
    """Name to commit."""

    def add(self, title: str, files: dict[str, bytes]) -> Commit:
        content = sorted((name, hashlib.sha1(data).hexdigest()) for name, data in files.items())
        text = f"{len(self.commits)} {title} {content}"
        self.commits.append(Commit(hashlib.sha1(text.encode()).hexdigest(), title, files))
        return self.commits[-1]

    def find(self, revision: str) -> Commit | None:
        revision = self.tags.get(revision, revision)
        if revision in ("main", ""):
            return self.commits[-1]
        return next((commit for commit in self.commits if commit.id == revision), None)


class PublishHub:
    """A context manager that serves any number of model repositories, which live in memory."""

    def __init__(self, *, token: str = "", delay_s: float = 0.0) -> None:
        """With a `token`, only requests that carry it may write. `delay_s` is the time that each request takes."""
        self.repositories: dict[str, Repository] = {}
        self.token, self.delay_s = token, delay_s
        self.is_broken = False
        """Whether each request is answered by 503."""
        self.port = 0
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None

    def __enter__(self) -> PublishHub:
        hub = self

        class Handler(_Handler):
            def answer(self) -> None:
                time.sleep(hub.delay_s)
                if hub.is_broken:
                    self.send({"error": "Service unavailable"}, 503)
                    return
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                if len(body) < length:
                    return  # The client was killed.
                with hub._lock:
                    self.answer_for(hub, body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that make a process use this hub."""
        return {"HF_ENDPOINT": f"http://127.0.0.1:{self.port}", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


class _Handler(HubHandler):
    def answer_for(self, hub: PublishHub, body: bytes) -> None:
        path = unquote(self.path.partition("?")[0])
        if self.command == "POST" and hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.send({"error": "Invalid credentials"}, 401)
        elif path == "/api/validate-yaml":  # The library checks the card's header there.
            self.send({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            is_new = name not in hub.repositories
            if is_new:
                hub.repositories[name] = Repository()
                hub.repositories[name].add("initial commit", {".gitattributes": b""})
            about = {"url": f"http://127.0.0.1:{hub.port}/{name}", "name": name, "id": name}
            self.send(
                about if is_new else {"error": "You already created this model repo", **about}, 200 if is_new else 409
            )
        elif (match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/.*)?", path)) and match[1] in hub.repositories:
            self._answer_api(hub.repositories[match[1]], match[1], match[2] or "", body)
        elif (match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)) and match[1] in hub.repositories:
            self._answer_file(hub.repositories[match[1]], match[2], match[3])
        else:
            self.send({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    def _answer_api(self, repository: Repository, name: str, rest: str, body: bytes) -> None:
        verb, _, argument = rest.removeprefix("/").partition("/")
        newest = repository.commits[-1]
        if verb in ("", "revision"):
            self._answer_info(repository, name, argument)
        elif verb == "refs":
            tags = [{"name": tag, "ref": f"refs/tags/{tag}", "targetCommit": c} for tag, c in repository.tags.items()]
            main = {"name": "main", "ref": "refs/heads/main", "targetCommit": newest.id}
            self.send({"branches": [main], "tags": tags, "converts": [], "pullRequests": []})
        elif verb == "commits":
            self.send([{"id": c.id, "title": c.title, "message": "", "date": AT, "authors": []}
                       for c in reversed(repository.commits)])  # fmt: skip
        elif verb == "tree":
            commit = repository.find(argument.partition("/")[0])
            files = commit.files if commit is not None else {}
            self.send([{"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": path}
                       for path, data in files.items()])  # fmt: skip
        elif verb == "preupload":
            asked = json.loads(body)["files"]
            self.send({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]})
        elif verb == "commit":
            self._commit(repository, name, body)
        elif verb == "tag":
            tag = json.loads(body)["tag"]
            commit = repository.find(argument)
            if tag in repository.tags or commit is None:
                self.send({"error": "Tag reference exists already"}, 409)
                return
            repository.tags[tag] = commit.id
            self.send({})
        else:
            self.send({"error": f"Not served here: {verb}"}, 404)

    def _answer_info(self, repository: Repository, name: str, revision: str) -> None:
        commit = repository.find(revision)
        if commit is None:
            self.send({"error": "Revision not found"}, 404, {"X-Error-Code": "RevisionNotFound"})
            return
        self.send({"id": name, "sha": commit.id, "siblings": [{"rfilename": path} for path in commit.files],
                   "private": False, "gated": False, "disabled": False, "tags": [], "downloads": 0, "likes": 0,
                   "lastModified": AT, "createdAt": AT})  # fmt: skip

    def _commit(self, repository: Repository, name: str, body: bytes) -> None:
        lines = [json.loads(line) for line in body.decode().splitlines() if line.strip()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        if header.get("parentCommit") not in (None, repository.commits[-1].id):
            self.send({"error": "A commit has happened since. Please refresh and try again."}, 412)
            return
        files = dict(repository.commits[-1].files)
        for line in lines:
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "deletedFile":
                files.pop(line["value"]["path"], None)
        commit = repository.add(header["summary"], files)
        url = f"http://{self.headers['Host']}/{name}/commit/{commit.id}"
        self.send({"success": True, "commitOid": commit.id, "commitUrl": url, "hookOutput": ""})

    def _answer_file(self, repository: Repository, revision: str, path: str) -> None:
        commit = repository.find(revision)
        if commit is None or path not in commit.files:
            self.send({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        data = commit.files[path]
        self.send_bytes(200, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit.id})
