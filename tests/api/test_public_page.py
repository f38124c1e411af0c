"""The public page of a run: what it shows, to whom, and what it never shows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from node.api.app import build_app
from node.api.public_page import STYLE, nice_ticks, render, short
from node.api.public_run import PublicRun, make_public_run, read_credit, read_run
from node.api.routes import ApiContext
from node.commands.site import keep_site, write_site
from node.config.manifest import Manifest, RunConfig
from node.errors import UsageError
from node.status import Member, Outcome, PeerRow, Phase, PhaseState, Report, RoundRecord, RunInfo
from tests.api.conftest import BUILD, TOKEN, FakeNode, HttpClient

NOW = datetime(2026, 11, 25, 12, tzinfo=UTC)
EVIL = "<script>alert(1)</script>\"'&"
KEYS = [f"12D3KooW{letter * 44}" for letter in "ABC"]
MANIFEST = Manifest(
    run_id="ab" * 16,
    initial_digest="cd" * 32,
    parameters=1000,
    run=RunConfig(name=EVIL, purpose=f"Because.\n{EVIL}", total_tokens=10_000),
)


def record(number: int, loss: float | None = None) -> RoundRecord:
    members = tuple(Member(peer_id=key, name=f"node {key[-1]}", weight=10, included=key != KEYS[2]) for key in KEYS)
    return RoundRecord(
        round=number, outcome=Outcome.COMPLETE, members=members, head=f"h{number}", swarm_tokens=1000 * (number + 1),
        started_at=f"2026-11-25T11:{number:02}:00Z", evaluation_loss=loss,
    )  # fmt: skip


def row(key: str, name: str, phase: str = "training") -> PeerRow:
    return PeerRow(
        peer_id=key, short_id=key[-6:], name=name, phase=phase, round=3, tokens_per_second=5.0,
        transport="direct", version="1", state_digest="", last_seen_s=1.0,
    )  # fmt: skip


@pytest.fixture
def node(fake_node: FakeNode, tmp_path: Path) -> FakeNode:
    folder = tmp_path / "data"
    folder.mkdir()
    own = fake_node.config.node.model_copy(update={"data_dir": folder})
    fake_node.config = fake_node.config.model_copy(update={"node": own})
    (folder / "manifest.json").write_bytes(MANIFEST.canonical())
    table = [
        {"member": key, "tokens": 100 * (i + 1), "rounds": 3, "first_round": 0, "streak_round": 1, "last_round": 3 - i}
        for i, key in enumerate(KEYS)
    ]
    (folder / "credit.json").write_text(json.dumps({"evidence": {"round": 3}, "table": table}))
    run = RunInfo(
        name=EVIL, manifest_hash="ef" * 32, round=3, swarm_tokens=4000, total_tokens=10_000, invite="diloco1-xyz"
    )
    rows = (row(KEYS[0], EVIL), row(KEYS[1], "Zoë", "paused"))
    fake_node.board.set_phase(None)
    fake_node.board.apply_report(Report(state=PhaseState(phase=Phase.TRAINING), run=run, swarm=rows))
    for number in range(4):
        fake_node.board.add_round(record(number, loss=4.0 - number / 2))
    return fake_node


def client(node: FakeNode, *, public: bool, token: str | None = None) -> HttpClient:
    api = node.config.api.model_copy(update={"public": public})
    config = node.config.model_copy(update={"api": api})
    context = ApiContext(node, node.past, node.metrics, node.keys, node, config, BUILD)
    return HttpClient(build_app(context), token, "203.0.113.9")


def test_page_is_served_without_a_token_under_any_name_if_the_owner_wants_it(node: FakeNode) -> None:
    http = client(node, public=True)
    for path in ("/public/", "/public/run.json", "/public/public.css"):
        answer = http.get(path, headers={"Host": "run.example.org"})
        assert answer.status_code == 200, path
        assert len(answer.content) < 150_000
    assert http.get("/public").headers["location"] == "/public/"
    assert http.get("/api/v1/status").status_code == 401, "the rest needs the token"
    assert http.get("/publicity").status_code == 401
    assert http.post("/public/").status_code == 403


def test_page_is_private_by_default_and_its_content_is_there_for_the_owner(node: FakeNode) -> None:
    assert client(node, public=False).get("/public/").status_code == 401
    owner = client(node, public=False, token=TOKEN)
    assert owner.get("/public/").status_code == 404
    assert owner.get("/api/v1/public").json()["round"] == 3


def test_page_shows_progress_leaders_rounds_and_how_to_join(node: FakeNode) -> None:
    run = client(node, public=False, token=TOKEN).get("/api/v1/public").json()
    assert (run["round"], run["tokens"], run["progress_ratio"], run["state"]) == (3, 4000, 0.4, "training")
    assert run["tokens_per_second"] == pytest.approx(3000 / 180)
    assert [(one["name"], one["tokens"], one["rank"]) for one in run["leaders"]] == [
        ("node C", 300, 1), ("Zoë", 200, 2), (EVIL, 100, 3),
    ]  # fmt: skip
    assert [one["streak"] for one in run["leaders"]] == [0, 0, 3]
    assert sum(one["share_ratio"] for one in run["leaders"]) == pytest.approx(1.0)
    assert [one["number"] for one in run["rounds"]] == [3, 2, 1, 0]
    assert [one["members"] for one in run["rounds"]] == [2] * 4
    assert [one["loss"] for one in run["losses"]] == [4.0, 3.5, 3.0, 2.5]
    assert [member["name"] for member in run["members"]] == [EVIL], "a paused node is not here"
    page = client(node, public=True).get("/public/").text
    for text in ("40.0 %", "diloco-node run --join diloco1-xyz", "It went from 4.000 to 2.500", "Because."):
        assert text in page


def test_page_asks_nobody_else_and_runs_no_script(node: FakeNode) -> None:
    page = client(node, public=True).get("/public/").text
    assert "<script" not in page and "javascript:" not in page
    assert re.findall(r"(?:src|href)=\"([^\"]+)\"", page) == ["public.css", "run.json"]
    assert "url(" not in STYLE and "@import" not in STYLE and "//" not in re.sub(r"/\*.*?\*/", "", STYLE)
    assert not re.search(r"\sstyle=|\son\w+=", page)


def test_page_contains_no_address_host_or_path(node: FakeNode) -> None:
    http = client(node, public=True)
    content = http.get("/public/").content + http.get("/public/run.json").content
    for secret in ("203.0.113", "127.0.0.1", "/ip4/", str(node.config.node.data_dir), TOKEN):
        assert secret.encode() not in content


def test_page_of_a_node_without_a_run_or_with_damaged_files_is_served(node: FakeNode) -> None:
    folder = node.config.node.data_dir
    (folder / "credit.json").write_text("{")
    (folder / "manifest.json").write_text("{")
    assert client(node, public=True).get("/public/").status_code == 200
    (folder / "credit.json").write_text(json.dumps({"evidence": {"round": 3}, "table": [{"member": 5}]}))
    assert client(node, public=True).get("/public/run.json").json()["leaders"] == []
    (folder / "credit.json").unlink()
    (folder / "manifest.json").unlink()
    unborn = make_public_run(replace(node.view(), rounds=()), None, None, NOW)
    assert (unborn.rounds, unborn.losses) == ((), ())
    empty = make_public_run(node.view(), read_run(folder), read_credit(folder), NOW)
    assert "The first credits appear after two rounds." in render(empty)


def test_page_of_a_node_that_has_just_started_names_the_run_but_no_member(node: FakeNode) -> None:
    view, manifest = node.view(), MANIFEST
    starting = view.status.model_copy(update={"phase": Phase.CONNECTING, "run": RunInfo()})
    run = make_public_run(replace(view, status=starting), manifest, None, NOW)
    assert (run.name, run.manifest_hash, run.total_tokens) == (EVIL, MANIFEST.hash, 10_000)
    assert (run.state, run.members) == ("unknown", ())
    assert make_public_run(replace(view, alive=False), manifest, None, NOW).state == "unknown"


def test_end_of_the_run_is_forecast_only_if_it_is_near(node: FakeNode) -> None:
    view = node.view()
    assert make_public_run(view, MANIFEST, None, NOW).ends_at == "2026-11-25T12:06:00Z", "6,000 tokens, 1,000 a minute"
    run = view.status.run.model_copy(update={"total_tokens": 2**62})
    far = replace(view, status=view.status.model_copy(update={"run": run}))
    assert make_public_run(far, MANIFEST, None, NOW).ends_at is None


def test_page_is_made_once_a_second_however_many_ask(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def make(run: PublicRun) -> str:
        made.append(run)
        return "page"

    monkeypatch.setattr("node.api.public_routes.render", make)
    http = client(node, public=True)
    assert [http.get("/public/").text for _ in range(20)] == ["page"] * 20
    assert len(made) <= 2


class OneNode:
    """A client of a node that answers, or not."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer, self.is_there = answer, True

    def public(self) -> dict[str, Any]:
        if not self.is_there:
            raise UsageError("No node runs here: start one.")
        return self.answer


