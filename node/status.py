"""The data model of a node's status, as immutable values. Moments are UTC in RFC 3339.

The worker sends a `Report`. The supervisor adds its own fields and serves the result as `Status`.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints

SCHEMA_VERSION = 1


class Value(BaseModel):
    """Base class of all values. Values are frozen, and unknown fields are an error."""

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


MEMBER_PHASES = frozenset({Phase.TRAINING, Phase.SYNCING, Phase.DRAINING})
"""Phases in which a node takes part in rounds."""
AT_WORK = frozenset({"training", "syncing"})
"""Codes between which a node changes in each round, so `since` is that of the first of them."""


class Outcome(StrEnum):
    COMPLETE = "complete"
    """The result includes every member's contribution."""
    PARTIAL = "partial"
    """The result excludes some members; the record names them."""
    FAILED = "failed"
    SKIPPED = "skipped"
    """Other peers committed the round; this node adopted the result without contributing."""
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
    """Traffic that this node relays between two other peers."""


FAILURE_REASONS = (
    "too_few_peers", "leader_lost", "reducer_lost", "left_out", "rejected", "timeout", "not_finite", "round_failed",
)  # fmt: skip
REJECT_REASONS = ("bad_message", "bad_signature", "bad_size", "not_finite", "bad_norm", "bad_weight", "equivocation")
PUBLISH_RESULTS = ("published", "found", "superseded", "given_up", "failed")
"""By this node; by another node; not, as a later round is there; not, as it waited too long; not yet."""
MOST_SCORES = 16
"""A peer record has no more scores in tasks."""
MOST_SCORE = 1e100
"""Upper bound of the absolute value of a score, so that no median is infinite. The perplexity of a word is large at
first."""
AMENDMENT_REFUSALS = ("forged", "replayed", "late", "early", "conflicting", "oversized", "invalid")
REACHABILITIES = ("direct", "relay", "none")
TRANSPORTS = ("direct", "relay")


def rfc3339(moment: datetime, timespec: Literal["seconds", "milliseconds"] = "seconds") -> str:
    """Format a moment as UTC in RFC 3339."""
    return moment.astimezone(UTC).isoformat(timespec=timespec).replace("+00:00", "Z")


def utc_now(ago_s: float = 0.0) -> str:
    """The wall-clock time `ago_s` seconds ago in RFC 3339, for display only."""
    return rfc3339(datetime.now(UTC) - timedelta(seconds=ago_s), "milliseconds")


def _check_calendar(moment: datetime) -> datetime:
    """Convert a moment to UTC. Raises ValueError if some time zone cannot represent the moment."""
    try:
        moment = moment.astimezone(UTC)
    except OverflowError as exc:
        raise ValueError("it lies beyond the calendar") from exc
    if not 1970 <= moment.year < 9999:
        raise ValueError("it lies beyond the calendar")
    return moment


TASK_NAME = r"^[A-Za-z0-9_.,:/-]{1,64}$"
TaskName = Annotated[str, StringConstraints(pattern=TASK_NAME)]
Moment = Annotated[AwareDatetime, AfterValidator(_check_calendar)]
PausedBy = Literal["owner", "schedule", "battery", "user", "traffic", ""]
TRAFFIC_LIMIT = "traffic_limit"
"""Code of a pause by `limits.month_gb`. The node is not in the swarm while it lasts."""


class PauseInfo(Value):
    by: PausedBy = ""
    """Who or what paused the node; empty while it is not paused."""
    until: str | None = None
    """When the pause ends, in RFC 3339; None if it lasts until `resume`, or until the cause has ended."""
    after_round: int | None = None
    """The owner requested a pause at the end of this round."""


class PhaseState(Value):
    phase: Phase = Phase.STARTING
    reason: str = "The node is starting."
    code: str = "starting"
    since: str = ""
    """When this began. Training and the syncs in between count as one."""
    final: bool = False
    """The node's process ends with this phase and accepts no more actions."""


