"""Who may call the API. The tests take the routes from the OpenAPI document, so they include every new route."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from node.api.auth import BODY_BYTES_MAX, FAILURES_MAX, SECURITY_HEADERS, SESSIONS_MAX, Keys, host_name, session_key
from tests.api.conftest import BASE, TOKEN, ClientMaker, FakeNode, HttpClient, make_app

PUBLIC = {"/livez", "/readyz", "/metrics"}
SAME_ORIGIN = {"Sec-Fetch-Site": "same-origin"}
STATUS = "/api/v1/status"
PAUSE = "/api/v1/actions/pause"


def routes(client: ClientMaker) -> list[tuple[str, str]]:
    document = client().get("/openapi.json").json()
    found = [(method.upper(), path) for path, item in document["paths"].items() for method in item]
    assert len(found) >= 15
    return found


def problem(http: HttpClient, method: str, path: str, **options: Any) -> httpx.Response:
    """Return the response. Asserts that it is a problem document (RFC 9457) with the security headers."""
    response = http.request(method, path, **options)
    assert response.headers["content-type"] == "application/problem+json", (method, path, response.text)
    assert response.json()["status"] == response.status_code
    for name, value in SECURITY_HEADERS.items():
        assert response.headers[name] == value
    return response


def test_every_route_that_is_not_public_needs_the_token(client: ClientMaker) -> None:
    for method, path in [*routes(client), ("GET", "/openapi.json"), ("GET", "/no/such"), ("GET", "/docs")]:
        if path not in PUBLIC:
            response = problem(client(token=None), method, path, headers=SAME_ORIGIN)
            assert response.status_code == 401, (method, path)
            assert "Bearer" in response.headers["www-authenticate"]
            wrong = problem(client(token="u" * 43, address="10.0.0.9"), method, path)
            assert wrong.status_code in (401, 429), (method, path)


def test_every_route_refuses_requests_with_a_foreign_host_name(client: ClientMaker) -> None:
    hosts = ("evil.example", "localhost.evil.example", "localhost@evil.example", "", "[::1", "10.1.1")
    for method, path in [*routes(client), ("GET", "/"), ("GET", "/assets/any.js")]:
        for host in hosts:
            assert problem(client(), method, path, headers={"Host": host}).status_code == 403, (method, path, host)


@pytest.mark.parametrize("bound", ["0.0.0.0", "::"])
def test_api_bound_to_all_addresses_still_refuses_foreign_host_names(
    fake_node: FakeNode, client: ClientMaker, bound: str
) -> None:
    http = HttpClient(make_app(fake_node, hosts=[bound]), TOKEN, "127.0.0.1")
    assert http.get(STATUS).status_code == 200
    assert http.get(STATUS, headers={"Host": "node.example:1"}).status_code == 200
    for method, path in routes(client):
        for host in ("evil.example", "192.168.1.7:8080", "0.0.0.0:8080", "[::]:8080"):
            assert problem(http, method, path, headers={"Host": host}).status_code == 403, (path, host)
    assert fake_node.acted == []


def test_every_route_that_changes_the_node_refuses_foreign_origins(client: ClientMaker, fake_node: FakeNode) -> None:
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
    unsafe = [(method, path) for method, path in routes(client) if method != "GET"]
    assert len(unsafe) >= 6
    for method, path in unsafe:
        for headers in foreign:
            assert problem(client(), method, path, headers=headers).status_code == 403, (method, path, headers)
    assert fake_node.acted == []


def test_every_route_refuses_bodies_above_the_size_limit(client: ClientMaker, fake_node: FakeNode) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(BODY_BYTES_MAX // 1000 + 2):
            yield b" " * 1000

    for method, path in routes(client):
        assert problem(client(), method, path, content=b" " * (BODY_BYTES_MAX + 1)).status_code == 413, (method, path)
        if method != "GET":
            assert problem(client(), method, path, content=chunks()).status_code == 413, (method, path)
    assert fake_node.acted == []


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:9", "[::1]:8080", "node.example", "[::1]"])
def test_api_accepts_loopback_and_configured_host_names(client: ClientMaker, host: str) -> None:
    assert client().get(STATUS, headers={"Host": host}).status_code == 200


def test_host_name_parses_the_host_header() -> None:
    assert host_name("[::1]:80") == "::1"
    assert host_name("A.b:80") == "a.b"
    assert [host_name(bad) for bad in ("", "a/b", "u@a", "a:b", "[::1", "a?b", "a#b")] == [""] * 7


@pytest.mark.parametrize("headers", [{"Sec-Fetch-Site": "same-origin", "Cookie": "a=b"}, {"Origin": BASE}, {}])
def test_dashboard_and_command_line_can_pause_the_node(
    client: ClientMaker, fake_node: FakeNode, headers: dict[str, str]
) -> None:
    assert client().post(PAUSE, headers=headers).status_code == 202
    assert [action for action, _ in fake_node.acted] == ["pause"]


def test_session_cookie_replaces_the_token_until_the_session_is_closed(client: ClientMaker) -> None:
    cookie = client().post("/api/v1/session").headers["set-cookie"]
    assert all(part in cookie for part in ("HttpOnly", "SameSite=strict", "Path=/"))
    browser = {"Cookie": cookie.split(";")[0]}
    http = client(token=None)
    assert http.get(STATUS, headers=browser).status_code == 200
    assert http.post(PAUSE, headers=browser).status_code == 403
    assert http.post(PAUSE, headers=browser | SAME_ORIGIN).status_code == 202
    for more in ({}, {"Authorization": "Basic x"}, {"Authorization": ""}):
        assert problem(http, "POST", "/api/v1/session", headers=browser | SAME_ORIGIN | more).status_code == 401
    assert http.get(STATUS, headers={"Cookie": browser["Cookie"] + "x"}).status_code == 401
    closed = http.request("DELETE", "/api/v1/session", headers=browser | SAME_ORIGIN)
    assert closed.status_code == 204
    assert "Max-Age=0" in closed.headers["set-cookie"]
    assert http.get(STATUS, headers=browser).status_code == 401


def test_session_cookie_is_for_https_only_behind_a_proxy_with_tls(fake_node: FakeNode) -> None:
    """A browser drops a cookie for https that comes over http, so an owner on the plain port could never log in."""
    api = fake_node.config.api.model_copy(update={"public_url": "https://nas.example"})
    fake_node.config = fake_node.config.model_copy(update={"api": api})
    http = HttpClient(make_app(fake_node), TOKEN, "127.0.0.1")
    for host, scheme in (("nas.example", "https"), ("nas.example:8080", "http"), ("127.0.0.1:8080", "http")):
        headers = {"Host": host, "Origin": f"{scheme}://{host}"}
        cookie = http.post("/api/v1/session", headers=headers).headers["set-cookie"]
        assert ("; secure" in cookie.lower()) == (scheme == "https")


@pytest.mark.parametrize(
    "other",
    [
        b'a={"b":1}', b"flag", b"a=x y", b"version=2", b"a=\xfc", b"\xfc=1", b'a="x', b"a=b=c", b"=", b"", b"a=,[]@",
        b"expires=Thu, 01 Jan 1970",
    ],
)  # fmt: skip
def test_cookies_of_other_programs_do_not_prevent_login(client: ClientMaker, fake_node: FakeNode, other: bytes) -> None:
    keys = fake_node.keys
    own = f"{keys.cookie_name}={keys.open_session()}".encode()
    for sent in ([other + b"; " + own], [own + b"; " + other], [other + b";" + own], [other, own], [own, other]):
        response = client(token=None).get(STATUS, headers=[(b"Cookie", cookie) for cookie in sent])
        assert response.status_code == 200, sent


def test_last_session_cookie_counts_and_a_hostile_cookie_is_parsed_quickly() -> None:
    assert session_key(Headers({"cookie": "own=of a path; other=x; own=ours"}), "own") == "ours"
    assert session_key(Headers({"cookie": "other=own; owner=1; own"}), "own") == ""
    assert session_key(Headers({}), "own") is None
    began_s = time.process_time()
    assert session_key(Headers({"cookie": 'a="' + "\\" * 16_000 + '"; own=ours'}), "own") == "ours"
    assert time.process_time() - began_s < 0.05


def test_sessions_expire_and_their_number_is_limited() -> None:
    now = [0.0]
    keys = Keys(TOKEN, lambda: now[0])
    first = keys.open_session()
    assert keys.is_session(first)
    for _ in range(SESSIONS_MAX):
        newest = keys.open_session()
    assert not keys.is_session(first)
    assert keys.is_session(newest)
    now[0] = 8 * 86400.0
    assert not keys.is_session(newest)
    assert keys.cookie_name != Keys("u" * 43, lambda: 0.0).cookie_name


def test_wrong_tokens_are_throttled_but_the_right_token_is_not(client: ClientMaker) -> None:
    codes = [problem(client(token="wrong"), "GET", STATUS).status_code for _ in range(FAILURES_MAX + 2)]
    assert codes == [401] * FAILURES_MAX + [429] * 2
    assert client().get(STATUS).status_code == 200
    assert client(token="wrong", address="127.0.0.2").get(STATUS).status_code == 401


def test_throttling_of_wrong_tokens_ends_after_a_minute() -> None:
    now = [0.0]
    keys = Keys(TOKEN, lambda: now[0])
    assert [keys.record_failure("a") for _ in range(FAILURES_MAX + 1)] == [False] * FAILURES_MAX + [True]
    now[0] = 61.0
    assert not keys.record_failure("a")


@pytest.mark.parametrize(
    ("token", "address", "headers", "status"),
    [
        (None, "127.0.0.1", {}, 200),
        (None, "::ffff:127.0.0.1", {}, 200),
        (None, "10.0.0.1", {}, 401),
        (TOKEN, "10.0.0.1", {}, 200),
        # Proxies on this machine for remote callers.
        (None, "127.0.0.1", {"X-Forwarded-For": "10.0.0.1"}, 401),
        (None, "127.0.0.1", {"X-Real-IP": "10.0.0.1"}, 401),
        (None, "127.0.0.1", {"Via": "1.1 nas"}, 401),
    ],
)
def test_metrics_are_public_on_loopback_only(
    client: ClientMaker, token: str | None, address: str, headers: dict[str, str], status: int
) -> None:
    assert client(token, address).get("/metrics", headers=headers).status_code == status


def test_metrics_are_not_public_under_the_name_of_a_proxy(fake_node: FakeNode) -> None:
    """Some proxies pass only the Host on, so that all callers seem to be on this machine."""
    api = fake_node.config.api.model_copy(update={"public_url": "https://nas.example"})
    fake_node.config = fake_node.config.model_copy(update={"api": api})
    for token, status in ((None, 401), (TOKEN, 200)):
        http = HttpClient(make_app(fake_node), token, "127.0.0.1")
        assert http.get("/metrics", headers={"Host": "nas.example"}).status_code == status
