"""The command `steer` with a stand-in for the node, which checks amendments as a member does."""

from __future__ import annotations

import errno
import hashlib
import json
import stat
from pathlib import Path
from typing import Any

import pytest

from node import cli
from node.config.amendments import SignedAmendment, decode_list
from node.config.manifest import RunConfig
from node.errors import DataFolderError
from node.status import AmendmentInfo, GovernanceInfo, RefusedAmendment
from node.swarm.governance.charter import AmendmentRefused, Charter
from node.swarm.identity import load_identity
from node.training.checkpoint import CheckpointStore
from tests.swarm.harness import tiny
from tests.unit.data_folder import make_data_folder

RUN, LAST = "ab" * 32, 20


class Node:
    """Stands for the client of a node whose run accepts amendments at once."""

    def __init__(self, settings: RunConfig) -> None:
        self.settings, self.charter, self.accepted = settings, Charter(RUN, settings), b""
        self.refused: list[RefusedAmendment] = []
        self.is_paused = False
        self.schedule_tokens = 1000
        self.pending: tuple[AmendmentInfo, ...] = ()
        self.is_running = True

    def __call__(self, _folder: Path) -> Node:
        return self

    def is_there(self) -> bool:
        return self.is_running

    def status(self) -> dict[str, Any]:
        return {"run": {"swarm_round": LAST}, "peers": {"training": 3}}

    def governance(self) -> GovernanceInfo:
        run = self.settings
        return GovernanceInfo(
            run=RUN,
            mode=run.governance,
            keys=run.governance_keys,
            threshold=run.governance_threshold,
            round=LAST,
            is_paused=self.is_paused,
            schedule_tokens=self.schedule_tokens,
            amendments=tuple(
                AmendmentInfo(
                    digest=hashlib.sha256(one.signed.text.encode()).hexdigest(),
                    number=one.signed.amendment.number,
                    from_round=one.signed.amendment.from_round,
                    change=one.signed.amendment.describe(),
                    signers=tuple(sorted(one.signed.signatures)),
                    accepted_round=one.round,
                )
                for one in decode_list(self.accepted)
            )
            + self.pending,
            refused=tuple(self.refused),
        )

    def submit_amendment(self, signed: dict[str, Any]) -> dict[str, Any]:
        amendment = SignedAmendment.model_validate(signed)
        digest = hashlib.sha256(amendment.text.encode()).hexdigest()
        try:
            self.accepted = self.charter.accept(self.accepted, amendment, LAST + 1)
        except AmendmentRefused as exc:
            number, change = amendment.amendment.number, amendment.amendment.describe()
            self.refused.append(RefusedAmendment(digest=digest, reason=exc.reason, number=number, change=change))
        return {"digest": digest}

    @property
    def changes(self) -> list[tuple[str, int]]:
        found = [one.signed.amendment for one in decode_list(self.accepted)]
        return [(one.describe(), one.from_round) for one in found]


