"""What everybody may know of a run: the content of the public page.

It contains the names that members chose, and no address but those of `swarm.announce`.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from node.api.leaderboard import KnownOwner, RankedMember, RankedOwner, RankedTeam, Ranking, rank
from node.api.node_interface import View
from node.config.manifest import Invite, Manifest, find_manifest, parse_invite
from node.errors import NodeError
from node.status import MEMBER_PHASES, TRAFFIC_LIMIT, Outcome, Phase, RoundRecord, Sample, TaskScore, Value, rfc3339

logger = logging.getLogger(__name__)

ROUNDS_SHOWN, LEADERS_SHOWN, STREAKS_SHOWN, MEMBERS_SHOWN = 20, 100, 10, 200
LONGEST_FORECAST_S = 10 * 365 * 86400.0
"""An end that is further away is not forecast."""
RATE_ROUNDS, LEAST_RATE_ROUNDS = 20, 3
"""The speed of the swarm is that of this many newest rounds, and unknown with fewer than the second number."""
USUAL_RATIO = 5.0
"""A round whose time is this many times more or less than the median is left out of the speed."""
SILENT_ROUNDS, LEAST_SILENT_S = 5, 60.0
"""The speed is unknown again if the newest round began this many mean rounds ago, and this many seconds."""
LIVE_OUTCOMES = frozenset({Outcome.COMPLETE, Outcome.PARTIAL, Outcome.ALONE})
"""Outcomes of rounds whose times this node has seen. It learns of others later, many at a time."""
UNSEEING_PHASES = frozenset({Phase.STARTING, Phase.CONNECTING, Phase.STOPPED, Phase.ERROR})


class PublicMember(Value):
    """A member that is there now."""

    name: str
    owner: str = ""
    """The key of the machine's owner."""
    owner_name: str = ""
    """Empty if the owner has chosen none."""
    team: str = ""
    tokens_per_second: float


class PublicRound(Value):
    """One committed round."""

    number: int
    """The first round is 0, as everywhere."""
    at: str
    members: int
    tokens: int | None
    """None if this node does not know the round before."""
    loss: float | None = None


class LossPoint(Value):
    tokens: int
    loss: float


class PublicSample(Value):
    """How the model continued a prompt. The text is untrusted output of the model."""

    number: int
    """The newest round of the state that continued the prompt."""
    prompt: str
    text: str


class PublicRun(Value):
    """Everything on the public page. Strings are plain text."""

    name: str
    purpose: str
    manifest_hash: str
    model: str
    parameters: int
    data: tuple[str, ...]
    tokenizer: str
    state: str
    """`training`, `paused`, `waiting` or `complete`: what the whole run does, as this node sees it. `unknown` while it
    does not see it."""
    at: str
    """When this was written, UTC."""
    round: int
    """The last committed round; -1 before the first."""
    tokens: int
    total_tokens: int
    progress_ratio: float
    ends_at: str | None = None
    """When the run will be complete at the speed of the newest rounds; None while unknown, or if it does not train."""
    tokens_per_second: float | None = None
    """The speed of the whole swarm in the newest rounds; None while unknown, or if it does not train."""
    loss: float | None = None
    state_digest: str = ""
    members: tuple[PublicMember, ...] = ()
    """The fastest members that are there now."""
    members_now: int = 0
    """How many are there now."""
    members_ever: int = 0
    leaders: tuple[RankedMember, ...] = ()
    """By machine."""
    owners: tuple[RankedOwner, ...] = ()
    """By owner. A machine that has joined no owner is an owner of its own."""
    streaks: tuple[RankedOwner, ...] = ()
    """The owners who are in the most rounds in a row up to `credit_round`, the longest first."""
    teams: tuple[RankedTeam, ...] = ()
    credit_round: int | None = None
    """The last round that the leaderboard includes."""
    rounds: tuple[PublicRound, ...] = ()
    """Newest first."""
    losses: tuple[LossPoint, ...] = ()
    """Oldest first."""
    task_scores: tuple[TaskScore, ...] = ()
    """Scores in evaluation tasks: medians of the members that evaluated the state of their round."""
    samples: tuple[PublicSample, ...] = ()
    """Of the first, a middle and the newest sampled round, oldest first."""
    invite: str = ""
    """Names only addresses that the owner of this node announces; empty if there are none."""


class OwnRun(Value):
    """The run as the owner's page shows it."""

    run: PublicRun
    own: RankedMember | None = None
    """This node's line of the leaderboard, whatever its rank; None before its first round."""
    public_page: str = ""
    """A path on this node, or a whole URL with `api.public_url`. Empty without `api.public`."""


def read_run(folder: Path) -> Manifest | None:
    """The manifest in a data folder; None if there is none yet."""
    try:
        return find_manifest(folder)
    except NodeError:
        return None


def read_credit(folder: Path) -> Mapping[str, Any] | None:
    """The table of credit that the worker has written; None if there is none yet."""
    path = folder / "credit.json"
    try:
        written = path.stat()
        return _read_table(path, written.st_ino, written.st_mtime_ns)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as exc:
        logger.warning("The table of credit in %s cannot be read: %s", folder, exc)
        return None


