"""The answers of each API route. The application is called in this process."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from typing import Any

import httpx
import pytest

from node.api.node_interface import SERIES
from node.api.redaction import hide_secrets
from node.api.routes import stream_events
from node.status import (
    AmendmentInfo,
    GovernanceInfo,
    Member,
    Outcome,
    PeerRow,
    Phase,
    PhaseState,
    Report,
    RoundRecord,
    RunInfo,
    Status,
)
from tests.api.conftest import BASE, ClientMaker, FakeNode, make_app
from tests.event_loop import until


def get(client: ClientMaker, path: str) -> Any:
    response = client().get(f"/api/v1/{path}")
    assert response.status_code == 200, response.text
    return response.json()


def phase_state(phase: Phase) -> PhaseState:
    return PhaseState(phase=phase, code=phase.value, reason="Because.", since="2026-01-01T00:00:00Z")


def peer_row(round_: int, digest: str, name: str = "n") -> PeerRow:
    return PeerRow(
        peer_id=f"Qm{round_}{digest}", short_id="1", name=name, phase="training", round=round_, tokens_per_second=1.5,
        transport="relay", version="1", state_digest=digest, last_seen_s=0.1,
    )  # fmt: skip


def log(node: FakeNode, text: str, level: int = logging.INFO, logger: str = "node.x") -> None:
    node.board.add_log(logging.LogRecord(logger, level, "", 0, text, (), None))


def test_status_route_returns_the_complete_status_of_the_node(client: ClientMaker, fake_node: FakeNode) -> None:
    fake_node.board.apply_report(Report(run=RunInfo(round=4)))
    status = get(client, "status")
    assert Status.model_validate(status) == fake_node.board.status
    assert (status["schema_version"], status["run"]["round"]) == (1, 4)


def test_swarm_and_rounds_routes_return_lists_inside_objects(client: ClientMaker, fake_node: FakeNode) -> None:
    row = peer_row(2, "ab")
    fake_node.board.set_phase(None)
    fake_node.board.apply_report(Report(swarm=(row,)))
    for number in range(5):
        fake_node.board.add_round(RoundRecord(round=number, outcome=Outcome.COMPLETE))
    assert get(client, "swarm") == {"peers": [row.model_dump()], "departed": []}
    assert [record["round"] for record in get(client, "rounds?limit=2")["rounds"]] == [4, 3]


def test_digests_of_peers_are_compared_by_round_and_dropped_rounds_are_ignored(
    client: ClientMaker, fake_node: FakeNode
) -> None:
    board = fake_node.board
    for number in range(5):
        board.add_round(RoundRecord(round=number, outcome=Outcome.COMPLETE, state_digest=f"d{number}"))
    board.add_round(RoundRecord(round=4, outcome=Outcome.SKIPPED, dropped=2))
    board.add_round(RoundRecord(round=3, outcome=Outcome.COMPLETE, state_digest="e3"))
    expected = {
        (2, "d2"): True, (2, "x"): False, (3, "d3"): False, (3, "e3"): True, (4, "d4"): None, (9, "d9"): None,
        (1, ""): None, (5, "m"): True,
    }  # fmt: skip
    rows = tuple(peer_row(number, digest) for number, digest in expected)
    board.set_phase(None)
    board.apply_report(Report(run=RunInfo(round=5, state_digest="m"), swarm=rows))
    assert [peer["digest_agrees"] for peer in get(client, "swarm")["peers"]] == list(expected.values())


def test_logs_route_filters_by_level_and_position(client: ClientMaker, fake_node: FakeNode) -> None:
    for number, level in enumerate((logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.INFO)):
        log(fake_node, f"m{number}", level)

    def messages(query: str) -> tuple[list[str], int]:
        logs = get(client, f"logs{query}")
        return [record["message"] for record in logs["records"]], logs["last_id"]

    assert messages("") == (["m0", "m1", "m2", "m3", "m4"], 5)
    assert messages("?limit=2") == (["m3", "m4"], 5)
    assert messages("?after=1&limit=2") == (["m1", "m2"], 3)
    assert messages("?level=warning") == (["m2", "m3"], 4)
    assert messages("?after=5") == ([], 5)


def test_log_search_ignores_case(client: ClientMaker, fake_node: FakeNode) -> None:
    for name, text in (("node.Alpha", "one"), ("node.b", "ALPHABET <b>"), ("node.b", "two")):
        log(fake_node, text, logger=name)
    records = get(client, "logs?search=alpha")["records"]
    assert [(r["message"], r["phase"]) for r in records] == [("one", "starting"), ("ALPHABET <b>", "starting")]
    assert get(client, "logs?search=%25") == {"records": [], "last_id": 0}


def test_hostile_names_are_returned_as_plain_json_text(client: ClientMaker, fake_node: FakeNode) -> None:
    name = "<script>alert(1)</script>"
    member = Member(peer_id="Qm1", name=name, weight=5, included=True)
    fake_node.board.set_phase(None)
    fake_node.board.apply_report(Report(swarm=(peer_row(1, "d", name),)))
    fake_node.board.add_round(RoundRecord(round=1, outcome=Outcome.COMPLETE, head="h", members=(member,)))
    log(fake_node, name)
    for path in ("swarm", "rounds", "logs"):
        response = client().get(f"/api/v1/{path}")
        assert name in json.dumps(response.json()), path
        assert response.headers["content-type"] == "application/json"
        assert response.headers["x-content-type-options"] == "nosniff"
    wrong = client().get(f"/api/v1/history?series={name}")
    assert (wrong.status_code, wrong.headers["content-type"]) == (422, "application/problem+json")


def test_history_routes_return_what_was_recorded(client: ClientMaker, fake_node: FakeNode) -> None:
    members = (Member(peer_id="Qm123456789", name="me", weight=5, included=True),)
    fake_node.board.apply_report(Report(peer_id="Qm123456789"))
    fake_node.board.add_round(RoundRecord(round=3, outcome=Outcome.COMPLETE, head="h", members=members))
    found = get(client, "history?series=training_loss,%20swarm_peers&points=7")
    assert set(found["series"]) == {"training_loss", "swarm_peers"}
    assert set(get(client, "history")["series"]) == set(SERIES)
    assert get(client, "work") == {"seen_s": 0, "rounds": 1, "computed_s": 0, "tokens": 0, "tokens_merged": 0}


@pytest.mark.parametrize(
    "query",
    ["points=0", "points=2001", "points=x", "since=yesterday", "since=2026-01-01T00:00:00", "series=nonsense",
     "series=" + "a," * 900],
)  # fmt: skip
def test_history_route_refuses_invalid_queries(client: ClientMaker, query: str) -> None:
    response = client().get(f"/api/v1/history?{query}")
    assert response.status_code == 422
    assert "nonsense" not in query or "training_loss" in response.text


@pytest.mark.parametrize("since", ["0001-01-01T00:00:00%2B14:00", "9999-12-31T23:59:59-14:00", "1e9", "-1e10"])
def test_history_route_does_not_fail_for_extreme_dates(client: ClientMaker, since: str) -> None:
    for name in ("history", "work"):
        assert client().get(f"/api/v1/{name}?since={since}").status_code in (200, 422)


def test_version_and_config_routes_return_versions_settings_and_origins(client: ClientMaker) -> None:
    version = get(client, "version")
    del version["python"]
    assert version == {"version": "1.2", "revision": "abc", "torch": "2.13", "hivemind": "1.1"}
    answer = get(client, "config")
    assert answer["config"]["api"]["allowed_hosts"] == ["node.example"]
    assert answer["config"]["swarm"]["listen"]
    assert answer["origins"] == {"api.allowed_hosts": "file"}


def test_secrets_in_the_configuration_are_hidden() -> None:
    hidden = hide_secrets({"a": {"api_token": "x", "total_tokens": 5, "tokenizer": "bytes"}, "password": ""})
    assert hidden == {"a": {"api_token": "(hidden)", "total_tokens": 5, "tokenizer": "bytes"}, "password": ""}


@pytest.mark.parametrize("phase", list(Phase))
def test_livez_and_readyz_reflect_the_state_of_the_node(client: ClientMaker, fake_node: FakeNode, phase: Phase) -> None:
    def codes() -> tuple[int, int]:
        http = client(token=None)
        livez, readyz = http.get("/livez").status_code, http.get("/readyz").status_code
        assert [http.request("HEAD", path).status_code for path in ("/livez", "/readyz")] == [livez, readyz]
        return livez, readyz

    is_ready = phase in (Phase.TRAINING, Phase.SYNCING, Phase.PAUSED, Phase.DOWNLOADING)
    fake_node.board.set_phase(phase_state(phase))
    assert codes() == (200, 200 if is_ready else 503)
    fake_node.alive = False
    assert codes() == (503, 503)


def test_action_routes_pass_the_action_to_the_node_and_report_a_refusal(
    client: ClientMaker, fake_node: FakeNode
) -> None:
    for action, options in (
        ("pause", {"json": {"for_s": 60}}), ("pause", {"json": {}}), ("pause", {}), ("resume", {}), ("drain", {}),
        ("leave", {}),
    ):  # fmt: skip
        response = client().post(f"/api/v1/actions/{action}", **options)
        assert (response.status_code, response.json()) == (202, {"phase": "paused"})
    assert [action for action, _ in fake_node.acted] == ["pause", "pause", "pause", "resume", "drain", "leave"]
    assert fake_node.acted[0][1].for_s == 60
    fake_node.refuses = True
    problem = client().post("/api/v1/actions/pause").json()
    assert (problem["status"], problem["code"], problem["detail"]) == (409, "not_allowed", "The node is leaving.")


@pytest.mark.parametrize(
    "body",
    [
        {"for_s": 0}, {"for_s": 60, "after_round": 3}, {"until": "2030-01-01T00:00:00"}, {"until": "soon"},
        {"after_round": -1}, {"for": 60}, [1],
    ],
)  # fmt: skip
def test_pause_route_refuses_invalid_orders(client: ClientMaker, fake_node: FakeNode, body: Any) -> None:
    response = client().post("/api/v1/actions/pause", json=body)
    assert response.status_code == 422
    assert response.json()["faults"]
    assert fake_node.acted == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/no/such", 404),
        ("GET", "/api/v1/status/", 404),
        ("PUT", "/api/v1/status", 405),
        ("GET", "/api/v1/actions/pause", 405),
        ("GET", "/api/v1/rounds?limit=0", 422),
        ("GET", "/api/v1/logs?level=loud", 422),
    ],
)
def test_http_errors_are_returned_as_problem_documents(
    client: ClientMaker, method: str, path: str, status: int
) -> None:
    response = client().request(method, path)
    assert (response.status_code, response.headers["content-type"]) == (status, "application/problem+json")
    assert response.json()["status"] == status


def test_internal_error_is_returned_as_a_problem_document_without_details(
    client: ClientMaker, fake_node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("inner secret")

    monkeypatch.setattr(fake_node, "view", fail)
    response = client().get("/api/v1/status")
    assert (response.status_code, response.headers["content-type"]) == (500, "application/problem+json")
    assert "secret" not in response.text
    assert response.headers["x-frame-options"] == "DENY"


def test_openapi_document_describes_every_route_completely(client: ClientMaker) -> None:
    document = client().get("/openapi.json").json()
    for part in json.dumps(document).split('"#/components/schemas/')[1:]:
        assert part.split('"')[0] in document["components"]["schemas"]
    operations = [(path, method, op) for path, item in document["paths"].items() for method, op in item.items()]
    for path, method, operation in operations:
        assert operation.get("description"), (method, path)
        assert "application/problem+json" in operation["responses"]["401"]["content"]
        successes = [response for code, response in operation["responses"].items() if code.startswith("2")]
        assert successes, (method, path)
        bodies = [operation["requestBody"]] if "requestBody" in operation else []
        for kind, content in [pair for body in (*bodies, *successes) for pair in body.get("content", {}).items()]:
            has_example = "example" in content or content.get("schema", {}).get("examples")
            assert has_example or kind == "application/zip", (method, path, kind)
        for parameter in operation.get("parameters", ()):
            assert parameter.get("description"), (method, path, parameter["name"])


def test_event_stream_starts_with_the_status_is_paced_and_ends_with_the_node(fake_node: FakeNode) -> None:
    async def main() -> None:
        board = fake_node.board
        events = stream_events(fake_node, interval_s=0.2, keep_alive_s=0.3)
        loop = asyncio.get_running_loop()
        assert await anext(events) == b"retry: 2000\n\n"
        first = await anext(events)
        assert first.startswith(b"event: status\ndata: {")
        assert first.endswith(b"}\n\n")
        began_s = loop.time()
        for number in range(3):
            board.apply_report(Report(run=RunInfo(round=number)))
        second = await anext(events)
        assert loop.time() - began_s >= 0.19
        assert json.loads(second.split(b"data: ")[1])["run"]["round"] == 2
        assert await anext(events) == b": keep-alive\n\n"
        board.set_phase(phase_state(Phase.STOPPED))
        board.close()
        last = await anext(events)
        assert json.loads(last.split(b"data: ")[1])["phase"] == "stopped"
        with pytest.raises(StopAsyncIteration):
            await anext(events)

    asyncio.run(main())


def test_event_stream_ends_with_its_session(fake_node: FakeNode) -> None:
    keys, board = fake_node.keys, fake_node.board

    async def main() -> None:
        transport = httpx.ASGITransport(make_app(fake_node), client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url=BASE, timeout=30) as http:
            key, other = keys.open_session(), keys.open_session()
            headers = [{"Cookie": f"{keys.cookie_name}={one}"} for one in (key, other)]
            streams = [asyncio.create_task(http.get("/api/v1/events", headers=one)) for one in headers]
            await until(lambda: len(board._subscribers) == 2 and all(queue.empty() for queue in board._subscribers))
            await asyncio.sleep(0.2)
            keys.close_session(key)
            board.apply_report(Report(run=RunInfo(round=7)))
            answer = await asyncio.wait_for(streams[0], 10)
            assert answer.text.count("event: status") == 1, "the newer status is not for it"
            assert not streams[1].done()
            board.close()
            assert '"round":7' in (await asyncio.wait_for(streams[1], 10)).text

    asyncio.run(main())


def test_amendments_are_listed_and_submitted(client: ClientMaker, fake_node: FakeNode) -> None:
    one = AmendmentInfo(digest="ab" * 32, number=1, from_round=9, change="pause", signers=("ada",), accepted_round=5)
    fake_node.board.set_governance(GovernanceInfo(run="cd" * 32, mode="founder", keys=("ada",), amendments=(one,)))
    found = client().get("/api/v1/amendments").json()
    assert (found["mode"], found["amendments"][0]["change"]) == ("founder", "pause")
    body = {"text": "{}", "signatures": {"ada": "00"}}
    answer = client().post("/api/v1/amendments", json=body)
    assert (answer.status_code, answer.json()) == (202, {"digest": hashlib.sha256(b"{}").hexdigest()})
    assert [signed.model_dump() for signed in fake_node.submitted] == [body]
    for bad in ({}, {"text": "", "signatures": {}}, {"text": "x" * 9000, "signatures": {}}, {"text": "x"}):
        assert client().post("/api/v1/amendments", json=bad).status_code == 422
    assert client(token=None).post("/api/v1/amendments", json=body).status_code == 401
    fake_node.refuses = True
    assert client().post("/api/v1/amendments", json=body).status_code == 409
    assert len(fake_node.submitted) == 1
