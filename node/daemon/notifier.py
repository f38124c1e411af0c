"""Tells the owner that the node needs them: to a webhook, an ntfy topic, or a command of theirs.

An alert is told once when it has lasted for SETTLE_S, and again only after it was gone for GONE_S. What was told is
kept in a file, so a restart does not repeat it. A receiver that hangs or refuses holds up nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError, URLError

from node.config.schema import NotifyConfig
from node.host.files import write_whole
from node.status import Phase, Status, utc_now

logger = logging.getLogger(__name__)

FILE = "notified.json"
LOOK_S = 1.0
SETTLE_S = 10.0
GONE_S = 60.0
TIMEOUT_S = 10.0
RETRY_S = (5.0, 30.0, 120.0)
"""Pauses before further tries, if nothing was sent because the receiver could not be reached."""
UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class Alert:
    """One reason why the node needs its owner. `code` identifies it."""

    code: str
    text: str


def alerts_of(status: Status) -> dict[str, Alert]:
    """The present alerts by code: an error, a port that nobody reaches, and all notices with a remedy."""
    alerts = [Alert(notice.code, notice.text) for notice in status.notices if is_told(notice.code, notice.level)]
    if status.phase is Phase.ERROR:
        alerts.append(Alert("error", status.reason))
    if status.reachability_code == "not_reached" and status.reachability_reason:
        alerts.append(Alert(UNREACHABLE, status.reachability_reason))
    return {alert.code: alert for alert in alerts}


def is_told(code: str, level: str) -> bool:
    """Whether a notice is worth a message. Of those that only inform, it is a newer version."""
    return level in ("warning", "error") or code == "newer_version"


class Notifier:
    """Follows the node's status for ever."""

    def __init__(
        self,
        cfg: NotifyConfig,
        folder: Path,
        status: Callable[[], Status],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cfg, self._path, self._status, self._clock = cfg, folder / FILE, status, clock
        self._since_s: dict[str, float] = {}
        """When each present alert began."""
        self._gone_since_s: dict[str, float] = {}
        self._told = _read(self._path)
        self._sending: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        if not any((self._cfg.webhook, self._cfg.ntfy, self._cfg.command)):
            await asyncio.Event().wait()
        while True:
            for alert in self.due():
                self._send(alert)
            await asyncio.sleep(LOOK_S)

    def due(self) -> list[Alert]:
        """The alerts to tell now. They count as told."""
        now_s, present = self._clock(), alerts_of(self._status())
        self._since_s = {code: self._since_s.get(code, now_s) for code in present}
        gone = self._told - present.keys()
        self._gone_since_s = {code: self._gone_since_s.get(code, now_s) for code in gone}
        over = {code for code, since_s in self._gone_since_s.items() if now_s - since_s >= GONE_S}
        new = {code for code, since_s in self._since_s.items() if now_s - since_s >= SETTLE_S} - self._told
        if new or over:
            self._told = (self._told | new) - over
            try:
                write_whole(self._path, json.dumps(sorted(self._told)) + "\n", forced=False)
            except OSError as exc:
                logger.warning("%s cannot be written (%s): a restart may repeat a message.", self._path, exc.strerror)
        return [present[code] for code in sorted(new)]

    def _send(self, alert: Alert) -> None:
        for receiver in receivers(self._cfg, self._status(), alert):
            task = asyncio.create_task(_deliver(receiver))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)


class NothingSent(Exception):
    """The receiver could not be reached, so a further try repeats nothing."""


@dataclass(frozen=True, slots=True)
class Receiver:
    """One way to tell an alert. `send` blocks for at most TIMEOUT_S; it raises NothingSent, OSError or ValueError."""

    name: str
    send: Callable[[], None]


def receivers(cfg: NotifyConfig, status: Status, alert: Alert) -> Iterable[Receiver]:
    node = status.node.name or "diloco-node"
    title = f"{node} needs you"
    if cfg.webhook:
        body = {"node": node, "run": status.run.name, "code": alert.code, "text": alert.text, "at": utc_now()}
        data = json.dumps(body).encode()
        yield Receiver("webhook", lambda: _post(cfg.webhook, data, {"Content-Type": "application/json"}))
    if cfg.ntfy:
        headers = {"Title": title.encode("ascii", "replace").decode(), "Tags": "warning"}
        yield Receiver("ntfy", lambda: _post(cfg.ntfy, alert.text.encode(), headers))
    if cfg.command:
        yield Receiver("command", lambda: _execute(cfg.command, title, alert))


async def _deliver(receiver: Receiver) -> None:
    for pause_s in (*RETRY_S, None):
        try:
            await asyncio.to_thread(receiver.send)
            return
        except NothingSent as exc:
            if pause_s is None:
                logger.warning("A message to notify.%s was given up: %s", receiver.name, exc)
                return
            await asyncio.sleep(pause_s)
        except (OSError, ValueError, subprocess.SubprocessError) as exc:
            logger.warning("A message to notify.%s was perhaps not received: %s", receiver.name, exc)
            return


def _post(url: str, data: bytes, headers: Mapping[str, str]) -> None:
    request = urllib.request.Request(url, data, dict(headers), method="POST")  # noqa: S310 - the scheme is checked
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):  # noqa: S310
            pass
    except HTTPError as exc:
        with exc:
            raise OSError(f"it answered {exc.code}") from exc
    except URLError as exc:
        if isinstance(exc.reason, ConnectionRefusedError | OSError) and not isinstance(exc.reason, TimeoutError):
            raise NothingSent(str(exc.reason)) from exc
        raise


def _execute(command: str, title: str, alert: Alert) -> None:
    environment = {**os.environ, "DILOCO_TITLE": title, "DILOCO_CODE": alert.code, "DILOCO_TEXT": alert.text}
    words = shlex.split(command)
    done = subprocess.run(
        words, env=environment, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if done.returncode:
        raise OSError(f"{words[0]} ended with {done.returncode}")


def _read(path: Path) -> set[str]:
    try:
        return set(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return set()
