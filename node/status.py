"""What a node says about itself: the words, as immutable values. Knows no process, no network, no torch.

The worker fills a `Report`, the supervisor adds what only it knows and serves the whole as `Status`. Units are in the
names; moments are UTC in RFC 3339.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1


class Value(BaseModel):
    """Base of every value here: frozen, and closed to unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Phase(StrEnum):
    STARTING = "starting"
    CONNECTING = "connecting"
    DOWNLOADING = "downloading"
    TRAINING = "training"
    SYNCING = "syncing"
    PAUSED = "paused"
    DRAINING = "draining"
    LEAVING = "leaving"
    STOPPED = "stopped"
    ERROR = "error"


class Outcome(StrEnum):
    COMPLETE = "complete"
    """Every member's contribution is in."""
    PARTIAL = "partial"
    """Somebody's contribution was left out; the record says whose."""
    FAILED = "failed"
    SKIPPED = "skipped"
    """The round was committed by others; this node took it over without contributing."""
    ALONE = "alone"


class Activity(StrEnum):
    COMPUTE = "compute"
    SYNC_WAIT = "sync_wait"
    DATA = "data"
    EVALUATE = "evaluate"
    CHECKPOINT = "checkpoint"
    PAUSED = "paused"
    IDLE = "idle"


class Stage(StrEnum):
    RENDEZVOUS = "rendezvous"
    REDUCE = "reduce"
    COMMIT = "commit"
    APPLY = "apply"


class Channel(StrEnum):
    DHT = "dht"
    REDUCE = "reduce"
    STATE = "state"
    RELAY = "relay"
    """Carried for two other peers."""


FAILURE_REASONS = (
    "too_few_peers", "leader_lost", "reducer_lost", "left_out", "rejected", "timeout", "not_finite", "round_failed",
)  # fmt: skip
REJECT_REASONS = ("bad_message", "bad_signature", "bad_size", "not_finite", "bad_norm", "bad_weight", "equivocation")
REACHABILITIES = ("direct", "relay", "none")
TRANSPORTS = ("direct", "relay")


def utc_now(ago_s: float = 0.0) -> str:
    """The wall clock, for display only: nothing decides by it."""
    then = datetime.now(UTC) - timedelta(seconds=ago_s)
    return then.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def rfc3339(moment: datetime) -> str:
    """UTC, to the second."""
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _in_calendar(moment: datetime) -> datetime:
    try:
        moment = moment.astimezone(UTC)
    except OverflowError as exc:
        raise ValueError("it lies beyond the calendar") from exc
    if not 1970 <= moment.year < 9999:
        raise ValueError("it lies beyond the calendar")
    return moment


Moment = Annotated[AwareDatetime, AfterValidator(_in_calendar)]
"""UTC; any time zone can show it."""
PausedBy = Literal["owner", "schedule", "battery", "user", ""]


class PauseInfo(Value):
    """Who wants this node paused."""

    by: PausedBy = ""
    """Empty: nobody."""
    until: str | None = None
    """RFC 3339; None: until `resume`, or until what it is for has ended."""
    after_round: int | None = None
    """The owner has asked for a pause once this round is over."""


class PhaseState(Value):
    phase: Phase = Phase.STARTING
    reason: str = "The node is starting."
    code: str = "starting"
    since: str = ""
    final: bool = False
    """The node's process ends with this phase: no order reaches it any more."""


class NodeInfo(Value):
    name: str = ""
    peer_id: str = ""
    version: str = ""
    data_dir: str = ""
    mode: Literal["train", "relay"] = "train"
    """What the node is for: a relay does not train."""
    started_at: str = ""
    """When the supervisor started."""


class Notice(Value):
    """Something that its owner should know, for as long as it holds."""

    code: str
    """One word for a program."""
    level: Literal["info", "warning", "error"] = "warning"
    text: str
    """One sentence, with the mend."""


class RunInfo(Value):
    name: str = ""
    """Of the run, as its manifest has it; empty until that is known."""
    manifest_hash: str = ""
    invite: str = ""
    invite_note: str = ""
    """One sentence, with the mend, where the invite can be used on this machine or network only; else empty."""
    round: int = -1
    """Last committed round; -1 before the first."""
    swarm_round: int = -1
    """Highest committed round that any live peer claims."""
    swarm_tokens: int = 0
    total_tokens: int = 0
    """With so many tokens of the swarm the run is complete; 0 until the manifest is known."""
    head: str = ""
    """Hash of the newest record in the chain of committed rounds (of the manifest before the first), hex."""
    state_digest: str = ""
    """Hex digest of the outer state after `round`."""


class TrainingInfo(Value):
    loss: float | None = None
    """Mean cross-entropy of the last inner step, nats per token."""
    evaluation_loss: float | None = None
    """Of the anchor on the held-out split, nats per token."""
    learning_rate: float = 0.0
    inner_step: int = 0
    inner_steps: int = 0
    tokens_total: int = 0
    """Tokens this node has trained on in its life."""
    tokens_per_second: float = 0.0


class Member(Value):
    peer_id: str
    name: str
    weight: int
    """Tokens that stand behind the contribution."""
    included: bool


class Seconds(Value):
    rendezvous: float = 0.0
    reduce: float = 0.0
    commit: float = 0.0
    apply: float = 0.0
    blocked: float = 0.0
    """Time the trainer stood still."""


