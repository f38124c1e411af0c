"""Messages to the owner reach a local receiver once, and a bad receiver holds up nothing."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from node.config.schema import NotifyConfig
from node.daemon import notifier
from node.daemon.notifier import GONE_S, SETTLE_S, WAITS, WAITS_S, Notifier, alerts_of
from node.daemon.supervisor import MEMORY_LIMIT
from node.status import Notice, Phase
from node.training.hub import NO_ANSWER
from tests.unit.test_terminal import make_status

DISK = Notice(code="quota", text="The disk is full: free some space.")


class Receiver(ThreadingHTTPServer):
    """Keeps what it receives. Waits before it answers, if the test wants it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.got: list[tuple[str, bytes]] = []
        self.delay_s, self.code = 0.0, 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/topic"


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.headers.get("Title", ""), body))
        time.sleep(self.server.delay_s)
        with suppress(OSError):
            self.send_response(self.server.code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Told:
    """A notifier on a clock and a status that the test sets."""

    def __init__(self, folder: Path, **cfg: str) -> None:
        self.now_s, self.status = 0.0, make_status()
        self.notifier = Notifier(NotifyConfig(**cfg), folder, lambda: self.status, lambda: self.now_s)

    def show(self, *notices: Notice, phase: Phase = Phase.TRAINING, reason: str = "It failed: see the log.") -> None:
        self.status = make_status(phase, reason=reason).model_copy(update={"notices": notices})

    def after(self, seconds: float) -> list[str]:
        """The alerts that are due after this time. A receiver takes them at once."""
        self.now_s += seconds
        alerts = self.notifier.due()
        for alert in alerts:
            self.notifier.mark_taken(alert)
        asyncio.run(self.notifier.store())
        return [alert.code for alert in alerts]


def test_alerts_are_errors_warnings_updates_and_a_port_that_nobody_reaches() -> None:
    notices = (
        DISK,
        Notice(code="api_port", level="info", text="x"),
        Notice(code="newer_version", level="info", text="x"),
    )
    update = {"notices": notices, "reachability_code": "not_reached", "reachability_reason": "Publish the port."}
    status = make_status(Phase.ERROR, reason="It failed.").model_copy(update=update)
    assert {alert.code for alert in alerts_of(status).values()} == {"quota", "newer_version", "error", "unreachable"}
    assert alerts_of(make_status()) == {}


def test_an_alert_is_told_once_and_again_after_it_was_gone(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.show(DISK)
    assert told.after(0) == []
    assert told.after(SETTLE_S - 1) == [], "it may pass by itself"
    assert told.after(1) == ["quota"]
    assert told.after(1000) == []
    told.show()
    assert told.after(GONE_S / 2) == []
    told.show(DISK)
    assert told.after(SETTLE_S) == [], "it was hardly gone"
    told.show()
    assert told.after(0) == told.after(GONE_S) == []
    told.show(DISK)
    assert told.after(0) == [] and told.after(SETTLE_S) == ["quota"]


def test_a_wait_for_memory_is_told_after_minutes_because_a_game_may_hold_it(tmp_path: Path) -> None:
    told = Told(tmp_path)
    waiting = make_status(Phase.STARTING, reason="Raise the limit.").model_copy(update={"code": "memory_limit"})
    told.status = waiting
    assert told.after(0) == told.after(WAITS_S - 1) == [] and told.after(1) == ["memory_limit"]
    told.status = waiting.model_copy(update={"phase": Phase.PAUSED})
    assert alerts_of(told.status) == {} and {MEMORY_LIMIT, NO_ANSWER} < WAITS


def test_a_second_error_with_another_reason_is_told_soon_after_the_first_one(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.show(phase=Phase.ERROR, reason="The disk is full.")
    assert told.after(0) == [] and told.after(SETTLE_S) == ["error"]
    told.show()
    assert told.after(5) == []
    told.show(phase=Phase.ERROR, reason="The disk is full.")
    assert told.after(0) == told.after(SETTLE_S) == [], "it was hardly gone"
    told.show(phase=Phase.ERROR, reason="The GPU is gone.")
    assert told.after(0) == [] and told.after(SETTLE_S) == ["error"]


def test_what_was_told_is_not_written_on_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    monkeypatch.setattr(notifier, "write_whole", lambda *_, **__: threads.append(threading.current_thread()))
    told = Told(tmp_path)
    told.show(DISK)
    assert told.after(0) == [] and told.after(SETTLE_S) == ["quota"]
    assert threads and threading.main_thread() not in threads


def test_a_restart_does_not_repeat_what_was_told(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.show(DISK)
    assert told.after(0) == [] and told.after(SETTLE_S) == ["quota"]
    again = Told(tmp_path)
    again.show(DISK, phase=Phase.ERROR)
    assert again.after(0) == [] and again.after(SETTLE_S) == ["error"]
    (tmp_path / notifier.FILE).write_text("damaged")
    third = Told(tmp_path)
    third.show(DISK)
    assert third.after(0) == [] and third.after(SETTLE_S) == ["quota"]


def deliver(told: Told, is_done: Callable[[], bool]) -> None:
    """Run the notifier with an alert that is due at once, until `is_done`, and for a while to see repetitions."""

    async def main() -> None:
        running = asyncio.create_task(told.notifier.run())
        deadline_s = time.monotonic() + 30
        while not is_done():
            assert time.monotonic() < deadline_s, "the notifier does not come to an end"
            told.now_s += SETTLE_S
            await asyncio.sleep(0.05)
        for _ in range(6):
            told.now_s += SETTLE_S
            await asyncio.sleep(0.05)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    asyncio.run(main())


def test_each_channel_gets_the_alert_once(tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier, "LOOK_S", 0.05)
    code = "import os; open('told', 'a').write(os.environ['DILOCO_TITLE'] + os.environ['DILOCO_TEXT'])"
    (tmp_path / "tell.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    told = Told(tmp_path, webhook=receiver.url, ntfy=receiver.url, command=f"{sys.executable} 'tell.py'")
    told.show(DISK)
    text = f"diloco-node needs you{DISK.text}"
    written = tmp_path / "told"
    deliver(told, lambda: len(receiver.got) == 2 and written.exists() and written.read_text() == text)
    (hook,) = [json.loads(body) for title, body in receiver.got if not title]
    assert (hook["code"], hook["text"], hook["node"]) == ("quota", DISK.text, "diloco-node")
    (topic,) = [(title, body.decode()) for title, body in receiver.got if title]
    assert topic == ("diloco-node needs you", DISK.text)
    assert written.read_text() == text


def test_a_receiver_that_hangs_gets_one_message_and_holds_up_nothing(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notifier, "LOOK_S", 0.05)
    monkeypatch.setattr(notifier, "TIMEOUT_S", 0.3)
    receiver.delay_s = 1.0
    told = Told(tmp_path, webhook=receiver.url, command=f"{sys.executable} -c 'import time; time.sleep(60)'")
    told.show(DISK)
    began_s = time.monotonic()
    deliver(told, lambda: caplog.text.count("perhaps not received") == 2)
    assert time.monotonic() - began_s < 30, "no thread of the loop waits for a receiver"
    assert len(receiver.got) == 1 and caplog.text.count("perhaps not received") == 2


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_receiver_that_is_away_for_a_while_gets_the_message_once(
    tmp_path: Path, receiver: Receiver, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "LOOK_S", 0.05)
    monkeypatch.setattr(notifier, "RETRY_S", (0.2, 0.2, 0.2))
    tries = []
    real = notifier._post

    def post(url: str, data: bytes, headers: dict[str, str]) -> None:
        tries.append(url)
        receiver.code = code if len(tries) == 2 else 200
        real("http://127.0.0.1:1/" if len(tries) == 1 else url, data, headers)

    monkeypatch.setattr(notifier, "_post", post)
    told = Told(tmp_path, webhook=receiver.url)
    told.show(DISK)
    deliver(told, lambda: len(receiver.got) == 2)
    assert len(receiver.got) == 2 and len(tries) == 3, "the first answer was a refusal"


def test_a_restart_repeats_a_message_that_no_receiver_has_got(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notifier, "LOOK_S", 0.05)
    monkeypatch.setattr(notifier, "RETRY_S", (600.0,))
    away = Told(tmp_path, webhook="http://127.0.0.1:1/topic")
    away.show(DISK)
    deliver(away, lambda: "was not sent" in caplog.text)
    asyncio.run(away.notifier.aclose())
    assert caplog.text.count("notify.webhook") == 1 and "topic" not in caplog.text, "the URL may be a secret"
    again = Told(tmp_path, webhook=receiver.url)
    again.show(DISK)
    deliver(again, lambda: len(receiver.got) == 1)
    asyncio.run(again.notifier.aclose())
    third = Told(tmp_path, webhook=receiver.url)
    third.show(DISK)
    assert third.after(0) == third.after(SETTLE_S) == []


def test_a_restart_does_not_repeat_an_error_that_was_being_sent_when_the_node_ended(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "LAST_S", 0.5)
    receiver.delay_s = 3.0
    told = Told(tmp_path, webhook=receiver.url)
    told.show(phase=Phase.ERROR)
    asyncio.run(told.notifier.aclose())
    again = Told(tmp_path, webhook=receiver.url)
    again.show(phase=Phase.ERROR)
    assert again.after(0) == again.after(SETTLE_S) == []


@pytest.mark.parametrize("code", [302, 404])
def test_a_receiver_that_redirects_or_refuses_is_logged_and_asked_again_only_after_a_restart(
    tmp_path: Path, receiver: Receiver, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notifier, "LOOK_S", 0.05)
    receiver.code = code
    told = Told(tmp_path, webhook=receiver.url)
    told.show(DISK)
    deliver(told, lambda: f"it answered {code}" in caplog.text)
    assert len(receiver.got) == 1
    assert f"it answered {code}" in caplog.text and "topic" not in caplog.text, "the URL may be a secret"
    asyncio.run(told.notifier.aclose())
    receiver.code = 200  # The owner has corrected the URL.
    again = Told(tmp_path, webhook=receiver.url)
    again.show(DISK)
    deliver(again, lambda: len(receiver.got) == 2)
    assert len(receiver.got) == 2


def test_an_error_with_which_the_node_ends_is_told_at_once(tmp_path: Path, receiver: Receiver) -> None:
    told = Told(tmp_path, webhook=receiver.url)
    told.show(phase=Phase.ERROR)
    asyncio.run(told.notifier.aclose())
    (body,) = [json.loads(body) for _, body in receiver.got]
    assert (body["code"], body["text"]) == ("error", "It failed: see the log.")
    asyncio.run(told.notifier.aclose())
    told.show()
    asyncio.run(Told(tmp_path, webhook=receiver.url).notifier.aclose())
    assert len(receiver.got) == 1


def test_a_restart_does_not_repeat_what_takes_a_while_to_test(tmp_path: Path) -> None:
    told = Told(tmp_path)
    closed = {"reachability_code": "not_reached", "reachability_reason": "Publish the port."}
    told.status = make_status().model_copy(update=closed)
    assert told.after(0) == [] and told.after(SETTLE_S) == ["unreachable"]
    again = Told(tmp_path)
    again.status = make_status(Phase.CONNECTING)
    assert again.after(0) == again.after(10 * GONE_S) == []
    again.status = make_status().model_copy(update=closed)
    assert again.after(0) == again.after(10 * GONE_S) == []
    again.status = make_status().model_copy(update={"reachability_code": "reached"})
    assert again.after(0) == again.after(GONE_S) == []
    again.status = make_status().model_copy(update=closed)
    assert again.after(0) == [] and again.after(SETTLE_S) == ["unreachable"]


@pytest.mark.parametrize("command", ["/no/such/program", f"{sys.executable} -c 'raise SystemExit(3)'"])
def test_a_command_that_fails_is_logged(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notifier, "LOOK_S", 0.05)
    told = Told(tmp_path, command=command)
    told.show(DISK)
    deliver(told, lambda: "notify.command" in caplog.text)
    assert caplog.text.count("notify.command") == 1


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"webhook": "ftp://example.org"}, "begins with http"),
        ({"ntfy": "my-topic"}, "begins with http"),
        ({"webhook": "http://host/my topic"}, "begins with http"),
        ({"webhook": "http://host:abc/x"}, "not a URL"),
        ({"webhook": "https://me:secret@host/x"}, "user name"),
        ({"command": "say 'hello"}, "close its quotes"),
        ({"command": "  "}, "blank"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(values: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        NotifyConfig(**values)
