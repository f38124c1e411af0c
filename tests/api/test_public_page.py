"""The public page of a run: what it shows, to whom, and what it never shows."""

from __future__ import annotations

import json
import os
import re
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html import escape
from pathlib import Path
from typing import Any

import pytest

from node.api.app import build_app
from node.api.public_page import STYLE, nice_ticks, render, short
from node.api.public_run import PublicRun, make_public_run, read_credit, read_run
from node.api.routes import ApiContext
from node.commands.site import keep_site, write_site
from node.config.manifest import Invite, Manifest, RunConfig, parse_invite
from node.errors import UsageError
from node.host.files import write_whole
from node.status import (
    TRAFFIC_LIMIT,
    Member,
    Outcome,
    PeerRow,
    Phase,
    PhaseState,
    Report,
    RoundRecord,
    RunInfo,
    TaskScore,
    rfc3339,
)
from tests.api.conftest import BUILD, TOKEN, FakeNode, HttpClient
from tests.unit.disk import disk_that_takes

NOW = datetime.now(UTC).replace(microsecond=0)
"""The moment at which the test began."""
EVIL = "<script>alert(1)</script>\"'&"
OWN, OTHER = "203.0.113.5", "198.51.100.7"
"""Addresses: what this node's owner announces, and another member's."""
KEYS = [f"12D3KooW{letter * 44}" for letter in "ABC"]
MANIFEST = Manifest(
    run_id="ab" * 16,
    initial_digest="cd" * 32,
    parameters=1000,
    run=RunConfig(name=EVIL, purpose=f"Because.\n{EVIL}", total_tokens=10_000),
)


