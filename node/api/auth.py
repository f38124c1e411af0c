"""Who may call: host names, same origin, token or session, throttle, body size. Pure ASGI around the whole application.

Everything is protected unless it is named in `PUBLIC`, so a new route needs no thought. Knows requests; knows no node.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from node.api.problem import problem_response

PUBLIC = frozenset({"/", "/livez", "/readyz"})
PUBLIC_PREFIX = "/assets/"
METRICS = "/metrics"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
BODY_BYTES_MAX = 64 * 1024
BODY_S = 10.0
"""A body that has not arrived by then is given up."""
SESSION_S = 7 * 86400.0
SESSIONS_MAX = 64
FAILURES_MAX = 10
FAILURE_WINDOW_S = 60.0
ADDRESSES_MAX = 1024
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    status: int
    detail: str
    headers: tuple[tuple[str, str], ...] = ()


class Keys:
    """The token, and the sessions that were opened with it. `clock` gives seconds that only grow."""

    def __init__(self, token: str, clock: Callable[[], float]) -> None:
        self._token = token.encode()
        self._clock = clock
        self._sessions: OrderedDict[str, float] = OrderedDict()
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()
        # Browsers share the cookies of all ports of one host: each node needs a name of its own.
        self.cookie_name = "diloco_session_" + hashlib.sha256(self._token).hexdigest()[:8]

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must not stand in anything that is handed on."""
        return (self._token.decode(),)

    def token_fits(self, offered: str) -> bool:
        return hmac.compare_digest(offered.encode(), self._token)

    def open_session(self) -> str:
        """A new session's key; beyond SESSIONS_MAX the oldest ends."""
        key = secrets.token_urlsafe(32)
        self._sessions[_digest(key)] = self._clock() + SESSION_S
        while len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)
        return key

    def close_session(self, key: str) -> None:
        self._sessions.pop(_digest(key), None)

    def session_fits(self, key: str) -> bool:
        # Looked up by digest, so the time it takes tells nothing about the keys.
        ends_at = self._sessions.get(_digest(key))
        return ends_at is not None and self._clock() < ends_at

    def throttled(self, address: str) -> bool:
        """Count one wrong token from `address`; whether that was too many. A right token is never throttled: it has
        256 bits, and a stale browser tab that keeps asking must not lock its owner out."""
        now = self._clock()
        failures = self._failures.setdefault(address, deque(maxlen=FAILURES_MAX + 1))
        self._failures.move_to_end(address)
        if len(self._failures) > ADDRESSES_MAX:
            self._failures.popitem(last=False)
        failures.append(now)
        return len(failures) > FAILURES_MAX and now - failures[0] < FAILURE_WINDOW_S