class NodeInfo(Value):
    name: str = ""
    peer_id: str = ""
    version: str = ""
    data_dir: str = ""
    mode: Literal["train", "relay"] = "train"
    """A relay does not train."""
    memory_limit_bytes: int | None = None
    """The memory limit that a container or service sets, read when the supervisor started; None without a limit."""
    started_at: str = ""
    """When the supervisor started."""


class Notice(Value):
    """A message to the owner, shown for as long as it applies."""

    code: str
    """One word, for programs."""
    level: Literal["info", "warning", "error"] = "warning"
    text: str
    """One sentence that includes the remedy."""


class RunInfo(Value):
    name: str = ""
    """The run's name from the manifest; empty until the manifest is known."""
    manifest_hash: str = ""
    invite: str = ""
    invite_note: str = ""
    """Where the invite may not work, and the remedy; empty if the invite works everywhere."""
    round: int = -1
    """The last committed round; -1 before the first."""
    swarm_round: int = -1
    """The newest committed round that more than half of the live members claim, or `round` if that is newer."""
    swarm_tokens: int = 0
    total_tokens: int = 0
    """The number of swarm tokens at which the run is complete; 0 until the manifest is known."""
    rewound_tokens: int = 0
    """Tokens of rounds that rollbacks took back. `swarm_tokens` and `total_tokens` include them."""
    is_paused: bool = False
    """Whether an amendment has paused the run, so that no member trains."""
    amendments: int = 0
    """The number of accepted amendments; `GET /api/v1/amendments` returns them."""
    head: str = ""
    """The hash of the newest record in the chain of committed rounds, in hex; at first, the hash of the manifest."""
    state_digest: str = ""
    """Hex digest of the outer state after `round`."""


class AmendmentInfo(Value):
    """An amendment of the run: a signed change that applies from a round on."""

    digest: str
    """SHA-256 of its text, in hex."""
    number: int
    from_round: int
    """The first round to which it applies."""
    change: str
    """The new values, such as `inner.lr = 0.0002`, or `pause`, `resume` or `stop`."""
    signers: tuple[str, ...]
    """Peer ids of the keys that have signed it."""
    is_replaceable: bool = False
    """Whether another action may replace it while it is pending: a rollback, or a change of `round.min_peers`."""
    accepted_round: int | None = None
    """The round whose record has accepted it; None while it is pending."""
    was_skipped: bool = False
    """Whether it is a rollback that did not take place, because too few members of its round had the state."""


class RefusedAmendment(Value):
    """A submitted amendment that this node has refused, or a pending one that no round can accept any more."""

    digest: str
    reason: str
    """A clause."""
    number: int = 0
    change: str = ""
    """As in `AmendmentInfo`."""


class GovernanceInfo(Value):
    """Who may amend the run, and its amendments."""

    run: str = ""
    """Hash of the manifest; empty until it is known."""
    mode: Literal["founder", "keys", "fixed"] = "fixed"
    keys: tuple[str, ...] = ()
    """Peer ids of the keys that may amend the run."""
    threshold: int = 1
    """How many of the keys must sign an amendment."""
    round: int = -1
    """The last committed round that this node knows."""
    schedule_tokens: int = 0
    """The tokens of the swarm without those that rollbacks took back. The run ends when they reach `total_tokens`."""
    is_paused: bool = False
    amendments: tuple[AmendmentInfo, ...] = ()
    """In the order of their numbers; pending ones come last."""
    refused: tuple[RefusedAmendment, ...] = ()
    """The newest amendments that this node has refused or dropped, newest last."""


class Sample(Value):
    """How the anchor after a round continued a prompt. The text is untrusted output of a model."""

    round: int
    prompt: str
    text: str


class TaskScore(Value):
    """The score of the swarm's newest evaluated state in one task: the median of the members that evaluated it."""

    name: str
    """TASK/METRIC."""
    score: float = Field(allow_inf_nan=False)
    round: int
    members: int
    """Number of members that evaluated it."""