def folder_of(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    load_identity(folder / "identity.key")
    return folder


def key_of(folder: Path) -> str:
    return load_identity(folder / "identity.key").peer_id


def steer(folder: Path, *words: str) -> int:
    return cli.main(["steer", *words, "--data-dir", str(folder)], {"HOME": "/nowhere"})


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return folder_of(tmp_path, "home")


@pytest.fixture
def node(home: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node(RunConfig(governance="founder", governance_keys=(key_of(home),)))
    monkeypatch.setattr("node.commands.client.Client", made)
    return made


def test_founder_amends_pauses_resumes_and_stops(node: Node, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert steer(home, "amend", "run.inner.lr=2e-4", "total_tokens=4000000000") == 0
    out = capsys.readouterr().out
    assert "Amendment 1 is accepted by round 21: inner.lr = 0.0002, total_tokens = 4000000000" in out
    assert steer(home, "resume") == 2
    assert "The run is not paused" in capsys.readouterr().err
    assert steer(home, "pause", "--from-round", "30") == 0
    assert steer(home, "pause") == 2
    assert "paused already, or will be" in capsys.readouterr().err
    node.is_paused = True
    assert steer(home, "resume", "--from-round", "32") == 0
    assert steer(home, "resume") == 2
    assert steer(home, "stop") == 0
    assert node.changes == [
        ("inner.lr = 0.0002, total_tokens = 4000000000", LAST + 4),
        ("pause", 30),
        ("resume", 32),
        ("stop", LAST + 2),
    ]
    capsys.readouterr()
    assert steer(home) == 0
    shown = capsys.readouterr().out
    assert "May amend  the founder's key" in shown and "State      paused after round 20" in shown
    assert shown.count("Amendment ") == 4


def test_a_run_whose_pause_comes_last_can_be_resumed(
    node: Node, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The order of the rounds counts, not that of the numbers."""
    assert steer(home, "pause", "--from-round", "30") == 0
    assert steer(home, "resume", "--from-round", "24") == 0
    assert steer(home, "pause", "--from-round", "31") == 2
    assert steer(home, "resume", "--from-round", "31") == 0


def test_lists_and_tables_are_values(node: Node, home: Path) -> None:
    (home / "text").mkdir()
    for name in "ab":
        (home / "text" / name).write_text("def f():\n    return 1\n" * 200)
    make_data_folder(home, RunConfig.model_validate(tiny(data={"sources": ["text:c"]})))
    phases = '[{"from_tokens": 1000, "lr_ratio": 0.5}]'
    assert steer(home, "amend", "data.sources=text:a,text:b", "data.weights=1,2", f"phases={phases}") == 0
    settings = node.charter.terms_at(node.accepted, LAST + 4).run
    assert settings.data.weights == (1.0, 2.0) and settings.data.sources == ("text:a", "text:b")
    assert settings.phases[0].lr_ratio == 0.5


def test_sources_that_this_machine_cannot_read_are_refused(
    node: Node, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All members would end in the round from which they hold."""
    make_data_folder(home, RunConfig.model_validate(tiny(data={"sources": ["text:c"]})))
    assert steer(home, "amend", "data.sources=text:missing") == 3
    assert "missing" in capsys.readouterr().err and node.accepted == b""


def test_new_sources_are_checked_with_the_settings_of_earlier_amendments(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunConfig.model_validate(tiny(data={"sources": ["text:a.txt", "text:b.txt"], "weights": [1.0, 2.0]}))
    made = Node(run.model_copy(update={"governance": "founder", "governance_keys": (key_of(home),)}))
    monkeypatch.setattr("node.commands.client.Client", made)
    make_data_folder(home, run)
    (home / "text").mkdir()
    for name in "abcd":
        (home / "text" / f"{name}.txt").write_text(f"{name} " * 5000)
    assert steer(home, "amend", "data.sources=text:c.txt", "data.weights=[]") == 0
    (folder := home / "checkpoints" / "round-00000005").mkdir()
    (folder / "meta.json").write_text(json.dumps({"body": {"amendments": made.accepted.decode(), "round": 5}}))
    assert steer(home, "amend", "data.sources=text:d.txt") == 0
    assert made.charter.terms_at(made.accepted, LAST + 9).run.data.sources == ("text:d.txt",)


def test_first_free_number_is_taken(node: Node, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2):
        node.pending = (AmendmentInfo(digest="", number=2, from_round=40, change="stop", signers=()),)
        assert steer(home, "pause", "--from-round", str(30 + number), "--out", str(home / f"{number}.json")) == 0
        written = SignedAmendment.model_validate_json((home / f"{number}.json").read_bytes()).amendment
        assert written.number == 1


def test_a_pending_rollback_can_be_replaced(node: Node, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    back = AmendmentInfo(digest="", number=1, from_round=40, change="rollback", signers=(), is_replaceable=True)
    node.pending = (back,)
    assert steer(home, "stop", "--replace", "1") == 0
    assert [one.signed.amendment.number for one in decode_list(node.accepted)] == [1]
    node.accepted, node.pending = b"", (back,)
    assert steer(home, "amend", "round.min_peers=2", "--replace", "1") == 2
    assert "an action that needs no more members" in capsys.readouterr().err
    node.pending = (back.model_copy(update={"is_replaceable": False}),)
    assert steer(home, "stop", "--replace", "1") == 2
    assert "takes the number of a pending rollback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("amend",), "Name what to change"),
        (("amend", "inner.lr"), "write KEY=VALUE"),
        (("amend", "inner.lrr=1"), "did you mean inner.lr?"),
        (("amend", "model.hidden_size=64"), "cannot be changed while the run runs"),
        (("amend", "inner.lr=fast"), "is not allowed"),
        (("amend", "inner.lr=2", "--from-round", "21"), "too early: the first round to change is 22"),
        (("amend", "inner.sequence_length=5000"), "longer than"),
        (("amend", "round.min_peers=4"), "more than the 3 members that are here"),
        (("amend", "total_tokens=1000"), "trained on 1000 tokens: to end it, run `diloco-node steer stop`"),
        (("pause", "now"), "takes no more arguments"),
        (("sign",), "Name one file"),
        (("show", "--from-round", "9"), "belong to"),
        (("pause", "--key", "/nowhere/key"), "There is no key"),
    ],
)
def test_a_change_that_cannot_be_is_refused_in_one_sentence(
    words: tuple[str, ...], why: str, node: Node, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert steer(home, *words) == 2
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1
    assert node.accepted == b""


def test_a_change_that_is_too_long_to_be_signed_is_refused_in_one_sentence(
    node: Node, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.commands.steer.MOST_BYTES", 100)
    assert steer(home, "amend", "inner.lr=2e-4") == 2
    assert "characters of at most 100" in capsys.readouterr().err and node.accepted == b""


def test_another_key_may_not_steer(node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stranger = folder_of(tmp_path, "stranger")
    assert steer(stranger, "pause") == 2
    assert "may not amend this run" in capsys.readouterr().err
    founder_key = tmp_path / "home" / "identity.key"
    assert steer(stranger, "pause", "--key", str(founder_key)) == 0
    assert node.changes == [("pause", LAST + 4)]


def test_nobody_steers_a_fixed_run(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("node.commands.client.Client", Node(RunConfig()))
    assert steer(home, "stop") == 2
    assert "Nobody may amend this run" in capsys.readouterr().err


def test_two_of_three_keys_sign_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [folder_of(tmp_path, name) for name in ("a", "b", "c")]
    keys = tuple(map(key_of, folders))
    node = Node(RunConfig(governance="keys", governance_keys=keys, governance_threshold=2))
    monkeypatch.setattr("node.commands.client.Client", node)
    file = tmp_path / "change.json"
    assert steer(folders[0], "amend", "inner.lr=0.5") == 2
    assert "needs 2 signatures" in capsys.readouterr().err
    assert steer(folders[0], "amend", "inner.lr=0.5", "--out", str(file)) == 0
    assert "needs 1 more signature, and must be accepted before its round" in capsys.readouterr().out
    assert steer(folders[0], "amend", "inner.lr=0.5", "--out", str(file)) == 2
    assert "exists already: name a new file" in capsys.readouterr().err
    assert steer(folders[0], "submit", str(file)) == 2
    assert "1 of the 2 signatures" in capsys.readouterr().err
    file.chmod(0o664)
    (tmp_path / "link.json").symlink_to(file)
    assert steer(folders[2], "sign", str(tmp_path / "link.json")) == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o664 and (tmp_path / "link.json").is_symlink()
    said = capsys.readouterr().out
    assert said.startswith(f"Signed amendment 1: inner.lr = 0.5, from round {LAST + 4}. It is complete:")
    stranger = folder_of(tmp_path, "stranger")
    assert steer(stranger, "sign", str(file)) == 2
    assert "may not amend this run" in capsys.readouterr().err
    node.is_running = False
    assert steer(stranger, "sign", str(file)) == 0, "the right ones stay valid"
    assert "No node of its run runs here to check the key." in capsys.readouterr().out
    node.is_running = True
    assert steer(folders[0]) == 0
    assert "Refused    1: inner.lr = 0.5, because it has 1 of the 2 signatures" in capsys.readouterr().out
    assert steer(folders[1], "submit", str(file)) == 0
    assert node.changes == [("inner.lr = 0.5", LAST + 4)]
    file.write_text("{}")
    assert steer(folders[1], "sign", str(file)) == 2
    assert "holds no amendment" in capsys.readouterr().err


def test_founder_goes_back_to_the_start_of_the_run(node: Node, home: Path) -> None:
    folder = home / "checkpoints" / "round--0000001"
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text(json.dumps({"body": {"state_digest": "ef" * 32}}))
    assert steer(home, "rollback", "-1") == 0
    assert decode_list(node.accepted)[0].signed.amendment.to_round == -1


def test_rollback_of_a_node_of_another_user_says_so(
    node: Node, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_store: CheckpointStore) -> list[int]:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(CheckpointStore, "rounds", refuse)
    assert steer(home, "rollback", "12") == DataFolderError.exit_code
    assert "belongs to another user" in capsys.readouterr().err and node.changes == []


def test_founder_goes_back_to_a_checkpoint_of_its_node(
    node: Node, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = home / "checkpoints" / "round-00000012"
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text(json.dumps({"body": {"state_digest": "ef" * 32}}))
    assert steer(home, "rollback", "11") == 2
    assert "no checkpoint of round 11: choose one of 12." in capsys.readouterr().err
    assert steer(home, "rollback", "x") == steer(home, "rollback") == 2
    assert "no checkpoint of round x: choose one of 12." in capsys.readouterr().err
    assert steer(home, "rollback", "12") == 0
    assert node.changes == [("rollback to round 12", LAST + 4)]
    assert decode_list(node.accepted)[0].signed.amendment.state == "ef" * 32


def test_an_early_round_is_chosen_by_this_nodes_own_round(
    node: Node, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round that members claim may be false, so it only decides the round that is chosen for the founder."""
    monkeypatch.setattr(node, "status", lambda: {"run": {"swarm_round": 5_000_000}, "peers": {"training": 3}})
    assert steer(home, "pause", "--from-round", str(LAST + 3)) == 0
    assert node.changes == [("pause", LAST + 3)]
    assert steer(home, "resume", "--from-round", str(LAST + 1)) == 2
