"""One run from its founding to its export, with joins, a pause, a kill by SIGKILL, a return and clean stops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.swarm.harness import START_S, Swarm, assert_agreed, command, tiny, wait_for


@pytest.mark.timeout(480)
def test_three_nodes_train_together_survive_a_pause_and_a_kill_and_export_the_model(tmp_path: Path) -> None:
    with Swarm(tmp_path, tiny(round={"inner_steps": 25, "min_peers": 2})) as swarm:
        founder = swarm.found()
        second, third = swarm.join("second", "third")
        nodes = (founder, second, third)
        everybody = {node.until_training(2 * START_S)["node"]["peer_id"] for node in nodes}
        wait_for(lambda: founder.rounds_with(everybody), 2 * START_S, "no round has all three")
        assert_agreed(nodes)

        assert third.act("pause").status_code == 202
        third.until(lambda s: s["phase"] == "paused", START_S)
        since = founder.status()["run"]["round"]
        founder.until_round(since + 2)
        assert third.act("resume").status_code == 202
        third.until_round(since + 2, 2 * START_S)

        second.find("worker").kill()
        second.find("supervisor").kill()
        second.end_by_force()
        since = founder.status()["run"]["round"]
        founder.until_round(since + 2)
        second.start()
        second.until_round(since + 2, 2 * START_S)
        assert_agreed(nodes)

        written = [path for name in ("logs", "history") for path in (third.folder / name).iterdir()]
        assert written and not any(path.stat().st_mode & 0o077 for path in written), "other users can read these"

        last = third.status()["run"]["round"]
        assert third.stop() == 0
        model = tmp_path / "model"
        code, _, said = command("export", str(model), "--data-dir", str(third.folder), timeout_s=240.0)
        assert code == 0, said
        assert json.loads((model / "config.json").read_text())["hidden_size"] == 32
        assert third.checkpoints() and last >= 0
        assert second.stop() == 0 and founder.stop() == 0
