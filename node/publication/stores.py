"""The places that hold the publications of a run. Each holds a revision whole or not at all, and at most once.

    folder   FOLDER/REVISION/, renamed into place when all of it is on the disk
    hub      one commit on `main` whose title is the revision, and a tag of the same name
    url      URL/REVISION/PART/, and URL/REVISION/COMPLETE, written last, which names the part that counts

Two publishers may work on one revision at the same time. The folder's rename and the hub's commit then fail for the
second one. In a URL each publisher writes a part of its own, so the files of two are never mixed.
"""

from __future__ import annotations

import glob
import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from node.config.publish_address import PublishAddress
from node.errors import MachineError, NodeError, UsageError
from node.host.files import whole_folder
from node.training.hub import first_sentence

RECORD_FILE = "diloco.json"
"""The file of a publication that names its state and its other files."""
MOST_RECORD_BYTES = 64 * 2**20
COMPLETE = "COMPLETE"
NOT_FETCHED = (".gguf", ".gitattributes")
"""Suffixes of files that are not downloaded to found a run."""
NEW_FILES = {".gitattributes", ".gitignore", "README.md", "LICENSE"}
"""Files that a new repository of the hub may have."""
DIGEST_DIGITS = 16
MAIN = "main"
COMMIT_TRIES = 5
"""How often a commit is tried when others commit to the repository at the same time."""
_REVISION = re.compile(r"round-(\d{8,})-([0-9a-f]{16})")


def revision_of(round_: int, state_digest: str) -> str:
    """The name of the publication of a state: its round, and the first digits of its digest."""
    return f"round-{round_:08d}-{state_digest[:DIGEST_DIGITS]}"


def round_of(revision: str) -> int | None:
    """The round in the name of a revision; None for any other name."""
    match = _REVISION.fullmatch(revision)
    return int(match[1]) if match is not None else None


CheckSize = Callable[[int], None]
"""Called with the size of a download in bytes. Raises NodeError if there is no room."""


class Superseded(Exception):
    """The place holds a later round already, so this revision is not published any more."""


class Store(Protocol):
    """A place of publications. Errors of the place are NodeErrors whose message names the remedy."""

    def has(self, revision: str) -> bool:
        """Whether the whole revision is there. Finishes the work of a publisher that died after its commit."""

    def put(self, revision: str, folder: Path) -> bool:
        """Publish the files of a folder. Returns False if another publisher was first. Raises Superseded."""

    def fetch(self, target: Path, check_size: CheckSize) -> Path:
        """Download the newest revision, or the one that the address names. Returns its folder.

        Calls `check_size` before it downloads anything.
        """


def open_store(address: PublishAddress, *, token: str | None = None, part: str = "") -> Store:
    """Open the place. `token` is for the hub; None means the token of this machine.

    `part` names the publisher. Two that run at the same time must have different names.
    """
    if address.kind == "folder":
        return FolderStore(Path(address.place))
    if address.kind == "hub":
        return HubStore(address, token)
    return UrlStore(address, part or "publisher")