@lru_cache(maxsize=1)
def _read_table(path: Path, _inode: int, _changed_at_ns: int) -> Mapping[str, Any]:
    """The table in a file. A large one takes a second to read, so it is read once for each version of the file."""
    record = json.loads(path.read_bytes())
    return {"round": record["evidence"]["round"], "table": record["table"]}


def read_owners(folder: Path) -> Mapping[str, KnownOwner]:
    """The owner of each machine that has a profile, as the worker has written them."""
    try:
        found = json.loads((folder / "profiles.json").read_bytes())["owners"]
        return {str(machine): KnownOwner.model_validate(owner) for machine, owner in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
        logger.warning("The profiles in %s cannot be read: %s", folder, exc)
        return {}


def read_samples(folder: Path) -> tuple[Sample, ...]:
    """The samples of the model's text that the worker has written, oldest first."""
    try:
        return tuple(
            Sample.model_validate(one) for one in json.loads((folder / "samples.json").read_bytes())["samples"]
        )
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, LookupError, TypeError) as exc:
        logger.warning("The samples in %s cannot be read: %s", folder, exc)
        return ()


def public_invite(invite: str, announced: Sequence[str]) -> str:
    """The invite without addresses at hosts that are not announced; empty if none is left. Takes multiaddresses."""
    hosts = {address.split("/")[2] for address in announced}
    if not invite or not hosts:
        return ""
    whole = parse_invite(invite)
    kept = tuple(address for address in whole.addresses if address.split("/")[2] in hosts)
    return str(Invite(whole.manifest_hash, kept)) if kept else ""


NO_RANKING = Ranking()
RUN_OVER = ("run_complete", "publishing")
"""Codes of a node whose run is complete. An amendment can end a run before it has all its tokens."""


def make_public_run(
    view: View,
    manifest: Manifest | None,
    credit: Mapping[str, Any] | None,
    now: datetime,
    ranking: Ranking = NO_RANKING,
    samples: Sequence[Sample] = (),
    invite: str = "",
) -> PublicRun:
    """Collect what the page shows. `credit`, `ranking`, `samples` and `invite` are the results of the others."""
    status, run = view.status, view.status.run
    done = _chain(view.rounds)
    model, data = (manifest.run.model, manifest.run.data) if manifest is not None else (None, None)
    state, members = _state(view), _members(view)
    rate = _tokens_per_second(done, now) if state == "training" else None
    total = run.total_tokens or (manifest.run.total_tokens + manifest.rewound_tokens if manifest is not None else 0)
    left = max(0, total - run.swarm_tokens)
    is_complete = (bool(total) and not left) or status.code in RUN_OVER
    return PublicRun(
        name=run.name or (manifest.run.name if manifest is not None else ""),
        purpose=manifest.run.purpose if manifest is not None else "",
        manifest_hash=run.manifest_hash or (manifest.hash if manifest is not None else ""),
        model="" if model is None else f"{model.type}, {model.num_hidden_layers} layers of width {model.hidden_size}",
        parameters=manifest.parameters if manifest is not None else 0,
        data=() if data is None else data.sources,
        tokenizer="" if data is None else data.tokenizer,
        state="complete" if is_complete else state,
        at=rfc3339(now),
        round=run.round,
        tokens=run.swarm_tokens,
        total_tokens=total,
        progress_ratio=min(1.0, run.swarm_tokens / total) if total else 0.0,
        ends_at=_end_at(now, left, rate),
        tokens_per_second=rate,
        loss=status.training.evaluation_loss,
        state_digest=run.state_digest,
        members=members[:MEMBERS_SHOWN],
        members_now=len(members),
        members_ever=len(credit["table"]) if credit is not None else 0,
        leaders=ranking.members[:LEADERS_SHOWN],
        owners=ranking.owners[:LEADERS_SHOWN],
        streaks=_longest_streaks(ranking.owners),
        teams=ranking.teams[:LEADERS_SHOWN],
        credit_round=credit["round"] if credit is not None else None,
        rounds=tuple(_round(*pair) for pair in zip_longest(done, done[1:]))[:ROUNDS_SHOWN],
        losses=_losses(done),
        task_scores=status.training.task_scores,
        samples=_chosen_samples(samples),
        invite=invite,
    )


def _chain(records: Sequence[RoundRecord]) -> list[RoundRecord]:
    """The committed rounds that still count, newest first. Takes all records, newest first."""
    kept: dict[int, RoundRecord] = {}
    for record in reversed(records):
        if record.dropped:
            for number in range(record.round - record.dropped + 1, record.round + 1):
                kept.pop(number, None)
        elif record.head and record.outcome is not Outcome.FAILED:
            kept[record.round] = record
    return [kept[number] for number in sorted(kept, reverse=True)]


