"""Evaluation on tasks: the draw, the medians of the members, the process, and the command."""

from __future__ import annotations

import json
import math
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.cli import main
from node.config.schema import Config, EvaluateConfig
from node.errors import MachineError, UsageError
from node.host.disk_quota import LEAST_BYTES
from node.publication.tasks import evaluate_folder, scores_of
from node.publication.waiting_rounds import SCRATCH, WaitingRounds
from node.status import MOST_SCORE, MOST_SCORES, PeerRow, Report, TaskScores, TrainingInfo
from node.swarm.member import MemberSnapshot
from node.training.checkpoint import CheckpointStore
from node.worker import publisher
from node.worker.evaluator import FOLDER, EvaluatorEvent, choose_scores, evaluate_waiting
from node.worker.publishing import Publishing
from node.worker.task_evaluation import MOST_TASKS, SCORES_FILE, TaskEvaluation, TaskMedians, draw
from node.worker_protocol import WORKER_MESSAGE, StatusReport, encode
from tests.peer_row import peer_row
from tests.unit.fake_duty import FakeProcess
from tests.unit.test_export import make_trained, run_of

needs_lm_eval = pytest.mark.skipif(
    find_spec("lm_eval") is None or find_spec("accelerate") is None,
    reason="the packages of the extra eval are not installed: pip install 'diloco-node[eval]'",
)
ONE, TWO = "ab" * 32, "cd" * 32


