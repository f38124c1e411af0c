"""Alerts, runbook and Grafana dashboard are consistent, and a real Prometheus scrapes real nodes.

The tests use Debian's package `prometheus`, which contains promtool. Without it they are skipped.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from node.api.metrics import Build, Metrics
from node.api.node_interface import Space
from node.daemon.node_state import NodeState
from node.status import Counters, DeviceInfo, NodeInfo, Phase, PhaseState, Report
from tests.docker.watch import CONFIG, Prometheus
from tests.swarm.harness import Node, Swarm, tiny, wait_for

DOCKER = CONFIG.parent
DASHBOARDS = DOCKER / "grafana" / "dashboards"
DASHBOARD: dict[str, Any] = json.loads((DASHBOARDS / "diloco.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel, target) for panel in PANELS for target in panel["targets"]]
ALERTS = [rule for group in yaml.safe_load((CONFIG / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
ABOUT_ABSENCE = ("DilocoNodeGone", "DilocoNoNode")
"""Alerts whose expressions yield nothing for nodes that are there."""
RUNBOOK = (DOCKER / "RUNBOOK.md").read_text(encoding="utf-8")
WINDOW_S = 20
VARIABLES = {"$node": ".*", "$__rate_interval": f"{WINDOW_S}s", "$__range": "5m"}

needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed (apt: prometheus)")
needs_prometheus = pytest.mark.skipif(not shutil.which("prometheus"), reason="prometheus is not installed (apt)")


# tests of the files


@needs_promtool
@pytest.mark.parametrize(
    "words",
    [("check", "config", "prometheus.yml"), ("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")],
)
def test_promtool_accepts_the_prometheus_configuration_and_alert_rules(words: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *words], cwd=CONFIG, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout + done.stderr


def test_each_alert_has_a_test_and_a_paragraph_in_the_runbook() -> None:
    names = [rule["alert"] for rule in ALERTS]
    tested = yaml.safe_load((CONFIG / "alerts_test.yml").read_text())["tests"]
    cases = [case for test in tested for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == set(names)
    paragraphs = dict(re.findall(r"^## (\S+)\n(.+?)(?=\n## |\Z)", RUNBOOK, re.MULTILINE | re.DOTALL))
    assert set(paragraphs) == set(names)
    assert {name for name, text in paragraphs.items() if len(text.split()) < 30} == set()
    for rule in ALERTS:
        assert rule["annotations"]["runbook"] == f"docker/RUNBOOK.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")


def seconds(text: str) -> int:
    return int(text[:-1]) * {"s": 1, "m": 60}[text[-1]]


def test_each_node_that_vanishes_is_a_message_within_two_and_a_half_minutes() -> None:
    """The longest way from the last answer of a node to Alertmanager's message, by the settings of both."""
    watch = yaml.safe_load((CONFIG / "prometheus.yml").read_text())
    route = yaml.safe_load((CONFIG / "alertmanager.yml").read_text())["route"]
    assert set(route["group_by"]) == {"alertname", "instance"}, (
        "the second node does not wait for the first one's group"
    )
    scrape_s, rule_s = (seconds(watch["global"][f"{name}_interval"]) for name in ("scrape", "evaluation"))
    timeout_s = 10  # The default of `scrape_timeout`.
    (down,) = [rule for rule in ALERTS if rule["alert"] == "DilocoNodeDown"]
    assert scrape_s + timeout_s + rule_s + seconds(down["for"]) + seconds(route["group_wait"]) <= 150
    # A target of DNS is gone at its next refresh, and its series about two intervals later.
    (gone,) = [rule for rule in ALERTS if rule["alert"] == "DilocoNodeGone"]
    refresh_s = max(seconds(one["refresh_interval"]) for one in watch["scrape_configs"][-1]["dns_sd_configs"])
    assert refresh_s + 2.2 * scrape_s + rule_s + seconds(gone["for"]) + seconds(route["group_wait"]) <= 150


