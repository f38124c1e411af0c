"""The number of deposits that a depositary holds, and the checks of their chunks."""

from __future__ import annotations

import pytest

from node.errors import PeerError
from node.swarm.allreduce.reducer import chunk_hash
from node.swarm.consensus.depositary import LEAST_PLACES, MEMORY_BYTES, MOST_PLACES, check_chunks, places_for

CHUNKS = [b"first", b"second", b"third"]
HASHES = [chunk_hash(chunk) for chunk in CHUNKS]


@pytest.mark.parametrize(
    ("round_bytes", "places"),
    [(0, MOST_PLACES), (1, MOST_PLACES), (MEMORY_BYTES // 10, 10), (MEMORY_BYTES, LEAST_PLACES), (2**40, LEAST_PLACES)],
)
def test_number_of_deposits_that_a_depositary_holds_follows_from_their_size(round_bytes: int, places: int) -> None:
    assert places_for(round_bytes) == places


def test_deposited_chunks_that_match_their_signed_hashes_are_accepted() -> None:
    assert check_chunks(HASHES, [2, 0], [b"third", b"first"]) == {2: b"third", 0: b"first"}


@pytest.mark.parametrize(
    ("chunks", "blobs"),
    [
        ([0], [b"other"]),
        ([1], [b"first"]),
        ([0, 1], [b"first"]),
        ([0, 0], [b"first", b"first"]),
        ([3], [b"fourth"]),
        ([-1], [b"third"]),
    ],
)
def test_altered_or_swapped_chunks_of_a_deposit_are_refused(chunks: list[int], blobs: list[bytes]) -> None:
    with pytest.raises(PeerError):
        check_chunks(HASHES, chunks, blobs)
