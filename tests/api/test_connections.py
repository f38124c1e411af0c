"""Limits on connections to the API: silent connections and those beyond the maximum are closed."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import select
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import ASGIApp

from node.daemon import http_server
from node.daemon.http_server import CONNECTIONS_MAX, FILES, GRACE_S, HEAD_S, Tls, bind, load_tls, make_server, url_of
from tests.api.conftest import TOKEN, FakeNode, make_app
from tests.api.daemon import PATIENCE_S, ROOT, Daemon, wait_for
from tests.api.test_tls import make_certificate
from tests.event_loop import until

SHORT_S = 1.0
CLOSE = "Connection: close\r\n"
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Served:
    """A real API server on a free port, and the connections that a test opens to it."""

    def __init__(self, sock: socket.socket, tls: Tls | None, server: uvicorn.Server) -> None:
        self.server, self.connections = server, server.server_state.connections
        self.url = url_of(sock, tls=tls is not None)
        self.address: tuple[str, int] = sock.getsockname()[:2]
        self.trusting = ssl.create_default_context(cadata=tls.certificate) if tls else None
        if self.trusting:
            self.trusting.check_hostname = False
        self.opened: list[asyncio.StreamWriter] = []
        self.failures: list[dict[str, Any]] = []

    async def open(self, sends: bytes = b"", *, tcp_only: bool = False) -> Pair:
        reader, writer = await asyncio.open_connection(*self.address, ssl=None if tcp_only else self.trusting)
        self.opened.append(writer)
        writer.write(sends)
        return reader, writer

    async def open_unread(self, sends: bytes) -> Pair:
        """Send requests. The client receives little more than it reads."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, self.address)
        host = "localhost" if self.trusting else None
        pair = await asyncio.open_connection(sock=sock, ssl=self.trusting, server_hostname=host, limit=2**12)
        self.opened.append(pair[1])
        pair[1].write(sends)
        return pair

    async def hang_up(self) -> None:
        for writer in self.opened:
            writer.transport.abort()
        await asyncio.sleep(0.05)

    def http(self) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        verify = self.trusting or False
        return httpx.AsyncClient(base_url=self.url, verify=verify, headers=headers, trust_env=False, timeout=PATIENCE_S)


@asynccontextmanager
async def serving(app: ASGIApp, tls: Tls | None, *, most: int = 64, head_s: float = SHORT_S) -> AsyncIterator[Served]:
    """Run the server. Asserts that it ends within twice the grace period even if silent connections are open."""
    with bind("127.0.0.1", 0, connections_max=most) as sock:
        server = make_server(app, tls, head_s=head_s)
        running = asyncio.create_task(server.serve(sockets=[sock]))
        served = Served(sock, tls, server)
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: served.failures.append(context))
        try:
            yield served
        finally:
            server.should_exit = True
            await asyncio.wait_for(running, 2 * GRACE_S)
            await served.hang_up()
    assert served.failures == []


@pytest.fixture(params=["http", "https"])
def tls(request: pytest.FixtureRequest, tmp_path: Path) -> Tls | None:
    if request.param == "http":
        return None
    cert, key = make_certificate(tmp_path)
    return load_tls(str(cert), str(key))


def asking(path: str, verb: str = "GET", more: str = "") -> bytes:
    return f"{verb} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n{more}\r\n".encode()


async def answer(pair: Pair) -> int:
    """Read a response to its end and return its status code."""
    head = await asyncio.wait_for(pair[0].readuntil(b"\r\n\r\n"), PATIENCE_S)
    length = int(head.lower().partition(b"content-length: ")[2].split()[0])
    await asyncio.wait_for(pair[0].readexactly(length), PATIENCE_S)
    return int(head.split()[1])


async def ended_at(pair: Pair) -> float:
    """Wait until the server closes the connection. Returns the time on the monotonic clock."""
    with suppress(ConnectionError):
        assert await asyncio.wait_for(pair[0].read(), PATIENCE_S) == b""
    return time.monotonic()


async def drip(pair: Pair) -> None:
    """Send single bytes more often than any idle timeout, but never a complete request head."""
    while True:
        pair[1].write(b"x")
        await asyncio.sleep(SHORT_S / 4)