INVITE = Invite(
    "ef" * 32, tuple(f"/ip4/{host}/tcp/31337/p2p/{key}" for host, key in ((OWN, KEYS[0]), (OTHER, KEYS[1])))
)


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page forecasts no end if the newest round is old, so the rounds must not be as old as this process."""
    monkeypatch.setitem(globals(), "NOW", datetime.now(UTC).replace(microsecond=0))


def record(number: int, loss: float | None = None) -> RoundRecord:
    members = tuple(Member(peer_id=key, name=f"node {key[-1]}", weight=10, included=key != KEYS[2]) for key in KEYS)
    return RoundRecord(
        round=number, outcome=Outcome.COMPLETE, members=members, head=f"h{number}", swarm_tokens=1000 * (number + 1),
        started_at=rfc3339(NOW + timedelta(minutes=number - 3)), evaluation_loss=loss,
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
    swarm = fake_node.config.swarm.model_copy(update={"announce": (f"/ip4/{OWN}/tcp/31337",)})
    fake_node.config = fake_node.config.model_copy(update={"node": own, "swarm": swarm})
    (folder / "manifest.json").write_bytes(MANIFEST.canonical())
    table = [
        {"member": key, "tokens": 100 * (i + 1), "rounds": 3, "first_round": 0, "streak_round": 1, "last_round": 3 - i}
        for i, key in enumerate(KEYS)
    ]
    (folder / "credit.json").write_text(json.dumps({"evidence": {"round": 3}, "table": table}))
    run = RunInfo(
        name=EVIL, manifest_hash="ef" * 32, round=3, swarm_tokens=4000, total_tokens=10_000, invite=str(INVITE)
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
        assert http.request("HEAD", path).status_code == 200
        assert answer.headers["connection"] == "close", "visitors' idle connections would use up the limit"
    assert "connection" not in http.get("/livez").headers
    assert http.get("/public").headers["location"] == "/public/"
    assert http.get("/api/v1/status").status_code == 401, "the rest needs the token"
    assert http.get("/publicity").status_code == 401
    assert http.post("/public/").status_code == 401


def test_page_is_private_by_default_and_its_content_is_there_for_the_owner(node: FakeNode) -> None:
    assert client(node, public=False).get("/public/").status_code == 401
    owner = client(node, public=False, token=TOKEN)
    assert owner.get("/public/").status_code == 404
    assert owner.get("/api/v1/public").json()["round"] == 3


def test_invite_on_the_page_names_only_what_the_owner_announces(node: FakeNode) -> None:
    """Whoever opens the page could decode the addresses of other members."""
    http = client(node, public=True)
    invite = http.get("/public/run.json").json()["invite"]
    assert parse_invite(invite).addresses == INVITE.addresses[:1]
    assert f"diloco-node run --join {invite}" in http.get("/public/").text
    for path in ("/public/", "/public/run.json", "/public/public.css"):
        text = http.get(path).text
        decoded = [parse_invite(found).addresses for found in re.findall(r"diloco1-[\w-]+", text)]
        assert OTHER not in text and OTHER not in str(decoded)
    silent = node.config.swarm.model_copy(update={"announce": ()})
    node.config = node.config.model_copy(update={"swarm": silent})
    assert "ask a member for the invite" in client(node, public=True).get("/public/").text
    assert client(node, public=True).get("/public/run.json").json()["invite"] == ""


@pytest.mark.parametrize(
    ("phase", "code"),
    [(Phase.DRAINING, "publishing"), (Phase.DRAINING, "run_complete"), (Phase.STOPPED, "run_complete")],
)
def test_run_that_an_amendment_ended_is_complete(node: FakeNode, phase: Phase, code: str) -> None:
    report = Report(state=PhaseState(phase=phase, code=code), run=node.board.status.run)
    node.board.apply_report(report)
    http = client(node, public=True)
    run = http.get("/public/run.json").json()
    assert (run["state"], run["progress_ratio"]) == ("complete", 0.4)
    page = http.get("/public/").text
    assert "The run is complete." in page and "--join" not in page


def test_progress_is_rounded_down(node: FakeNode) -> None:
    run = node.board.status.run.model_copy(update={"swarm_tokens": 9_996, "total_tokens": 10_000})
    node.board.apply_report(Report(state=PhaseState(phase=Phase.TRAINING), run=run))
    assert "99.9 %" in client(node, public=True).get("/public/").text


def test_page_shows_progress_leaders_rounds_and_how_to_join(node: FakeNode) -> None:
    run = client(node, public=False, token=TOKEN).get("/api/v1/public").json()
    assert (run["round"], run["tokens"], run["progress_ratio"], run["state"]) == (3, 4000, 0.4, "training")
    assert run["tokens_per_second"] == pytest.approx(3000 / 180)
    assert [(one["name"], one["tokens"], one["rank"]) for one in run["leaders"]] == [
        ("node C", 300, 1), ("Zoë", 200, 2), (EVIL, 100, 3),
    ]  # fmt: skip
    assert all(f'<code class="key">{key[-6:]}</code>' in client(node, public=True).get("/public/").text for key in KEYS)
    assert [one["streak"] for one in run["leaders"]] == [0, 0, 3]
    assert [(one["name"], one["streak"]) for one in run["streaks"]] == [(EVIL, 3)], "the others missed round 3"
    assert sum(one["share_ratio"] for one in run["leaders"]) == pytest.approx(1.0)
    assert [(one["number"], one["tokens"]) for one in run["rounds"]] == [(3, 1000), (2, 1000), (1, 1000), (0, 1000)]
    assert [one["members"] for one in run["rounds"]] == [2] * 4
    assert [one["loss"] for one in run["losses"]] == [4.0, 3.5, 3.0, 2.5]
    assert [member["name"] for member in run["members"]] == [EVIL], "a paused node is not here"
    page = client(node, public=True).get("/public/").text
    for text in ("40.0 %", "<h2>Take part</h2>", "<h2>Longest streaks</h2>", "It went from 4.000 to 2.500", "Because."):
        assert text in page


def test_rounds_that_this_node_has_dropped_are_not_shown(node: FakeNode) -> None:
    dropped = RoundRecord(round=3, outcome=Outcome.SKIPPED, head="h", swarm_tokens=2500, dropped=2)
    for newer in (dropped, record(2).model_copy(update={"swarm_tokens": 2500})):
        node.board.add_round(newer)
    run = public(node)
    assert [(one["number"], one["tokens"]) for one in run["rounds"]] == [(2, 500), (1, 1000), (0, 1000)]
    tokens = [one["tokens"] for one in run["losses"]]
    assert tokens == sorted(tokens)


def test_a_round_after_a_gap_does_not_show_the_tokens_of_the_rounds_between(node: FakeNode) -> None:
    """The node was away, and has downloaded a state."""
    node.board.add_round(record(7))
    assert [(one["number"], one["tokens"]) for one in public(node)["rounds"]][:2] == [(7, None), (3, 1000)]


def test_node_that_is_out_of_the_swarm_does_not_know_what_the_run_does(node: FakeNode) -> None:
    node.board.set_phase(PhaseState(phase=Phase.PAUSED, code=TRAFFIC_LIMIT, reason="The month is over."))
    assert public(node)["state"] == "unknown"
    assert "Waiting for members" not in client(node, public=True).get("/public/").text


def test_paused_run_is_shown_as_paused_and_without_an_end(node: FakeNode) -> None:
    assert public(node)["state"] == "training" and public(node)["ends_at"] is not None
    info = node.board.status.run.model_copy(update={"is_paused": True})
    rows = (row(KEYS[0], "Ada", "syncing"),)
    node.board.apply_report(Report(state=PhaseState(phase=Phase.SYNCING, code="run_paused"), run=info, swarm=rows))
    assert (public(node)["state"], public(node)["ends_at"]) == ("paused", None)
    page = client(node, public=True).get("/public/").text
    assert '<p class="eyebrow">Paused</p>' in page and ">Ada <code" in page
    assert f"<title>{escape(EVIL)}: Paused</title>" in page


@pytest.mark.parametrize(
    ("phase", "state", "said"),
    [
        ("paused", "paused", "It is paused."),
        ("draining", "training", "At the present speed"),
        ("stopped", "waiting", "It waits for members."),
    ],
)
def test_no_end_is_forecast_while_nobody_trains(node: FakeNode, phase: str, state: str, said: str) -> None:
    node.board.apply_report(Report(state=PhaseState(phase=Phase.PAUSED), swarm=(row(KEYS[0], "Ada", phase),)))
    run = public(node)
    assert run["state"] == state and said in client(node, public=True).get("/public/").text
    assert (run["ends_at"] is None) == (run["tokens_per_second"] is None) == (state != "training")


def test_speed_and_end_are_unknown_if_the_newest_round_is_old(node: FakeNode) -> None:
    for minutes, is_known in ((4, True), (6, False)):
        run = make_public_run(node.view(), MANIFEST, None, NOW + timedelta(minutes=minutes))
        assert (run.state, run.tokens_per_second is not None, run.ends_at is not None) == (
            "training",
            is_known,
            is_known,
        )


def timed(*rounds: tuple[int, float, Outcome]) -> list[RoundRecord]:
    """Records, newest first, from (number, seconds ago, outcome). Each round has 1,000 tokens."""
    return [
        record(number).model_copy(update={"started_at": rfc3339(NOW - timedelta(seconds=ago_s)), "outcome": outcome})
        for number, ago_s, outcome in reversed(rounds)
    ]


LIVE, MISSED = Outcome.PARTIAL, Outcome.SKIPPED


@pytest.mark.parametrize(
    ("rounds", "tokens_per_second"),
    [
        ([(n, 60.0 * (5 - n), LIVE) for n in range(5)], 1000 / 60),
        # This node was away during rounds 5 to 24, and learned of them in ten seconds.
        ([(n, 60.0 * (35 - n), LIVE) for n in range(5)] + [(n, 320 - n / 2, MISSED) for n in range(5, 25)]
         + [(n, 60.0 * (29 - n), LIVE) for n in range(25, 29)], 1000 / 60),
        # The run was paused for a day after round 3.
        ([(n, 86400.0 * (n < 4) + 60 * (9 - n), LIVE) for n in range(9)], 1000 / 60),
        # This node downloaded a state, so it does not know rounds 3 to 99.
        ([(n, 60.0 * (102 - n), LIVE) for n in (0, 1, 2, 100, 101)], 1000 / 60),
        ([(n, 60.0 * (3 - n), LIVE) for n in range(3)], None),
        ([(n, 10 - n / 2, MISSED) for n in range(20)], None),
    ],
)  # fmt: skip
def test_speed_counts_only_rounds_that_this_node_saw_one_after_the_other(
    node: FakeNode, rounds: list[tuple[int, float, Outcome]], tokens_per_second: float | None
) -> None:
    view = replace(node.view(), rounds=tuple(timed(*rounds)))
    run = make_public_run(view, MANIFEST, None, NOW)
    assert run.tokens_per_second == (tokens_per_second and pytest.approx(tokens_per_second, rel=0.01))


def write_owners(node: FakeNode, **owners: tuple[str, str, str]) -> None:
    """Write the owner of each of KEYS, by the letter in it, as (key, name, team)."""
    known = {key: dict(zip(("key", "name", "team"), owners[key[-1]], strict=True)) for key in KEYS if key[-1] in owners}
    (node.config.node.data_dir / "profiles.json").write_text(json.dumps({"documents": [], "owners": known}))


def public(node: FakeNode) -> dict[str, Any]:
    return dict(client(node, public=False, token=TOKEN).get("/api/v1/public").json())


def test_machines_of_one_owner_are_one_row_with_the_sum_and_owners_of_a_team_are_one(node: FakeNode) -> None:
    write_owners(node, A=(KEYS[0], "Ada", "Blue"), B=(KEYS[0], "Ada", "Blue"), C=(KEYS[2], "Cy", "BLUE"))
    run = public(node)
    assert [(one["name"], one["machines"], one["tokens"], one["team"]) for one in run["owners"]] == [
        ("Ada", 2, 300, "Blue"), ("Cy", 1, 300, "BLUE"),
    ]  # fmt: skip
    first = run["owners"][0]
    assert (first["rounds"], first["first_round"], first["last_round"], first["streak"]) == (3, 0, 3, 3)
    assert [(one["name"], one["owners"], one["machines"], one["tokens"]) for one in run["teams"]] == [
        ("Blue", 2, 3, 600)
    ]
    assert run["teams"][0]["share_ratio"] == pytest.approx(1.0)
    assert [one["owner"] for one in run["leaders"]] == [KEYS[2], KEYS[0], KEYS[0]], "by machine, with its owner"
    page = client(node, public=True).get("/public/").text
    assert len(re.findall(r">Ada <code[^>]*>A{6}</code></span>", page)) == 1 and "<h2>Teams</h2>" in page


def test_machines_without_an_owner_are_owners_of_their_own_and_there_is_no_team(node: FakeNode) -> None:
    run = public(node)
    assert [(one["name"], one["key"]) for one in run["owners"]] == [
        ("node C", KEYS[2]),
        ("Zoë", KEYS[1]),
        (EVIL, KEYS[0]),
    ]
    assert run["teams"] == []
    assert "<h2>Teams</h2>" not in client(node, public=True).get("/public/").text


def test_two_owners_of_one_name_can_be_told_apart(node: FakeNode) -> None:
    """The end of the key has an element of its own, so no name looks like another owner's name and key."""
    forged = 'Ada <code class="key">AAAAAA</code>'
    write_owners(node, A=(KEYS[0], "Ada", ""), B=(KEYS[1], "Ada (AAAAAA)", ""), C=(KEYS[2], forged, ""))
    rows = tuple(
        row(key, "box").model_copy(update={"owner": key, "owner_name": name})
        for key, name in zip(KEYS, ("Ada", "Ada (AAAAAA)", forged), strict=True)
    )
    node.board.apply_report(Report(state=PhaseState(phase=Phase.TRAINING), swarm=rows))
    assert [one["name"] for one in public(node)["owners"]] == [forged, "Ada (AAAAAA)", "Ada"]
    page = client(node, public=True).get("/public/").text
    for shown in (">Ada", ">Ada (AAAAAA)", "&lt;/code&gt;"):
        key = KEYS[(">Ada", ">Ada (AAAAAA)", "&lt;/code&gt;").index(shown)]
        assert page.count(f'{shown} <code class="key">{key[-6:]}</code>') >= 2, "in the table and in `Here now`"
    assert page.count(f'<code class="key">{KEYS[0][-6:]}</code>') == 3, "those of Ada: table, streaks and `Here now`"