def _end_at(now: datetime, tokens_left: int, tokens_per_second: float | None) -> str | None:
    if not tokens_per_second or not 0 < tokens_left <= tokens_per_second * LONGEST_FORECAST_S:
        return None
    return rfc3339(now + timedelta(seconds=tokens_left / tokens_per_second))


def _longest_streaks(owners: Sequence[RankedOwner]) -> tuple[RankedOwner, ...]:
    """Owners, who come by rank, with the longest streaks first; of equal streaks the one with the most tokens."""
    present = [owner for owner in owners if owner.streak]
    return tuple(sorted(present, key=lambda owner: -owner.streak)[:STREAKS_SHOWN])


def _losses(done: Sequence[RoundRecord]) -> tuple[LossPoint, ...]:
    return tuple(
        LossPoint(tokens=record.swarm_tokens, loss=record.evaluation_loss)
        for record in reversed(done)
        if record.evaluation_loss is not None
    )


def _chosen_samples(samples: Sequence[Sample]) -> tuple[PublicSample, ...]:
    """The samples of the first, the newest and a middle round, whose number is in equal ratio to both."""
    numbers = sorted({one.round for one in samples})
    if not numbers:
        return ()
    middle = math.log((numbers[0] + 1) * (numbers[-1] + 1)) / 2
    chosen = {numbers[0], min(numbers, key=lambda number: abs(math.log(number + 1) - middle)), numbers[-1]}
    return tuple(
        PublicSample(number=one.round, prompt=one.prompt, text=one.text)
        for one in sorted(samples, key=lambda one: one.round)
        if one.round in chosen
    )


def rank_members(
    credit: Mapping[str, Any] | None, names: Mapping[str, str], owners: Mapping[str, KnownOwner]
) -> Ranking:
    """The leaderboard; empty without a table of credit, or if the table is damaged."""
    try:
        return rank(credit, names, owners) if credit is not None else Ranking()
    except (ValidationError, KeyError, TypeError):
        return Ranking()


def names_in(view: View) -> dict[str, str]:
    """The newest known name of each peer."""
    found = {member.peer_id: member.name for record in reversed(view.rounds) for member in record.members}
    return found | {row.peer_id: row.name for row in view.swarm if row.name}


def _members(view: View) -> tuple[PublicMember, ...]:
    rows = [row for row in view.swarm if row.phase in MEMBER_PHASES and _state(view) != "unknown"]
    rows.sort(key=lambda row: -row.tokens_per_second)
    return tuple(
        PublicMember(
            name=row.name or row.short_id,
            owner=row.owner or row.peer_id,
            owner_name=row.owner_name,
            team=row.team,
            tokens_per_second=row.tokens_per_second,
        )
        for row in rows
    )


def _round(record: RoundRecord, older: RoundRecord | None) -> PublicRound:
    before = older.swarm_tokens if older is not None and older.round == record.round - 1 else None
    if record.round == 0:
        before = 0
    return PublicRound(
        number=record.round,
        at=record.started_at,
        members=sum(member.included for member in record.members),
        tokens=max(0, record.swarm_tokens - before) if before is not None else None,
        loss=record.evaluation_loss,
    )


def _tokens_per_second(done: Sequence[RoundRecord], now: datetime) -> float | None:
    """The speed of the whole swarm over the newest rounds that this node saw one after the other; None if unknown."""
    seen = [
        ((_moment(newer) - _moment(older)).total_seconds(), newer.swarm_tokens - older.swarm_tokens)
        for newer, older in pairwise(done)
        if newer.round == older.round + 1 and _is_timed(newer) and _is_timed(older)
    ]
    seen = [(seconds, tokens) for seconds, tokens in seen if seconds > 0 and tokens > 0][:RATE_ROUNDS]
    usual_s = statistics.median(seconds for seconds, _ in seen) if seen else 0.0
    kept = [one for one in seen if usual_s / USUAL_RATIO <= one[0] <= usual_s * USUAL_RATIO]
    if len(kept) < LEAST_RATE_ROUNDS:
        return None
    total_s = sum(seconds for seconds, _ in kept)
    silent_s = (now - _moment(done[0])).total_seconds() if done[0].started_at else 0.0
    if silent_s > max(LEAST_SILENT_S, SILENT_ROUNDS * total_s / len(kept)):
        return None
    return sum(tokens for _, tokens in kept) / total_s


def _is_timed(record: RoundRecord) -> bool:
    return bool(record.started_at) and record.outcome in LIVE_OUTCOMES


def _moment(record: RoundRecord) -> datetime:
    return datetime.fromisoformat(record.started_at)


def _state(view: View) -> str:
    if not view.alive or view.status.phase in UNSEEING_PHASES or view.status.code == TRAFFIC_LIMIT:
        return "unknown"
    if view.status.run.is_paused:  # Its members wait in phase `syncing`.
        return "paused"
    if any(row.phase in MEMBER_PHASES for row in view.swarm):
        return "training"
    return "paused" if any(row.phase == Phase.PAUSED.value for row in view.swarm) else "waiting"