class TrainingInfo(Value):
    loss: float | None = None
    """Mean cross-entropy of the last inner step, nats per token."""
    evaluation_loss: float | None = None
    """Loss of the anchor on the held-out split, nats per token."""
    learning_rate: float = 0.0
    inner_step: int = 0
    inner_steps: int = 0
    tokens_total: int = 0
    """Tokens on which this node has trained since its data folder was made."""
    tokens_per_second: float = 0.0
    samples: tuple[Sample, ...] = ()
    """The newest samples of the model's text, one for each prompt of the run; empty if this node has made none."""
    task_scores: tuple[TaskScore, ...] = ()
    """Scores of the swarm in evaluation tasks, by name; empty if no member evaluates on tasks."""


class Member(Value):
    peer_id: str
    name: str
    weight: int
    """The tokens that the round credits to the member, if it includes the member. In streaming runs, a contribution has
    the tokens of one fragment of F, so a round credits 1/F of them."""
    included: bool


class Seconds(Value):
    rendezvous: float = 0.0
    reduce: float = 0.0
    commit: float = 0.0
    apply: float = 0.0
    blocked: float = 0.0
    """Seconds for which the trainer was blocked."""


class RoundRecord(Value):
    """One round as this node saw it. `head` is the hash of the part that the members signed, equal on all nodes. Also
    equal are members with weights, tokens, losses, learning rate, norm and cosine."""

    round: int
    outcome: Outcome
    members: tuple[Member, ...] = ()
    started_at: str = ""
    """When this node began matchmaking for the round, or learned of a round that it missed."""
    seconds: Seconds = Seconds()
    bytes_sent: int = 0
    bytes_received: int = 0
    head: str = ""
    state_digest: str = ""
    swarm_tokens: int = 0
    evaluation_loss: float | None = None
    """Loss of the anchor before this round on the held-out text, nats per token: the median of the members' values."""
    training_loss: float | None = None
    """Loss of the inner steps before this round, nats per token: the median of the members' means."""
    learning_rate: float | None = None
    """Inner learning rate at `swarm_tokens`, by the run's schedule."""
    mean_norm: float | None = None
    """L2 norm of the averaged pseudo-gradient (of one fragment, in streaming runs), as decoded, to 9 digits."""
    contribution_cosine: float | None = None
    """Mean cosine similarity of all pairs of contributions, from the signed norms and `mean_norm`; None for one."""
    dropped: int = Field(0, ge=0)
    """Number of rounds, ending with `round`, that this node discarded when it left its side of a split."""
    reason: str = ""
    attempts: int = Field(1, ge=1)
    """Number of failed attempts in a row that this record stands for; 1 for any other record."""

    def with_failure(self, newer: RoundRecord) -> RoundRecord | None:
        """Merge this record with a newer one if both are failed attempts at one round. None if they are not."""
        records = (self, newer)
        if self.round != newer.round or any(r.outcome is not Outcome.FAILED or r.head or r.dropped for r in records):
            return None
        return newer.model_copy(
            update={
                "started_at": self.started_at,
                "attempts": self.attempts + newer.attempts,
                "bytes_sent": self.bytes_sent + newer.bytes_sent,
                "bytes_received": self.bytes_received + newer.bytes_received,
            }
        )


class SyncInfo(Value):
    stage: str = "idle"
    progress_ratio: float = 0.0
    """How far this node is in the current round, from 0 to 1."""
    round_s: float | None = None
    """Seconds that the current round lasts, if it ends by the clock (policy `time`); None if it ends after a number of
    inner steps."""
    eta_s: float | None = None
    """Seconds until this node's next sync; None if unknown."""
    last: RoundRecord | None = None


