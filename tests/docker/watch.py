"""Runs a real Prometheus with the shipped configuration for the duration of a test."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.swarm.harness import wait_for

CONFIG = Path(__file__).parents[2] / "docker" / "prometheus"
START_S = 60.0


class Prometheus:
    """A context manager that runs Prometheus with the shipped configuration and a scrape interval of one second."""

    def __init__(self, folder: Path, targets: Mapping[str, str]) -> None:
        """`targets` maps the names of nodes, as dashboard and alerts show them, to HOST:PORT."""
        self._folder = folder
        shutil.copytree(CONFIG, folder / "config")
        file = folder / "config" / "prometheus.yml"
        file.write_text(re.sub(r"(scrape|evaluation)_interval: 15s", r"\1_interval: 1s", file.read_text()))
        lines = [f'- {{targets: ["{at}"], labels: {{instance: {name}}}}}' for name, at in targets.items()]
        (folder / "config" / "targets" / "nodes.yml").write_text("\n".join(lines) + "\n")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", trust_env=False, timeout=30)

    def __enter__(self) -> Prometheus:
        command = [
            "prometheus", f"--config.file={self._folder / 'config' / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._folder / 'data'}", f"--web.listen-address=127.0.0.1:{self._port}",
        ]  # fmt: skip
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        wait_for(self._ready, START_S, "Prometheus is ready")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._http.close()
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    def _ready(self) -> bool:
        assert self._process is not None and self._process.poll() is None, (self._folder / "prometheus.log").read_text()
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def _data(self, path: str, **parameters: Any) -> dict[str, Any]:
        answer = self._http.get(path, params=parameters).json()
        assert answer["status"] == "success", answer
        return dict(answer["data"])

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Run an instant query. Returns metric and value of each element of the vector."""
        data = self._data("/api/v1/query", query=expression)
        assert data["resultType"] == "vector", data
        return [{"metric": row["metric"], "value": float(row["value"][1])} for row in data["result"]]

    def query_range(self, expression: str, last_s: float) -> list[dict[str, Any]]:
        """Run a range query over the last `last_s` seconds. Returns metric and values of each series."""
        now = time.time()
        data = self._data("/api/v1/query_range", query=expression, start=now - last_s, end=now, step=1)
        assert data["resultType"] == "matrix", data
        return [{"metric": row["metric"], "values": [float(v) for _, v in row["values"]]} for row in data["result"]]

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._data("/api/v1/rules")["groups"] for rule in group["rules"]]

    def firing(self, alert: str) -> list[str]:
        """The instances for which the alert fires."""
        return [labels["instance"] for labels in self._firing(alert)]

    def is_firing(self, alert: str) -> bool:
        """Whether the alert fires at all, for an alert that is not about one instance."""
        return bool(self._firing(alert))

    def _firing(self, alert: str) -> list[dict[str, str]]:
        alerts = self._data("/api/v1/alerts")["alerts"]
        return [a["labels"] for a in alerts if a["labels"]["alertname"] == alert and a["state"] == "firing"]
