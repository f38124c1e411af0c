"""Decides who may call the API: checks host name, origin, token or session, and limits failures and body size.

`Guard` wraps the whole ASGI application. Every path needs the token or a session, except `PUBLIC` ones, assets,
and `/metrics` for callers on this machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from node.api.errors import problem_response

PUBLIC = frozenset({"/", "/livez", "/readyz"})
PUBLIC_PREFIX = "/assets/"
METRICS = "/metrics"
RUN_PAGE = "/public"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
BODY_BYTES_MAX = 64 * 1024
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
"""Headers with which a proxy shows that it asks for somebody else."""
BODY_TIMEOUT_S = 10.0
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

Answer = Callable[..., Response]


class Keys:
    """The token and the sessions opened with it. `clock` is monotonic, in seconds."""

    def __init__(self, token: str, clock: Callable[[], float]) -> None:
        self._token = token.encode()
        self._clock = clock
        self._sessions: OrderedDict[str, float] = OrderedDict()
        """Digest of a session's key -> when it ends."""
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()
        # Browsers share cookies between all ports of a host, so each node needs its own name.
        self.cookie_name = "diloco_session_" + hashlib.sha256(self._token).hexdigest()[:8]

    @property
    def secrets(self) -> tuple[str, ...]:
        """Texts that must not appear in a support bundle."""
        return (self._token.decode(),)

    def is_token(self, candidate: str) -> bool:
        return hmac.compare_digest(candidate.encode(), self._token)

    def open_session(self) -> str:
        """Return a new session's key. Beyond SESSIONS_MAX the oldest session ends."""
        key = secrets.token_urlsafe(32)
        self._sessions[_digest(key)] = self._clock() + SESSION_S
        while len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)
        return key

    def close_session(self, key: str) -> None:
        self._sessions.pop(_digest(key), None)

    def is_session(self, key: str) -> bool:
        # Looked up by digest, so the time it takes reveals nothing about the keys.
        ends_at = self._sessions.get(_digest(key))
        return ends_at is not None and self._clock() < ends_at

    def record_failure(self, address: str) -> bool:
        """Count one wrong token from `address`. Returns whether there were too many in the last minute.

        The right token is never refused, because an old browser tab must not lock its owner out. A token of 256
        bits cannot be guessed.
        """
        now = self._clock()
        failures = self._failures.setdefault(address, deque(maxlen=FAILURES_MAX + 1))
        self._failures.move_to_end(address)
        if len(self._failures) > ADDRESSES_MAX:
            self._failures.popitem(last=False)
        failures.append(now)
        return len(failures) > FAILURES_MAX and now - failures[0] < FAILURE_WINDOW_S