def test_static_site_is_written_again_after_each_round_and_survives_the_node(node: FakeNode, tmp_path: Path) -> None:
    run = client(node, public=False, token=TOKEN).get("/api/v1/public").json()
    there: Any = OneNode(run)
    told: list[str] = []
    folder, looks = tmp_path / "site", iter(["same", "round", "away", "away", "back", "end"])

    def sleep(_seconds: float) -> None:
        match next(looks):
            case "round":
                there.answer = run | {"round": 5}
            case "away":
                there.is_there = False
            case "back":
                there.is_there = True
            case "end":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        keep_site(there, folder, told.append, sleep)
    assert json.loads((folder / "run.json").read_text())["round"] == 5
    assert {path.name for path in folder.iterdir()} == {"index.html", "public.css", "run.json"}
    assert [text[:30] for text in told] == ["Wrote the page after round 3 t", "The page stays as it is: No no"]
    with pytest.raises(UsageError, match="has not joined a run"):
        write_site(OneNode(run | {"manifest_hash": ""}), tmp_path / "new")  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written"):
        write_site(there, tmp_path / "file" / "site")


def test_numbers_and_ticks_are_round() -> None:
    assert [short(n) for n in (None, 0, 7, 999, 1234, 5.6e10)] == ["unknown", "0", "7", "999", "1.23 k", "56 G"]
    assert nice_ticks(2.9, 8.7) == [4, 6, 8]
    assert nice_ticks(0.011, 0.048) == [0.02, 0.03, 0.04]