@needs_promtool
def test_example_of_a_node_with_a_token_is_valid(tmp_path: Path) -> None:
    text = re.sub(r"^  # (- job_name|  )", r"  \1", (CONFIG / "prometheus.yml").read_text(), flags=re.MULTILINE)
    (tmp_path / "prometheus.yml").write_text(text)
    job = next(one for one in yaml.safe_load(text)["scrape_configs"] if "authorization" in one)
    folder = str(Path(job["authorization"]["credentials_file"]).parent)
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    assert all(f"./secrets:{folder}:ro,z" in services[name]["volumes"] for name in ("prometheus", "alertmanager"))
    assert job["job_name"].startswith("diloco") and job["static_configs"][0]["labels"]["instance"]
    command = ["promtool", "check", "config", "--syntax-only", "prometheus.yml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_git_ignores_secrets_and_lists_of_nodes() -> None:
    names = ["docker/secrets/node-c", "docker/prometheus/targets/nodes.yml"]
    command = ["git", "check-ignore", *names]
    done = subprocess.run(command, cwd=DOCKER.parent, capture_output=True, text=True, timeout=20, check=False)
    assert done.stdout.split() == names


def test_grafana_panels_do_not_overlap_have_units_and_filter_by_node() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24 and not cells & taken, panel["title"]
        taken |= cells
    for panel, target in QUERIES:
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"] == target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert 'instance=~"$node"' in target["expr"], panel["title"]
    assert [v["name"] for v in DASHBOARD["templating"]["list"]] == ["datasource", "run", "node"]


def test_grafana_shows_only_nodes_of_the_chosen_run() -> None:
    _, run, node = DASHBOARD["templating"]["list"]
    assert run["query"]["query"] == "label_values(diloco_run_info, run)" and not run["multi"]
    assert node["query"]["query"] == 'label_values(diloco_run_info{run=~"$run"}, instance)'
    assert node["includeAll"] and "allValue" not in node, "`All` means all nodes of the run"


def runbook_dashboard() -> dict[str, Any]:
    """A dashboard whose panels are the sections of the runbook, for the links from panels and alerts."""
    sections = re.findall(r"^## (\S+)\n(.+?)(?=\n## |\Z)", RUNBOOK, re.MULTILINE | re.DOTALL)
    panels = [
        {
            "id": number, "type": "text", "title": name,
            "gridPos": {"h": 6, "w": 12, "x": 12 * (row % 2), "y": 6 * (row // 2)},
            "options": {"mode": "markdown", "content": text.strip().replace("\n", " ")},
        }
        for number, (row, (name, text)) in enumerate(enumerate(sections), start=1)
    ]  # fmt: skip
    return {
        "uid": "diloco-runbook", "title": "DiLoCo: runbook", "description": "What each alert means, and what to do.",
        "tags": ["diloco"], "schemaVersion": DASHBOARD["schemaVersion"], "version": 1, "editable": False,
        "panels": panels,
    }  # fmt: skip


def test_runbook_dashboard_holds_the_runbook() -> None:
    """`UPDATE_RUNBOOK=1` writes the file."""
    file, wanted = DASHBOARDS / "runbook.json", json.dumps(runbook_dashboard(), indent=2, ensure_ascii=False) + "\n"
    if os.environ.get("UPDATE_RUNBOOK"):
        file.write_text(wanted, encoding="utf-8")
    assert file.read_text(encoding="utf-8") == wanted, "run this test with UPDATE_RUNBOOK=1 and commit the file"
    links = [*DASHBOARD["links"], *(link for panel in PANELS for link in panel.get("links", []))]
    assert len(links) > 3 and {link["url"] for link in links} == {"/d/diloco-runbook"}


def test_columns_of_the_table_of_nodes_come_from_its_queries() -> None:
    (table,) = [panel for panel in PANELS if panel["type"] == "table"]
    join, organize = table["transformations"]
    assert join["options"] == {"byField": "instance", "mode": "outer"}
    labels = {
        label
        for t in table["targets"]
        for group in re.findall(r"by \(([^)]+)\)", t["expr"])
        for label in group.split(", ")
    }
    columns = labels | {f"Value #{target['refId']}" for target in table["targets"]}
    options = organize["options"]
    assert set(options["renameByName"]) == set(options["indexByName"]) <= columns
    assert columns - set(options["renameByName"]) <= set(options["excludeByName"])
    named = {override["matcher"]["options"] for override in table["fieldConfig"]["overrides"]}
    assert named <= set(options["renameByName"].values())


def test_grafana_dashboard_and_alerts_use_only_existing_metrics() -> None:
    board = NodeState(NodeInfo(), {}, state=PhaseState())
    text = page_with_gpu(board, metrics_of(board))
    there = set(re.findall(r"^(diloco_\w+)", text, re.MULTILINE))
    asked = [target["expr"] for _, target in QUERIES] + [rule["expr"] for rule in ALERTS]
    assert {name for expr in asked for name in re.findall(r"diloco_\w+", expr)} - there == set()


# tests with a running Prometheus


def metrics_of(board: NodeState) -> Metrics:
    return Metrics(
        Build("0"), lambda: board.view(alive=True), space=lambda: Space({"cache": 3}, 10, 40), known=Counters()
    )


def page_with_gpu(board: NodeState, metrics: Metrics) -> str:
    """The /metrics page of a node with a simulated GPU that draws 300 W."""
    gpu = DeviceInfo(
        kind="cuda", name="x", utilization_ratio=0.9, memory_used_bytes=7, memory_size_bytes=8,
        temperature_celsius=70.0, energy_joules=300.0 * time.monotonic(),
    )  # fmt: skip
    report = Report(state=PhaseState(phase=Phase.PAUSED), devices=(gpu,), counters=Counters())
    metrics.update(report)
    board.apply_report(report)
    board.set_phase(None)
    return metrics.render().decode()


@contextmanager
def node_with_gpu() -> Iterator[str]:
    """Serve the metrics of a node with a simulated GPU. Yields the server's address."""
    board = NodeState(NodeInfo(), {}, state=PhaseState())
    metrics = metrics_of(board)

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page_with_gpu(board, metrics).encode())

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def legend(template: str, labels: Mapping[str, str]) -> str:
    """The legend that Grafana shows for a series."""
    return re.sub(r"{{(\w+)}}", lambda match: labels[match[1]], template)


def ready_to_run(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


def check_panel(prometheus: Prometheus, panel: dict[str, Any], target: dict[str, Any]) -> None:
    """Assert that the query returns one number for a stat panel, and series with distinct legends for any other."""
    expression, title = ready_to_run(target["expr"]), panel["title"]
    if panel["type"] == "table":
        rows = prometheus.query(expression)
        instances = [row["metric"]["instance"] for row in rows]
        assert rows and len(instances) == len(set(instances)), f"{title}: one row for each node: {rows}"
        found = [(row["metric"], [row["value"]]) for row in rows]
    elif panel["type"] == "stat":
        (row,) = prometheus.query(expression)
        found = [(row["metric"], [row["value"]])]
    else:
        found = [(row["metric"], row["values"]) for row in prometheus.query_range(expression, WINDOW_S)]
        wanted = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert found, f"{title}: {expression} finds nothing"
        assert all(wanted <= set(metric) for metric, _ in found), title
        legends = [legend(target["legendFormat"], metric) for metric, _ in found]
        assert len(legends) == len(set(legends)), f"{title}: lines that cannot be told apart: {legends}"
    values = [value for _, values in found for value in values if math.isfinite(value)]
    assert values, f"{title}: {expression} is never a number"
    if panel["fieldConfig"]["defaults"]["unit"] == "percentunit":
        assert all(-0.01 <= value <= 1.2 for value in values), (title, values)


def bring_to_error(node: Node) -> None:
    """Kill the node's worker after each restart until the supervisor gives up."""
    deadline_s = time.monotonic() + 90
    while node.status()["phase"] != "error":
        assert time.monotonic() < deadline_s, "the supervisor has not given up"
        for process in node.with_word("node.worker"):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.1)


@needs_prometheus
@pytest.mark.timeout(400)
def test_prometheus_evaluates_all_panels_and_alerts_for_three_real_nodes(tmp_path: Path) -> None:
    run = tiny(round={"inner_steps": 5, "min_peers": 2}, evaluation={"batches": 1})
    with Swarm(tmp_path / "swarm", run) as swarm, node_with_gpu() as gpu:
        nodes = [swarm.found(), *swarm.join("second", "third")]
        targets = {node.name: str(node.http.base_url).removeprefix("http://").rstrip("/") for node in nodes}
        (tmp_path / "watch").mkdir()
        with Prometheus(tmp_path / "watch", {**targets, "gpu": gpu}) as prometheus:
            for node in nodes:
                node.until_round(3, 120)
            since_s = time.monotonic()
            wait_for(lambda: len(prometheus.query('up{job="diloco"} == 1')) == 4, 60, "all targets are scraped")
            wait_for(lambda: time.monotonic() - since_s > WINDOW_S, 2 * WINDOW_S, "a window's worth of samples")
            for panel, target in QUERIES:
                check_panel(prometheus, panel, target)

            rules = {rule["name"]: rule for rule in prometheus.rules()}
            for rule in ALERTS:
                assert rules[rule["alert"]]["health"] == "ok", rules[rule["alert"]]
                if rule["alert"] in ABOUT_ABSENCE:
                    assert prometheus.query(rule["expr"]) == []
                    continue
                # With `bool`, a comparison yields 0 or 1 for each node instead of dropping nodes.
                told = re.sub(r"(==|<=|>=|<|>)(?!~)", r"\1 bool", rule["expr"])
                values = {row["metric"]["instance"]: row["value"] for row in prometheus.query(told)}
                assert set(targets) <= set(values), (rule["alert"], values)
                assert set(values.values()) <= {0.0, 1.0}, (rule["alert"], values)
            assert prometheus.firing("DilocoNodeInError") == []

            bring_to_error(nodes[2])
            wait_for(lambda: prometheus.firing("DilocoNodeInError"), 60, "the alert fires")
            assert prometheus.firing("DilocoNodeInError") == ["third"]


class TwoNodes:
    """Two pages of metrics. Prometheus finds those that `there` names, as it finds the containers that run."""

    def __init__(self, file: Path, addresses: Mapping[str, str]) -> None:
        self._file, self._addresses = file, addresses

    def there(self, *names: str) -> None:
        lines = [f'- {{targets: ["{self._addresses[name]}"], labels: {{instance: {name}}}}}' for name in names]
        new = self._file.with_suffix(".new")
        new.write_text("\n".join(lines) or "[]")
        new.replace(self._file)


@needs_prometheus
@pytest.mark.timeout(400)
def test_alert_fires_within_three_minutes_after_one_node_and_then_all_nodes_are_gone(tmp_path: Path) -> None:
    with node_with_gpu() as first, node_with_gpu() as second:
        addresses = {"a": first, "b": second}
        with Prometheus(tmp_path, addresses) as prometheus:
            nodes = TwoNodes(tmp_path / "config" / "targets" / "nodes.yml", addresses)
            wait_for(lambda: len(prometheus.query('up{job="diloco"} == 1')) == 2, 60, "both nodes are scraped")
            nodes.there("b")
            wait_for(lambda: prometheus.firing("DilocoNodeGone") == ["a"], 180, "the alert of the node that is gone")
            assert not prometheus.is_firing("DilocoNoNode")
            nodes.there()
            wait_for(lambda: prometheus.is_firing("DilocoNoNode"), 180, "the alert of a swarm without nodes")
            assert prometheus.firing("DilocoNodeGone") == ["a"] or set(prometheus.firing("DilocoNodeGone")) == {
                "a",
                "b",
            }
            nodes.there("a", "b")
            wait_for(lambda: not prometheus.is_firing("DilocoNoNode"), 60, "the alert ends with the first node")