class Guard:
    """ASGI application that passes allowed requests on and answers the others with an error."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        *,
        hosts: Iterable[str],
        metrics_public: bool = False,
        page_public: bool = False,
        body_bytes_max: int = BODY_BYTES_MAX,
        answer: Answer = problem_response,
    ) -> None:
        """`hosts` are allowed host names, without ports, besides those of loopback. The public page has any name.

        `answer` makes the response to a refused request from its status, sentence and headers.
        """
        self._app = app
        self._keys = keys
        # A wildcard address is for binding only: browsers let any page reach this machine under it.
        named = {host.strip("[]").lower() for host in hosts if host} - {"0.0.0.0", "::"}
        self._hosts = LOOPBACK_NAMES | named
        self._metrics_public = metrics_public
        self._page_public = page_public
        self._body_bytes_max = body_bytes_max
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        is_public = self._page_public and is_run_page(scope["path"])

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(SECURITY_HEADERS)
                headers.setdefault("Cache-Control", "no-store")
                if headers.get("Content-Type", "").startswith("text/event-stream"):
                    headers["X-Accel-Buffering"] = "no"  # nginx would hold events back until a buffer is full.
                if is_public:  # Otherwise the idle connections of many visitors would use up the limit.
                    headers["Connection"] = "close"
            await send(message)

        refusal = self._refusal(scope, Headers(scope=scope))
        if refusal is None and scope["method"] not in SAFE_METHODS:
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    receive = await _read_body(receive, self._body_bytes_max)
            except TimeoutError:
                refusal = self._answer(408, "The request's body did not arrive in time: send it again.")
            except OverflowError:
                refusal = self._too_large()
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        if self._page_public and is_run_page(scope["path"]) and scope["method"] in SAFE_METHODS:
            return None  # It shows the same to everybody, so no host name and no key matters.
        return (
            self._check_host(headers)
            or self._check_origin(scope, headers)
            or self._check_key(scope, headers)
            or self._check_length(headers)
        )

    def _check_host(self, headers: Headers) -> Response | None:
        """Refuse other host names: a hostile page can make its own resolve to this machine (DNS rebinding)."""
        hosts = headers.getlist("host")
        if len(hosts) == 1 and host_name(hosts[0]) in self._hosts:
            return None
        return self._answer(403, "This host name is not allowed: add it to api.allowed_hosts if it is yours.")

    def _check_origin(self, scope: Scope, headers: Headers) -> Response | None:
        """Allow a request that changes something only from the node's page, or with the token and no cookie."""
        if scope["method"] in SAFE_METHODS:
            return None
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if site is None and origin is None:
            is_own = "cookie" not in headers  # Without a cookie, the token is needed.
        else:
            is_own = site in (None, "same-origin") and (origin is None or _is_origin_of(origin, headers["host"]))
        return (
            None
            if is_own
            else self._answer(
                403, "Only this node's own page, or a program that sends the token, may send such requests."
            )
        )

    def _check_key(self, scope: Scope, headers: Headers) -> Response | None:
        path = scope["path"]
        if path in PUBLIC or path.startswith(PUBLIC_PREFIX):
            return None
        if path == METRICS and (self._metrics_public or _is_from_loopback(scope, headers)):
            return None
        challenge: Mapping[str, str] = {"WWW-Authenticate": 'Bearer realm="diloco-node"'}
        token = bearer(headers)
        if token is not None:
            if self._keys.is_token(token):
                return None
            if self._keys.record_failure(scope["client"][0] if scope.get("client") else ""):
                return self._answer(429, "Too many wrong tokens: wait a minute.", {"Retry-After": "60"})
            return self._answer(401, "The token is wrong: it is in the file api-token of the data folder.", challenge)
        key = session_key(headers, self._keys.cookie_name)
        if key is not None and self._keys.is_session(key):
            return None
        return self._answer(
            401, "A token or a session is needed: the token is in the file api-token of the data folder.", challenge
        )

    def _check_length(self, headers: Headers) -> Response | None:
        length = headers.get("content-length", "0")
        if not length.isdecimal():
            return self._answer(400, "Content-Length is not a number.")
        return self._too_large() if int(length) > self._body_bytes_max else None

    def _too_large(self) -> Response:
        return self._answer(413, f"The request's body is larger than {self._body_bytes_max} bytes: send less.")


def is_run_page(path: str) -> bool:
    """Whether a path belongs to the public page of the run."""
    return path == RUN_PAGE or path.startswith(RUN_PAGE + "/")


def host_name(host: str) -> str:
    """Return the name in a Host header, lower case, without port and brackets; empty if the header is malformed."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # raises for a port that is not a number
    except ValueError:
        return ""
    if "@" in host or parts.path or parts.query or parts.fragment:
        return ""
    return parts.hostname or ""


def session_key(headers: Headers, cookie_name: str) -> str | None:
    """Return the cookie's raw value. If there are several, the last one counts: browsers send longer paths first.

    `http.cookies` is not used, because it stops at the first malformed cookie of another program and takes a second to
    unquote a hostile one. Starlette's parser has the same flaws.
    """
    pairs = (pair.partition("=") for header in headers.getlist("cookie") for pair in header.split(";"))
    values = [value.strip() for name, _, value in pairs if name.strip() == cookie_name]
    return values[-1] if values else None


def bearer(headers: Headers) -> str | None:
    """Return the token in the Authorization header."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _is_origin_of(origin: str, host: str) -> bool:
    try:
        return urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:  # such as an unclosed bracket
        return False


def _is_from_loopback(scope: Scope, headers: Headers) -> bool:
    """Whether the caller is on this machine and is not a proxy for somebody elsewhere.

    A proxy that adds none of its headers shows itself by the Host of the original request, if it passes that on.
    """
    if any(name in headers for name in PROXY_HEADERS) or host_name(headers["host"]) not in LOOPBACK_NAMES:
        return False
    if not scope.get("client"):
        return False
    try:
        address = ipaddress.ip_address(scope["client"][0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


async def _read_body(receive: Receive, bytes_max: int) -> Receive:
    """Read the body and return a `receive` that yields it again. Raises OverflowError beyond `bytes_max`."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            pending = [message]
            break
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > bytes_max:
            raise OverflowError
    else:
        pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return pending.pop() if pending else await receive()

    return receive_again