class FolderStore:
    """Publications in a folder. It may be on a network file system that has atomic renames."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def has(self, revision: str) -> bool:
        with self._translated():
            return self._has(revision)

    def _translated(self) -> AbstractContextManager[None]:
        return _translated(str(self._root), "free disk, make the folder readable and writable, or name another one")

    def _has(self, revision: str) -> bool:
        return (self._root / revision / RECORD_FILE).is_file()

    def put(self, revision: str, folder: Path) -> bool:
        with self._translated():
            try:
                with whole_folder(self._root / revision) as temporary:
                    for name, path in _files_of(folder).items():
                        (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                        shutil.copyfile(path, temporary / name)
            except OSError:
                if self._has(revision):  # Another publisher's rename came first.
                    return False
                raise
        return True

    def fetch(self, target: Path, check_size: CheckSize) -> Path:
        with _translated(str(self._root), "name a folder with publications"):
            if (self._root / RECORD_FILE).is_file():
                return self._root
            if not self._root.is_dir():
                raise UsageError(f"There is no folder {self._root}: name a folder with publications.")
            names = [path.name for path in self._root.iterdir()]
        return self._root / _newest(names, str(self._root))


class HubStore:
    """Publications in a model repository of the Hugging Face hub."""

    def __init__(self, address: PublishAddress, token: str | None) -> None:
        from huggingface_hub import HfApi

        self._name, self._revision, self._api = address.place, address.revision, HfApi(token=token)

    def _translated(self) -> AbstractContextManager[None]:
        remedy = (
            "check the name, this machine's network, and that the token in HF_TOKEN or publish.token_file may write"
        )
        return _translated(f"hub:{self._name}", remedy)

    def has(self, revision: str) -> bool:
        with self._translated():
            return self._has(revision)

    def _has(self, revision: str) -> bool:
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            if any(tag.name == revision for tag in self._api.list_repo_refs(self._name).tags):
                return True
            commits = self._api.list_repo_commits(self._name)
        except RepositoryNotFoundError:
            return False
        found = next((commit.commit_id for commit in commits if commit.title == revision), None)
        if found is not None:
            self._tag(revision, found)
        elif any((round_of(commit.title) or -1) > (round_of(revision) or 0) for commit in commits):
            raise Superseded
        return found is not None

    def put(self, revision: str, folder: Path) -> bool:
        with self._translated():
            self._make_repository()
            for tries_left in reversed(range(COMMIT_TRIES)):
                parent = self._api.repo_info(self._name).sha
                if self._has(revision):
                    return False
                commit = self._commit(revision, folder, parent, may_fail=tries_left > 0)
                if commit is not None:
                    self._tag(revision, commit)
                    return True
        return False

    def _make_repository(self) -> None:
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            self._api.repo_info(self._name)
        except RepositoryNotFoundError:
            self._api.create_repo(self._name, exist_ok=True)

    def _commit(self, revision: str, folder: Path, parent: str | None, *, may_fail: bool) -> str | None:
        """Replace the files of the publication before by those of the folder. The owner's own files stay.

        It is one commit, whose parent must still be the newest commit. Returns the commit; None if somebody else has
        committed since `parent` was read.
        """
        from huggingface_hub import CommitOperation, CommitOperationAdd, CommitOperationDelete
        from huggingface_hub.errors import HfHubHTTPError

        files = _files_of(folder)
        known = set(self._api.list_repo_files(self._name, revision=parent))
        if RECORD_FILE not in known and known - NEW_FILES:
            raise UsageError(
                f"hub:{self._name} holds files that do not belong to a publication, and publishing would remove them: "
                "name an empty or a new repository."
            )
        old = known & {RECORD_FILE, *self._published_files(parent)} - set(files) if RECORD_FILE in known else set()
        operations: list[CommitOperation] = [
            *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()),
            *(CommitOperationDelete(path_in_repo=name, is_folder=False) for name in sorted(old)),
        ]
        try:
            done = self._api.create_commit(self._name, operations, commit_message=revision, parent_commit=parent)
        except HfHubHTTPError as exc:
            if may_fail and exc.response is not None and exc.response.status_code == 412:
                return None
            raise
        return done.oid

    def _published_files(self, commit: str | None) -> set[str]:
        """The files that the record of the publication in this commit names; none if it is damaged."""
        with tempfile.TemporaryDirectory() as folder:
            path = self._api.hf_hub_download(self._name, RECORD_FILE, revision=commit, cache_dir=folder)
            try:
                return set(json.loads(Path(path).read_bytes())["files"])
            except (ValueError, LookupError, TypeError):
                return set()

    def _tag(self, revision: str, commit: str) -> None:
        self._api.create_tag(self._name, tag=revision, revision=commit, exist_ok=True)

    def fetch(self, target: Path, check_size: CheckSize) -> Path:
        from huggingface_hub.hf_api import RepoFile

        with self._translated():
            commit = self._api.repo_info(self._name, revision=self._revision or MAIN).sha
            tree = self._api.list_repo_tree(self._name, recursive=True, revision=commit)
            sizes = {one.path: one.size for one in tree if isinstance(one, RepoFile)}
            if sizes.get(RECORD_FILE, math.inf) > MOST_RECORD_BYTES:
                raise _nothing_at(f"hub:{self._name}")
            # The owner may keep other files there, which are no part of the publication.
            wanted = {RECORD_FILE, *self._published_files(commit)}.intersection(sizes)
            wanted = {name for name in wanted if not name.endswith(NOT_FETCHED)}
            check_size(sum(sizes[name] for name in wanted))
            patterns = sorted(map(glob.escape, wanted))
            return Path(
                self._api.snapshot_download(self._name, revision=commit, cache_dir=target, allow_patterns=patterns)
            )


class UrlStore:
    """Publications below a URL that fsspec opens. The place needs no atomic rename, only writes of one small file."""

    def __init__(self, address: PublishAddress, part: str) -> None:
        self._url, self._part = address.place, part

    def _open(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs

        scheme = self._url.partition("://")[0]
        try:
            fs, root = url_to_fs(self._url)
            return fs, root
        except ImportError as exc:
            raise MachineError(
                f"{self._url} needs a Python package that is not installed ({first_sentence(exc)}): install it, or "
                f"name another place than {scheme}://."
            ) from exc

    def _translated(self) -> AbstractContextManager[None]:
        return _translated(self._url, "check the URL, this machine's network and the keys in the environment")

    def has(self, revision: str) -> bool:
        with self._translated():
            fs, root = self._open()
            return self._complete_part(fs, f"{root}/{revision}") is not None

    def _complete_part(self, fs: Any, folder: str) -> str | None:
        """The part that counts; None without a valid COMPLETE, which a killed publisher may have left half written."""
        fs.invalidate_cache()
        try:
            part = json.loads(fs.cat_file(f"{folder}/{COMPLETE}"))["part"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None
        return part if isinstance(part, str) and re.fullmatch(r"\w+", part) else None

    def put(self, revision: str, folder: Path) -> bool:
        with self._translated():
            fs, root = self._open()
            place = f"{root}/{revision}"
            own = f"{place}/{self._part}"
            if self._complete_part(fs, place) is not None:
                return False
            with suppress(FileNotFoundError):
                fs.rm(own, recursive=True)
            for relative, path in _files_of(folder).items():
                name = f"{own}/{relative}"
                fs.makedirs(name.rpartition("/")[0], exist_ok=True)
                fs.put_file(str(path), name)
            complete = self._complete_part(fs, place)
            if complete is not None:  # Another publisher was faster.
                if complete != self._part:
                    fs.rm(own, recursive=True)
                return False
            fs.pipe_file(f"{place}/{COMPLETE}", json.dumps({"part": self._part}).encode())
            return True

    def fetch(self, target: Path, check_size: CheckSize) -> Path:
        with self._translated():
            fs, root = self._open()
            place = root
            if round_of(root.rpartition("/")[2]) is None:
                names = [name.rstrip("/").rpartition("/")[2] for name in fs.ls(root, detail=False)]
                complete = [name for name in names if round_of(name) is not None]
                complete = [name for name in complete if self._complete_part(fs, f"{root}/{name}") is not None]
                place = f"{root}/{_newest(complete, self._url)}"
            part = self._complete_part(fs, place)
            if part is None:
                raise _nothing_at(self._url)
            found = fs.find(f"{place}/{part}", detail=True)
            files = {name: about for name, about in found.items() if not name.endswith(NOT_FETCHED)}
            check_size(sum(about["size"] or 0 for about in files.values()))
            folder = target / place.rpartition("/")[2]
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            for name in files:
                inside = name.rpartition(f"/{part}/")[2]
                fs.get_file(name, str(folder / Path(inside).name))
            return folder


def _newest(names: list[str], where: str) -> str:
    revisions = [name for name in names if round_of(name) is not None]
    if not revisions:
        raise _nothing_at(where)
    return max(revisions, key=lambda name: (round_of(name), name))


def _files_of(folder: Path) -> dict[str, Path]:
    """The files of a publication by name. Raises MachineError if they are not complete."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    if RECORD_FILE not in files:
        raise MachineError(f"The files in {folder} were removed while they were published: try again.")
    return files


def _nothing_at(where: str) -> UsageError:
    return UsageError(f"There is no whole publication at {where}: name a place that a node's publish.to names.")


@contextmanager
def _translated(where: str, remedy: str) -> Iterator[None]:
    """Translate the errors of the place. Whatever a library raises, the caller may try again."""
    try:
        yield
    except (NodeError, Superseded):
        raise
    except Exception as exc:
        raise MachineError(f"{where} does not work ({first_sentence(exc)}): {remedy}.") from exc
