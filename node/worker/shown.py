"""What a trainer shows of itself, put into the teller's words. Knows fields; no training."""

from __future__ import annotations

from node.status import Phase, RoundRecord
from node.swarm.chain import Tip
from node.swarm.member import View
from node.worker.session import Session
from node.worker.teller import Teller


def step(teller: Teller, loss: float, lr: float, steps: int, tokens_per_second: float) -> None:
    """An inner step is done."""
    teller.training = teller.training.model_copy(
        update={"loss": loss, "learning_rate": lr, "inner_step": steps, "tokens_per_second": tokens_per_second}
    )


def steps(teller: Teller, done: int, inner_steps: int) -> None:
    teller.training = teller.training.model_copy(update={"inner_step": done, "inner_steps": inner_steps})


def waits(teller: Teller, done_ratio: float, eta_s: float | None) -> None:
    """How far it is to the next contribution; None where no step has been timed yet."""
    teller.sync = teller.sync.model_copy(update={"progress_ratio": done_ratio, "eta_s": eta_s})


def training(teller: Teller, next_round: int, *, overlaps: bool) -> None:
    reason = f"Training towards round {next_round}."
    if overlaps:
        reason = f"Training towards round {next_round + 1}, while round {next_round} is averaged."
    teller.enter(Phase.TRAINING, reason, "training")


def no_text(teller: Teller, problem: str) -> None:
    teller.enter(Phase.TRAINING, f"{problem or 'Reading text.'} Waiting for it.", "no_text")


def waiting(teller: Teller, view: View, next_round: int) -> None:
    """Standing still until a round is over."""
    stage = f" ({view.stage})" if view.stage != "idle" else ""
    reason = view.waiting_reason or f"Averaging round {next_round}{stage}."
    teller.enter(Phase.SYNCING, reason, view.waiting_code or "syncing")


def evaluation(teller: Teller, own: float | None, record: RoundRecord | None) -> None:
    """A round is over: this node's own word on the new anchor, else the others' on the one before."""
    loss = own if own is not None or record is None else record.evaluation_loss
    if loss is not None:
        teller.training = teller.training.model_copy(update={"evaluation_loss": loss})


def position(teller: Teller, session: Session, tip: Tip) -> None:
    """Where the node stands in the run."""
    teller.run = teller.run.model_copy(
        update={
            "manifest_hash": session.manifest.hash,
            "name": session.manifest.run.name,
            "total_tokens": session.manifest.run.total_tokens,
            "round": tip.round,
            "swarm_tokens": tip.state.tokens,
            "head": tip.head,
            "state_digest": tip.digest,
        }
    )
