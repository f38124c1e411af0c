"""Addresses of publications: a folder, a model repository on the Hugging Face hub, or a URL that fsspec opens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from node.config.manifest import is_hub_name
from node.host.files import expand_user

HUB = "hub:"
REMEDY = "write a folder, hub:OWNER/NAME or a URL such as s3://bucket/folder"
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://")
_REVISION = re.compile(r"[\w][\w./-]*")


@dataclass(frozen=True, slots=True)
class PublishAddress:
    """Where publications of a run are."""

    kind: Literal["folder", "hub", "url"]
    place: str
    """An absolute path, OWNER/NAME or a URL."""
    revision: str = ""
    """The revision to read, for `hub` only; empty means the newest one."""

    def __str__(self) -> str:
        place = f"{HUB}{self.place}" if self.kind == "hub" else self.place
        return f"{place}@{self.revision}" if self.revision else place

    @property
    def public_name(self) -> str:
        """The address without the folders of this machine."""
        return Path(self.place).name if self.kind == "folder" else str(self)


def parse_publish_address(text: str, *, may_have_revision: bool = False) -> PublishAddress:
    """Parse an address. A relative folder is relative to the working folder. Raises ValueError with the remedy.

    `may_have_revision` allows `hub:OWNER/NAME@REVISION`, which names one publication to read.
    """
    if not text.strip() or not text.isprintable():
        raise ValueError(f"the address is empty or has control characters: {REMEDY}")
    if text.startswith(HUB):
        return _parse_hub(text, may_have_revision=may_have_revision)
    if not _SCHEME.match(text):
        return PublishAddress("folder", str(expand_user(text).absolute()))
    parts = urlsplit(text)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise ValueError(f"a file URL names a folder of this machine: write file:///FOLDER, or {REMEDY}")
        return PublishAddress("folder", str(Path(unquote(parts.path)).absolute()))
    if parts.username is not None or parts.password is not None:
        raise ValueError("keys in the URL would be shown with the settings: put them into the environment")
    from fsspec import available_protocols

    if parts.scheme not in available_protocols():
        raise ValueError(f"fsspec knows no scheme {parts.scheme!r}: {REMEDY}")
    return PublishAddress("url", text.rstrip("/"))


def _parse_hub(text: str, *, may_have_revision: bool) -> PublishAddress:
    name, at, revision = text.removeprefix(HUB).partition("@")
    if not is_hub_name(name):
        raise ValueError(f"{text!r} is not a model of the hub: write hub:OWNER/NAME")
    if at and not may_have_revision:
        raise ValueError(f"{text!r} names a revision, which the node chooses by itself: write hub:{name}")
    if at and not _REVISION.fullmatch(revision):
        raise ValueError(f"{revision!r} is not a revision: write hub:{name}@REVISION")
    return PublishAddress("hub", name, revision)
