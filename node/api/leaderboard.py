"""Ranks contributions to the run by machine, owner and team."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from node.status import Value

EARLIER_MEMBERS = "earlier members"
"""The name of the entry for members whose lines were given up."""


class KnownOwner(Value):
    """Who a machine belongs to, as the worker writes it."""

    key: str
    name: str
    team: str


class RankedMember(Value):
    """What one machine gave."""

    rank: int
    name: str
    key: str
    """The peer id; empty for the members whose lines were given up."""
    owner: str = ""
    """The key of its owner; its own key if it has joined none."""
    tokens: int
    share_ratio: float
    rounds: int
    first_round: int
    last_round: int
    streak: int
    """Newest rounds in a row that include the member; 0 if the newest round with contributions does not."""


class RankedOwner(Value):
    """What all machines of one owner gave."""

    rank: int
    name: str
    """The name that the owner has chosen, else that of the machine. Others may have the same: show it with `key`."""
    key: str
    team: str
    machines: int
    tokens: int
    share_ratio: float
    rounds: int
    """The most rounds of one machine. Machines may have taken part in the same rounds."""
    first_round: int
    last_round: int
    streak: int
    """The longest streak of one machine."""


class RankedTeam(Value):
    """What all owners gave who name this team. Anybody can name a team; letters of either case are the same."""

    rank: int
    name: str
    """As the owner with the most tokens writes it."""
    owners: int
    machines: int
    tokens: int
    share_ratio: float


class Ranking(Value):
    """The most tokens first."""

    members: tuple[RankedMember, ...] = ()
    owners: tuple[RankedOwner, ...] = ()
    teams: tuple[RankedTeam, ...] = ()


def rank(credit: Mapping[str, Any], names: Mapping[str, str], owners: Mapping[str, KnownOwner]) -> Ranking:
    """Rank the lines of a table of credit. `names` are those of machines, and `owners` those who have profiles.

    Raises KeyError, TypeError or ValidationError if the table has another form.
    """
    members = _rank_members(credit, names, owners)
    by_owner: dict[str, list[RankedMember]] = defaultdict(list)
    for member in members:
        by_owner[member.owner].append(member)
    by_rank = sorted(by_owner, key=lambda key: (-sum(one.tokens for one in by_owner[key]), key))
    ranked = tuple(_owner(place, key, owners.get(key), by_owner[key]) for place, key in enumerate(by_rank, 1))
    return Ranking(members=members, owners=ranked, teams=_rank_teams(ranked))


def _rank_members(
    credit: Mapping[str, Any], names: Mapping[str, str], owners: Mapping[str, KnownOwner]
) -> tuple[RankedMember, ...]:
    table = credit["table"]
    newest = max((entry["last_round"] for entry in table if entry["member"]), default=-1)
    total = sum(entry["tokens"] for entry in table) or 1
    ranked = sorted(table, key=lambda entry: (-entry["tokens"], entry["member"]))
    return tuple(
        RankedMember(
            rank=place,
            name=names.get(entry["member"]) or (entry["member"][-6:] if entry["member"] else EARLIER_MEMBERS),
            key=entry["member"],
            owner=owners[entry["member"]].key if entry["member"] in owners else entry["member"],
            tokens=entry["tokens"],
            share_ratio=entry["tokens"] / total,
            rounds=entry["rounds"],
            first_round=entry["first_round"],
            last_round=entry["last_round"],
            streak=newest - entry["streak_round"] + 1 if entry["member"] and entry["last_round"] == newest else 0,
        )
        for place, entry in enumerate(ranked, 1)
    )


def _owner(place: int, key: str, profile: KnownOwner | None, machines: Sequence[RankedMember]) -> RankedOwner:
    return RankedOwner(
        rank=place,
        name=(profile.name if profile is not None else "") or machines[0].name,
        key=key,
        team=profile.team if profile is not None else "",
        machines=len(machines),
        tokens=sum(one.tokens for one in machines),
        share_ratio=sum(one.share_ratio for one in machines),
        rounds=max(one.rounds for one in machines),
        first_round=min(one.first_round for one in machines),
        last_round=max(one.last_round for one in machines),
        streak=max(one.streak for one in machines),
    )


def _rank_teams(owners: Sequence[RankedOwner]) -> tuple[RankedTeam, ...]:
    """The teams of owners, who come with the most tokens first."""
    by_name: dict[str, list[RankedOwner]] = defaultdict(list)
    for owner in owners:
        if owner.team:
            by_name[same_name(owner.team)].append(owner)
    teams = sorted(by_name.values(), key=lambda team: (-sum(one.tokens for one in team), team[0].team))
    return tuple(
        RankedTeam(
            rank=place,
            name=team[0].team,
            owners=len(team),
            machines=sum(one.machines for one in team),
            tokens=sum(one.tokens for one in team),
            share_ratio=sum(one.share_ratio for one in team),
        )
        for place, team in enumerate(teams, 1)
    )


def same_name(name: str) -> str:
    """Names that people take for one have one such text."""
    return unicodedata.normalize("NFKC", name).casefold()
