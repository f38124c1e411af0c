"""The support bundle: a zip file for the people who help with a node, without secrets and addresses."""

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from node.api.metrics import Build
from node.api.node_interface import View
from node.api.redaction import ADDRESS, HIDDEN, Redactor, hide_secrets
from node.config.schema import Config
from node.host.cgroup import memory_limit, quota_cores
from node.host.revision import installed_version
from node.multiaddress import parse

PART_BYTES_MAX = 2_000_000
"""Largest uncompressed size of each of the ten files."""
PACKAGES = (
    "blake3", "cryptography", "datasets", "fastapi", "hivemind", "numpy", "psutil", "pydantic", "safetensors",
    "starlette", "torch", "transformers", "uvicorn",
)  # fmt: skip
README = """\
Support bundle of a diloco-node: status, swarm, rounds, configuration, machine, and the newest log lines. Token, keys,
invites, IP addresses, hosts in URLs, passwords, the home folder, and the names of this machine and its user are removed
where their form shows what they are. Names of peers and of the run remain. Read it before you pass it on."""


@dataclass(frozen=True, slots=True)
class BundleSource:
    """Everything that goes into a bundle, taken at one moment."""

    view: View
    config: Config
    origins: Mapping[str, str]
    build: Build
    metrics: bytes
    secrets: tuple[str, ...]


def make_bundle(source: BundleSource) -> bytes:
    """Return the zip file's content. This reads the log from disk and compresses, so call it on a thread."""
    replacements = [*_private_names(source.config.node.data_dir), *_configured_hosts(source.config)]
    redact = Redactor((*source.secrets, source.view.status.run.invite), replacements)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in _parts(source):
            archive.writestr(f"diloco-node-support/{name}", redact(text)[-PART_BYTES_MAX:].encode(errors="replace"))
    return content.getvalue()


def _parts(source: BundleSource) -> Iterator[tuple[str, str]]:
    view, config, data_dir = source.view, source.config.model_dump(mode="json"), source.config.node.data_dir
    for section, key in (("swarm", "bootstrap"), ("swarm", "announce"), ("swarm", "listen"), ("api", "allowed_hosts")):
        config[section][key] = f"({len(config[section][key])} entries)"
    config["api"]["public_url"] = HIDDEN if config["api"]["public_url"] else ""
    config["notify"] = {key: HIDDEN if value else value for key, value in config["notify"].items()}
    yield "README.txt", README
    yield "status.json", view.status.model_dump_json(indent=1)
    yield "swarm.json", _lines(row.model_dump_json() for row in view.swarm)
    yield "rounds.jsonl", _lines(record.model_dump_json() for record in view.rounds)
    yield "config.json", _json({"config": hide_secrets(config), "origins": dict(source.origins)})
    yield "versions.json", _json(_versions(source.build))
    yield "machine.json", _json(_machine(data_dir))
    yield "metrics.txt", source.metrics.decode()
    yield "log.jsonl", _lines(line.model_dump_json() for line in reversed(view.logs))
    yield "node.log", _tail(data_dir / "logs" / "node.log")


def _lines(texts: Iterator[str]) -> str:
    """Join as many of the first lines as fit into PART_BYTES_MAX."""
    lines, size = [], 0
    for text in texts:
        size += len(text) + 1
        if size > PART_BYTES_MAX:
            break
        lines.append(text)
    return "\n".join(lines) + "\n"


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=1, default=str, ensure_ascii=False)


def _versions(build: Build) -> dict[str, str]:
    versions = {"diloco-node": build.version, "revision": build.revision, "python": sys.version}
    return versions | {package: installed_version(package) or "not installed" for package in PACKAGES}


def _machine(data_dir: Path) -> dict[str, Any]:
    memory, limit = psutil.virtual_memory(), memory_limit()
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
        "memory_limit": asdict(limit) if limit is not None else None,
        "cores_quota": quota_cores(),
        "disk_free_bytes": disk.free if disk else None,
        "disk_size_bytes": disk.total if disk else None,
        "in_container": Path("/.dockerenv").exists(),
        # Pairs, because the redactor takes `"api-token": 44` for a secret with its value.
        "files": [(file.name, size) for file in sorted(data_dir.glob("*")) if (size := _size_bytes(file)) is not None],
    }


def _size_bytes(path: Path) -> int | None:
    """The size of a file; None if the path is no file, or was removed a moment ago."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


def _tail(file: Path) -> str:
    try:
        with file.open("rb") as log:
            log.seek(max(0, file.stat().st_size - PART_BYTES_MAX))
            return log.read().decode(errors="replace")
    except OSError as exc:
        return f"The log file could not be read: {exc.strerror}.\n"


def _configured_hosts(config: Config) -> Iterator[tuple[str, str]]:
    """Yield host names to hide. Names without a dot may be common words and are hidden only before a port."""
    for name in config.api.host_names:
        if "." in name:
            yield name, ADDRESS
    for address in map(parse, (*config.swarm.announce, *config.swarm.bootstrap)):
        if address.is_name:
            yield (address.host if "." in address.host else f"{address.host}:{address.port}"), ADDRESS


def _private_names(data_dir: Path) -> Iterator[tuple[str, str]]:
    """Yield folders, user and machine to replace. Short names stay, because they occur inside other words."""
    yield str(data_dir), "(data folder)"
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home raises where there is none
    if len(home) > len("/root"):
        yield home, "(home)"
    with suppress(KeyError, OSError):
        if len(user := getpass.getuser()) > len("node") and user != "diloco":
            yield f"/{user}/", "/(user)/"
    if len(socket.gethostname()) > len("node"):
        yield socket.gethostname(), "(host)"