def test_a_pause_of_the_run_ends_nobodys_streak(node: FakeNode) -> None:
    """The rounds of a paused run have no contributions."""
    path = node.config.node.data_dir / "credit.json"
    credit = json.loads(path.read_text())
    path.write_text(json.dumps(credit | {"evidence": {"round": 9}}))
    run = public(node)
    assert [one["streak"] for one in run["leaders"]] == [0, 0, 3]
    assert [(one["name"], one["streak"]) for one in run["streaks"]] == [(EVIL, 3)]


def test_hostile_names_of_owners_and_teams_stay_text(node: FakeNode) -> None:
    write_owners(node, A=(KEYS[0], EVIL, EVIL), C=(EVIL, EVIL, EVIL))
    rows = (row(KEYS[0], "x").model_copy(update={"owner": KEYS[0], "owner_name": EVIL, "team": EVIL}),)
    node.board.apply_report(Report(state=PhaseState(phase=Phase.TRAINING), swarm=rows))
    page = client(node, public=True).get("/public/").text
    assert "<script" not in page and page.count("&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#x27;&amp;") >= 5


def test_members_that_are_here_are_shown_by_owner(node: FakeNode) -> None:
    rows = tuple(
        row(key, f"box {key[-1]}").model_copy(update={"owner": KEYS[0], "owner_name": "Ada"}) for key in KEYS[:2]
    )
    rows += (row(KEYS[2], "box A"),)
    node.board.apply_report(Report(state=PhaseState(phase=Phase.TRAINING), swarm=rows))
    page = client(node, public=True).get("/public/").text
    keys = [f'<code class="key">{key[-6:]}</code>' for key in (KEYS[0], KEYS[2])]
    assert f"<li>Ada {keys[0]} (2 machines)</li><li>box A {keys[1]}</li>" in page
    assert [one["owner_name"] for one in public(node)["members"]] == ["Ada", "Ada", ""]


