"""The steering of a storm: its plan, its commands, and when it runs them. The swarm and the command are stand-ins."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import cast

import pytest

from node import cli
from node.commands.steer import parse_changes
from node.config.amendments import Amendment, changed
from node.config.manifest import RunConfig
from tests.swarm import storm_steering
from tests.swarm.harness import Node, wait_for
from tests.swarm.storm import RUN, arguments, run_of
from tests.swarm.storm_judge import STEPS, ObservedAmendment, SteeringStep
from tests.swarm.storm_steering import PAUSE_S, PLAN, SETTINGS, Steering, command_of, steered, write_text
from tests.swarm.storm_watch import Watch, read_mix, read_table

LENGTH_S = 600.0
SENT = "print('Amendment 1 is pending: x, from round 12, signed by y.')"


class SwarmStandIn:
    """The part of a watch that the steering uses."""

    def __init__(self) -> None:
        self.listed: list[ObservedAmendment] = []
        self.round, self.is_paused = 5, False

    def amendments(self) -> list[ObservedAmendment]:
        return self.listed

    def swarm_round(self) -> int:
        return self.round

    def run_is_paused(self) -> bool:
        return self.is_paused

    def accept(self, change: str) -> None:
        number = len(self.listed) + 1
        self.listed.append(ObservedAmendment(number, change, self.round + 4, self.round))


class Stage:
    """A steering on a clock that the test sets."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.swarm, self.now_s, self.sent = SwarmStandIn(), 0.0, list[str]()
        self.taken: list[SteeringStep] = []
        self.program = SENT
        founder = Node(folder / "n00", "n00", preset=None, join=None)
        founder.folder.mkdir()

        def command(step: storm_steering.PlannedStep, node: Node, key: Path) -> list[str]:
            assert key == founder.folder / "identity.key"
            self.sent.append(f"{step.name} to {node.name} at {self.now_s:g} s")
            return [sys.executable, "-c", self.program]

        monkeypatch.setattr(storm_steering, "command_of", command)
        self.steering = Steering(
            cast(Watch, self.swarm),
            self.taken,
            founder.folder / "identity.key",
            lambda: [founder],
            began_s=0.0,
            length_s=LENGTH_S,
            clock=lambda: self.now_s,
        )

    def until(self, now_s: float) -> None:
        """Let the time pass until then, in steps of a second. Commands end within the second in which they start."""
        while self.now_s <= now_s:
            self.steering.run_due()
            wait_for(self._command_has_ended, 20, "the command runs on")
            self.now_s += 1

    def _command_has_ended(self) -> bool:
        running = self.steering._running
        return running is None or running.poll() is not None


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def test_plan_has_the_steps_that_the_judge_expects_in_the_first_two_thirds_of_the_storm() -> None:
    assert tuple(step.name for step in PLAN) == STEPS
    dues = [step.due_ratio for step in PLAN]
    assert dues == sorted(dues) and dues[0] > 0 and dues[-1] < 2 / 3


def test_amendments_of_the_plan_are_those_that_the_command_makes_and_lead_to_the_expected_settings() -> None:
    run = RunConfig.model_validate(steered(RUN))
    assert (run.inner.lr, run.data.weights) == (SETTINGS.rates[0], SETTINGS.weights[0])
    for number, step in enumerate(PLAN, 1):
        action, *words = step.words
        content = {"changes": parse_changes(words)} if words else {}
        amendment = Amendment.model_validate(
            {"run": "ab" * 32, "number": number, "from_round": 9, "action": action, **content}
        )
        assert amendment.describe() == step.change
        run = changed(run, amendment.changes)
    assert (run.inner.lr, run.data.weights) == (SETTINGS.rates[1], SETTINGS.weights[1])
    assert run.inner.schedule == "constant" and run.governance == "founder"


