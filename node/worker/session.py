"""The session of a node in a run, and the rules that follow from the run's manifest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from node.config.amendments import Terms
from node.config.manifest import Invite, Manifest, RunConfig
from node.diloco.codec import MAX_CHUNK_ELEMENTS, make_codec
from node.diloco.fragments import strided
from node.errors import ConfigError, ManifestError
from node.swarm.allreduce.reducer import chunk_layouts
from node.swarm.chain.chain import OuterRule, Tip, schedule_tokens
from node.swarm.consensus.context import AmendedRules, Rules
from node.swarm.consensus.group_closing import ClosingRule
from node.swarm.governance.charter import Charter
from node.swarm.member_thread import SwarmThread
from node.swarm.messages import MOST_CHUNKS
from node.training.algorithm import feedback_of, optimizer_of
from node.training.checkpoint import Checkpoint, CheckpointStore
from node.training.model import unit_elements
from node.worker.checkpointing import CheckpointSource


class StartingPoint:
    """The state from which a node starts. Whoever uses it takes it, so that its tensors do not stay in memory."""

    def __init__(self, tip: Tip | None, checkpoint: Checkpoint | None = None) -> None:
        """`tip` is None for a node without a state: a relay, or a node that was paused before it had one.

        `checkpoint` is the one that training resumes from; None if it starts from a downloaded state.
        """
        self.tip, self._checkpoint = tip, checkpoint
        self.is_resumed = checkpoint is not None

    def take(self) -> tuple[Tip | None, Checkpoint | None]:
        """Return the tip and the checkpoint, once."""
        taken = self.tip, self._checkpoint
        self.tip = self._checkpoint = None
        return taken


@dataclass(frozen=True, slots=True)
class Session:
    """The run that a node is in, and the state from which it starts."""

    manifest: Manifest
    rules: Rules
    swarm: SwarmThread
    store: CheckpointStore
    source: CheckpointSource
    start: StartingPoint
    folder: Path
    """The data folder."""

    def schedule_tokens(self, tip: Tip) -> int:
        """The tokens of the swarm without rewound ones. Learning rate, phases and the end of the run follow them."""
        return schedule_tokens(tip.state) - self.manifest.rewound_tokens

    def is_last(self, tip: Tip) -> bool:
        """Whether the run ends at a tip."""
        terms = self.terms_after(tip)
        return terms.is_stopped or self.schedule_tokens(tip) >= terms.run.total_tokens

    def terms_after(self, tip: Tip) -> Terms:
        """The settings of the round after a tip: the manifest's, as amendments have changed them."""
        assert self.rules.amended is not None
        return self.rules.amended.charter.terms_at(tip.state.amendments, tip.round + 1)


def rules_of(manifest: Manifest) -> Rules:
    """The rules of a manifest, and how amendments change them."""
    charter = Charter(manifest.hash, manifest.run)
    make = partial(_rules_of, manifest)
    return replace(make(manifest.run), amended=AmendedRules(charter, make))


def check_size(manifest: Manifest) -> None:
    """Raise ManifestError if the run's model is too large for its rounds. Lists of its chunks would fill the memory."""
    largest = MOST_CHUNKS * MAX_CHUNK_ELEMENTS * manifest.run.sync.fragment_count
    if manifest.parameters > largest:
        raise ManifestError(
            f"The run has {manifest.parameters} parameters, and its rounds take at most {largest}: join another run."
        )


def check_chunks(rules: Rules) -> None:
    """Raise ConfigError if the rounds of a run have more chunks than a plan can name."""
    if max(len(layout.bounds) for layout in rules.layouts) > MOST_CHUNKS:
        raise ConfigError(
            f"One round of this run has more than {MOST_CHUNKS * MAX_CHUNK_ELEMENTS / 1e9:.3g} billion parameters: set "
            "run.sync.mode to streaming, with more run.sync.fragments."
        )


def _rules_of(manifest: Manifest, run: RunConfig) -> Rules:
    fragments = run.sync.fragment_count
    units = unit_elements(run.model) if fragments > 1 else [manifest.parameters]
    min_steps = run.round.inner_steps
    max_steps = run.round.most_inner_steps or 4 * min_steps
    outer = OuterRule(
        lr=run.outer.lr,
        optimizer=optimizer_of(run.outer),
        # Each fragment has its own rounds, so a round has 1/F of the inner steps.
        inner_steps=max(1, min_steps // fragments),
        fragments=fragments,
        most_inner_steps=max(1, max_steps // fragments) if run.sync.auto else 0,
        follows_peers=run.sync.auto,
    )
    return Rules(
        run=manifest.hash,
        layouts=chunk_layouts(make_codec(run.sync.codec), strided(units, fragments)),
        closing=ClosingRule(run.round.policy, run.round.min_peers, run.round.quorum_ratio),
        outer=outer,
        max_tokens=run.max_contribution_tokens,
        overlapped=run.sync.mode != "blocking",
        result_codec=make_codec(run.sync.encoding_of_results),
        feedback=feedback_of(run.sync),
    )


def invite_of(manifest: Manifest, addresses: tuple[str, ...]) -> str:
    return str(Invite(manifest.hash, addresses)) if addresses else ""
