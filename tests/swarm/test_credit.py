"""Real nodes keep one table of credit, from which each can prove what it gave."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from node.swarm.chain.certificate import CREDIT_FILE, CreditRecord, Entry
from node.worker.credit_file import LEAST_INTERVAL_S
from tests.swarm.harness import PATIENCE, START_S, Node, Swarm, command, tiny, wait_for
from tests.unit.documented_checker import check_as_a_user

INNER_STEPS, STEP_S = 60, 0.1
"""A node writes its table at most every LEAST_INTERVAL_S. Rounds that take longer let each node write every table, so
the nodes' tables can be compared at one round. The steps rest, which leaves the processor to the other processes."""
assert INNER_STEPS * STEP_S > LEAST_INTERVAL_S


def credit(node: Node) -> CreditRecord:
    return CreditRecord.model_validate_json((node.folder / CREDIT_FILE).read_bytes())


def tables_at_one_round(nodes: Sequence[Node], from_round: int) -> list[tuple[Entry, ...]]:
    """The tables of all nodes after the first round whose table all of them have written, with credit for each node.

    Each file holds the newest table only, so this reads the files until it has seen all tables of one round.
    """
    seen: dict[int, dict[str, tuple[Entry, ...]]] = {}

    def common() -> list[int]:
        for node in nodes:
            with suppress(FileNotFoundError):
                record = credit(node)
                if len(record.table) < len(nodes):
                    continue  # The node that came last has not contributed yet.
                seen.setdefault(record.evidence.round, {})[node.name] = record.table
        return sorted(number for number, tables in seen.items() if number >= from_round and len(tables) == len(nodes))

    why = f"no round from {from_round} on whose table all nodes have written"
    number = wait_for(common, PATIENCE * START_S, why)[0]
    return list(seen[number].values())


@pytest.mark.nightly
@pytest.mark.timeout(420)
def test_late_node_has_the_same_credit_as_the_others_and_each_can_prove_its_own(tmp_path: Path) -> None:
    run = tiny(round={"min_peers": 2, "inner_steps": INNER_STEPS})
    slow = {"DILOCO_FAULTS": f"inner@*=rest:{STEP_S}"}
    with Swarm(tmp_path / "swarm", run) as swarm:
        founder = swarm.found(env=slow)
        (second,) = swarm.join("second", env=slow)
        founder.until_round(1)
        (late,) = swarm.join("late", env=slow)
        joined = late.until_round(founder.status()["run"]["round"] + 2)["run"]["round"]
        nodes = (founder, second, late)
        first, *others = tables_at_one_round(nodes, joined)
        assert [table == first for table in others] == [True, True], "nodes at one round have one table"
        assert {entry.member for entry in first} == {node.peer_id() for node in nodes}
        assert [node.stop() for node in nodes] == [0, 0, 0]
    for node in nodes:
        record = credit(node)
        assert sum(entry.tokens for entry in record.table) == record.evidence.tokens
        file = node.folder / "certificate.json"
        code, written, problem = command("certificate", str(file), "--data-dir", str(node.folder), timeout_s=60.0)
        assert code == 0, problem
        assert command("verify", str(file), timeout_s=60.0)[1] == written
        assert json.loads(file.read_text())["entry"]["rounds"] >= 1
        checked = check_as_a_user(tmp_path, file.read_text())
        assert checked.returncode == 0, checked.stderr