def make_tasks(folder: Path) -> Path:
    """Two tasks of lm-eval that need no network: one with choices, and one with a perplexity."""
    folder.mkdir()
    rows = [
        {"question": "def main(", "choices": ["self):", "zzz qqq"], "answer": 0},
        {"question": "import ", "choices": ["%%%%", "os"], "answer": 1},
        {"question": "return ", "choices": ["None", "@@@@"], "answer": 0},
    ]
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [{"text": "def main():\n    return 0\n"}, {"text": "import os\nimport sys\n"}]
    (folder / "code.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    data = "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {}\ntest_split: test\n"
    (folder / "words.yaml").write_text(
        "task: words\n" + data.format(folder / "words.jsonl") + "output_type: multiple_choice\ndoc_to_text: question\n"
        "doc_to_choice: choices\ndoc_to_target: answer\nmetric_list:\n  - metric: acc\n"
    )
    (folder / "code.yaml").write_text(
        "task: code\n" + data.format(folder / "code.jsonl") + "output_type: loglikelihood_rolling\ndoc_to_text: ''\n"
        "doc_to_target: text\nmetric_list:\n  - metric: word_perplexity\n  - metric: bits_per_byte\n"
    )
    return folder


def config_of(folder: Path, task_dir: Path, **more: Any) -> Config:
    evaluate = {"tasks": ["words", "code"], "task_dir": str(task_dir), "every_rounds": 2, **more}
    return Config.model_validate({"node": {"data_dir": str(folder)}, "evaluate": evaluate})


# The draw


def test_as_many_evaluators_are_drawn_as_are_wanted_and_others_each_time() -> None:
    peers = {f"peer {number}" for number in range(8)}
    drawn = [frozenset(draw(f"{n:064x}", peers, 3)) for n in range(20)]
    assert {len(some) for some in drawn} == {3} and len(set(drawn)) > 10
    assert draw(ONE, ["me"], 3) == ["me"]


# Medians


def row(peer: str, evaluation: TaskScores | None) -> PeerRow:
    return peer_row(peer, state_digest=ONE, evaluates=True, evaluation=evaluation)


def scores(round_: int, digest: str, **values: float) -> TaskScores:
    return TaskScores(
        round=round_, state_digest=digest, scores={f"{name}/acc": value for name, value in values.items()}
    )


def test_the_swarms_score_is_the_median_of_the_members_at_the_newest_known_state() -> None:
    medians = TaskMedians(7)
    medians.know(3, ONE)
    medians.know(5, TWO)
    rows = [
        row("a", scores(5, TWO, one=0.1, two=0.7)),
        row("b", scores(5, TWO, one=0.2)),
        row("c", scores(5, TWO, one=0.9)),
        row("d", scores(3, ONE, one=0.0)),
        row("e", None),
        row("liar", scores(5, ONE, one=1.0)),
        row("boaster", scores(10**15, TWO, one=1.0)),
    ]
    credit = {row.peer_id for row in rows}
    found = {score.name: (score.score, score.round, score.members) for score in medians.of(rows, credit)}
    assert found == {"one/acc": (0.2, 5, 3), "two/acc": (0.7, 5, 1)}
    assert TaskMedians(7).of(rows, credit) == ()


def test_scores_of_peers_without_credit_and_of_members_that_are_not_drawn_do_not_count() -> None:
    medians = TaskMedians(2)
    medians.know(5, TWO)
    first, second, third = draw(TWO, ["a", "b", "c"], 3)
    rows = [row(peer, scores(5, TWO, one=value)) for peer, value in ((first, 0.2), (second, 0.4), (third, 0.9))]
    strangers = [row(f"stranger{n}", scores(5, TWO, one=1.0, **{f"new{n}": 1.0})) for n in range(9)]
    found = {score.name: (score.score, score.members) for score in medians.of([*strangers, *rows], {"a", "b", "c"})}
    assert len(found) == 1 and found["one/acc"] == pytest.approx((0.3, 2))
    own = row("me", scores(5, TWO, one=0.7)).model_copy(update={"this_node": True})
    assert [score.score for score in TaskMedians(1).of([own], ())] == [], "of an unknown state"
    assert [score.score for score in medians.of([own, *strangers], ())] == [0.7]


def test_the_status_is_readable_with_the_largest_scores_of_peers() -> None:
    medians = TaskMedians(2)
    medians.know(5, TWO)
    for value in (MOST_SCORE, -MOST_SCORE):
        rows = (row("a", scores(5, TWO, one=value)), row("b", scores(5, TWO, one=value)))
        training = TrainingInfo(task_scores=medians.of(rows, {"a", "b"}))
        report = StatusReport(report=Report(training=training, swarm=rows))
        assert training.task_scores and WORKER_MESSAGE.validate_json(encode(report)) == report


def test_a_member_that_names_ever_new_tasks_makes_few_time_series() -> None:
    medians, shown = TaskMedians(3), set()
    medians.know(5, TWO)

    def names(told: dict[str, float], round_: int = 5) -> set[str]:
        rows = [row("liar", scores(round_, TWO, **told)), *(row(peer, scores(round_, TWO, one=0.1)) for peer in "ab")]
        return {score.name for score in medians.of(rows, {"liar", "a", "b"})}

    for number in range(20):
        found = names({f"new{number}_{i}": 1.0 for i in range(16)})
        assert "one/acc" in found
        shown |= found
    assert len(shown) == MOST_TASKS
    assert "honest/acc" not in names({"honest": 1.0})
    medians.know(7, TWO)
    assert "honest/acc" in names({"honest": 1.0}, round_=7), "old names do not keep out those of a newer state"


def test_scores_of_a_chain_that_the_node_has_left_do_not_count() -> None:
    medians = TaskMedians(1)
    for number in range(6):
        medians.know(number, TWO)
    medians.know(3, ONE)
    assert medians.of([row("a", scores(5, TWO, one=0.1))], {"a"}) == ()
    assert medians.of([row("a", scores(3, ONE, one=0.1))], {"a"})[0].score == 0.1


@pytest.mark.parametrize(
    "values",
    [
        {"a b": 1.0},
        {"x" * 65: 1.0},
        {"t/acc": math.nan},
        {"t/acc": 1.7e308},
        {f"t{n}": 1.0 for n in range(MOST_SCORES + 1)},
    ],
)
def test_a_peer_cannot_state_scores_of_another_form(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"scores"):
        TaskScores(round=1, state_digest=ONE, scores=values)


# Results of lm-eval


def test_numbers_of_the_results_are_scores_and_errors_are_not() -> None:
    results = {
        "words": {
            "alias": "words", "sample_len": 3, "acc,none": 0.5, "acc_stderr,none": 0.1, "acc_norm,none": 1,
            "exact_match,strict": 0.25, "word_perplexity,none": math.inf, "other,none": "N/A",
        },
    }  # fmt: skip
    assert scores_of(results) == {"words/acc": 0.5, "words/acc_norm": 1.0, "words/exact_match,strict": 0.25}
    assert len(scores_of({f"task{n}": {"acc,none": 0.5} for n in range(40)})) == 40


def test_the_tasks_that_the_user_names_come_first_in_the_peer_record() -> None:
    found = {f"{name}/acc": 0.5 for name in ["arc_easy", *(f"a_mmlu_{n:02}" for n in range(57)), "mmlu"]}
    chosen = choose_scores(found | {"bad name/acc": 0.5, "mmlu/perplexity": 1e200}, ["mmlu", "arc_easy"])
    assert len(chosen) == MOST_SCORES and list(chosen)[:2] == ["mmlu/acc", "arc_easy/acc"]
    assert TaskScores(round=1, state_digest=ONE, scores=chosen).scores == chosen


def test_without_lm_eval_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MachineError, match=r"pip install .diloco-node\[eval\]"):
        evaluate_folder(tmp_path, EvaluateConfig(tasks=("words",)))


