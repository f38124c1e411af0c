"""Judges the listed runs by what this machine can train, and chooses one.

The rule: of the runs that this machine can train and that answer, the one with the most parameters; of several, the one
with the most members.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from node.config.manifest import Invite
from node.config.schema import Config
from node.errors import MachineError, SwarmError
from node.swarm.membership.directory import MAX_INVITED, DirectoryReader, ListedRun, open_reader
from node.training.device import ComputeDevice
from node.training.fit import compare_resources, estimate_requirements, first_lack
from node.training.model import has_stated_size
from node.training.text import text_lack

logger = logging.getLogger(__name__)

ASKED_AT_ONCE = 32
"""Runs that are asked at the same time whether they answer."""


@dataclass(frozen=True, slots=True)
class JudgedRun:
    listed: ListedRun
    needs_bytes: dict[str, float]
    """Bytes that a node on this machine needs, by the names of `fit.compare_resources`."""
    lack: str
    """Why this machine cannot train the run, as a predicate; empty if it can."""


def judge(runs: Iterable[ListedRun], config: Config, device: ComputeDevice) -> list[JudgedRun]:
    """Judge runs, best first: those that this machine can train, and then the others, the smallest of them first.

    Runs whose manifest states a wrong number of parameters are dropped.
    """
    judged = []
    for listed in runs:
        run = listed.manifest.run
        if not has_stated_size(listed.manifest):
            logger.debug("The listed run %s has another number of parameters than it says.", listed.manifest.hash[:12])
            continue
        needs = estimate_requirements(run, config, device.precision)
        needs_bytes = {what: needed for what, needed, _, _ in compare_resources(needs, config, device)}
        lack = "is complete" if _is_complete(listed) else first_lack(run, config, device)[0]
        judged.append(JudgedRun(listed, needs_bytes, lack or text_lack(run)))
    return sorted(judged, key=_rank)


def _is_complete(listed: ListedRun) -> bool:
    """Whether the run has trained all its tokens. An amendment, which the manifest does not show, may add to them."""
    manifest = listed.manifest
    is_fixed = manifest.run.governance == "fixed"
    return is_fixed and listed.tokens - manifest.rewound_tokens >= manifest.run.total_tokens


def _rank(one: JudgedRun) -> tuple[bool, int, int, str]:
    size = one.listed.manifest.parameters
    return bool(one.lack), size if one.lack else -size, -one.listed.members, one.listed.manifest.hash


def choose_run(config: Config, device: ComputeDevice) -> Invite:
    """Choose a run from the directory, and return an invite whose addresses have answered.

    Raises MachineError if no listed run fits this machine, and SwarmError if no peer answers or no run is listed.
    """

    async def choose(folder: Path) -> Invite:
        async with open_reader(folder) as reader:
            found = await reader.read(config.swarm.bootstrap)
            judged = judge(found.runs, config, device)
            if not judged:
                raise SwarmError("the directory lists no run of this protocol version", code="no_runs")
            fitting = [one.listed for one in judged if not one.lack]
            if not fitting:
                raise MachineError(_none_fits(judged), code="no_run_fits")
            return await _first_answering(reader, fitting)

    folder = config.node.data_dir / "cache" / "directory"  # A stop leaves it behind, and the next start empties it.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return asyncio.run(choose(folder))


def _none_fits(judged: list[JudgedRun]) -> str:
    nearest = judged[0]
    which = "The listed run" if len(judged) == 1 else f"None of the {len(judged)} listed runs fits; the smallest"
    return (
        f"{which}, {nearest.listed.manifest.run.name!r}, {nearest.lack}: see `diloco-node runs` for what each "
        "needs, or found a run of your own with `diloco-node run`."
    )


async def _first_answering(reader: DirectoryReader, fitting: list[ListedRun]) -> Invite:
    for start in range(0, len(fitting), ASKED_AT_ONCE):
        group = fitting[start : start + ASKED_AT_ONCE]
        answers = await asyncio.gather(*map(reader.answering, group))
        for run, addresses in zip(group, answers, strict=True):
            if addresses:
                logger.info(
                    "Joining the run %r (hash %s, %d parameters, members: %d). It has the most parameters of the runs "
                    "that fit this machine (%d) and answer.",
                    run.manifest.run.name, run.manifest.hash[:12], run.manifest.parameters, run.members, len(fitting),
                )  # fmt: skip
                return Invite(run.manifest.hash, addresses[:MAX_INVITED])
    raise SwarmError(f"none of the listed runs that fit this machine ({len(fitting)}) answers", code="no_answer")
