"""When a node takes its own state for the damaged one: by the weight of those it has heard, never by who came first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from node.diloco.outer import genesis
from node.status import Phase
from node.swarm.catchup import outvoted
from node.swarm.chain import Outer, tip_at
from node.swarm.directory import PeerRecord

RUN = "ab" * 32
TIP = tip_at(genesis(torch.zeros(10)), RUN, None, Outer(0.7, 0.9, 10), {}, 0.0)
OTHER = "0" * 64
"""Smaller than any real digest."""


def record(peer: str, digest: str, head: str = RUN) -> PeerRecord:
    return PeerRecord(peer_id=peer, number=1, run=RUN, head=head, state_digest=digest, phase=Phase.TRAINING)


@pytest.mark.parametrize(
    ("others", "lost"),
    [
        ([], False),
        ([("b", OTHER, RUN), ("c", OTHER, RUN)], True),
        ([("b", OTHER, RUN), ("c", TIP.digest, RUN)], False),
        # Right after a commit: c and d have not told yet, and may still side with this node.
        ([("b", OTHER, RUN), ("c", TIP.digest, "cd" * 32), ("d", TIP.digest, "cd" * 32)], False),
        # Whatever the silent one says, it is too late.
        ([("b", OTHER, RUN), ("c", OTHER, RUN), ("d", OTHER, RUN), ("e", TIP.digest, "cd" * 32)], True),
        # Who took no part in the newest record and is elsewhere has no word in it.
        ([("b", OTHER, RUN), ("c", OTHER, RUN), ("x", "", "cd" * 32), ("y", "", "cd" * 32)], True),
    ],
)
def test_outvoted_only_by_more_than_may_still_speak(others: list[tuple[str, str, str]], lost: bool) -> None:
    tip = replace(TIP, last_weights=dict.fromkeys("abcde", 100))
    assert outvoted([record("a", TIP.digest), *(record(*other) for other in others)], tip) is lost


@pytest.mark.parametrize("digest", [OTHER, "f" * 64])
@pytest.mark.parametrize("honest", [2, 10])
def test_one_contributor_outvotes_no_two_that_agree_however_much_it_signs(honest: int, digest: str) -> None:
    """64 rounds' worth of tokens, which one contribution may weigh, against one each."""
    names = [f"honest {i}" for i in range(honest)]
    tip = replace(TIP, last_weights=dict.fromkeys(names, 100) | {"liar": 6400})
    records = [*(record(name, TIP.digest) for name in names), record("liar", digest)]
    assert not outvoted(records, tip)
    elsewhere = [record(name, "", head="cd" * 32) for name in names[1:]]
    assert not outvoted([records[0], *elsewhere, records[-1]], tip), "its friends have not told yet"
    assert outvoted([records[-1], *records[:-1]], replace(tip, digest=digest)), "so it is the liar who has to go"


def test_strangers_outvote_nobody() -> None:
    """However many: whoever trains alone would be at the mercy of a few keys, which cost nothing."""
    tip = replace(TIP, last_weights={"a": 100})
    strangers = [record(f"stranger {i}", OTHER) for i in range(300)]
    assert not outvoted([record("a", TIP.digest), *strangers], tip)
    assert not outvoted([record("a", TIP.digest), *strangers], TIP), "nobody has contributed yet"


def test_of_two_the_smaller_digest_decides_whatever_they_sign() -> None:
    for weights in ((100, 1), (1, 100), (100, 100)):
        tip = replace(TIP, last_weights=dict(zip("ab", weights, strict=True)))
        assert outvoted([record("a", TIP.digest), record("b", OTHER)], tip)
        assert not outvoted([record("a", TIP.digest), record("b", "f" * 64)], tip)