class PublicationInfo(Value):
    """What this node knows of the publications of the run."""

    to: str = ""
    """The place, as in `publish.to`; empty if this node does not publish."""
    round: int = -1
    """The newest round that this node has published or found published; -1 before the first."""
    revision: str = ""
    """The name of that publication."""
    at: str = ""
    """When this node published it or found it."""
    waiting: int = 0
    """Number of rounds that wait to be published."""
    problem: str = ""
    """Why publishing does not work now, with the remedy; empty if it works."""


class TaskScores(Value):
    """The scores of one state in evaluation tasks, by the name of task and metric."""

    round: int = Field(ge=-1, lt=2**63)
    state_digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    scores: dict[TaskName, Annotated[float, Field(ge=-MOST_SCORE, le=MOST_SCORE)]] = Field(max_length=MOST_SCORES)


class PeersInfo(Value):
    connected: int = 0
    training: int = 0
    """Live training members of this run, including this node."""


class PeerRow(Value):
    """One row of the peer table."""

    peer_id: str
    short_id: str
    name: str
    phase: str
    """One of `Phase`, or `relaying` for a peer that never trains."""
    round: int
    tokens_per_second: float
    transport: str
    version: str
    state_digest: str
    last_seen_s: float
    """Seconds since this node last heard of the peer."""
    this_node: bool = False
    owner: str = ""
    """The key of the machine's owner, which is its own peer id if it has joined no owner."""
    owner_name: str = ""
    """The name that the owner has chosen; empty if there is none."""
    team: str = ""
    """The team that the owner has named; empty if there is none."""
    compute_utilization_ratio: float | None = None
    """Compute seconds / wall seconds of the peer's last complete round, as it reports; None if it reports none."""
    publishes: bool = False
    """Whether the peer publishes the run."""
    evaluates: bool = False
    """Whether the peer evaluates the model on tasks."""
    evaluation: TaskScores | None = None
    """The peer's newest scores in tasks, as it reports them."""
    digest_agrees: bool | None = None
    """Whether the peer's state equals this node's state after the same round, bit for bit; None if unknown."""


JournalKind = Literal["joined", "back", "left", "gone", "node"]


class JournalEntry(Value):
    """Something that happened: to a peer, or to this node (`node`)."""

    at: str
    kind: JournalKind
    """A `left` peer said goodbye; a `gone` one no longer answers."""
    peer_id: str = ""
    name: str = ""
    """The peer's name."""
    text: str
    """What the peer did, as in "is gone: no answer"; or a whole sentence about this node."""


class DepartedPeer(Value):
    """A peer that was in the peer table and no longer is."""

    peer: PeerRow
    """Its last row."""
    at: str
    said_goodbye: bool
    """False if it fell silent."""


class DeviceInfo(Value):
    kind: str
    """`cpu`, `cuda`, `rocm`, `mps` or `xpu`."""
    name: str
    utilization_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_size_bytes: int | None = None
    temperature_celsius: float | None = None
    energy_joules: float | None = None
    power_watts: float | None = None
    """The power that the device draws now."""


class ContributionInfo(Value):
    rounds_joined: int = 0
    rounds_attempted: int = 0
    tokens_total: int = 0
    tokens_merged: int = 0
    """Tokens of this node that committed rounds include. Tokens in flight are neither merged nor discarded."""
    tokens_discarded: int = 0
    """Tokens that no round will include, because they were left out of too many rounds or damaged."""
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_relayed: int = 0
    """Bytes relayed between other peers, counted once here, and once each in `bytes_sent` and `bytes_received`."""
    bytes_forwarded: int = 0
    """Bytes of contributions that this node forwarded for members with slow uplinks; `bytes_sent` includes them."""
    training_s: float = 0.0
    """Seconds that this node spent computing."""


