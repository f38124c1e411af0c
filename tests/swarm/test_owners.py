"""Real nodes: two machines of one owner are one row, also after they have left, and each node samples the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.swarm.harness import PATIENCE, START_S, Node, Swarm, command, tiny, wait_for

PROMPT = "def f("


def public(node: Node) -> dict[str, Any]:
    return node._get("/api/v1/public")


def owner(node: Node, *words: str) -> str:
    code, out, error = command("owner", *words, "--data-dir", str(node.folder))
    assert code == 0, error
    return out.strip()


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_machines_of_one_owner_are_one_row_and_keep_their_name_when_they_leave(tmp_path: Path) -> None:
    run = tiny(
        round={"min_peers": 1, "inner_steps": 38},
        sample={"prompts": [PROMPT], "every_rounds": 10, "tokens": 16},
    )
    with Swarm(tmp_path / "swarm", run) as swarm:
        founder = swarm.found()
        ada, box = swarm.join("laptop", "box")
        assert owner(ada, "set", "Ada", "--team", "Blue") == "This machine belongs to Ada of team Blue."
        owner(box, "join", owner(ada, "token"))

        def rows_of_ada() -> list[dict[str, Any]]:
            return [one for one in public(founder)["owners"] if one["name"] == "Ada"]

        wait_for(lambda: any(one["machines"] == 2 for one in rows_of_ada()), PATIENCE * START_S, "no row of the owner")
        is_ada = ("Ada", "Blue", "Ada", "Blue")

        def owners() -> tuple[str, ...]:
            rows = {row["name"]: row for row in founder.peers()}
            return tuple(rows[name][field] for name in ("laptop", "box") for field in ("owner_name", "team"))

        wait_for(lambda: owners() == is_ada, START_S, "the peers have no owner")
        assert "Machines  2" in owner(box)
        assert [node.stop() for node in (ada, box)] == [0, 0]
        found = public(founder)
        (row,) = (one for one in found["owners"] if one["name"] == "Ada")
        machines = [one for one in found["leaders"] if one["owner"] == row["key"]]
        assert sorted(one["name"] for one in machines) == ["box", "laptop"]
        assert row["machines"] == 2 and row["tokens"] == sum(one["tokens"] for one in machines) > 0
        samples = founder.until(lambda status: status["training"]["samples"], START_S)["training"]["samples"]
        assert [one["prompt"] for one in samples] == [PROMPT]
        assert public(founder)["samples"][-1]["prompt"] == PROMPT
        assert founder.stop() == 0
        founder.start()
        again = public(founder)
        assert [(one["name"], one["machines"]) for one in again["owners"] if one["team"] == "Blue"] == [("Ada", 2)]
        assert again["samples"]
