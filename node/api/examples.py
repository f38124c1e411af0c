"""Example responses for the OpenAPI document, built from the models so that they stay valid."""

from __future__ import annotations

from typing import Any

from node.api import models
from node.api.leaderboard import RankedMember, RankedOwner, RankedTeam
from node.api.node_interface import GeneratedText, LogLine, RecentWork
from node.api.public_run import LossPoint, OwnRun, PublicMember, PublicRound, PublicRun, PublicSample
from node.status import (
    AmendmentInfo,
    ContributionInfo,
    DepartedPeer,
    DeviceInfo,
    GovernanceInfo,
    JournalEntry,
    Member,
    MonthUsage,
    NodeInfo,
    Notice,
    Outcome,
    PeerRow,
    PeersInfo,
    Phase,
    RoundRecord,
    RunInfo,
    Sample,
    Seconds,
    Status,
    SyncInfo,
    TrainingInfo,
    Value,
)

ADA, BOB = "12D3KooWAdaAdaAdaAda3fQ2xK", "12D3KooWBobBobBobBob8sT1vN"
AT = "2026-11-22T01:02:03.456Z"
DIGEST = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"

# fmt: off
ROUND = RoundRecord(
    round=41, outcome=Outcome.COMPLETE, started_at=AT, head=DIGEST, state_digest=DIGEST, swarm_tokens=16_500_000,
    members=(
        Member(peer_id=ADA, name="ada", weight=262144, included=True),
        Member(peer_id=BOB, name="bob", weight=131072, included=True),
    ),
    seconds=Seconds(rendezvous=0.4, reduce=3.1, commit=0.2, apply=0.1, blocked=3.8),
    bytes_sent=31_000_000, bytes_received=31_000_000, evaluation_loss=2.31,
)
STATUS = Status(
    node=NodeInfo(name="ada", peer_id=ADA, version="0.1.0", data_dir="/data", started_at=AT),
    phase=Phase.TRAINING, reason="Training towards round 42.", code="training", since=AT,
    run=RunInfo(
        name="builtin", manifest_hash=DIGEST, round=41, swarm_round=41, swarm_tokens=16_500_000,
        total_tokens=100_000_000, head=DIGEST, state_digest=DIGEST,
    ),
    training=TrainingInfo(
        loss=2.29, evaluation_loss=2.31, learning_rate=4e-4, inner_step=120, inner_steps=500, tokens_total=9_000_000,
        tokens_per_second=5200.0, samples=(Sample(round=39, prompt="def main(", text="argv):\n    return 0"),),
    ),
    sync=SyncInfo(progress_ratio=0.24, eta_s=76.0, round_s=100.0, last=ROUND),
    peers=PeersInfo(connected=1, training=2),
    compute_utilization_ratio=0.96, forecast_utilization_ratio=0.97, reachability="direct",
    devices=(DeviceInfo(kind="cuda", name="NVIDIA GeForce RTX 4090", utilization_ratio=0.98, power_watts=310.0),),
    limits={"cpu_threads": 0, "upload_mbit_s": 20.0, "download_mbit_s": 0.0},
    contribution=ContributionInfo(
        rounds_joined=40, rounds_attempted=41, tokens_total=9_000_000, bytes_sent=1_200_000_000, training_s=86_400.0
    ),
    month=MonthUsage(
        month="2026-11", ends_at="2026-12-01T00:00:00Z", sent_bytes=31_000_000_000, received_bytes=30_000_000_000,
        limit_bytes=200_000_000_000, measured_joules=9e7,
    ),
    notices=(Notice(code="newer_version", level="info", text="2 of 3 peers run a newer version: update."),),
)
PEER = PeerRow(
    peer_id=BOB, short_id=BOB[-6:], name="bob", phase="training", round=41, tokens_per_second=2600.0,
    transport="relay", version="0.1.0", state_digest=DIGEST, last_seen_s=0.8, compute_utilization_ratio=0.94,
    digest_agrees=True, owner=ADA, owner_name="Ada", team="Blue Team",
)
JOURNAL_ENTRY = JournalEntry(at=AT, kind="left", peer_id=BOB, name="bob", text="left")
CONTRIBUTION = models.Contribution(
    peer_id=ADA, short_id=ADA[-6:], name="ada", rounds=40, tokens=9_000_000, last_round=41, this_node=True
)
LOG_LINE = LogLine(
    id=7, at=AT, level="info", logger="node.worker.trainer", message="Round 41: complete with 2 of 2 members.",
    phase="training", round=41,
)
CONFIG = models.ResolvedConfig(
    config={"limits": {"upload_mbit_s": 20.0}}, origins={"limits.upload_mbit_s": "settings page"},
    changeable={"limits.upload_mbit_s": "now"}, cores=8, timezone="Europe/Berlin", pending_restart=(),
)
HEALTH = models.Health(ok=True, phase=Phase.TRAINING, code="training")
HISTORY = models.History(
    step_s=20.0, at_s=(1795309200.0, 1795309220.0), series={"training_loss": (2.31, None)}
)
VERSION = models.Version(
    version="0.1.0", revision="ec6d688", python="3.11.7", torch="2.13.0", hivemind="1.1.12"
)
GOVERNANCE = GovernanceInfo(
    run=DIGEST, mode="founder", keys=(ADA,), round=41,
    amendments=(
        AmendmentInfo(
            digest=DIGEST, number=1, from_round=30, change="inner.lr = 0.0002", signers=(ADA,), accepted_round=26
        ),
    ),
)
ADAS_LINE = RankedOwner(
    rank=1, name="Ada", key="12D3KooW...", team="Blue Team", machines=2, tokens=1_000_000, share_ratio=0.83,
    rounds=12, first_round=0, last_round=11, streak=12,
)
PUBLIC_RUN = PublicRun(
    name="a run", purpose="To see how far ten laptops get.", manifest_hash="8f" * 32,
    model="llama, 4 layers of width 128", parameters=1_000_000, data=("builtin:python-stdlib",), tokenizer="bytes",
    state="training", at="2026-11-22T10:00:00Z",
    round=11, tokens=1_200_000, total_tokens=2_000_000_000, progress_ratio=0.0006, ends_at="2027-02-01T12:00:00Z",
    tokens_per_second=5400.0, loss=2.31, state_digest="1c" * 32,
    members=(
        PublicMember(name="attic", owner=ADA, owner_name="Ada", team="Blue Team", tokens_per_second=2700.0),
    ), members_now=1, members_ever=3,
    leaders=(
        RankedMember(
            rank=1, name="attic", key="12D3KooW...", tokens=700_000, share_ratio=0.58, rounds=12, first_round=0,
            last_round=11, streak=12, owner="12D3KooW...",
        ),
    ),
    owners=(ADAS_LINE,),
    streaks=(ADAS_LINE,),
    teams=(RankedTeam(rank=1, name="Blue Team", owners=1, machines=2, tokens=1_000_000, share_ratio=0.83),),
    credit_round=11, rounds=(PublicRound(number=11, at="2026-11-22T09:58:00Z", members=2, tokens=98_304, loss=2.31),),
    samples=(PublicSample(number=10, prompt="def main(", text="argv):\n    return 0"),),
    losses=(LossPoint(tokens=1_200_000, loss=2.31),), invite="diloco1-...",
)
# fmt: on