class RoundRecord(Value):
    """What this node tells about one round. The signed core, equal on all nodes, is `head`'s preimage."""

    round: int
    outcome: Outcome
    members: tuple[Member, ...] = ()
    started_at: str = ""
    """When this node began to look for the round's group; for rounds that it learned of later, when it did."""
    seconds: Seconds = Seconds()
    bytes_sent: int = 0
    bytes_received: int = 0
    head: str = ""
    state_digest: str = ""
    swarm_tokens: int = 0
    evaluation_loss: float | None = None
    """Of the anchor before this round on the held-out text, nats per token: the median of the members that tell one."""
    dropped: int = Field(0, ge=0)
    """So many rounds of this node's side of a split, the last of them `round`, do not hold any more."""
    reason: str = ""


class SyncInfo(Value):
    stage: str = "idle"
    progress_ratio: float = 0.0
    """Of the current round's inner steps, 0 to 1."""
    eta_s: float | None = None
    """Until this node's next sync."""
    last: RoundRecord | None = None


class PeersInfo(Value):
    connected: int = 0
    training: int = 0
    """Live members of this run that train, this node included."""


class PeerRow(Value):
    """One peer as the directory tells it."""

    peer_id: str
    short_id: str
    name: str
    phase: str
    """As in the status; `relaying` of one that never trains."""
    round: int
    tokens_per_second: float
    transport: str
    version: str
    state_digest: str
    last_seen_s: float
    """Seconds since this node last had news of it."""
    this_node: bool = False
    compute_utilization_ratio: float | None = None
    """Of its last complete round, as it says itself; None where it does not."""
    digest_agrees: bool | None = None
    """Whether its state is, bit for bit, this node's after the same round; None where it cannot be told."""


class DeviceInfo(Value):
    kind: str
    """`cpu` or `cuda`."""
    name: str
    utilization_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_size_bytes: int | None = None
    temperature_celsius: float | None = None
    energy_joules: float | None = None
    power_watts: float | None = None
    """What it draws now."""


class ContributionInfo(Value):
    rounds_joined: int = 0
    rounds_attempted: int = 0
    tokens_total: int = 0
    tokens_merged: int = 0
    """In the records of committed rounds; what is on its way to one is in neither of the two."""
    tokens_discarded: int = 0
    """Left out of too many rounds, or spoilt: they will never be in a record."""
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_relayed: int = 0
    """Carried for peers that cannot reach each other, counted once; also in `bytes_sent` and `bytes_received`."""
    bytes_forwarded: int = 0
    """Sent for members on slow lines: their contributions; part of `bytes_sent`."""
    training_s: float = 0.0
    """Seconds of computing given."""


class Counters(Value):
    """Totals since the worker's life began in this data folder; they only grow."""

    activity_seconds: dict[Activity, float] = Field(default_factory=dict)
    tokens_processed: int = 0
    tokens_merged: int = 0
    tokens_discarded: int = 0
    forwarded_bytes: int = 0
    inner_steps: int = 0
    skipped_steps: int = 0
    """Inner steps whose loss or gradient was no finite number; they changed nothing."""
    sync_rounds: dict[Outcome, int] = Field(default_factory=dict)
    sync_failures: dict[str, int] = Field(default_factory=dict)
    contributions_carried: int = 0
    digest_mismatches: int = 0
    peers_rejected: dict[str, int] = Field(default_factory=dict)
    network_sent_bytes: dict[Channel, int] = Field(default_factory=dict)
    network_received_bytes: dict[Channel, int] = Field(default_factory=dict)
    last_sync_at_s: float = 0.0
    """Unix time of the last commit; 0 before the first."""


class Report(Value):
    """All that the worker knows, once a second at most. Replaces the one before it."""

    state: PhaseState = PhaseState()
    peer_id: str = ""
    run: RunInfo = RunInfo()
    training: TrainingInfo = TrainingInfo()
    sync: SyncInfo = SyncInfo()
    peers: PeersInfo = PeersInfo()
    swarm: tuple[PeerRow, ...] = ()
    compute_utilization_ratio: float | None = None
    """Of the last complete round: compute seconds / wall seconds."""
    forecast_utilization_ratio: float | None = None
    """What the formula says of it, with the measured step time, line and members (`node.diloco.forecast`)."""
    reachability: str = "none"
    """How others reach this node: `direct`, `relay` or `none`; also `none` until another peer has tried."""
    reachability_code: str = "not_tested"
    """One word: `reached`, `not_reached`, `not_tested`, `disputed` (those that tried do not agree) or `no_port`."""
    reachability_reason: str = ""
    """One sentence, with the mend."""
    devices: tuple[DeviceInfo, ...] = ()
    contribution: ContributionInfo = ContributionInfo()
    counters: Counters = Counters()


class Status(Value):
    """`GET /api/v1/status`, and each full event."""

    schema_version: int = SCHEMA_VERSION
    node: NodeInfo
    phase: Phase
    reason: str
    code: str
    since: str
    final: bool = False
    """The node's process ends with this phase: no order reaches it any more, and only a new start takes it back."""
    run: RunInfo
    training: TrainingInfo
    sync: SyncInfo
    peers: PeersInfo
    compute_utilization_ratio: float | None
    forecast_utilization_ratio: float | None = None
    reachability: str
    reachability_code: str = "not_tested"
    reachability_reason: str = ""
    devices: tuple[DeviceInfo, ...]
    limits: dict[str, float | int | None]
    contribution: ContributionInfo
    notices: tuple[Notice, ...] = ()
    """What its owner should know."""
    pause: PauseInfo = PauseInfo()
    schedule_next: str | None = None
    """The next moment at which the node's hours begin or end; None where they never do."""
