"""Amendments: signed changes of a running run, and the settings that follow from them in each round.

An amendment is valid from a round on. The members of a run accept amendments one after the other, in its records. The
accepted ones are a list in the outer state, so every node that has a state has the list. The functions here are pure.
`swarm.governance` checks the signatures.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from node.config.manifest import MOST_KEYS, RunConfig

Action = Literal["amend", "pause", "resume", "rollback", "stop"]
MOST_BYTES = 8 * 2**10
"""Limit on the text of one amendment together with its signatures."""
MOST_AMENDMENTS = 256
MOST_LIST_BYTES = 512 * 2**10
"""Limit on the encoded list, so that it fits into a header."""
LAST_ROUND = 2**31
MOST_NUMBER = 2**63
MOST_DEPTH = 8
"""Limit on lists and tables inside each other in a new value."""
RESERVED_NUMBERS = 2
"""Numbers that only `resume` and `stop` may have, so that a run cannot be left paused for ever."""
REWOUND_BYTES = 20
"""Bytes by which the entry of a rollback grows when it takes place."""
CHANGEABLE = (
    "total_tokens", "phases",
    "data.sources", "data.weights", "data.sources_per_member", "data.held_out_source",
    "inner.lr", "inner.warmup_tokens", "inner.schedule", "inner.min_lr_ratio", "inner.decay_ratio", "inner.cycles",
    "inner.batch_size", "inner.sequence_length",
    "outer.lr", "outer.momentum",
    "round.policy", "round.inner_steps", "round.most_inner_steps", "round.min_peers", "round.quorum_ratio",
    "round.max_tokens",
    "sync.mode", "sync.fragments", "sync.codec", "sync.result_codec", "sync.feedback", "sync.feedback_decay",
    "sync.err_beta", "sync.feedback_reset_rounds", "sync.merge", "sync.mix_alpha", "sync.auto",
    "evaluation.batches", "evaluation.every_rounds", "evaluation.members", "evaluation.budget_s",
)  # fmt: skip
"""The keys of [run] that an amendment may change. All others decide what the state is, or whom the run belongs to."""


class AmendmentError(ValueError):
    """An amendment that cannot be accepted."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Amendment(_Part):
    """What is signed: one change of a run."""

    run: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Hash of the run's manifest."""
    number: int = Field(ge=1, le=MOST_AMENDMENTS)
    """Amendments are accepted in the order of their numbers, and each number once."""
    from_round: int = Field(ge=1, le=LAST_ROUND)
    """The first round to which the amendment applies."""
    action: Action = "amend"
    changes: dict[str, Any] = {}
    """New values of keys in CHANGEABLE, as JSON; only with the action `amend`."""
    to_round: int | None = Field(None, ge=-1, le=LAST_ROUND)
    """With `rollback`: the round whose parameters and momentum come back."""
    state: str = Field("", pattern=r"^([0-9a-f]{64})?$")
    """With `rollback`: digest of the outer state after `to_round`."""

    @model_validator(mode="after")
    def _fits(self) -> Amendment:
        if (self.action == "amend") != bool(self.changes):
            raise ValueError("the action amend has changes, and no other action has any")
        is_rollback = self.action == "rollback"
        if is_rollback != (self.to_round is not None) or is_rollback != bool(self.state):
            raise ValueError("the action rollback names a round and its state, and no other action names any")
        if self.to_round is not None and self.to_round >= self.from_round - 1:
            raise ValueError("a rollback goes back to an earlier round")
        for key, value in self.changes.items():
            if key not in CHANGEABLE:
                raise ValueError(f"{key[:64]} cannot be changed")
            _check_json(value)
        return self

    def canonical(self) -> str:
        """The text under the signatures: JSON with sorted keys and no spaces."""
        return json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":"))

    @property
    def is_replaceable(self) -> bool:
        """Whether another action may replace it while it is pending, as no round may have the members it needs."""
        return self.action == "rollback" or "round.min_peers" in self.changes

    def describe(self) -> str:
        """The change as a phrase, such as `inner.lr = 0.0002`, or `pause`."""
        if self.to_round is not None:
            return f"rollback to round {self.to_round}"
        return ", ".join(f"{key} = {json.dumps(value)}" for key, value in self.changes.items()) or self.action


class SignedAmendment(_Part):
    """The text of an amendment, and signatures over it."""

    text: str = Field(max_length=MOST_BYTES)
    signatures: dict[str, str] = Field(max_length=MOST_KEYS)
    """Signatures in hex, by the peer id of the key."""

    @property
    def amendment(self) -> Amendment:
        """The content. Raises AmendmentError if the text is not the canonical text of an amendment."""
        return _read_text(self.text)

    @property
    def size_bytes(self) -> int:
        return len(self.model_dump_json().encode())


class AcceptedAmendment(_Part):
    """An amendment in the list of a state."""

    signed: SignedAmendment
    round: int = Field(ge=0, le=LAST_ROUND)
    """The round whose record has accepted it."""
    rewound_tokens: int | None = Field(None, ge=-(2**63), lt=2**63)
    """By how many tokens the schedules went back, if this is a rollback that has taken place; else None."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The settings of one round."""

    run: RunConfig
    is_paused: bool = False
    """Whether nobody trains. A round then has no contribution and changes no parameter."""
    is_stopped: bool = False
    """Whether the run is over."""


