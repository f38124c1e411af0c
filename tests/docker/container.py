"""Runs a node in a container as docker/README.md says, queries it over its published port, and removes it."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import httpx

from tests.docker.engine import IMAGE, Engine
from tests.swarm.harness import wait_for

HARD = ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
AS_TOLD = ("--detach", "--restart", "unless-stopped", "--stop-timeout", "60", "--publish", "127.0.0.1::8080")
SMALL = (
    "--run.round.policy=steps", "--run.round.inner_steps=200", "--run.round.min_peers=1", "--run.evaluation.batches=0",
    "--run.model.hidden_size=32", "--run.model.intermediate_size=64", "--run.model.num_hidden_layers=2",
    "--run.inner.sequence_length=64", "--run.inner.batch_size=4",
)  # fmt: skip
THREAD = "--limits.cpu_threads=1"


class Container:
    """One container and its volume. The volume outlives the container until `purge`."""

    def __init__(
        self, docker: Engine, name: str, network: str = "bridge", volume: str = "", image: str = IMAGE
    ) -> None:
        self.docker, self.image = docker, image
        self.name = f"diloco-test-{name}-{uuid.uuid4().hex[:6]}"
        self.volume = volume or self.name
        self.network = network
        self._http: httpx.Client | None = None

    def run(self, *words: str, env: Mapping[str, str] | None = None, engine_words: tuple[str, ...] = ()) -> Container:
        given = [f"--env={key}={value}" for key, value in (env or {}).items()]
        self.docker(
            "run", "--name", self.name, *AS_TOLD, *HARD, "--volume", f"{self.volume}:/data", "--network", self.network,
            *given, *engine_words, self.image, *words,
        )  # fmt: skip
        return self

    def remove(self) -> None:
        """Remove the container but keep its volume."""
        self.forget()
        self.docker("rm", "--force", self.name, check=False)

    def purge(self) -> None:
        self.remove()
        self.docker("volume", "rm", "--force", self.volume, check=False)

    # queries to the engine

    def state(self) -> dict[str, Any]:
        return dict(json.loads(self.docker("inspect", "--format", "{{json .State}}", self.name)))

    def is_healthy(self) -> bool:
        return bool(self.state()["Health"]["Status"] == "healthy")

    def restarts(self) -> int:
        return int(self.docker("inspect", "--format", "{{.RestartCount}}", self.name))

    def said(self) -> str:
        return self.docker("logs", self.name, both=True)

    def execute(self, *words: str, check: bool = True) -> str:
        return self.docker("exec", self.name, *words, check=check, both=True)

    # queries to the node

    def forget(self) -> None:
        """Close the HTTP client, because the published port changes with each start."""
        if self._http is not None:
            self._http.close()
        self._http = None

    @property
    def http(self) -> httpx.Client:
        if self._http is None:
            words = ("exec", self.name, "cat", "/data/api-token")
            token = wait_for(lambda: self.docker(*words, check=False), 60, f"{self.name}'s token")
            at = self.docker("port", self.name, "8080/tcp").splitlines()[0]
            bearer = {"Authorization": f"Bearer {token}"}
            self._http = httpx.Client(base_url=f"http://{at}", headers=bearer, timeout=20, trust_env=False)
        return self._http

    def status(self) -> dict[str, Any]:
        return dict(self.http.get("/api/v1/status").raise_for_status().json())

    def until(self, ready: Callable[[dict[str, Any]], Any], timeout_s: float, why: str) -> dict[str, Any]:
        newest: dict[str, Any] = {}

        def there() -> bool:
            nonlocal newest
            with suppress(httpx.HTTPError):
                newest = self.status()
                return bool(ready(newest))
            return False

        try:
            wait_for(there, timeout_s, why)
        except AssertionError as exc:
            raise AssertionError(f"{self.name}: {exc}; {json.dumps(newest)}\n{self.said()[-3000:]}") from exc
        return newest

    def until_phase(self, phase: str, timeout_s: float = 120) -> dict[str, Any]:
        return self.until(lambda s: s["phase"] == phase, timeout_s, f"phase {phase}")

    def until_round(self, number: int, timeout_s: float = 180) -> dict[str, Any]:
        return self.until(lambda s: s["run"]["round"] >= number, timeout_s, f"round {number}")

    def invite(self) -> str:
        return str(self.until(lambda s: s["run"]["invite"], 120, "an invite")["run"]["invite"])

    def rounds(self) -> list[dict[str, Any]]:
        return list(self.http.get("/api/v1/rounds?limit=200").raise_for_status().json()["rounds"])

    def digests(self) -> dict[int, str]:
        """The state digests of the current chain by round number."""
        return {r["round"]: r["state_digest"] for r in reversed(self.rounds()) if r["outcome"] != "failed"}

    @contextmanager
    def page_open(self) -> Iterator[None]:
        """Keep an event stream open and read it, as an open page does."""

        def read() -> None:
            with suppress(httpx.HTTPError), self.http.stream("GET", "/api/v1/events", timeout=120) as answer:
                opened.set()
                for _ in answer.iter_lines():
                    pass

        opened = threading.Event()
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        assert opened.wait(30), "the event stream does not open"
        yield
        reader.join(30)
        assert not reader.is_alive(), "the event stream did not end with the node"


def agree(containers: list[Container], timeout_s: float = 180) -> int:
    """Wait for a new round that all nodes report with one digest. Returns its number."""
    since = max(c.status()["run"]["round"] for c in containers)
    deadline_s = time.monotonic() + timeout_s
    while True:
        told = [c.digests() for c in containers]
        common = [number for number in set.intersection(*(set(one) for one in told)) if number > since]
        if common:
            newest = max(common)
            assert len({one[newest] for one in told}) == 1, {newest: [one[newest] for one in told]}
            return newest
        assert time.monotonic() < deadline_s, f"no common round after {since}: {[max(one, default=-1) for one in told]}"
        time.sleep(1)
