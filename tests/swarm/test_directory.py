"""Two runs share a bootstrap peer, and with it the directory: each is listed, and `run --any` joins the larger one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.swarm.conftest import Figures
from tests.swarm.harness import START_S, Node, Swarm, command, tiny, wait_for

ANY_S = 60.0


def listen_address(node: Node) -> str:
    """The node's TCP address without its peer id, as a person would write it."""
    found: list[str] = node.until(lambda s: s["run"]["invite"], START_S) and _connections(node)
    return found[0]


def _connections(node: Node) -> list[str]:
    from node.config.manifest import parse_invite

    parts = parse_invite(node.invite()).addresses[0].split("/")
    return [f"{parts[2]}:{parts[4]}"]


def listed(bootstrap: str, *flags: str) -> list[dict[str, Any]]:
    status, out, err = command("runs", "--json", "--bootstrap", bootstrap, *flags, timeout_s=60)
    assert status == 0, err
    return list(json.loads(out)["runs"])


@pytest.mark.timeout(400)
def test_any_joins_the_largest_listed_run_that_fits_and_trains_within_a_minute(
    tmp_path: Path, figures: Figures
) -> None:
    larger = tiny(name="larger", purpose="To be chosen.", model={"hidden_size": 64})
    with Swarm(tmp_path / "first", tiny(name="smaller")) as first, Swarm(tmp_path / "second", larger) as second:
        bootstrap = listen_address(first.found("--swarm.list_run=true"))
        founder = second.found("--swarm.list_run=true", f"--swarm.bootstrap={bootstrap}")
        for one in (*first.nodes, *second.nodes):
            one.until_training()
            one.calm()
        empty = str(tmp_path / "nobody")
        runs = wait_for(
            lambda: len(found := listed(bootstrap, "--data-dir", empty)) == 2 and found, START_S, "two runs"
        )
        assert [(run["name"], run["fits"], run["members"]) for run in runs] == [
            ("larger", True, 1),
            ("smaller", True, 1),
        ]
        assert runs[0]["purpose"] == "To be chosen."
        node = second.node("stranger")
        node.preset = None
        began_s = time.monotonic()
        node.start("--any", "--bootstrap", bootstrap)
        trains = node.until_training(ANY_S)
        figures.tell("run --any to the first inner step", time.monotonic() - began_s)
        assert trains["run"]["manifest_hash"] == runs[0]["manifest_hash"]
        assert trains["run"]["name"] == "larger"
        assert "Joining the run 'larger'" in node.said()
        founder.until(lambda s: s["peers"]["training"] == 2, START_S)
        assert node.stop() == 0


@pytest.mark.timeout(200)
def test_any_ends_with_a_remedy_if_no_listed_run_fits_or_no_peer_is_named(tmp_path: Path) -> None:
    with Swarm(tmp_path / "swarm") as swarm:
        bootstrap = listen_address(swarm.found("--swarm.list_run=true"))
        swarm.nodes[0].until_training()
        swarm.nodes[0].calm()
        wait_for(lambda: listed(bootstrap, "--data-dir", str(tmp_path / "nobody")), START_S, "the run is not listed")
        node = swarm.node("full")
        node.preset = None
        assert node.start("--any", "--bootstrap", bootstrap, "--limits.disk_gb=0.021").wait_end(START_S) == 3
        assert "The listed run, 'tiny', needs" in node.said() and "diloco-node runs" in node.said()
        alone = swarm.node("alone")
        alone.preset = None
        assert alone.start("--any").wait_end(START_S) == 2
        assert "--bootstrap HOST:PORT" in alone.said()
