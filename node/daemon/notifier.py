"""Tells the owner that the node needs them: to a webhook, an ntfy topic, or a command of theirs.

It sends an alert once the alert has lasted for its `settle_s`, and again only after it was absent for GONE_S. A file
lists the alerts that a receiver has got, or perhaps got, and a restart does not repeat those. Each receiver has its own
thread, so a slow one delays no other.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import queue
import shlex
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

from node.config.schema import NotifyConfig
from node.daemon.node_state import NEWER_VERSION
from node.errors import cause_of
from node.host.files import write_whole
from node.status import Phase, Status, utc_now

logger = logging.getLogger(__name__)

FILE = "notified.json"
LOOK_S = 1.0
SETTLE_S = 10.0
WAITS = frozenset({"does_not_fit", "memory_limit", "no_answer", "too_slow"})
"""Codes with which a starting node waits for memory, processor, disk or the Hugging Face hub."""
WAITS_S = 300.0
"""A wait of this length needs the owner. A shorter one may be due to a game or to an outage of the network."""
GONE_S = 60.0
TIMEOUT_S = 10.0
LAST_S = 3.0
"""When the node ends with an error, it waits this long for the last message to go out."""
RETRY_S = (5.0, 30.0, 120.0, *(144 * (600.0,)))
"""Pauses before further tries, for a day, if the receiver has taken nothing yet."""
WAITING_MAX = 16
"""Messages that wait for one receiver. Further ones are dropped."""
ERROR, UNREACHABLE = "error", "unreachable"
UNTESTED_PHASES = frozenset({Phase.STARTING, Phase.CONNECTING, Phase.DOWNLOADING})


@dataclass(frozen=True, slots=True)
class Alert:
    """One reason why the node needs its owner."""

    code: str
    text: str
    settle_s: float = SETTLE_S
    """How long it must last before it is told."""

    @property
    def key(self) -> str:
        """What identifies the alert. Errors with different reasons are different alerts."""
        return f"{self.code}: {self.text}" if self.code == ERROR else self.code


def alerts_of(status: Status) -> dict[str, Alert]:
    """The present alerts by key: an error, a wait, a port that nobody reaches, and all notices with a remedy."""
    alerts = [Alert(notice.code, notice.text) for notice in status.notices if is_told(notice.code, notice.level)]
    if status.phase is Phase.ERROR:
        alerts.append(Alert(ERROR, status.reason))
    if status.phase is Phase.STARTING and status.code in WAITS:
        alerts.append(Alert(status.code, status.reason, WAITS_S))
    if status.reachability_code == "not_reached" and status.reachability_reason and status.node.mode == "train":
        alerts.append(Alert(UNREACHABLE, status.reachability_reason))
    return {alert.key: alert for alert in alerts}


def is_told(code: str, level: str) -> bool:
    """Whether a notice is worth a message. Of those that only inform, it is a newer version."""
    return level in ("warning", "error") or code == NEWER_VERSION


def untested(status: Status) -> set[str]:
    """Keys of alerts that this node cannot judge yet, because it has just started or was not tested."""
    keys = {UNREACHABLE} if status.reachability_code in ("not_tested", "disputed") else set()
    return keys | ({UNREACHABLE, NEWER_VERSION} if status.phase in UNTESTED_PHASES else set())


class Notifier:
    """Follows the node's status for ever."""

    def __init__(
        self,
        cfg: NotifyConfig,
        folder: Path,
        status: Callable[[], Status],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._status, self._clock = folder / FILE, status, clock
        self._since_s: dict[str, float] = {}
        """When each present alert began."""
        self._gone_since_s: dict[str, float] = {}
        self._told = _read(self._path)
        """Keys of the alerts that need no further message in this start."""
        self._listed = set(self._told)
        """Those of them that the file lists."""
        self._taken: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Keys that the file must list as well."""
        self._receivers = [_Receiver(name, send, self.mark_taken) for name, send in _senders(cfg)]

    async def run(self) -> None:
        while True:
            if self._receivers:
                for alert in self.due():
                    self._tell(alert)
                await self.store()
            await asyncio.sleep(LOOK_S)

    async def aclose(self) -> None:
        """Tell an error with which the node ends, and wait for that at most LAST_S."""
        error = next((one for one in alerts_of(self._status()).values() if one.code == ERROR), None)
        if error is not None and self._receivers and error.key not in self._told:
            self._told.add(error.key)
            self._tell(error)
            until_s = time.monotonic() + LAST_S
            while any(one.is_busy for one in self._receivers) and time.monotonic() < until_s:  # noqa: ASYNC110 - threads
                await asyncio.sleep(0.05)
        for receiver in self._receivers:
            if (alert := receiver.in_flight) is not None:
                self.mark_taken(alert)
        await self.store()

    def mark_taken(self, alert: Alert) -> None:
        """Count an alert as told for later starts as well, from the next `store` on. Callable from any thread."""
        self._taken.put(alert.key)

    def due(self) -> list[Alert]:
        """The alerts to tell now. They count as told until the node ends."""
        now_s, status = self._clock(), self._status()
        present = alerts_of(status)
        self._since_s = {key: self._since_s.get(key, now_s) for key in present}
        gone = self._told - present.keys() - untested(status)
        self._gone_since_s = {key: self._gone_since_s.get(key, now_s) for key in gone}
        over = {key for key, since_s in self._gone_since_s.items() if now_s - since_s >= GONE_S}
        new = {key for key, since_s in self._since_s.items() if now_s - since_s >= present[key].settle_s} - self._told
        self._told = (self._told | new) - over
        return [present[key] for key in sorted(new)]

    async def store(self) -> None:
        """Write the file if the list has changed."""
        listed = set(self._listed)
        while not self._taken.empty():
            listed.add(self._taken.get())
        listed &= self._told
        if listed == self._listed:
            return
        self._listed = listed
        text = json.dumps(sorted(listed)) + "\n"
        try:
            await asyncio.to_thread(write_whole, self._path, text, forced=False)
        except OSError as exc:
            logger.warning("%s cannot be written (%s): a restart may repeat a message.", self._path, exc.strerror)

    def _tell(self, alert: Alert) -> None:
        status = self._status()
        message = Notification(status.node.name or "diloco-node", status.run.name, alert, utc_now())
        for receiver in self._receivers:
            receiver.put(message)


@dataclass(frozen=True, slots=True)
class Notification:
    """An alert as the owner gets it."""

    node: str
    run: str
    alert: Alert
    at: str

    @property
    def title(self) -> str:
        return f"{self.node} needs you"


Send = Callable[[Notification], None]


class NothingSent(Exception):
    """The receiver was not reached, or says that it did not take the message."""

    def __init__(self, reason: str, *, is_temporary: bool = True) -> None:
        """`is_temporary`: the receiver may take the message later."""
        super().__init__(reason)
        self.is_temporary = is_temporary


class _Receiver:
    """Sends messages one after the other on a thread that nobody waits for."""

    def __init__(self, name: str, send: Send, on_taken: Callable[[Alert], None]) -> None:
        """`on_taken` is called on the thread with each alert that the receiver has got, or perhaps got."""
        self._name, self._send, self._on_taken = name, send, on_taken
        self.in_flight: Alert | None = None
        """The alert that is being sent now."""
        self._waiting: queue.Queue[Notification] = queue.Queue(WAITING_MAX)
        threading.Thread(target=self._work, name=f"notify {name}", daemon=True).start()

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting.unfinished_tasks)

    def put(self, message: Notification) -> None:
        try:
            self._waiting.put_nowait(message)
        except queue.Full:
            logger.warning("A message to notify.%s is dropped, because too many earlier ones still wait.", self._name)

    def _work(self) -> None:
        while True:
            self._deliver(self._waiting.get())
            self._waiting.task_done()

    def _deliver(self, message: Notification) -> None:
        for tries, pause_s in enumerate((*RETRY_S, None), start=1):
            self.in_flight = message.alert
            try:
                self._send(message)
            except NothingSent as exc:
                self.in_flight = None
                if pause_s is None or not exc.is_temporary:
                    logger.warning("A message to notify.%s was given up: %s", self._name, exc)
                    return
                if tries == 1:
                    logger.warning("A message to notify.%s was not sent (%s). Further tries follow.", self._name, exc)
                time.sleep(pause_s)
                continue
            except (OSError, ValueError, HTTPException, subprocess.SubprocessError) as exc:
                logger.warning("A message to notify.%s was perhaps not received: %s", self._name, _reason(exc))
            self._on_taken(message.alert)
            self.in_flight = None
            return


def _senders(cfg: NotifyConfig) -> list[tuple[str, Send]]:
    senders: list[tuple[str, Send]] = []
    if cfg.webhook:
        senders.append(("webhook", lambda message: _to_webhook(cfg.webhook, message)))
    if cfg.ntfy:
        senders.append(("ntfy", lambda message: _to_ntfy(cfg.ntfy, message)))
    if cfg.command:
        senders.append(("command", lambda message: _to_command(cfg.command, message)))
    return senders


def _to_webhook(url: str, message: Notification) -> None:
    alert = message.alert
    body = {"node": message.node, "run": message.run, "code": alert.code, "text": alert.text, "at": message.at}
    _post(url, json.dumps(body).encode(), {"Content-Type": "application/json"})


def _to_ntfy(url: str, message: Notification) -> None:
    title = message.title.encode("ascii", "replace").decode()
    _post(url, message.alert.text.encode(), {"Title": title, "Tags": "warning"})


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET without the message."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _post(url: str, data: bytes, headers: Mapping[str, str]) -> None:
    request = urllib.request.Request(url, data, dict(headers), method="POST")  # noqa: S310 - the scheme is checked
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=TIMEOUT_S):
            pass
    except HTTPError as exc:
        with exc:
            is_temporary = exc.code == 429 or exc.code >= 500
            raise NothingSent(f"it answered {exc.code}", is_temporary=is_temporary) from exc
    except URLError as exc:  # Raised while connecting and sending; a late answer is a TimeoutError.
        raise NothingSent(_reason(exc)) from exc


def _to_command(command: str, message: Notification) -> None:
    alert = message.alert
    own = {"DILOCO_TITLE": message.title, "DILOCO_CODE": alert.code, "DILOCO_TEXT": alert.text}
    words, nothing = shlex.split(command), subprocess.DEVNULL
    done = subprocess.run(
        words, env={**os.environ, **own}, timeout=TIMEOUT_S, stdin=nothing, stdout=nothing, stderr=nothing, check=False
    )
    if done.returncode:
        raise OSError(f"it ended with {done.returncode}")


def _reason(error: Exception) -> str:
    """The kind of an error. Its text may hold the URL, which can be a secret."""
    reason = error.reason if isinstance(error, URLError) else error
    if isinstance(reason, OSError):
        return reason.strerror or cause_of(reason)
    return type(reason).__name__


def _read(path: Path) -> set[str]:
    with suppress(OSError, ValueError, TypeError):
        return set(json.loads(path.read_bytes()))
    return set()
