"""What each endpoint answers, in process."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from node.api.configure import hide_secrets
from node.api.events import stream
from node.api.seam import SERIES
from node.status import Member, Outcome, PeerRow, Phase, PhaseState, Report, RoundRecord, RunInfo, Status
from tests.api.conftest import ClientMaker, StillNode


def get(client: ClientMaker, path: str) -> Any:
    async def main() -> Any:
        async with client() as http:
            answer = await http.get(path)
            assert answer.status_code == 200, answer.text
            return answer.json()

    return asyncio.run(main())


def state(phase: Phase) -> PhaseState:
    return PhaseState(phase=phase, code=phase.value, reason="Because.", since="2026-01-01T00:00:00Z")


def test_status_is_the_whole_snapshot(client: ClientMaker, still_node: StillNode) -> None:
    still_node.board.told(Report(run=RunInfo(round=4)))
    status = get(client, "/api/v1/status")
    assert Status.model_validate(status) == still_node.board.status
    assert (status["schema_version"], status["run"]["round"]) == (1, 4)


def test_swarm_and_rounds_come_in_objects(client: ClientMaker, still_node: StillNode) -> None:
    row = PeerRow(
        peer_id="Qm1", short_id="1", name="n", phase="training", round=2, tokens_per_second=1.5,
        transport="relay", version="1", state_digest="ab", last_seen_s=0.1,
    )  # fmt: skip
    still_node.board.told(Report(swarm=(row,)))
    for number in range(5):
        still_node.board.add_round(RoundRecord(round=number, outcome=Outcome.COMPLETE))
    assert get(client, "/api/v1/swarm") == {"peers": [row.model_dump()]}
    assert [r["round"] for r in get(client, "/api/v1/rounds?limit=2")["rounds"]] == [4, 3]


def test_logs_by_level_and_position(client: ClientMaker, still_node: StillNode) -> None:
    for number, level in enumerate((logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.INFO)):
        still_node.board.add_log(logging.LogRecord("node.x", level, "", 0, f"m{number}", (), None))

    def messages(query: str) -> tuple[list[str], int]:
        logs = get(client, f"/api/v1/logs{query}")
        return [record["message"] for record in logs["records"]], logs["last_id"]

    assert messages("") == (["m0", "m1", "m2", "m3", "m4"], 5)
    assert messages("?limit=2") == (["m3", "m4"], 5)
    assert messages("?after=1&limit=2") == (["m1", "m2"], 3)
    assert messages("?level=warning") == (["m2", "m3"], 4)
    assert messages("?after=5") == ([], 5)


def test_logs_are_searched_in_any_case(client: ClientMaker, still_node: StillNode) -> None:
    for name, text in (("node.Alpha", "one"), ("node.b", "ALPHABET <b>"), ("node.b", "two")):
        still_node.board.add_log(logging.LogRecord(name, logging.INFO, "", 0, text, (), None))
    records = get(client, "/api/v1/logs?search=alpha")["records"]
    assert [(r["message"], r["phase"]) for r in records] == [("one", "starting"), ("ALPHABET <b>", "starting")]
    assert get(client, "/api/v1/logs?search=%25") == {"records": [], "last_id": 0}


def row(round_: int, digest: str, name: str = "n") -> PeerRow:
    return PeerRow(
        peer_id=f"Qm{round_}{digest}", short_id="1", name=name, phase="training", round=round_, tokens_per_second=1.5,
        transport="relay", version="1", state_digest=digest, last_seen_s=0.1,
    )  # fmt: skip


def test_whose_state_agrees(client: ClientMaker, still_node: StillNode) -> None:
    board = still_node.board
    for number in range(5):
        board.add_round(RoundRecord(round=number, outcome=Outcome.COMPLETE, state_digest=f"d{number}"))
    board.add_round(RoundRecord(round=4, outcome=Outcome.SKIPPED, dropped=2))
    board.add_round(RoundRecord(round=3, outcome=Outcome.COMPLETE, state_digest="e3"))
    rows = (row(2, "d2"), row(2, "x"), row(3, "d3"), row(3, "e3"), row(4, "d4"), row(9, "d9"), row(1, ""), row(5, "m"))
    board.told(Report(run=RunInfo(round=5, state_digest="m"), swarm=rows))
    agrees = [peer["digest_agrees"] for peer in get(client, "/api/v1/swarm")["peers"]]
    assert agrees == [True, False, False, True, None, None, None, True]


def test_hostile_text_stays_text(client: ClientMaker, still_node: StillNode) -> None:
    name = "<script>alert(1)</script>"
    member = Member(peer_id="Qm1", name=name, weight=5, included=True)
    still_node.board.told(Report(swarm=(row(1, "d", name),)))
    still_node.board.add_round(RoundRecord(round=1, outcome=Outcome.COMPLETE, head="h", members=(member,)))
    still_node.board.add_log(logging.LogRecord("node.x", logging.INFO, "", 0, name, (), None))

    async def main() -> None:
        async with client() as http:
            for path in ("swarm", "rounds", "contributions", "logs"):
                answer = await http.get(f"/api/v1/{path}")
                assert name in json.dumps(answer.json()), path
                assert answer.headers["content-type"] == "application/json"
                assert answer.headers["x-content-type-options"] == "nosniff"
            wrong = await http.get(f"/api/v1/history?series={name}")
            assert (wrong.status_code, wrong.headers["content-type"]) == (422, "application/problem+json")

    asyncio.run(main())


def test_history_and_contributions(client: ClientMaker, still_node: StillNode) -> None:
    members = (Member(peer_id="Qm123456789", name="me", weight=5, included=True),)
    still_node.board.told(Report(peer_id="Qm123456789"))
    still_node.board.add_round(RoundRecord(round=3, outcome=Outcome.COMPLETE, head="h", members=members))
    assert get(client, "/api/v1/contributions") == {
        "contributions": [
            {
                "peer_id": "Qm123456789", "short_id": "456789", "name": "me", "rounds": 1, "tokens": 5,
                "last_round": 3, "this_node": True,
            }
        ]
    }  # fmt: skip
    found = get(client, "/api/v1/history?series=training_loss,%20swarm_peers&points=7")
    assert set(found["series"]) == {"training_loss", "swarm_peers"}
    assert set(get(client, "/api/v1/history")["series"]) == set(SERIES)


@pytest.mark.parametrize(
    "query",
    ["points=0", "points=2001", "points=x", "since=yesterday", "since=2026-01-01T00:00:00", "series=nonsense",
     "series=" + "a," * 900],
)  # fmt: skip
def test_history_refuses_what_it_does_not_know(client: ClientMaker, query: str) -> None:
    async def main() -> None:
        async with client() as http:
            answer = await http.get(f"/api/v1/history?{query}")
            assert answer.status_code == 422
            assert "nonsense" not in query or "training_loss" in answer.text

    asyncio.run(main())


@pytest.mark.parametrize("since", ["0001-01-01T00:00:00%2B14:00", "9999-12-31T23:59:59-14:00", "1e9", "-1e10"])
def test_history_of_any_time_is_answered(client: ClientMaker, since: str) -> None:
    async def main() -> None:
        async with client() as http:
            assert (await http.get(f"/api/v1/history?since={since}")).status_code in (200, 422)

    asyncio.run(main())


def test_version_and_config(client: ClientMaker) -> None:
    assert get(client, "/api/v1/version")["torch"] == "2.13"
    answer = get(client, "/api/v1/config")
    assert answer["config"]["api"]["allowed_hosts"] == ["node.example"]
    assert answer["config"]["swarm"]["listen"]
    assert answer["origins"] == {"api.allowed_hosts": "file"}


def test_secrets_are_hidden() -> None:
    shown = hide_secrets({"a": {"api_token": "x", "total_tokens": 5, "tokenizer": "bytes"}, "password": ""})
    assert shown == {"a": {"api_token": "(hidden)", "total_tokens": 5, "tokenizer": "bytes"}, "password": ""}


@pytest.mark.parametrize("phase", list(Phase))
def test_health(client: ClientMaker, still_node: StillNode, phase: Phase) -> None:
    ready = phase in (Phase.TRAINING, Phase.SYNCING, Phase.PAUSED, Phase.DOWNLOADING)
    still_node.board.decide(state(phase))

    async def codes() -> tuple[int, int]:
        async with client(token=None) as http:
            return (await http.get("/livez")).status_code, (await http.get("/readyz")).status_code

    assert asyncio.run(codes()) == (200, 200 if ready else 503)
    still_node.alive = False
    assert asyncio.run(codes()) == (503, 503)


def post(client: ClientMaker, path: str, body: Any = None) -> tuple[int, Any]:
    async def main() -> tuple[int, Any]:
        async with client() as http:
            answer = await http.post(path, json=body) if body is not None else await http.post(path)
            if answer.status_code >= 400:
                assert answer.headers["content-type"] == "application/problem+json"
            return answer.status_code, answer.json()

    return asyncio.run(main())


def test_actions(client: ClientMaker, still_node: StillNode) -> None:
    assert post(client, "/api/v1/actions/pause", {"for_s": 60}) == (202, {"phase": "paused"})
    assert post(client, "/api/v1/actions/pause", {}) == (202, {"phase": "paused"})
    for action in ("pause", "resume", "drain", "leave"):
        assert post(client, f"/api/v1/actions/{action}")[0] == 202
    assert [a for a, _ in still_node.acted] == ["pause", "pause", "pause", "resume", "drain", "leave"]
    assert still_node.acted[0][1].for_s == 60
    still_node.refuse = True
    code, problem = post(client, "/api/v1/actions/pause")
    assert (code, problem["code"], problem["detail"]) == (409, "not_allowed", "The node is leaving.")


@pytest.mark.parametrize(
    "body",
    [
        {"for_s": 0},
        {"for_s": 60, "after_round": 3},
        {"until": "2030-01-01T00:00:00"},
        {"until": "soon"},
        {"after_round": -1},
        {"for": 60},
        [1],
    ],
)
def test_pause_refuses_bad_orders(client: ClientMaker, still_node: StillNode, body: Any) -> None:
    code, problem = post(client, "/api/v1/actions/pause", body)
    assert code == 422
    assert problem["faults"]
    assert still_node.acted == []


@pytest.mark.parametrize(
    ("verb", "path", "code"),
    [
        ("GET", "/no/such", 404),
        ("GET", "/api/v1/status/", 404),
        ("PUT", "/api/v1/status", 405),
        ("GET", "/api/v1/actions/pause", 405),
        ("GET", "/api/v1/rounds?limit=0", 422),
        ("GET", "/api/v1/logs?level=loud", 422),
    ],
)
def test_errors_are_problems(client: ClientMaker, verb: str, path: str, code: int) -> None:
    async def main() -> None:
        async with client() as http:
            answer = await http.request(verb, path)
            assert (answer.status_code, answer.headers["content-type"]) == (code, "application/problem+json")
            assert answer.json()["status"] == code

    asyncio.run(main())


def test_our_own_fault_is_a_problem_without_details(
    client: ClientMaker, still_node: StillNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("inner secret")

    monkeypatch.setattr(still_node, "view", fail)

    async def main() -> None:
        async with client() as http:
            answer = await http.get("/api/v1/status")
            assert (answer.status_code, answer.headers["content-type"]) == (500, "application/problem+json")
            assert "secret" not in answer.text
            assert answer.headers["x-frame-options"] == "DENY"

    asyncio.run(main())


def test_openapi_document_is_whole(client: ClientMaker) -> None:
    document = get(client, "/openapi.json")
    text = json.dumps(document)
    for part in text.split('"#/components/schemas/')[1:]:
        assert part.split('"')[0] in document["components"]["schemas"]
    for path, item in document["paths"].items():
        for verb, operation in item.items():
            assert operation.get("description"), (verb, path)
            assert any(code.startswith("2") for code in operation["responses"])
            assert "application/problem+json" in operation["responses"]["401"]["content"]
            bodies = [operation["requestBody"]] if "requestBody" in operation else []
            for described in [*bodies, *(r for c, r in operation["responses"].items() if c.startswith("2"))]:
                for kind, content in described.get("content", {}).items():
                    has_example = "example" in content or content.get("schema", {}).get("examples")
                    assert has_example or kind == "application/zip", (verb, path, kind)
            for parameter in operation.get("parameters", ()):
                assert parameter.get("description"), (verb, path, parameter["name"])


def test_events_start_full_are_paced_and_end_with_the_node(still_node: StillNode) -> None:
    async def main() -> None:
        board = still_node.board
        events = stream(still_node, interval_s=0.2, keep_alive_s=0.3)
        loop = asyncio.get_running_loop()
        assert await anext(events) == b"retry: 2000\n\n"
        first = await anext(events)
        assert first.startswith(b"event: status\ndata: {")
        assert first.endswith(b"}\n\n")
        began_s = loop.time()
        for number in range(3):
            board.told(Report(run=RunInfo(round=number)))
        second = await anext(events)
        assert loop.time() - began_s >= 0.19
        assert json.loads(second.split(b"data: ")[1])["run"]["round"] == 2
        assert await anext(events) == b": keep-alive\n\n"
        board.decide(state(Phase.STOPPED))
        board.close()
        last = await anext(events)
        assert json.loads(last.split(b"data: ")[1])["phase"] == "stopped"
        with pytest.raises(StopAsyncIteration):
            await anext(events)

    asyncio.run(main())