class MonthUsage(Value):
    """What this node used in the present calendar month, in the time zone of the schedule."""

    month: str = ""
    """Such as `2026-11`."""
    ends_at: str = ""
    """When the next month begins."""
    sent_bytes: int = 0
    received_bytes: int = 0
    """Traffic with other members. Downloads of data sets and the dashboard's own traffic are not counted."""
    limit_bytes: int = 0
    """The node pauses until the next month when it has sent and received this much; 0 means no limit."""
    measured_joules: float = 0.0
    """Energy while the node trained, by the device's own meter, with all else that runs on the device."""
    estimated_joules: float = 0.0
    """Energy of devices without a meter, estimated from the seconds of computing."""


class Counters(Value, frozen=False):
    """Totals since the data folder was made. They only grow. Only the worker changes them, by counting."""

    activity_seconds: dict[Activity, float] = Field(default_factory=dict)
    tokens_processed: int = 0
    tokens_merged: int = 0
    tokens_discarded: int = 0
    forwarded_bytes: int = 0
    inner_steps: int = 0
    skipped_steps: int = 0
    """Inner steps that were skipped because the loss or gradient was not finite."""
    sync_rounds: dict[Outcome, int] = Field(default_factory=dict)
    sync_failures: dict[str, int] = Field(default_factory=dict)
    contributions_carried: int = 0
    digest_mismatches: int = 0
    peers_rejected: dict[str, int] = Field(default_factory=dict)
    amendments_refused: dict[str, int] = Field(default_factory=dict)
    network_sent_bytes: dict[Channel, int] = Field(default_factory=dict)
    network_received_bytes: dict[Channel, int] = Field(default_factory=dict)
    publications: dict[str, int] = Field(default_factory=dict)
    """Rounds by what became of their publication at this node (`PUBLISH_RESULTS`)."""
    last_sync_at_s: float = 0.0
    """Unix time of the last commit; 0 before the first."""


class SavedCounters(Value):
    """What a node has done since its data folder was made, as kept in `totals.json` and in every checkpoint."""

    counters: Counters
    rounds_joined: int
    rounds_attempted: int
    last_round: int = -1
    """The newest round that is counted. A round that is replayed after a crash is not counted again."""


class Report(Value):
    """The whole state of the worker. Each report replaces the previous one."""

    state: PhaseState = PhaseState()
    peer_id: str = ""
    run: RunInfo = RunInfo()
    training: TrainingInfo = TrainingInfo()
    sync: SyncInfo = SyncInfo()
    peers: PeersInfo = PeersInfo()
    swarm: tuple[PeerRow, ...] = ()
    left: tuple[str, ...] = ()
    """Ids of the peers that said goodbye within the last minutes."""
    compute_utilization_ratio: float | None = None
    """Compute seconds / wall seconds of the last complete round."""
    forecast_utilization_ratio: float | None = None
    """The value that `node.diloco.forecast` predicts from the measured step time, uplink and members."""
    reachability: str = "none"
    """How other peers reach this node: `direct`, `relay` or `none`; `none` until a peer has tried."""
    reachability_code: str = "not_tested"
    """One of `reached`, `not_reached`, `not_tested`, `disputed` (the peers that tried disagree) and `no_port`."""
    reachability_reason: str = ""
    """What `reachability_code` means, in sentences with the remedy."""
    devices: tuple[DeviceInfo, ...] = ()
    contribution: ContributionInfo = ContributionInfo()
    publication: PublicationInfo = PublicationInfo()
    counters: Counters = Counters()


class Status(Value):
    """The body of `GET /api/v1/status` and of each full event."""

    schema_version: int = SCHEMA_VERSION
    node: NodeInfo
    phase: Phase
    reason: str
    code: str
    since: str
    final: bool = False
    """The node's process ends with this phase and accepts no more actions; only a new start resumes work."""
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
    publication: PublicationInfo = PublicationInfo()
    month: MonthUsage = MonthUsage()
    notices: tuple[Notice, ...] = ()
    pause: PauseInfo = PauseInfo()
    schedule_next: str | None = None
    """The next moment at which the scheduled hours begin or end; None if they never do."""
