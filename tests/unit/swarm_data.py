"""Makes signed proofs and leaves of states for tests."""

from __future__ import annotations

from collections.abc import Sequence

from node.diloco.digest import tree_slices
from node.diloco.outer import OuterState
from node.swarm.identity import Identity, new_identity
from node.swarm.messages import Join, Plan, Proof, RoundOutcome, accept, results_root, sign

RUN = "ab" * 32
STATE = "5a" * 32
A, B = sorted((new_identity() for _ in range(2)), key=lambda identity: identity.peer_id)


def new_join(tokens: int = 100, step_s: float = 0.1, parent: str = RUN, state: str = STATE, run: str = RUN) -> Join:
    return Join(run=run, parent=parent, state=state, tokens=tokens, step_s=step_s, norm=1.0)


def committed(
    parent: str,
    round_: int,
    members: Sequence[Identity] = (A, B),
    *,
    tokens: int | Sequence[int] = 100,
    hashes: Sequence[bytes] = (bytes(32),),
    state: str = STATE,
    run: str = RUN,
) -> Proof:
    """A proof in which all members voted and each member contributed `tokens`, or its item of them."""
    tokens = [tokens] * len(members) if isinstance(tokens, int) else tokens
    joins = tuple(
        sign(member, new_join(one, parent=parent, state=state, run=run))
        for member, one in zip(members, tokens, strict=True)
    )
    ids = tuple(member.peer_id for member in members)
    plan = Plan(
        run=run, parent=parent, attempt=0, leader=ids[0], joins=joins, reducers=ids[:1], owners=(0,) * len(hashes)
    )
    document = sign(members[0], RoundOutcome(round=round_, plan=plan, included=ids, results=results_root(hashes)))
    accepts = {member.peer_id: accept(member, document.hash, 0) for member in members}
    return Proof(outcome=document, attempt=0, group=ids, accepts=accepts, hashes=b"".join(hashes).hex())


def leaf_of(state: OuterState, index: int) -> bytes:
    slices = tree_slices(state.anchor.numel(), state.moments)
    if index == len(slices):
        return state.credit.encode()
    vector, start, end = slices[index]
    data: bytes = (state.anchor, state.momentum)[vector][start:end].numpy().tobytes()
    return data
