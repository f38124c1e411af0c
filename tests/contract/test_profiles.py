"""Profiles spread among nodes, outlive their owners, and survive restarts, over each transport."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from node.status import Channel
from node.swarm.identity import new_identity
from node.swarm.owners import profile_exchange
from node.swarm.owners.profile import OWN_PROFILE_FILE, machine_profile, owner_profile
from node.swarm.owners.profile_exchange import PROFILES_FILE, ProfileExchange
from node.swarm.owners.profile_table import ProfileTable
from node.swarm.transport.wire import Message, Service
from tests.contract.harness import Node, Swarm, wait_until

INTERVAL_S = 0.1


class Member:
    """A node with its profiles."""

    def __init__(self, node: Node, folder: Path) -> None:
        self.node, self.folder = node, folder
        folder.mkdir(exist_ok=True)
        self.start()

    def start(self) -> None:
        """Start with what is on the disk."""
        node = self.node
        self.table = ProfileTable(node.peer_id, lambda: ())

        async def run() -> None:
            exchange = ProfileExchange(
                node.host.wire, node.peer_table, self.table, self.folder, random.Random(1), INTERVAL_S
            )
            node._tasks.append(node.host.loop.create_task(exchange.run()))

        node.host.do(run())

    def name_of(self, peer_id: str) -> str:
        return self.table.owner_of(peer_id).name


def members(swarm: Swarm, count: int, folder: Path) -> list[Member]:
    nodes = swarm.nodes(count, swarm.rules(1000))
    return [Member(node, folder / str(i)) for i, node in enumerate(nodes)]


def test_profiles_reach_all_and_stay_when_their_owner_has_left(swarm: Swarm, tmp_path: Path) -> None:
    first, box, ada = members(swarm, 3, tmp_path)
    joining = first.node.host.identity
    profile = owner_profile(ada.node.host.identity, 5, "Ada", "Blue", joining)
    (ada.folder / OWN_PROFILE_FILE).write_text(profile.model_dump_json())
    joined = machine_profile(box.node.host.identity, 1, ada.node.peer_id, joining)
    (box.folder / OWN_PROFILE_FILE).write_text(joined.model_dump_json())
    wait_until(lambda: all(m.name_of(box.node.peer_id) == "Ada" for m in (first, box, ada)))
    ada.node.vanish()
    late = Member(swarm.node(swarm.rules(1000)), tmp_path / "late")
    late.node.meet([first.node])
    late.node.start_gossip()
    wait_until(lambda: late.name_of(ada.node.peer_id) == "Ada")
    file, known = late.folder / PROFILES_FILE, {"key": ada.node.peer_id, "name": "Ada", "team": "Blue"}
    wait_until(lambda: file.exists() and json.loads(file.read_text())["owners"].get(box.node.peer_id) == known)


def test_profiles_are_read_from_the_disk_and_a_damaged_file_is_replaced(swarm: Swarm, tmp_path: Path) -> None:
    (alone,) = members(swarm, 1, tmp_path)
    profile = owner_profile(alone.node.host.identity, 5, "Ada", "", alone.node.host.identity)
    (alone.folder / OWN_PROFILE_FILE).write_text(profile.model_dump_json())
    wait_until((alone.folder / PROFILES_FILE).exists)
    (alone.folder / OWN_PROFILE_FILE).unlink()
    alone.start()
    wait_until(lambda: alone.name_of(alone.node.peer_id) == "Ada")
    (alone.folder / PROFILES_FILE).write_text("[")
    (alone.folder / OWN_PROFILE_FILE).write_text("{}")
    alone.start()
    wait_until(lambda: not alone.name_of(alone.node.peer_id))
    (alone.folder / OWN_PROFILE_FILE).write_text(profile.model_dump_json())
    wait_until(lambda: alone.name_of(alone.node.peer_id) == "Ada")


def test_a_profile_that_changes_for_ever_is_written_seldom(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def write(_path: Path, text: str, *, forced: bool) -> None:
        written.append(text)
        time.sleep(0.05)

    monkeypatch.setattr(profile_exchange, "write_whole", write)
    (alone,) = members(swarm, 1, tmp_path)
    own = alone.node.host.identity
    for number in range(1, 6):
        profile = owner_profile(own, number, f"Ada {number}", "", own)
        (alone.folder / OWN_PROFILE_FILE).write_text(profile.model_dump_json())
        wait_until(lambda name=f"Ada {number}": alone.name_of(own.peer_id) == name)  # type: ignore[misc]
    assert len(written) == 1


def test_hostile_replies_change_nothing_and_are_counted(swarm: Swarm, tmp_path: Path) -> None:
    """The hostile peer sends a forged profile of the honest one among its own valid one, then garbage."""
    honest, hostile = members(swarm, 2, tmp_path)
    evil = hostile.node.host.identity
    forged = owner_profile(evil, 9, "Not me", "", evil).document.model_copy(update={"signer": honest.node.peer_id})
    documents = [forged, owner_profile(evil, 1, "Eve", "", evil).document]
    replies = [[document.model_dump_json().encode() for document in documents], [b"{}"], [b"x" * 200_000]]

    async def answer(_caller: str, _message: Message) -> Message:
        return Message(blobs=replies.pop(0) if len(replies) > 1 else replies[0])

    def serve() -> None:
        hostile.node.host.wire.serve({"profiles": Service(answer, Channel.DHT, 4096)})

    hostile.node.host.loop.call_soon_threadsafe(serve)
    wait_until(lambda: honest.node.host.wire.traffic.rejected["bad_size"] >= 1)
    rejected = honest.node.host.wire.traffic.rejected
    assert rejected["bad_signature"] >= 1
    assert (honest.name_of(honest.node.peer_id), honest.name_of(evil.peer_id)) == ("", "Eve")


def test_a_table_longer_than_a_reply_arrives_in_parts(swarm: Swarm, tmp_path: Path) -> None:
    full, empty = members(swarm, 2, tmp_path)
    key = new_identity()
    documents = [owner_profile(new_identity(), 1, "x" * 40, "y" * 40, key).document for _ in range(400)]

    async def fill() -> None:
        assert full.table.merge(documents) == []

    full.node.host.do(fill())
    wait_until(lambda: len(empty.table) == 400)
    assert empty.table.digests == full.table.digests