def test_page_counts_all_members_but_names_a_limited_number(node: FakeNode) -> None:
    rows = tuple(row(f"12D3KooW{number:044}", f"box {number}") for number in range(1000))
    node.board.apply_report(Report(state=PhaseState(phase=Phase.TRAINING), swarm=rows))
    run = public(node)
    assert (run["members_now"], len(run["members"])) == (1000, 200)
    page = client(node, public=True).get("/public/").text
    assert "<dt>Members now</dt><dd>1,000</dd>" in page and "<li>and 800 more machines</li>" in page


@pytest.mark.parametrize("content", ["{", "[]", '{"owners": {"x": {"key": 5}}}', '{"owners": [1]}'])
def test_damaged_file_of_profiles_hides_the_names_only(node: FakeNode, content: str) -> None:
    (node.config.node.data_dir / "profiles.json").write_text(content)
    assert [one["tokens"] for one in public(node)["owners"]] == [300, 200, 100]


def write_samples(node: FakeNode, *samples: tuple[int, str, str]) -> None:
    found = [dict(zip(("round", "prompt", "text"), sample, strict=True)) for sample in samples]
    (node.config.node.data_dir / "samples.json").write_text(json.dumps({"samples": found}))


def test_samples_of_the_first_a_middle_and_the_newest_round_are_side_by_side(node: FakeNode) -> None:
    rounds = (0, 10, 30, 100, 500, 1000)
    write_samples(node, *((number, prompt, f" text {number}") for number in rounds for prompt in ("def", "class")))
    shown = public(node)["samples"]
    assert [(one["number"], one["prompt"]) for one in shown] == [
        (number, prompt) for number in (0, 30, 1000) for prompt in ("def", "class")
    ]
    page = client(node, public=True).get("/public/").text
    rows = re.findall(r'<div class="samples">(.*?)</div>', page)
    sample = r"After round ([\d,]+)</figcaption><pre[^>]*><b>(\w+)</b> text (\d+)<"
    assert [re.findall(sample, row) for row in rows] == [
        [("0", prompt, "0"), ("30", prompt, "30"), ("1,000", prompt, "1000")] for prompt in ("def", "class")
    ]


