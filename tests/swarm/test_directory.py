"""Two runs share a bootstrap peer, and with it the directory: each is listed, and `run --any` joins the larger one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.utils.serializer import MSGPackSerializer

from node.config.manifest import parse_invite
from node.host.disk_quota import LEAST_BYTES
from node.swarm.identity import new_identity
from node.swarm.membership.directory import DIRECTORY_KEY, open_reader
from tests.swarm.conftest import Figures
from tests.swarm.harness import PATIENCE, START_S, Node, Swarm, command, tiny, wait_for
from tests.unit.listings import BAD_KINDS, Entry, good_entry

ANY_S = 60.0


def address_of(node: Node) -> str:
    """HOST:PORT of a node, as a person would write it."""
    _, _, host, _, port, *_ = parse_invite(node.invite()).addresses[0].split("/")
    return f"{host}:{port}"


def listed(bootstrap: str, folder: Path, count: int) -> list[dict[str, Any]]:
    """Wait until `diloco-node runs`, on a machine with an empty data folder, prints so many runs."""

    def look() -> list[dict[str, Any]]:
        status, out, err = command(
            "runs", "--json", "--bootstrap", bootstrap, "--data-dir", str(folder / "nobody"), timeout_s=60
        )
        assert status == 0, err
        runs = list(json.loads(out)["runs"])
        return runs if len(runs) == count else []

    return list(wait_for(look, START_S, f"{count} runs are not listed"))


@pytest.mark.timeout(400)
def test_any_joins_the_largest_listed_run_that_fits_and_trains_within_a_minute(
    tmp_path: Path, figures: Figures
) -> None:
    larger = tiny(name="larger", purpose="To be chosen.", model={"hidden_size": 64})
    with Swarm(tmp_path / "first", tiny(name="smaller")) as first, Swarm(tmp_path / "second", larger) as second:
        bootstrap = address_of(first.found("--swarm.list_run=true"))
        founder = second.found("--swarm.list_run=true", f"--swarm.bootstrap={bootstrap}")
        for one in (*first.nodes, *second.nodes):
            one.until_training()
            one.calm()
        runs = listed(bootstrap, tmp_path, 2)
        assert [(run["name"], run["members"]) for run in runs] == [("larger", 1), ("smaller", 1)]
        assert all(run["fits"] for run in runs)
        assert runs[0]["purpose"] == "To be chosen."
        node = second.node("stranger")
        node.preset = None
        began_s = time.monotonic()
        node.start("--any", "--bootstrap", bootstrap)
        trains = node.until_training(ANY_S * PATIENCE)
        figures.hold("run --any to the first inner step", time.monotonic() - began_s, ANY_S)
        assert trains["run"]["manifest_hash"] == runs[0]["manifest_hash"]
        assert trains["run"]["name"] == "larger"
        assert "Joining the run 'larger'" in node.said()
        founder.until(lambda s: s["peers"]["training"] == 2, START_S)
        assert node.stop() == 0
        assert node.start("--any").until_training()["run"]["name"] == "larger", "it continues without the directory"


def fill_directory(bootstrap: str, folder: Path, entries: Sequence[Entry]) -> int:
    """Send entries to the bootstrap peer, as any program can. Returns the number that it has taken."""

    async def store() -> int:
        async with open_reader(folder) as reader:
            await reader.read([bootstrap])
            protocol, key = reader._wire.directory._node.protocol, DHTID.generate(DIRECTORY_KEY)
            holder = PeerID.from_base58(bootstrap.rpartition("/p2p/")[2])
            taken = 0
            for signer, value, expires_at in entries:
                packed = MSGPackSerializer.dumps(value)
                taken += sum(await protocol.call_store(holder, [key], [packed], [expires_at], [signer]))
            return taken

    folder.mkdir()
    return asyncio.run(store())


@pytest.mark.timeout(400)
def test_any_finds_the_run_that_answers_among_fifty_listings_and_trains_within_a_minute(
    tmp_path: Path, figures: Figures
) -> None:
    """29 larger runs do not answer, and 20 listings are forged, expired, kept too long, oversized or renewed."""
    silent, bad = 29, 20
    with Swarm(tmp_path / "swarm", tiny(name="alive")) as swarm:
        founder = swarm.found("--swarm.list_run=true")
        founder.until_training()
        founder.calm()
        bootstrap = parse_invite(founder.invite()).addresses[0]
        listed(bootstrap, tmp_path, 1)
        entries = [good_entry(number, model={"hidden_size": 64}) for number in range(silent)]
        entries += [BAD_KINDS[number % len(BAD_KINDS)](new_identity()) for number in range(bad)]
        assert fill_directory(bootstrap, tmp_path / "others", entries) == silent
        names = {run["name"] for run in listed(bootstrap, tmp_path, silent + 1)}
        assert names == {"alive", *(f"run {number}" for number in range(silent))}
        node = swarm.node("stranger")
        node.preset = None
        began_s = time.monotonic()
        node.start("--any", "--bootstrap", bootstrap)
        assert node.until_training(ANY_S * PATIENCE)["run"]["name"] == "alive"
        figures.hold("run --any among 50 listings to the first inner step", time.monotonic() - began_s, ANY_S)


@pytest.mark.timeout(200)
def test_any_ends_with_a_remedy_if_no_listed_run_fits_or_no_peer_is_named(tmp_path: Path) -> None:
    with Swarm(tmp_path / "swarm") as swarm:
        bootstrap = address_of(swarm.found("--swarm.list_run=true"))
        swarm.nodes[0].until_training()
        swarm.nodes[0].calm()
        listed(bootstrap, tmp_path, 1)
        node = swarm.node("full")
        node.preset = None
        assert (
            node.start("--any", "--bootstrap", bootstrap, f"--limits.disk_gb={LEAST_BYTES / 1e9}").wait_end(START_S)
            == 3
        )
        assert "The listed run, 'tiny', needs" in node.said() and "diloco-node runs" in node.said()
        alone = swarm.node("alone")
        alone.preset = None
        assert alone.start(env={"DILOCO_JOIN": "any"}).wait_end(START_S) == 2
        assert "--bootstrap HOST:PORT" in alone.said()