class Guard:
    """ASGI application that lets through what is allowed and answers the rest with a problem."""

    def __init__(self, app: ASGIApp, keys: Keys, *, hosts: Iterable[str], metrics_public: bool) -> None:
        """`hosts` are the allowed host names beside loopback's, without ports."""
        self._app = app
        self._keys = keys
        # A wildcard is an address to bind, and no name: browsers let any page reach this machine under it.
        named = {h.strip("[]").lower() for h in hosts if h} - {"0.0.0.0", "::"}
        self._hosts = {"localhost", "127.0.0.1", "::1"} | named
        self._metrics_public = metrics_public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(SECURITY_HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)
        if refusal is None and scope["method"] not in SAFE_METHODS:
            try:
                receive = await asyncio.wait_for(_whole_body(receive), BODY_S)
            except TimeoutError:
                refusal = Refusal(408, "The request's body did not arrive in time.")
            except OverflowError:
                refusal = _too_large()
        if refusal is None:
            await self._app(scope, receive, send_with_headers)
        else:
            response = problem_response(refusal.status, refusal.detail, dict(refusal.headers))
            await response(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope, headers: Headers) -> Refusal | None:
        return (
            self._wrong_host(headers)
            or self._wrong_origin(scope, headers)
            or self._wrong_key(scope, headers)
            or _wrong_length(headers)
        )

    def _wrong_host(self, headers: Headers) -> Refusal | None:
        """Whatever the bind address: a foreign name that resolves to this machine must not reach it (DNS rebinding)."""
        hosts = headers.getlist("host")
        name = host_name(hosts[0]) if len(hosts) == 1 else ""
        if name in self._hosts:
            return None
        return Refusal(403, "This host name is not allowed: add it to api.allowed_hosts if it is yours.")

    def _wrong_origin(self, scope: Scope, headers: Headers) -> Refusal | None:
        if scope["method"] in SAFE_METHODS:
            return None
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        foreign = Refusal(403, "Requests that change something must come from this node's own page.")
        if site is not None and site != "same-origin":
            return foreign
        if origin is not None and not _is_at(origin, headers["host"]):
            return foreign
        if site is not None or origin is not None:
            return None
        return foreign if bearer(headers) is None or "cookie" in headers else None

    def _wrong_key(self, scope: Scope, headers: Headers) -> Refusal | None:
        path = scope["path"]
        if path in PUBLIC or path.startswith(PUBLIC_PREFIX):
            return None
        if path == METRICS and (self._metrics_public or _on_loopback(scope, headers)):
            return None
        challenge = (("WWW-Authenticate", 'Bearer realm="diloco-node"'),)
        offered = bearer(headers)
        if offered is not None:
            if self._keys.token_fits(offered):
                return None
            address = scope["client"][0] if scope.get("client") else ""
            if self._keys.throttled(address):
                return Refusal(429, "Too many wrong tokens: wait a minute.", (("Retry-After", "60"),))
            return Refusal(401, "The token is wrong: it is in the file api-token of the data folder.", challenge)
        key = session_key(headers, self._keys.cookie_name)
        if key is not None and self._keys.session_fits(key):
            return None
        return Refusal(401, "A token or a session is needed: the token is in api-token in the data folder.", challenge)


def host_name(host: str) -> str:
    """The name in a Host header, without port and brackets, lower case; empty where it is malformed."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # raises for a port that is no number
    except ValueError:
        return ""
    if "@" in host or parts.path or parts.query or parts.fragment:
        return ""
    return parts.hostname or ""


def session_key(headers: Headers, cookie_name: str) -> str | None:
    """The value of the cookie, as it stands; of several the last, for browsers name those of longer paths first.

    `http.cookies` does not do: it stops at the first cookie of some other program that it dislikes, and unquoting a
    hostile one (starlette's parser does that too) takes it a second.
    """
    pairs = (pair.partition("=") for header in headers.getlist("cookie") for pair in header.split(";"))
    fitting = [value.strip() for name, _, value in pairs if name.strip() == cookie_name]
    return fitting[-1] if fitting else None


def bearer(headers: Headers) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _is_at(origin: str, host: str) -> bool:
    try:
        return urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:  # a bracket that nobody closes, say: the origin of no page
        return False


def _on_loopback(scope: Scope, headers: Headers) -> bool:
    """The caller sits on this machine, and no proxy says that it speaks for somebody else."""
    if "forwarded" in headers or "x-forwarded-for" in headers or not scope.get("client"):
        return False
    try:
        address = ipaddress.ip_address(scope["client"][0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _wrong_length(headers: Headers) -> Refusal | None:
    length = headers.get("content-length", "0")
    if not length.isdecimal():
        return Refusal(400, "Content-Length is not a number.")
    return _too_large() if int(length) > BODY_BYTES_MAX else None


def _too_large() -> Refusal:
    return Refusal(413, f"The request's body is larger than {BODY_BYTES_MAX} bytes.")


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


async def _whole_body(receive: Receive) -> Receive:
    """Read the body, and return a `receive` that gives it again. Raises OverflowError beyond BODY_BYTES_MAX."""
    first: list[Message] = []
    body = b""
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            first = [message]
            break
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > BODY_BYTES_MAX:
            raise OverflowError
        first = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return first.pop() if first else await receive()

    return again