def test_text_of_the_model_stays_text(node: FakeNode) -> None:
    write_samples(node, (0, EVIL, f"{EVIL}</pre>\n\n" + "x" * 2000))
    page = client(node, public=True).get("/public/").text
    assert "<script" not in page and page.count("</pre>") == page.count("<pre ") == 2
    assert public(node)["samples"][0]["text"].startswith(EVIL)


def test_scores_in_tasks_are_on_the_page(node: FakeNode) -> None:
    score = TaskScore(name="words/acc", score=0.25, round=4, members=2)
    training = node.board.status.training.model_copy(update={"task_scores": (score,)})
    assert "What it can do" not in client(node, public=True).get("/public/").text
    node.board.apply_report(Report(training=training), -1)
    page = client(node, public=True).get("/public/").text
    assert "words/acc" in page and "0.2500" in page and "after round 4" in page


@pytest.mark.parametrize("content", ["{", "[]", '{"samples": [1]}', '{"samples": [{"round": "x"}]}', None])
def test_page_without_samples_says_nothing_of_them(node: FakeNode, content: str | None) -> None:
    if content is not None:
        (node.config.node.data_dir / "samples.json").write_text(content)
    assert public(node)["samples"] == []
    assert "What it writes" not in client(node, public=True).get("/public/").text


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


