"""Real nodes publish their run, and a run that is founded from a publication continues it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from node.publication.model_folder import verify_model_folder
from node.publication.stores import round_of
from tests.publish_hub import PublishHub
from tests.swarm.harness import PATIENCE, ROOT, START_S, Node, Swarm, command, tiny, wait_for
from tests.unit.test_task_evaluation import make_tasks, needs_lm_eval

STEPS, ROUNDS, EVERY = 5, 6, 2
TOKENS_PER_ROUND = STEPS * 4 * 64
RUN = tiny(
    round={"policy": "steps", "inner_steps": STEPS, "min_peers": 1},
    # AdamW without memory: a publication has no inner optimizer, which is the node's own.
    inner={"beta1": 0.0, "beta2": 0.0, "lr": 1e-3},
    total_tokens=ROUNDS * TOKENS_PER_ROUND,
)


def published(folder: Path) -> dict[int, Path]:
    """The publications in a folder by round. No other entries are there."""
    paths = [path for path in folder.iterdir() if not path.name.startswith(".")]  # Those are being written.
    found = {round_of(path.name): path for path in paths}
    assert None not in found, sorted(path.name for path in paths)
    return {number: path for number, path in found.items() if number is not None}


def finish(node: Node) -> None:
    """Wait for the end of the run."""
    assert node.wait_end(PATIENCE * START_S) == 0, node.said()[-3000:]


@pytest.mark.timeout(400)
def test_run_from_a_publication_reaches_the_digest_of_the_uninterrupted_run(tmp_path: Path) -> None:
    place = tmp_path / "publications"
    with Swarm(tmp_path / "swarm", RUN) as swarm:
        first = swarm.found(f"--publish.to={place}", f"--publish.every_rounds={EVERY}")
        finish(first)
        folders = published(place)
        assert set(folders) == {1, 3, 5}
        records = {number: verify_model_folder(path, tmp_path / "cache") for number, path in folders.items()}
        assert [records[number].tokens for number in (1, 3, 5)] == [n * TOKENS_PER_ROUND for n in (2, 4, 6)]
        card = (folders[5] / "README.md").read_text(encoding="utf-8")
        assert "--publish.to publications --publish.every_rounds 2" in card and str(tmp_path) not in card
        assert "curve.svg" in card and (folders[5] / "curve.svg").read_text().startswith("<svg")

        second = swarm.node("second")
        second.preset = None
        second.folder.mkdir(mode=0o700)
        shutil.copy(first.folder / "identity.key", second.folder)  # The text that a member reads follows from its key.
        again = tmp_path / "again"
        second.start(f"--from={folders[3]}", f"--publish.to={again}", "--publish.every_rounds=1")
        finish(second)
        continued = published(again)
        assert set(continued) == {4, 5}
        record = verify_model_folder(continued[5], tmp_path / "cache")
        assert record.state_digest == records[5].state_digest
        assert record.manifest_hash != records[5].manifest_hash
        manifest = json.loads((continued[5] / "manifest.json").read_text())
        assert manifest["run"]["model"]["start"] == folders[3].name

        third = swarm.node("third")
        third.preset = None
        third.start(f"--from={place}")
        assert third.wait_end(PATIENCE * START_S) == 2
        assert "is complete" in third.said() and "--run.total_tokens" in third.said()


@pytest.mark.timeout(400)
def test_members_publish_each_round_once_and_others_join_a_run_that_was_founded_from_the_hub(tmp_path: Path) -> None:
    run = tiny(round={"policy": "steps", "inner_steps": 12, "min_peers": 1})
    with PublishHub(token="hf_of_this_test") as hub, Swarm(tmp_path / "swarm", run) as swarm:
        env = {**hub.environment, "HF_TOKEN": "hf_of_this_test", "HF_HOME": str(tmp_path / "home")}
        flags = ("--publish.to=hub:ada/tiny", "--publish.every_rounds=12", "--publish.turn_s=20")
        founder = swarm.found(*flags, env=env)
        (member,) = swarm.join("member", flags=flags, env=env)

        def rounds() -> list[int]:
            repository = hub.repositories.get("ada/tiny")
            titles = [commit.title for commit in repository.commits] if repository else []
            return [number for title in titles if (number := round_of(title)) is not None]

        wait_for(lambda: len(rounds()) >= 3, PATIENCE * START_S, "too few publications")
        status = member.until(lambda s: s["publication"]["round"] >= 0, PATIENCE * START_S)
        assert status["publication"]["problem"] == "" and status["publication"]["to"] == "hub:ada/tiny"
        found = rounds()
        assert found == sorted(set(found)), "a round was published twice, or after a later one"
        digests = founder.digests() | member.digests()
        for commit in hub.repositories["ada/tiny"].commits[1:]:
            number = round_of(commit.title)
            assert number is not None and commit.title.endswith(digests[number][:16])
        metrics = founder.http.get("/metrics").text + member.http.get("/metrics").text
        assert 'diloco_publications_total{result="published"}' in metrics
        assert "hf_of_this_test" not in founder.said() + member.said()
        founder.stop()
        member.stop()

        again = swarm.node("again")
        again.preset = None
        again.start("--from=hub:ada/tiny", "--run.round.inner_steps=30", env=env)
        status = again.until_round(max(rounds()) + 1, PATIENCE * START_S)
        assert status["training"]["inner_steps"] == 30
        late = swarm.node("late", join=again.invite())
        late.start()
        number = late.until_round(status["run"]["round"] + 1, PATIENCE * START_S)["run"]["round"]
        wait_for(lambda: number in again.digests(), START_S, "the founder lacks the round")
        common: dict[int, Any] = again.digests()
        assert late.digests()[number] == common[number]


@needs_lm_eval
@pytest.mark.timeout(400)
def test_scores_of_drawn_members_are_those_of_the_published_model_and_all_members_see_them(tmp_path: Path) -> None:
    tasks, place = make_tasks(tmp_path / "tasks"), tmp_path / "publications"
    run = tiny(round={"policy": "time", "inner_steps": 100, "min_peers": 1})
    # The package may be elsewhere on the path of this process.
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "HF_HUB_OFFLINE": "1"}
    flags = ("--evaluate.tasks=words,code", f"--evaluate.task_dir={tasks}", "--evaluate.every_rounds=4")
    with Swarm(tmp_path / "swarm", run) as swarm:
        founder = swarm.found(*flags, f"--publish.to={place}", "--publish.every_rounds=4", env=env)
        (member,) = swarm.join("member")
        status = member.until(lambda s: s["training"]["task_scores"], PATIENCE * START_S)
        scores = {one["name"]: one["score"] for one in status["training"]["task_scores"]}
        number = status["training"]["task_scores"][0]["round"]
        assert set(scores) == {"words/acc", "code/word_perplexity", "code/bits_per_byte"} and (number + 1) % 4 == 0
        assert 'diloco_task_score{task="code/bits_per_byte"}' in member.http.get("/metrics").text
        assert [row["evaluates"] for row in sorted(founder.peers(), key=lambda row: row["name"])] == [True, False]
        wait_for(lambda: place.is_dir() and number in published(place), PATIENCE * START_S, "it is not published")
        words = [
            "evaluate",
            str(published(place)[number]),
            "--tasks=words,code",
            f"--evaluate.task_dir={tasks}",
            "--json",
        ]
        code, out, err = command(*words, env=env, timeout_s=PATIENCE * 60)
        assert code == 0, err
        assert json.loads(out) == pytest.approx(scores, abs=1e-6)