def test_server_closes_connections_that_send_no_complete_request(app: ASGIApp, tls: Tls | None) -> None:
    async def main() -> None:
        async with serving(app, tls) as served:
            refused = asking("/livez", "POST", "Origin: http://evil.example\r\nContent-Length: 9999\r\n")
            began_at = time.monotonic()
            silent = {
                "nothing": await served.open(),
                "nothing, not even TLS": await served.open(tcp_only=True),
                "half a head": await served.open(b"GET / HT"),
                "a head that drips": await served.open(b"GET /"),
                "half a head after an answer": await served.open(asking("/livez")),
                "a body that drips after its refusal": await served.open(refused),
            }
            assert await answer(silent["half a head after an answer"]) == 200
            silent["half a head after an answer"][1].write(b"GET / HT")
            assert await answer(silent["a body that drips after its refusal"]) == 403
            dripping = [asyncio.create_task(drip(pair)) for name, pair in silent.items() if "drips" in name]
            ends = await asyncio.gather(*map(ended_at, silent.values()))
            for one in dripping:
                one.cancel()
            seconds = {name: end - began_at for name, end in zip(silent, ends, strict=True)}
            assert min(seconds.values()) >= SHORT_S and max(seconds.values()) < SHORT_S + 3, seconds

    asyncio.run(main())


def test_event_streams_uploads_and_active_connections_outlive_the_idle_timeout(
    app: ASGIApp, tls: Tls | None, fake_node: FakeNode
) -> None:
    async def upload(pair: Pair) -> int:
        for byte in b'{"for_s": 9}':
            pair[1].write(bytes([byte]))
            await asyncio.sleep(SHORT_S / 4)
        return await answer(pair)

    async def main() -> None:
        async with serving(app, tls) as served, served.http() as http, http.stream("GET", "/api/v1/events") as stream:
            lines = stream.aiter_lines()
            assert (await anext(lines)).startswith("retry")
            more = "Content-Type: application/json\r\nContent-Length: 12\r\n"
            uploading = asyncio.create_task(upload(await served.open(asking("/api/v1/actions/pause", "POST", more))))
            used = await served.open()
            for _ in range(8):
                used[1].write(asking("/api/v1/version"))
                assert await answer(used) == 200
                await asyncio.sleep(SHORT_S / 4)
            assert await uploading == 202
            fake_node.board.update_settings("anew", {})
            while not (await anext(lines)).startswith("data"):
                pass
            fake_node.board.close()

    asyncio.run(main())


async def stream_from(served: Served) -> Pair:
    """Open an event stream, which is a request in progress."""
    pair = await served.open(asking("/api/v1/events", more=CLOSE))
    assert b" 200 " in await asyncio.wait_for(pair[0].readuntil(b"\r\n\r\n"), PATIENCE_S)
    return pair


