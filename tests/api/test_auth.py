"""Who may call. The loops go over the OpenAPI document, so a new route is tested the day it is written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.datastructures import Headers

from node.api.app import build_app
from node.api.auth import BODY_BYTES_MAX, FAILURES_MAX, SECURITY_HEADERS, SESSIONS_MAX, Keys, host_name, session_key
from node.api.metrics import Build
from node.api.routes import Served
from tests.api.conftest import BASE, TOKEN, ClientMaker, StillNode

PUBLIC = {"/livez", "/readyz", "/metrics"}
PROBLEM = "application/problem+json"


async def routes(client: ClientMaker) -> list[tuple[str, str]]:
    async with client() as http:
        document = (await http.get("/openapi.json")).json()
    found = [(verb.upper(), path) for path, item in document["paths"].items() for verb in item]
    assert len(found) >= 15
    return found


async def answers(http: httpx.AsyncClient, verb: str, path: str, **more: object) -> httpx.Response:
    answer = await http.request(verb, path, **more)  # type: ignore[arg-type]
    assert answer.headers["content-type"] == PROBLEM, (verb, path, answer.text)
    assert answer.json()["status"] == answer.status_code
    for name, value in SECURITY_HEADERS.items():
        assert answer.headers[name] == value
    return answer


def test_every_route_needs_the_token(client: ClientMaker) -> None:
    async def main() -> None:
        for verb, path in [*await routes(client), ("GET", "/openapi.json"), ("GET", "/no/such"), ("GET", "/docs")]:
            if path in PUBLIC:
                continue
            async with client(token=None) as http:
                # Same origin, so that only the token is missing.
                answer = await answers(http, verb, path, headers={"Sec-Fetch-Site": "same-origin"})
                assert answer.status_code == 401, (verb, path)
                assert "Bearer" in answer.headers["www-authenticate"]
            async with client(token="u" * 43, address="10.0.0.9") as http:
                assert (await answers(http, verb, path)).status_code in (401, 429), (verb, path)

    asyncio.run(main())


def test_every_route_refuses_foreign_hosts(client: ClientMaker) -> None:
    async def main() -> None:
        async with client() as http:
            for verb, path in [*await routes(client), ("GET", "/"), ("GET", "/assets/any.js")]:
                for host in ("evil.example", "localhost.evil.example", "localhost@evil.example", "", "[::1", "10.1.1"):
                    answer = await answers(http, verb, path, headers={"Host": host})
                    assert answer.status_code == 403, (verb, path, host)

    asyncio.run(main())


@pytest.mark.parametrize("bound", ["0.0.0.0", "::"])
def test_bound_to_all_addresses_the_names_are_the_same(still_node: StillNode, client: ClientMaker, bound: str) -> None:
    assert still_node.past is not None
    served = Served(
        still_node, still_node.past, still_node.metrics, still_node.keys, still_node, still_node.config, Build("1")
    )
    transport = httpx.ASGITransport(build_app(served, hosts=[bound]))

    async def main() -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(transport=transport, base_url=BASE, headers=headers) as http:
            assert (await http.get("/api/v1/status")).status_code == 200
            assert (await http.get("/api/v1/status", headers={"Host": "node.example:1"})).status_code == 200
            for verb, path in await routes(client):
                for host in ("evil.example", "192.168.1.7:8080", "0.0.0.0:8080", "[::]:8080"):
                    assert (await answers(http, verb, path, headers={"Host": host})).status_code == 403, (path, host)

    asyncio.run(main())
    assert still_node.acted == []


def test_every_unsafe_route_refuses_foreign_origins(client: ClientMaker, still_node: StillNode) -> None:
    foreign = [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:9999"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "same-origin", "Origin": "http://evil.example"},
        {"Cookie": "a=b"},
        {"Origin": "http://["},
        {"Origin": "http://127.0.0.1:8080]"},
    ]

    async def main() -> None:
        async with client() as http:
            unsafe = [(verb, path) for verb, path in await routes(client) if verb != "GET"]
            assert len(unsafe) >= 6
            for verb, path in unsafe:
                for headers in foreign:
                    assert (await answers(http, verb, path, headers=headers)).status_code == 403, (verb, path, headers)

    asyncio.run(main())
    assert still_node.acted == []


def test_every_route_refuses_large_bodies(client: ClientMaker, still_node: StillNode) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(BODY_BYTES_MAX // 1000 + 2):
            yield b" " * 1000

    async def main() -> None:
        async with client() as http:
            for verb, path in await routes(client):
                answer = await answers(http, verb, path, content=b" " * (BODY_BYTES_MAX + 1))
                assert answer.status_code == 413, (verb, path)
                if verb != "GET":
                    assert (await answers(http, verb, path, content=chunks())).status_code == 413, (verb, path)

    asyncio.run(main())
    assert still_node.acted == []


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:9", "[::1]:8080", "node.example", "[::1]"])
def test_own_hosts_are_let_in(client: ClientMaker, host: str) -> None:
    async def main() -> None:
        async with client() as http:
            assert (await http.get("/api/v1/status", headers={"Host": host})).status_code == 200

    asyncio.run(main())


def test_host_name_reads_what_hosts_look_like() -> None:
    assert host_name("[::1]:80") == "::1"
    assert host_name("A.b:80") == "a.b"
    assert [host_name(bad) for bad in ("", "a/b", "u@a", "a:b", "[::1", "a?b", "a#b")] == [""] * 7


@pytest.mark.parametrize("headers", [{"Sec-Fetch-Site": "same-origin", "Cookie": "a=b"}, {"Origin": BASE}, {}])
def test_own_page_and_command_line_may_act(client: ClientMaker, still_node: StillNode, headers: dict[str, str]) -> None:
    async def main() -> None:
        async with client() as http:
            assert (await http.post("/api/v1/actions/pause", headers=headers)).status_code == 202

    asyncio.run(main())
    assert [action for action, _ in still_node.acted] == ["pause"]


def test_session_from_token_to_farewell(client: ClientMaker, still_node: StillNode) -> None:
    same = {"Sec-Fetch-Site": "same-origin"}

    async def main() -> None:
        async with client() as http:
            opened = await http.post("/api/v1/session")
        cookie = opened.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert "Path=/" in cookie
        browser = {"Cookie": cookie.split(";")[0]}
        async with client(token=None) as http:
            assert (await http.get("/api/v1/status", headers=browser)).status_code == 200
            assert (await http.post("/api/v1/actions/pause", headers=browser)).status_code == 403
            assert (await http.post("/api/v1/actions/pause", headers=browser | same)).status_code == 202
            for more in ({}, {"Authorization": "Basic x"}, {"Authorization": ""}):
                again = await answers(http, "POST", "/api/v1/session", headers=browser | same | more)
                assert again.status_code == 401
            assert (await http.get("/api/v1/status", headers={"Cookie": browser["Cookie"] + "x"})).status_code == 401
            closed = await http.request("DELETE", "/api/v1/session", headers=browser | same)
            assert closed.status_code == 204
            assert "Max-Age=0" in closed.headers["set-cookie"]
            assert (await http.get("/api/v1/status", headers=browser)).status_code == 401

    asyncio.run(main())


@pytest.mark.parametrize(
    "others",
    [
        b'a={"b":1}', b"flag", b"a=x y", b"version=2", b"a=\xfc", b"\xfc=1", b'a="x', b"a=b=c", b"=", b"", b"a=,[]@",
        b"expires=Thu, 01 Jan 1970",
    ],
)  # fmt: skip
def test_cookies_of_other_programs_on_this_host_lock_nobody_out(
    client: ClientMaker, still_node: StillNode, others: bytes
) -> None:
    keys = still_node.keys
    own = f"{keys.cookie_name}={keys.open_session()}".encode()

    async def main() -> None:
        for sent in (
            [others + b"; " + own],
            [own + b"; " + others],
            [others + b";" + own],
            [others, own],
            [own, others],
        ):
            async with client(token=None) as http:
                answer = await http.get("/api/v1/status", headers=[(b"Cookie", one) for one in sent])
                assert answer.status_code == 200, sent

    asyncio.run(main())


def test_of_two_sessions_the_one_for_the_whole_host_counts_and_a_hostile_cookie_costs_no_time() -> None:
    assert session_key(Headers({"cookie": "own=of a path; other=x; own=ours"}), "own") == "ours"
    assert session_key(Headers({"cookie": "other=own; owner=1; own"}), "own") == ""
    assert session_key(Headers({}), "own") is None
    began_s = time.process_time()
    assert session_key(Headers({"cookie": 'a="' + "\\" * 16_000 + '"; own=ours'}), "own") == "ours"
    assert time.process_time() - began_s < 0.05


def test_sessions_end_and_are_bounded() -> None:
    now = [0.0]
    keys = Keys("t" * 43, lambda: now[0])
    first = keys.open_session()
    assert keys.session_fits(first)
    for _ in range(SESSIONS_MAX):
        newest = keys.open_session()
    assert not keys.session_fits(first)
    assert keys.session_fits(newest)
    now[0] = 8 * 86400.0
    assert not keys.session_fits(newest)
    assert keys.cookie_name != Keys("u" * 43, lambda: 0.0).cookie_name


def test_wrong_tokens_are_throttled_and_the_right_one_never(client: ClientMaker) -> None:
    async def main() -> None:
        async with client(token="wrong") as http:
            codes = [(await answers(http, "GET", "/api/v1/status")).status_code for _ in range(FAILURES_MAX + 2)]
        assert codes == [401] * FAILURES_MAX + [429] * 2
        async with client() as http:
            assert (await http.get("/api/v1/status")).status_code == 200
        async with client(token="wrong", address="127.0.0.2") as http:
            assert (await http.get("/api/v1/status")).status_code == 401

    asyncio.run(main())


def test_throttle_forgets_after_its_window() -> None:
    now = [0.0]
    keys = Keys("t" * 43, lambda: now[0])
    assert [keys.throttled("a") for _ in range(FAILURES_MAX + 1)] == [False] * FAILURES_MAX + [True]
    now[0] = 61.0
    assert not keys.throttled("a")


def test_metrics_are_open_on_loopback_only(client: ClientMaker) -> None:
    async def code(token: str | None, address: str, **headers: str) -> int:
        async with client(token=token, address=address) as http:
            return (await http.get("/metrics", headers=headers)).status_code

    async def main() -> None:
        assert await code(None, "127.0.0.1") == 200
        assert await code(None, "::ffff:127.0.0.1") == 200
        assert await code(None, "10.0.0.1") == 401
        assert await code("t" * 43, "10.0.0.1") == 200
        # A proxy on this machine speaks for somebody elsewhere.
        assert await code(None, "127.0.0.1", **{"X-Forwarded-For": "10.0.0.1"}) == 401

    asyncio.run(main())