def test_page_before_the_first_round_says_that_there_is_none(node: FakeNode) -> None:
    run = make_public_run(replace(node.view(), rounds=()), MANIFEST, None, NOW)
    assert (run.rounds, run.losses) == ((), ())
    assert "There is none yet." in render(run)


def test_end_of_the_run_is_forecast_only_if_it_is_near(node: FakeNode) -> None:
    view = node.view()
    in_time = rfc3339(NOW + timedelta(minutes=6))
    assert make_public_run(view, MANIFEST, None, NOW).ends_at == in_time, "6,000 tokens, 1,000 a minute"
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
    looks = iter(["same", "left", "emptier", "same", "round", "away", "look", "away", "back", "end"])
    folder = tmp_path / "site"
    members = [{"name": name, "owner": name, "tokens_per_second": 5.0} for name in ("Ada", "Ben")]
    there.answer = run | {"members": members, "members_now": 2}

    def sleep(_seconds: float) -> None:
        match next(looks):
            case "left":
                there.answer = there.answer | {"members": there.answer["members"][:1], "members_now": 1}
            case "emptier":
                page = (folder / "index.html").read_text()
                assert "Ada" in page and "Ben" not in page
                there.answer = run
            case "round":
                there.answer = run | {"round": 5}
            case "away":
                there.is_there = False
            case "look":
                page, lost = (folder / "index.html").read_text(), json.loads((folder / "run.json").read_text())
                assert "This node has lost touch with the run" in page and "In training now" not in page
                assert (lost["state"], lost["round"], lost["at"]) == ("unknown", 5, run["at"])
                assert (lost["ends_at"], lost["tokens_per_second"], lost["members"]) == (None, None, [])
            case "back":
                there.is_there = True
            case "end":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        keep_site(there, folder, told.append, sleep)
    assert json.loads((folder / "run.json").read_text()) == run | {"round": 5}
    header = (folder / "index.html").read_text().partition("</header>")[0]
    assert "In training now" in header and run["at"] in header
    assert {path.name for path in folder.iterdir()} == {"index.html", "public.css", "run.json"}
    assert [text[:30] for text in told] == ["Wrote the page after round 3 t", "The page is not up to date: No"]
    with pytest.raises(UsageError, match="of another version"):
        write_site(OneNode({"name": "a field is missing"}), folder)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="has not joined a run"):
        write_site(OneNode(run | {"manifest_hash": ""}), tmp_path / "new")  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written"):
        write_site(there, tmp_path / "file" / "site")


