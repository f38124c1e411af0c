"""Real nodes keep one table of credit, from which each can prove what it gave."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from node.swarm.chain.certificate import CREDIT_FILE, CreditRecord, Entry
from tests.swarm.harness import PATIENCE, START_S, Node, Swarm, environment, tiny, wait_for


def credit(node: Node) -> CreditRecord:
    return CreditRecord.model_validate_json((node.folder / CREDIT_FILE).read_bytes())


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "node.cli", *words],
        env=environment({}), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.timeout(300)
def test_late_node_has_the_same_credit_as_the_others_and_each_can_prove_its_own(tmp_path: Path) -> None:
    with Swarm(tmp_path / "swarm", tiny(round={"min_peers": 2, "inner_steps": 60})) as swarm:
        founder = swarm.found()
        (second,) = swarm.join("second")
        founder.until_round(3)
        (late,) = swarm.join("late")
        joined = late.until_round(founder.status()["run"]["round"] + 2)["run"]["round"]
        nodes = (founder, second, late)
        wait_for(
            lambda: all((n.folder / CREDIT_FILE).exists() and credit(n).evidence.round >= joined for n in nodes),
            PATIENCE * START_S,
            "the tables are not written",
        )
        assert [node.stop() for node in nodes] == [0, 0, 0]
    tables: dict[int, set[tuple[Entry, ...]]] = {}
    for node in nodes:
        record = credit(node)
        assert sum(entry.tokens for entry in record.table) == record.evidence.tokens
        tables.setdefault(record.evidence.round, set()).add(record.table)
        file = node.folder / "certificate.json"
        written = command("certificate", str(file), "--data-dir", str(node.folder))
        assert written.returncode == 0, written.stderr
        assert command("verify", str(file)).stdout == written.stdout
        assert json.loads(file.read_text())["entry"]["rounds"] >= 1
    assert all(len(same) == 1 for same in tables.values()), "nodes at one round have one table"
