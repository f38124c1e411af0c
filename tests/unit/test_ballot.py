"""What a ballot remembers of other members."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from node.swarm.consensus.ballot import Ballot


def test_a_member_that_could_not_be_reached_is_doubted_only_for_a_time() -> None:
    """One that has answered falsely is doubted until it claims another head."""
    now_s = 100.0
    chain: Any = SimpleNamespace(tip=SimpleNamespace(head="aa"), store=SimpleNamespace(lowest_attempt=lambda _head: 0))
    nothing: Any = None
    ballot = Ballot(chain, nothing, lambda: now_s)
    silent: Any = SimpleNamespace(peer_id="silent", head="bb")
    false: Any = SimpleNamespace(peer_id="false", head="bb")
    ballot.add_false_claim(silent, doubt_s=30.0)
    ballot.add_false_claim(false)
    assert ballot.has_false_claim(silent) and ballot.has_false_claim(false)
    assert not ballot.has_false_claim(SimpleNamespace(peer_id="false", head="cc"))  # type: ignore[arg-type]
    now_s = 131.0
    assert not ballot.has_false_claim(silent)
    assert ballot.has_false_claim(false)