RESPONSES: dict[tuple[str, str], Value] = {
    ("get", "/livez"): HEALTH,
    ("get", "/readyz"): HEALTH,
    ("get", "/api/v1/status"): STATUS,
    ("get", "/api/v1/swarm"): models.Swarm(
        peers=(PEER,), departed=(DepartedPeer(peer=PEER, at=AT, said_goodbye=True),)
    ),
    ("get", "/api/v1/journal"): models.JournalEntries(entries=(JOURNAL_ENTRY,)),
    ("get", "/api/v1/rounds"): models.Rounds(rounds=(ROUND,)),
    ("get", "/api/v1/history"): HISTORY,
    ("get", "/api/v1/work"): RecentWork(
        seen_s=86400.0, rounds=144, computed_s=84900.0, tokens=90_000_000, tokens_merged=89_400_000
    ),
    ("get", "/api/v1/contributions"): models.Contributions(contributions=(CONTRIBUTION,)),
    ("get", "/api/v1/public"): PUBLIC_RUN,
    ("get", "/api/v1/run"): OwnRun(run=PUBLIC_RUN, own=PUBLIC_RUN.leaders[0]),
    ("get", "/api/v1/logs"): models.Logs(records=(LOG_LINE,), last_id=7),
    ("get", "/api/v1/version"): VERSION,
    ("get", "/api/v1/config"): CONFIG,
    ("patch", "/api/v1/config"): CONFIG,
    ("post", "/api/v1/actions/pause"): models.Accepted(phase=Phase.PAUSED),
    ("post", "/api/v1/actions/resume"): models.Accepted(phase=Phase.TRAINING),
    ("post", "/api/v1/actions/drain"): models.Accepted(phase=Phase.DRAINING),
    ("post", "/api/v1/actions/leave"): models.Accepted(phase=Phase.LEAVING),
    ("post", "/api/v1/generate"): GeneratedText(text="argv):\n    return 0", round=11),
    ("get", "/api/v1/amendments"): GOVERNANCE,
    ("post", "/api/v1/amendments"): models.AmendmentAccepted(digest=DIGEST),
    ("post", "/api/v1/session"): models.SessionOpened(cookie="diloco_session_1a2b3c4d"),
}
REQUESTS: dict[tuple[str, str], Any] = {
    ("post", "/api/v1/actions/pause"): {"for_s": 3600},
    ("post", "/api/v1/generate"): {"prompt": "def main(", "tokens": 64, "temperature": 0.8},
    ("post", "/api/v1/amendments"): {"text": '{"action":"pause",..}', "signatures": {ADA: "00" * 64}},
}


def add_examples(document: dict[str, Any]) -> None:
    """Add the examples to each operation of an OpenAPI document that has none."""
    for path, item in document["paths"].items():
        for method, operation in item.items():
            example = RESPONSES.get((method, path))
            for status, response in operation["responses"].items():
                content = response.get("content", {}).get("application/json")
                if content is not None and example is not None and status.startswith("2"):
                    content.setdefault("example", example.model_dump(mode="json"))
            body = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if body is not None and (method, path) in REQUESTS:
                body.setdefault("example", REQUESTS[method, path])
