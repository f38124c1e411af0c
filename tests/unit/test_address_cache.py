"""Which addresses the file of known peers keeps."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from node.swarm.identity import new_identity
from node.swarm.membership.discovery import MAX_CACHED, MAX_GONE, PER_PEER, AddressCache, merge_addresses
from tests.event_loop import in_loop


def address(peer: str, port: int = 1) -> str:
    return f"/ip4/203.0.113.5/tcp/{port}/p2p/{peer}"


def test_peers_known_for_longest_come_first_and_those_that_are_gone_come_last() -> None:
    known = [address("a"), address("b"), address("c")]
    assert merge_addresses(known, [address("d"), address("c"), address("a")]) == [
        address("a"),
        address("c"),
        address("d"),
        address("b"),
    ]


def test_many_new_identities_do_not_push_out_the_peers_of_before() -> None:
    known = [address(f"friend {i}") for i in range(20)]
    live = [*known[:5], *(address(f"new {i}", port) for i in range(500) for port in range(16))]
    merged = merge_addresses(merge_addresses(known, live), live)
    assert len(merged) == MAX_CACHED
    assert merged[:5] == known[:5], "live peers stay"
    gone = merged[-MAX_GONE:]
    assert set(known[5:]) <= set(gone), "peers that are offline stay as well"


def test_one_peer_takes_few_places_and_its_old_addresses_go_when_it_names_others() -> None:
    merged = merge_addresses([], [address("a", port) for port in range(16)])
    assert merged == [address("a", port) for port in range(PER_PEER)]
    assert merge_addresses(merged, [address("a", 3), address("a", 77)]) == [address("a", 3), address("a", 77)]


@in_loop
async def test_a_disk_that_refuses_the_file_is_logged_once_until_a_write_succeeds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, live = tmp_path / "cache", [address(new_identity().peer_id)]
    cache = AddressCache(folder / "peers.json")
    for told in (1, 2):
        for _ in range(3):
            await cache.update(live)
        assert sum(record.levelno == logging.WARNING for record in caplog.records) == told
        folder.mkdir()
        await cache.update(live)
        assert await AddressCache(folder / "peers.json").read() == live
        (folder / "peers.json").unlink()
        folder.rmdir()
        live.append(address(new_identity().peer_id))
