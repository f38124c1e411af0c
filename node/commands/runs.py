"""Lists the runs of the directory, with what they need and whether this machine fits."""

from __future__ import annotations

import asyncio
import logging
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from node.api.public_page import short
from node.config.schema import Config
from node.errors import MachineError, SwarmError, UsageError
from node.swarm.membership.directory import NO_BOOTSTRAP, RunDirectory, open_reader
from node.swarm.membership.discovery import AddressCache
from node.training.device import choose_device
from node.training.fit import GB
from node.worker.run_choice import JudgedRun, judge

MAX_KNOWN = 8
"""Peers that the node of the data folder has known and that are asked besides the bootstrap peers."""
ID_CHARACTERS = 8
ID = re.compile(rf"[0-9a-f]{{{ID_CHARACTERS},}}")
PURPOSE_CHARACTERS = 72
JSON_NAMES = {"GPU memory": "gpu_memory", "memory": "memory", "disk": "disk"}


def find_runs(config: Config) -> tuple[list[JudgedRun], int]:
    """The listed runs, best first, and the number of runs of other protocol versions.

    Raises UsageError without a bootstrap peer, and MachineError if none answers.
    """
    for library in ("asyncio", "hivemind"):
        logging.getLogger(library).setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
        try:
            found = asyncio.run(_read(config, Path(folder)))
        except SwarmError as exc:
            raise MachineError(
                f"No peer of the directory answers ({exc}): check this machine's network, or name another peer with "
                "--bootstrap HOST:PORT.",
                code=exc.code,
            ) from exc
    limits = config.limits
    device = choose_device(config.devices, limits.cpu_threads, gpu_memory_ratio=limits.gpu_memory_ratio)
    return judge(found.runs, config, device), found.other_protocols


async def _read(config: Config, folder: Path) -> RunDirectory:
    known = await AddressCache(config.node.data_dir / "peers.json").read()
    bootstrap = dict.fromkeys([*config.swarm.bootstrap, *known[:MAX_KNOWN]])
    if not bootstrap:
        raise UsageError(NO_BOOTSTRAP)
    async with open_reader(folder) as reader:
        return await reader.read(list(bootstrap))


def to_json(runs: Sequence[JudgedRun], other_protocols: int) -> dict[str, Any]:
    """What `runs --json` prints."""
    return {"runs": [_entry(one) for one in runs], "other_protocols": other_protocols}


def _entry(one: JudgedRun) -> dict[str, Any]:
    listed, manifest, needs = one.listed, one.listed.manifest, one.needs_bytes.items()
    return {
        "name": manifest.run.name,
        "purpose": manifest.run.purpose,
        "manifest_hash": manifest.hash,
        "protocol_version": manifest.protocol_version,
        "parameters": manifest.parameters,
        "needs_bytes": {JSON_NAMES[what]: max(0, round(needed)) for what, needed in needs if what in JSON_NAMES},
        "members": listed.members,
        "round": listed.round,
        "tokens": listed.tokens,
        "total_tokens": manifest.run.total_tokens,
        "progress_ratio": listed.progress_ratio,
        "fits": not one.lack,
        "reason": one.lack,
        "invite": listed.invite,
    }


def find_run(runs: Sequence[JudgedRun], name: str) -> JudgedRun:
    """The run with this name or id. Raises UsageError unless there is exactly one.

    What reads like an id is only an id, so nobody can name a run like the id of another one.
    """
    if ID.fullmatch(name):
        chosen = [one for one in runs if one.listed.manifest.hash.startswith(name)]
    else:
        chosen = [one for one in runs if name == one.listed.manifest.run.name]
    if not chosen:
        raise UsageError(f"The directory lists no run {name!r}: see `diloco-node runs`.", code="no_run")
    if len(chosen) > 1:
        raise UsageError(
            f"{len(chosen)} listed runs are named {name!r}: name one of them by its id in `diloco-node runs`.",
            code="no_run",
        )
    return chosen[0]


def describe_runs(runs: Sequence[JudgedRun]) -> Table:
    """A table of the runs that fits into 80 columns."""
    table = Table(box=None, pad_edge=False)
    table.add_column("Run", overflow="fold", ratio=3)
    for name in ("Id", "Size", "Members", "Done", "Memory"):
        table.add_column(name, justify="left" if name == "Id" else "right", no_wrap=True)
    table.add_column("This machine", overflow="fold", ratio=2)
    for one in runs:
        listed, manifest = one.listed, one.listed.manifest
        purpose = " ".join(manifest.run.purpose.split())
        if len(purpose) > PURPOSE_CHARACTERS:
            purpose = purpose[: PURPOSE_CHARACTERS - 1] + "…"
        # Text objects, because a string from a stranger could contain markup.
        run = Text.assemble(manifest.run.name, (f"\n{purpose}" if purpose else "", "dim"))
        cells = (
            manifest.hash[:ID_CHARACTERS],
            short(manifest.parameters),
            f"{listed.members:,}",
            f"{listed.progress_ratio:.1%}",
            f"{_memory_bytes(one) / GB:.3g} GB",
        )
        table.add_row(run, *map(Text, cells), Text(one.lack or "fits", "" if one.lack else "green"))
    return table


def _memory_bytes(one: JudgedRun) -> float:
    """The memory that decides whether the model fits: that of the GPU, or else the main memory."""
    return one.needs_bytes.get("GPU memory", one.needs_bytes["memory"])


def describe_run(one: JudgedRun) -> str:
    """Everything about one run, in plain text."""
    listed, manifest = one.listed, one.listed.manifest
    rows = [
        ("run", f"{manifest.run.name} ({manifest.hash})"),
        ("size", f"{manifest.parameters:,} parameters"),
        ("progress", f"{listed.progress_ratio:.1%}, {listed.round:,} rounds, {listed.tokens:,} tokens"),
        ("members", f"{listed.members:,}"),
        *((what, f"{needed / GB:.3g} GB") for what, needed in one.needs_bytes.items() if needed > 0),
        ("here", one.lack or "fits"),
        ("text", ", ".join(manifest.run.data.sources)),
        *(("purpose", line) for line in manifest.run.purpose.split("\n") if line),
        ("join", f"diloco-node run --join {listed.invite}"),
    ]
    return "\n".join(f"{name:<10} {text}" for name, text in rows)