@pytest.mark.parametrize("step", PLAN, ids=lambda step: step.name)
def test_commands_are_known_to_the_command_line(
    step: storm_steering.PlannedStep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = Node(tmp_path / "n01", "n01", preset=None, join=None)
    words = command_of(step, node, tmp_path / "n00" / "identity.key")
    assert words[:4] == [sys.executable, "-m", "node.cli", "steer"]
    assert cli.main(words[3:]) != 0
    assert "No node runs on" in (said := capsys.readouterr().err), said
    assert str(node.folder) in said


def test_each_step_waits_for_its_time_and_for_the_previous_one(stage: Stage) -> None:
    stage.until(89)
    assert stage.sent == []
    stage.until(200)
    assert stage.sent == ["rate to n00 at 90 s"], "no round has accepted it, and some round still can"
    stage.swarm.accept(PLAN[0].change)
    stage.until(250)
    assert stage.sent[1:] == ["weights to n00 at 202 s"]
    stage.swarm.accept(PLAN[1].change)
    stage.until(400)
    assert stage.sent[2:] == ["pause to n00 at 300 s"]
    stage.swarm.accept(PLAN[2].change)
    stage.until(410)
    assert stage.sent[3:] == [], "the run is not paused yet"
    stage.swarm.is_paused = True
    stage.until(450)
    assert stage.sent[3:] == [f"resume to n00 at {411 + PAUSE_S:g} s"]
    assert not stage.steering.is_done
    stage.swarm.accept(PLAN[3].change)
    stage.until(460)
    assert stage.steering.is_done
    assert [(step.name, step.number, step.from_round) for step in stage.taken] == [
        (step.name, number, 9) for number, step in enumerate(PLAN, 1)
    ]


def test_amendment_that_no_round_has_accepted_in_time_is_sent_again(stage: Stage) -> None:
    stage.until(100)
    stage.swarm.round = 11
    stage.until(150)
    assert len(stage.sent) == 1
    stage.swarm.round = 12
    stage.until(160)
    assert stage.sent[1:] == ["rate to n00 at 156 s"]


def test_command_that_fails_is_run_again(stage: Stage) -> None:
    stage.program = "raise SystemExit('The node is not in its run yet.')"
    stage.until(93)
    assert len(stage.sent) == 1
    stage.program = SENT
    stage.until(120)
    assert stage.sent == ["rate to n00 at 90 s", "rate to n00 at 96 s"]


def test_command_that_hangs_is_killed_and_does_not_block(stage: Stage) -> None:
    stage.program = "import time; time.sleep(600)"
    stage.now_s = 90.0
    began_s = time.monotonic()
    stage.steering.run_due()
    running = stage.steering._running
    assert running is not None and running.poll() is None
    stage.now_s += storm_steering.COMMAND_S
    stage.steering.run_due()
    assert running.poll() is not None
    assert time.monotonic() - began_s < 30, "no call waits for the command"
    stage.now_s += 60
    stage.steering.run_due()
    stage.steering.end()
    assert stage.steering._running is None


def test_both_sources_have_the_text_that_their_patterns_name(tmp_path: Path) -> None:
    write_text(tmp_path)
    sources = steered(RUN)["data"]["sources"]
    assert len(sources) == len(SETTINGS.weights[0])
    for source in sources:
        files = list(tmp_path.glob(source.removeprefix("text:")))
        assert len(files) == storm_steering.DOCUMENTS and all(file.stat().st_size > 10_000 for file in files)


def test_flags_of_the_storm_reach_its_run(capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments(["--codec", "int2", "--result-codec", "int4", "--feedback", "loco"])
    assert run_of(given)["sync"] == {"codec": "int2", "result_codec": "int4", "feedback": "loco"}
    assert "governance" not in run_of(given) and run_of(arguments(["--steer"]))["governance"] == "founder"
    with pytest.raises(SystemExit):
        arguments(["--result-codec", "morse"])
    assert "result_codec" in capsys.readouterr().err


def test_weights_are_read_from_checkpoints_in_which_they_were_used() -> None:
    text = {"weights": [1.0, 3.0], "taken": [7, 9], "taken_before": [5, 3], "lanes": [], "shards": [1, 1]}
    mix = read_mix({"round": 4, "inner_step": 8, "text": text})
    assert mix is not None and (mix.round, mix.weights, mix.rows) == (4, (1.0, 3.0), (2, 6))
    assert read_mix({"round": 4, "inner_step": 0, "text": text}) is None
    assert read_mix({"round": 4, "inner_step": 8, "text": {"round": 0, "position": 0}}) is None


def test_tables_have_one_digest_only_if_they_are_equal() -> None:
    lines = [{"member": "a", "tokens": 3, "rounds": 1}, {"member": "b", "tokens": 4, "rounds": 1}]
    record = {"evidence": {"round": 6, "tokens": 7}, "table": lines}
    table = read_table(record)
    assert (table.round, table.tokens, table.entries) == (6, 7, {"a": 3, "b": 4})
    other = {**record, "table": [lines[0], {**lines[1], "rounds": 2}]}
    assert read_table(other).digest != table.digest == read_table({**record, "other": 1}).digest