def test_a_connection_beyond_the_maximum_replaces_the_one_that_is_idle_for_longest(
    app: ASGIApp, tls: Tls | None, fake_node: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with serving(app, tls, most=8, head_s=PATIENCE_S) as served:
            stream = await stream_from(served)
            used = await served.open(asking("/livez"))
            assert await answer(used) == 200
            silent = [await served.open() for _ in range(6)]
            used[1].write(asking("/livez"))
            assert await answer(used) == 200
            late = [await served.open(asking("/livez")) for _ in range(3)]
            assert [await answer(one) for one in late] == [200] * 3
            await asyncio.wait_for(asyncio.gather(*map(ended_at, silent[:3])), PATIENCE_S / 4)
            for one in (*silent[3:], used, *late):
                one[1].write(asking("/livez"))
                assert await answer(one) == 200
            fake_node.board.close()
            assert b"event: status" in await asyncio.wait_for(stream[0].read(), PATIENCE_S)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert len([text for text in caplog.messages if "8 open connections" in text]) == 1


def test_connections_are_closed_at_once_while_all_others_have_requests(
    app: ASGIApp, tls: Tls | None, fake_node: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with serving(app, tls, most=8, head_s=PATIENCE_S) as served:
            streams = [await stream_from(served) for _ in range(8)]
            beyond = [await served.open(tcp_only=True) for _ in range(30)]
            await asyncio.wait_for(asyncio.gather(*map(ended_at, beyond)), PATIENCE_S / 4)
            for _, writer in streams[:3]:
                writer.transport.abort()
            await asyncio.sleep(0.1)
            for _ in range(20):
                async with served.http() as another:
                    assert (await another.get("/livez")).status_code == 200
            fake_node.board.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert len([text for text in caplog.messages if "8 open connections" in text]) == 1


def test_clients_that_do_not_read_are_disconnected(app: ASGIApp, tls: Tls | None) -> None:
    """With one request, with many at once, and with a last one after which the server closes."""

    async def main() -> None:
        async with serving(app, tls) as served:
            for sends in (
                60 * asking("/openapi.json"),
                300 * asking("/livez") + 60 * asking("/openapi.json"),
                60 * asking("/openapi.json") + asking("/openapi.json", more=CLOSE),
            ):
                await served.open_unread(sends)
            await asyncio.sleep(SHORT_S / 2)
            assert len(served.connections) == 3
            began_at = time.monotonic()
            while served.connections:
                assert time.monotonic() - began_at < 6 * SHORT_S
                await asyncio.sleep(0.05)

    asyncio.run(main())


def test_a_slow_client_gets_its_whole_answer(app: ASGIApp, tls: Tls | None) -> None:
    async def main() -> None:
        async with serving(app, tls) as served:
            reader, _ = await served.open_unread(30 * asking("/openapi.json") + asking("/livez", more=CLOSE))
            found, began_at = b"", time.monotonic()
            while read := await reader.read(2**14):
                found += read
                await asyncio.sleep(0.02)
            assert time.monotonic() - began_at > 3 * SHORT_S, len(found)
            assert found.count(b"HTTP/1.1 200") == 31

    asyncio.run(main())


@pytest.mark.parametrize(
    ("host", "caller"),
    [
        ("192.0.2.7", "192.0.2.7"), ("::ffff:192.0.2.7", "192.0.2.7"), ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"), ("127.0.0.1", ""), ("::1", ""), ("::ffff:127.0.0.1", ""),
    ],
)  # fmt: skip
def test_limits_count_an_ipv6_network_as_one_caller(host: str, caller: str) -> None:
    assert http_server._caller(host) == caller


def test_some_connections_are_reserved_for_callers_on_this_machine(
    fake_node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_is_loopback", lambda host: host == "127.0.0.1")

    async def main() -> None:
        async with serving(make_app(fake_node), None, most=16, head_s=PATIENCE_S) as served:
            for number in range(2, 7):
                for _ in range(4):
                    reader, writer = await connect_from(served, f"127.0.0.{number}")
                    writer.write(asking("/api/v1/events"))
                    with suppress(asyncio.IncompleteReadError, ConnectionError):
                        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
            assert len(served.connections) == 15
            reader, writer = await connect_from(served, "127.0.0.1")
            writer.write(asking("/api/v1/status"))
            assert await answer((reader, writer)) == 200
            fake_node.board.close()

    asyncio.run(main())


def test_one_address_cannot_use_up_the_connections_of_the_others(
    fake_node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_is_loopback", lambda host: host == "127.0.0.1")

    async def main() -> None:
        async with serving(make_app(fake_node), None, most=16) as served:
            silent = [await connect_from(served, "127.0.0.2") for _ in range(12)]
            await until(lambda: sum(one[0].at_eof() for one in silent) >= 8)
            await asyncio.sleep(0.1)
            assert sum(one[0].at_eof() for one in silent) == 8, "a quarter of 16 connections stays open"
            for source in ("127.0.0.3", "127.0.0.1"):
                reader, writer = await connect_from(served, source)
                writer.write(asking("/api/v1/status"))
                assert await answer((reader, writer)) == 200

    asyncio.run(main())


async def connect_from(served: Served, address: str) -> Pair:
    pair = await asyncio.open_connection(*served.address, local_addr=(address, 0))
    served.opened.append(pair[1])
    return pair


def test_node_answers_its_owner_and_closes_silent_connections_when_too_many_are_open(
    tmp_path: Path,
) -> None:
    with Daemon(tmp_path) as daemon, ExitStack() as opened:
        daemon.ready().until_phase("training")
        url = httpx.URL(json.loads((tmp_path / "api.json").read_text())["url"])
        silent = [socket.create_connection((url.host, url.port or 0)) for _ in range(CONNECTIONS_MAX + 50)]
        for one in silent:
            opened.enter_context(one)
        wait_for(lambda: len(select.select(silent, [], [], 0)[0]) >= 50, HEAD_S / 2)

        assert httpx.get(f"{url}/livez", trust_env=False).status_code == 200
        wait_for(lambda: len(select.select(silent, [], [], 0)[0]) == len(silent))
        assert daemon.terminate()[0] == 0


FILES_CODE = """
import resource
from node.daemon.http_server import bind
bind("127.0.0.1", 0).close()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("soft", "hard", "then"), [(256, 4096, 4096), (256, 20000, FILES), (9000, 20000, 9000)])
def test_server_raises_its_limit_of_open_files_up_to_a_maximum(soft: int, hard: int, then: int) -> None:
    if hard > resource.getrlimit(resource.RLIMIT_NOFILE)[1]:
        pytest.skip("this machine allows fewer files")
    limits = f"ulimit -S -n {soft} && ulimit -H -n {hard} && exec {sys.executable} -c '{FILES_CODE}'"
    done = subprocess.run(["bash", "-c", limits], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == [str(then), str(hard)], done.stderr