@lru_cache(maxsize=256)
def _read_text(text: str) -> Amendment:
    try:
        amendment = Amendment.model_validate(json.loads(text, parse_constant=_refuse_constant))
        is_canonical = amendment.canonical() == text
    except (ValueError, RecursionError) as exc:
        raise AmendmentError(f"it cannot be read ({_first_line(exc)})") from exc
    if not is_canonical:
        raise AmendmentError("its text is not in canonical form")
    return amendment


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a finite number")


def _check_json(value: Any, depth: int = 0) -> None:
    """Raise ValueError for numbers that are not finite, or too large for exact arithmetic everywhere."""
    if depth > MOST_DEPTH:
        raise ValueError("a value is nested too deeply")
    if isinstance(value, int | float) and not abs(value) < MOST_NUMBER:  # An int can be too large for a float.
        raise ValueError("a number is too large")
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_json(child, depth + 1)


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return error.errors()[0]["msg"].removeprefix("Value error, ")
    return str(error).partition("\n")[0]


def changed(run: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """The settings after these changes. Raises AmendmentError if they are not valid together."""
    tree = run.model_dump(mode="json")
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        table = tree[section] if section else tree
        if isinstance(value, bool) != isinstance(table[name], bool):
            raise AmendmentError(f"run.{key} cannot be {json.dumps(value)}")
        table[name] = value
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as exc:
        where = ".".join(map(str, exc.errors()[0]["loc"]))
        raise AmendmentError(f"run{'.' if where else ''}{where}: {_first_line(exc)}") from exc


def encode_list(accepted: Sequence[AcceptedAmendment]) -> bytes:
    """The list as it is in the outer state: canonical JSON; empty for no amendment."""
    if not accepted:
        return b""
    return json.dumps([one.model_dump() for one in accepted], sort_keys=True, separators=(",", ":")).encode()


@lru_cache(maxsize=8)
def decode_list(data: bytes) -> tuple[AcceptedAmendment, ...]:
    """Read what `encode_list` has written. Raises AmendmentError for anything else. Checks no signature."""
    if not data:
        return ()
    if len(data) > MOST_LIST_BYTES:
        raise AmendmentError("a list of amendments is too long")
    try:
        parts = json.loads(data, parse_constant=_refuse_constant)
        accepted = tuple(AcceptedAmendment.model_validate(part) for part in parts)
    except (ValueError, TypeError, RecursionError) as exc:
        raise AmendmentError(f"a list of amendments cannot be read ({_first_line(exc)})") from exc
    if not accepted or encode_list(accepted) != data:
        raise AmendmentError("a list of amendments is not in canonical form")
    numbers = [one.signed.amendment.number for one in accepted]
    if numbers != list(range(1, len(accepted) + 1)):
        raise AmendmentError("a list of amendments is not in the order of their numbers")
    return accepted


@dataclass(frozen=True, slots=True)
class Schedule:
    """The settings of all rounds, by the first round to which they apply."""

    starts: tuple[int, ...]
    terms: tuple[Terms, ...]
    rollbacks: Mapping[int, Amendment]
    """The rollback before each of these rounds."""

    def at(self, round_: int) -> Terms:
        return self.terms[max(0, bisect_right(self.starts, round_) - 1)]


@lru_cache(maxsize=64)
def schedule_of(run: RunConfig, data: bytes) -> Schedule:
    """The settings of all rounds: those of the manifest, and the changes of this encoded list.

    The amendments apply in the order of their first rounds; of two with the same one, the higher number applies last.
    Raises AmendmentError if the settings of any round are not valid.
    """
    starts, terms, rollbacks = [0], [Terms(run)], dict[int, Amendment]()
    amendments = [one.signed.amendment for one in decode_list(data)]
    for one in sorted(amendments, key=lambda one: (one.from_round, one.number)):
        if one.action == "rollback":
            rollbacks[one.from_round] = one
        before = terms[-1]
        after = Terms(
            changed(before.run, one.changes) if one.changes else before.run,
            is_paused=one.action == "pause" or (before.is_paused and one.action != "resume"),
            is_stopped=before.is_stopped or one.action == "stop",
        )
        if one.from_round == starts[-1]:
            terms[-1] = after
        else:
            starts.append(one.from_round)
            terms.append(after)
    return Schedule(tuple(starts), tuple(terms), rollbacks)


def rewound(data: bytes, number: int, tokens: int) -> bytes:
    """The encoded list after the rollback with this number, by which the schedules went back by these tokens."""
    return encode_list(
        [
            one.model_copy(update={"rewound_tokens": tokens}) if one.signed.amendment.number == number else one
            for one in decode_list(data)
        ]
    )


def rewound_tokens(data: bytes) -> int:
    """By how many tokens the schedules are behind the tokens of the swarm, because of rollbacks."""
    return sum(one.rewound_tokens or 0 for one in decode_list(data))