def test_owner_sees_the_place_of_this_node_whatever_its_rank(node: FakeNode) -> None:
    report = Report(peer_id=KEYS[0], run=RunInfo(manifest_hash="ef" * 32, round=3, swarm_tokens=4000))
    node.board.apply_report(report)
    many = [
        {"member": f"{n:052}", "tokens": 1000, "rounds": 3, "first_round": 0, "streak_round": 1, "last_round": 3}
        for n in range(150)
    ]
    own = {"member": KEYS[0], "tokens": 50_000, "rounds": 3, "first_round": 1, "streak_round": 2, "last_round": 3}
    file = node.config.node.data_dir / "credit.json"
    file.write_text(json.dumps({"evidence": {"round": 3}, "table": [*many, own | {"tokens": 10}]}))
    owner = client(node, public=False, token=TOKEN)
    found = owner.get("/api/v1/run").json()
    assert len(found["run"]["leaders"]) == 100
    line = found["own"]
    assert (line["rank"], line["streak"], line["first_round"]) == (151, 2, 1)
    assert line["share_ratio"] == pytest.approx(10 / 150_010)
    assert client(node, public=True).get("/api/v1/run").status_code == 401
    node.board.apply_report(report.model_copy(update={"peer_id": KEYS[2]}))
    assert owner.get("/api/v1/run").json()["own"] is None