def test_a_folder_whose_model_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot_load(**_: Any) -> None:
        raise OSError("model.safetensors is cut off. See the manual.")

    manager = SimpleNamespace(all_tasks=["words"])
    parts: dict[str, dict[str, Any]] = {
        "lm_eval": {"simple_evaluate": None},
        "lm_eval.models.huggingface": {"HFLM": cannot_load},
        "lm_eval.tasks": {"TaskManager": lambda **_: manager},
    }
    for name, names in parts.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**names))
    with pytest.raises(MachineError, match=f"The model in {tmp_path} cannot be loaded"):
        evaluate_folder(tmp_path, EvaluateConfig(tasks=("words",)))


def test_evaluate_without_tasks_or_model_says_what_to_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "has no model: name a folder" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "--tasks NAME,NAME" in capsys.readouterr().err


# With lm-eval


@needs_lm_eval
@pytest.mark.filterwarnings("default")
def test_a_node_and_the_command_agree_on_the_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    node, tasks = tmp_path / "node", make_tasks(tmp_path / "tasks")
    _, _, digest = make_trained(node, run_of())
    rounds = WaitingRounds(node / FOLDER)
    rounds.add(CheckpointStore(node / "checkpoints", 2), 1, digest, 0)
    events: list[EvaluatorEvent] = []
    evaluate_waiting(config_of(node, tasks), events.append)
    (event,) = events
    assert event.scores is not None and (event.scores.round, event.scores.state_digest) == (1, digest)
    assert set(event.scores.scores) == {"words/acc", "code/word_perplexity", "code/bits_per_byte"}
    assert rounds.all() == [] and not (node / FOLDER / ".scratch").exists()

    assert main(["export", str(tmp_path / "out"), "--data-dir", str(node)]) == 0
    capsys.readouterr()
    words = ["--tasks", "words,code", "--evaluate.task_dir", str(tasks), "--json"]
    assert main(["evaluate", str(tmp_path / "out"), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == pytest.approx(event.scores.scores, abs=1e-6)
    with pytest.raises(UsageError, match="lm-eval has no task nonsense"):
        evaluate_folder(tmp_path / "out", EvaluateConfig(tasks=("nonsense",), task_dir=str(tasks)))


@needs_lm_eval
@pytest.mark.filterwarnings("default")
def test_a_task_whose_data_is_missing_is_reported_and_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    node, tasks = tmp_path / "node", make_tasks(tmp_path / "tasks")
    _, _, digest = make_trained(node, run_of())
    (tasks / "words.jsonl").unlink()
    rounds = WaitingRounds(node / FOLDER)
    rounds.add(CheckpointStore(node / "checkpoints", 2), 1, digest, 0)
    events: list[EvaluatorEvent] = []
    evaluate_waiting(config_of(node, tasks), events.append)
    assert events[0].scores is None and "words, code could not be evaluated" in events[0].reason
    assert rounds.all() == []


def test_model_is_not_written_if_the_disk_limit_leaves_no_room(tmp_path: Path) -> None:
    node, tasks = tmp_path / "node", make_tasks(tmp_path / "tasks")
    _, _, digest = make_trained(node, run_of())
    (node / "large").write_bytes(bytes(LEAST_BYTES))
    WaitingRounds(node / FOLDER).add(CheckpointStore(node / "checkpoints", 2), 1, digest, 0)
    config = config_of(node, tasks)
    config = config.model_copy(update={"limits": config.limits.model_copy(update={"disk_gb": LEAST_BYTES / 1e9})})
    events: list[EvaluatorEvent] = []
    evaluate_waiting(config, events.append)
    assert events[0].scores is None and "limits.disk_gb allows" in events[0].reason


def test_nothing_waits_on_the_disk_after_publishing_and_evaluation_are_turned_off(tmp_path: Path) -> None:
    _, _, digest = make_trained(tmp_path, run_of())
    store: Any = CheckpointStore(tmp_path / "checkpoints", 2)
    duties = [tmp_path / FOLDER, tmp_path / publisher.FOLDER]
    for folder in duties:
        WaitingRounds(folder).add(store, 1, digest, 0)
        (folder / SCRATCH).mkdir()
    reporter: Any = FakeReporter()
    config = Config.model_validate({"node": {"data_dir": str(tmp_path)}})
    TaskEvaluation(config, store, reporter, MemberSnapshot, lambda _: None, command=FakeProcess)
    counters: Any = SimpleNamespace()
    Publishing(config, store, reporter, counters, MemberSnapshot, lambda _: False, command=FakeProcess)
    assert [list(folder.iterdir()) for folder in duties] == [[], []]


# The worker's part


class FakeReporter:
    def __init__(self) -> None:
        self.notices: list[str] = []
        self.task_scores: Any = None

    def notice(self, code: str, text: str) -> None:
        assert code == "evaluate"
        self.notices.append(text)

    def set_task_scores(self, found: Any) -> None:
        self.task_scores = found


def tip_of(round_: int, digest: str, credit: set[str], head: str = "") -> Any:
    return SimpleNamespace(head=head, round=round_, digest=digest, state=SimpleNamespace(credit=credit))


class Scene:
    def __init__(self, folder: Path, **more: Any) -> None:
        self.folder, self.told = folder, list[TaskScores]()
        reporter: Any = FakeReporter()
        self.reporter = reporter
        self.view = MemberSnapshot(peer_id="me", rows=(row("me", None), row("other", None)))
        self.made = TaskEvaluation(
            config_of(folder, folder, **more), CheckpointStore(folder / "checkpoints", 2), reporter,
            lambda: self.view, self.told.append, command=FakeProcess,
        )  # fmt: skip
        self.process: Any = self.made._process


def test_scores_reach_the_swarm_the_status_and_the_next_start(tmp_path: Path) -> None:
    _, _, digest = make_trained(tmp_path, run_of())
    (tmp_path / FOLDER).mkdir()
    scene = Scene(tmp_path)
    found = scores(1, digest, one=0.25)
    scene.made.know(tip_of(1, digest, {"me", "other"}))
    scene.process.on_line(EvaluatorEvent(round=1, scores=found).model_dump_json())
    scene.made.attend()
    assert scene.told == [found] and scene.reporter.notices == []
    scene.view = MemberSnapshot(peer_id="me", rows=(row("me", found), row("other", scores(1, digest, one=0.75))))
    scene.made.attend()
    assert [(score.score, score.members) for score in scene.reporter.task_scores] == [(0.5, 2)]
    assert (tmp_path / FOLDER / SCORES_FILE).is_file()
    again = Scene(tmp_path)
    assert again.told == [found]
    again.made.saved(tip_of(1, digest, {"me"}, head="kept"))
    assert not again.made._rounds.all(), "this state has been evaluated before the restart"


def test_a_failed_evaluation_is_one_notice_until_one_succeeds(tmp_path: Path) -> None:
    make_trained(tmp_path, run_of())
    scene = Scene(tmp_path)
    failed = EvaluatorEvent(round=1, scores=None, reason="install it.").model_dump_json()
    for _ in range(2):
        scene.process.on_line(failed)
        scene.made.attend()
    assert scene.reporter.notices == ["Round 1 is not evaluated on tasks: install it."]
    scene.process.on_line(EvaluatorEvent(round=3, scores=scores(3, ONE, one=1.0)).model_dump_json())
    scene.made.attend()
    assert scene.reporter.notices[-1] == "" and len(scene.told) == 1


def test_only_drawn_nodes_evaluate_and_only_every_kth_round(tmp_path: Path) -> None:
    _, _, digest = make_trained(tmp_path, run_of())
    scene = Scene(tmp_path, members=1)
    assert [number for number in range(-1, 8) if scene.made.is_due(number)] == [1, 3, 5, 7]
    for number in range(20):
        me, other = f"me{number}", f"other{number}"
        scene.view = MemberSnapshot(peer_id=me, rows=(row(me, None), row(other, None)))
        scene.made.saved(tip_of(1, digest, {other}, head=other))
        is_drawn = draw(digest, [me, other], 1) == [me]
        assert [one.round for one in scene.made._rounds.all()] == ([1] if is_drawn else [])
        scene.made.chain_left()
    assert 0 < scene.process.wakes < 20
    assert not Scene(tmp_path, tasks=[]).made.is_on