def test_static_site_goes_on_after_a_full_disk(node: FakeNode, tmp_path: Path) -> None:
    run = client(node, public=False, token=TOKEN).get("/api/v1/public").json()
    there: Any = OneNode(run)
    told: list[str] = []
    looks, disk = iter(["full", "free", "end"]), ExitStack()

    def sleep(_seconds: float) -> None:
        disk.close()
        match next(looks):
            case "full":
                there.answer = run | {"round": 5}
                disk.enter_context(disk_that_takes(100))
            case "end":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), disk:
        keep_site(there, tmp_path / "site", told.append, sleep)
    assert "free some space" in told[-1]
    assert json.loads((tmp_path / "site" / "run.json").read_text())["round"] == 5


def test_web_server_may_read_the_site_whatever_the_umask(node: FakeNode, tmp_path: Path) -> None:
    there: Any = OneNode(client(node, public=False, token=TOKEN).get("/api/v1/public").json())
    before = os.umask(0o077)
    try:
        write_site(there, tmp_path / "site")
    finally:
        os.umask(before)
    assert (tmp_path / "site").stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "site").iterdir()} == {0o644}


def test_table_of_credit_is_read_once_for_each_version_of_its_file(node: FakeNode) -> None:
    folder = node.config.node.data_dir
    first = read_credit(folder)
    assert first is not None and read_credit(folder) is first
    write_whole(folder / "credit.json", json.dumps({"evidence": {"round": 4}, "table": []}), forced=False)
    assert read_credit(folder) == {"round": 4, "table": []}


def test_numbers_and_ticks_are_round() -> None:
    assert [short(n) for n in (None, 0, 7, 999, 1234, 5.6e10)] == ["unknown", "0", "7", "999", "1.23 k", "56 G"]
    assert [short(n) for n in (999.4, 999.7, 999_499, 999_600)] == ["999", "1 k", "999 k", "1 M"]
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


def test_contributions_are_those_of_the_table_of_credit(node: FakeNode) -> None:
    file = node.config.node.data_dir / "credit.json"
    line = {"tokens": 9000, "rounds": 1, "first_round": 0, "streak_round": 0, "last_round": 2}
    table = [
        *json.loads(file.read_text())["table"],
        line | {"member": "", "tokens": 10_000},
        line | {"member": "gone42x"},
    ]
    file.write_text(json.dumps({"evidence": {"round": 3}, "table": table}))
    node.board.apply_report(Report(peer_id=KEYS[0]))
    found = client(node, public=False, token=TOKEN).get("/api/v1/contributions").json()["contributions"]
    assert found[0] == {
        "peer_id": "gone42x", "short_id": "one42x", "name": "one42x", "rounds": 1, "tokens": 9000, "last_round": 2,
        "this_node": False,
    }  # fmt: skip
    rest = [(one["peer_id"], one["tokens"], one["this_node"]) for one in found[1:]]
    assert rest == [(key, 100 * (i + 1), i == 0) for i, key in reversed(list(enumerate(KEYS)))]
    file.unlink()
    empty = client(node, public=False, token=TOKEN).get("/api/v1/contributions").json()
    assert empty == {"contributions": []}
