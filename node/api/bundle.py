"""The support bundle: what somebody needs who helps, and nothing that would let him in. Knows a view and the machine.

Everything is written as text, scrubbed as a whole, and cut to a size; made in a thread, as it reads files and packs.
"""

from __future__ import annotations

import getpass
import io
import json
import os
import platform
import shutil
import socket
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from node.api.configure import hide_secrets
from node.api.metrics import Build
from node.api.scrub import Scrubber
from node.api.seam import View
from node.config import Config
from node.multiaddress import parse

PART_BYTES_MAX = 2_000_000
"""Of each file in it, before packing; there are ten at most."""
PACKAGES = (
    "blake3", "cryptography", "datasets", "fastapi", "hivemind", "numpy", "psutil", "pydantic", "safetensors",
    "starlette", "torch", "transformers", "uvicorn",
)  # fmt: skip
README = """\
Support bundle of a diloco-node: status, swarm, rounds, configuration, machine, and the newest log lines. Token, keys,
invites, IP addresses, hosts in URLs, passwords, the home folder, this machine's name and its user's are taken out, as
far as they can be told by their form; names of peers and of the run are in. Look through it before you hand it on."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the bundle is made of, all of one moment."""

    view: View
    config: Config
    origins: Mapping[str, str]
    build: Build
    metrics: bytes
    secrets: tuple[str, ...]


def make_bundle(facts: Facts) -> bytes:
    """A zip file. Blocks: it reads the log and packs."""
    places = [*_places(facts.config.node.data_dir), *_hosts(facts.config)]
    scrub = Scrubber((*facts.secrets, facts.view.status.run.invite), places)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in _parts(facts):
            archive.writestr(f"diloco-node-support/{name}", scrub(text)[-PART_BYTES_MAX:])
    return packed.getvalue()


def _parts(facts: Facts) -> Iterator[tuple[str, str]]:
    view, config = facts.view, facts.config.model_dump(mode="json")
    for section, key in (("swarm", "bootstrap"), ("swarm", "announce"), ("swarm", "listen"), ("api", "allowed_hosts")):
        config[section][key] = f"({len(config[section][key])} of them)"
    yield "README.txt", README
    yield "status.json", view.status.model_dump_json(indent=1)
    yield "swarm.json", _lines(row.model_dump_json() for row in view.swarm)
    yield "rounds.jsonl", _lines(record.model_dump_json() for record in view.rounds)
    yield "config.json", _json({"config": hide_secrets(config), "origins": dict(facts.origins)})
    yield "versions.json", _json(_versions(facts.build))
    yield "machine.json", _json(_machine(facts.config.node.data_dir))
    yield "metrics.txt", facts.metrics.decode()
    yield "log.jsonl", _lines(line.model_dump_json() for line in reversed(view.logs))
    yield "node.log", _tail(facts.config.node.data_dir / "logs" / "node.log")


def _hosts(config: Config) -> Iterator[tuple[str, str]]:
    """The names that are set, and by what they are replaced: alone where they have a dot, else with their port only,
    as a single word may be any word of the log."""
    for name in config.api.allowed_hosts:
        if "." in name:
            yield name, "(address)"
    for address in map(parse, (*config.swarm.announce, *config.swarm.bootstrap)):
        if address.is_name:
            yield (address.host if "." in address.host else f"{address.host}:{address.port}"), "(address)"


def _lines(texts: Iterator[str]) -> str:
    """As many as fit, the first ones first."""
    kept, size = [], 0
    for text in texts:
        size += len(text) + 1
        if size > PART_BYTES_MAX:
            break
        kept.append(text)
    return "\n".join(kept) + "\n"


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=1, default=str, ensure_ascii=False)


def _versions(build: Build) -> dict[str, str]:
    found = {"diloco-node": build.version, "revision": build.revision, "python": sys.version}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _machine(data_dir: Path) -> dict[str, Any]:
    memory, group = psutil.virtual_memory(), Path("/sys/fs/cgroup")
    disk = shutil.disk_usage(data_dir) if data_dir.exists() else None
    return {
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "load": psutil.getloadavg(),
        "memory_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "swap_used_bytes": psutil.swap_memory().used,
        "cgroup": {name: _read(group / name) for name in ("cpu.max", "memory.max", "memory.current")},
        "disk_free_bytes": disk.free if disk else None,
        "disk_size_bytes": disk.total if disk else None,
        "in_container": Path("/.dockerenv").exists(),
        "files": {item.name: item.stat().st_size for item in sorted(data_dir.glob("*")) if item.is_file()},
    }


def _read(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None


def _tail(file: Path) -> str:
    try:
        with file.open("rb") as log:
            log.seek(max(0, file.stat().st_size - PART_BYTES_MAX))
            return log.read().decode(errors="replace")
    except OSError as exc:
        return f"The log file could not be read: {exc.strerror}.\n"


def _places(data_dir: Path) -> Iterator[tuple[str, str]]:
    """Short names would be found in other words, too."""
    yield str(data_dir), "(data folder)"
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home raises where there is none
    if len(home) > len("/root"):
        yield home, "(home)"
    with suppress(KeyError, OSError):
        if len(user := getpass.getuser()) > len("node") and user != "diloco":
            yield f"/{user}/", "/(user)/"
    if len(socket.gethostname()) > len("node"):
        yield socket.gethostname(), "(host)"
