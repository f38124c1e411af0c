"""Several nodes on one machine, started as the README says, and ports that other programs use.

Each test has its own network namespace, because the default ports may be in use on this machine. The tests need root
and iproute2; otherwise they are skipped with a reason.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import psutil
import pytest

from node.config.manifest import parse_invite
from tests.homes.home import Home
from tests.homes.namespace import inside
from tests.homes.world import why_not, world
from tests.swarm.conftest import Figures
from tests.swarm.harness import MARK, START_S, Node, Swarm, environment

PORT, API_PORT = 31337, 8080
LONG_S = 2 * START_S
"""Timeout for a start with default settings, which uses all cores, on a busy machine."""
TRAINING_S = 30.0
"""Promised time from the start command to the first inner step, on a quiet machine."""
NO_IPV6 = "net.ipv6.conf.all.disable_ipv6=1"


pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def namespace() -> Iterator[str]:
    if reason := why_not():
        pytest.skip(reason)
    with world([Home("public", lines=None)]) as homes:
        yield homes[0].machine.namespace


class PlainNode(Node):
    """A node that `diloco-node run` starts with a data folder, an invite and otherwise default settings."""

    def start(self, *flags: str, env: Mapping[str, str] | None = None) -> Self:
        words = ["ip", "netns", "exec", self.namespace, sys.executable, "-m", self.program, self.order]
        words += ["--join", self.join] if self.join else []
        words += ["--data-dir", str(self.folder)] if self.name != "founder" else []
        self.forget()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*words, *flags],
                env=environment({MARK: self.mark, "HOME": str(self.log.parent / "home"), **(env or {})}),
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return self


def plain(swarm: Swarm, namespace: str, name: str, join: str | None = None) -> PlainNode:
    """Return a node of this swarm. The founder uses the default data folder, in a HOME of its own."""
    home = swarm.folder / "home" / ".local" / "share" / "diloco-node"
    node = PlainNode(swarm.folder / name, name, preset=None, join=join)
    if name == "founder":
        node.folder = home
    node.namespace = namespace
    swarm.nodes.append(node)
    return node


def invite_of(node: Node) -> str:
    return str(node.until(lambda s: s["run"]["invite"], LONG_S)["run"]["invite"])


def listening_ports(node: Node) -> set[tuple[str, int]]:
    """The host and port of every TCP socket on which the node's libp2p daemon listens."""
    with inside(node.namespace):
        found = node.find("p2pd").net_connections(kind="tcp")
    return {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}


def both(port: int) -> set[tuple[str, int]]:
    return {("0.0.0.0", port), ("::", port)}


def notices(node: Node) -> dict[str, str]:
    return {notice["code"]: notice["text"] for notice in node.status()["notices"]}


@contextmanager
def held(namespace: str, host: str, port: int, *, shared: bool = False) -> Iterator[None]:
    """Listen on the port as another program would. If `shared` is true, the socket has SO_REUSEPORT."""
    with inside(namespace):
        taken = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    with taken:
        if shared:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind((host, port))
        taken.listen()
        yield


@pytest.mark.parametrize("joiners", [1, 3])
def test_nodes_started_with_default_settings_on_one_machine_all_train(
    namespace: str, tmp_path: Path, figures: Figures, joiners: int
) -> None:
    with Swarm(tmp_path) as swarm:
        founder = plain(swarm, namespace, "founder").start()
        founder.until_training(LONG_S)
        invite = invite_of(founder)
        began_s = time.monotonic()
        joined = [plain(swarm, namespace, f"joiner{i}", join=invite).start() for i in range(joiners)]
        for node in joined:
            node.until_training(2 * LONG_S)
        took_s, what = time.monotonic() - began_s, f"{joiners + 1} nodes by the plain line: all train"
        if joiners == 1:
            figures.hold(what, took_s, TRAINING_S)
        else:
            # Four nodes load their libraries at the same time, so the time depends on the machine's cores.
            figures.tell(what, took_s)
        for member in swarm.nodes:
            member.until(lambda s: s["peers"]["training"] == joiners + 1, LONG_S)

        ports = [sorted({port for _, port in listening_ports(node)}) for node in swarm.nodes]
        assert sorted(ports) == [[PORT + i] for i in range(joiners + 1)], "one port each, the same for IPv4 and IPv6"
        assert all(len(listening_ports(node)) == 2 for node in swarm.nodes)
        pages = {int(str(node.http.base_url).rpartition(":")[2].strip("/")) for node in swarm.nodes}
        assert pages == {API_PORT + i for i in range(joiners + 1)}
        assert not notices(founder) and ports[0] == [PORT]
        for node, (port,) in zip(joined, ports[1:], strict=True):
            assert f"listens on {port}" in notices(node)["listen_port"]
            assert f"{API_PORT} was in use" in notices(node)["api_port"]
            assert node.said().count(notices(node)["listen_port"]) == 1, "said once in the log"


@pytest.mark.parametrize(
    ("host", "shared"), [("0.0.0.0", False), ("0.0.0.0", True), ("127.0.0.1", True), ("::", False)]
)
def test_node_uses_the_next_port_if_another_program_holds_the_default_port(
    namespace: str, tmp_path: Path, host: str, shared: bool
) -> None:
    with held(namespace, host, PORT, shared=shared), Swarm(tmp_path) as swarm:
        founder = plain(swarm, namespace, "founder").start()
        founder.until(lambda s: s["run"]["invite"], LONG_S)
        assert listening_ports(founder) == both(PORT + 1)
        assert str(PORT + 1) in notices(founder)["listen_port"]
        assert all(f"/tcp/{PORT + 1}/" in address for address in parse_invite(invite_of(founder)).addresses)


def test_node_keeps_its_alternative_ports_after_a_restart(namespace: str, tmp_path: Path) -> None:
    with Swarm(tmp_path) as swarm:
        founder = plain(swarm, namespace, "founder")
        with held(namespace, "0.0.0.0", PORT), held(namespace, "127.0.0.1", API_PORT):
            page = str(founder.start().http.base_url)
            invite_of(founder)
            founder.act("leave")
            founder.wait_end(LONG_S)
        assert str(founder.start().http.base_url) == page
        invite_of(founder)
        assert listening_ports(founder) == both(PORT + 1)


@pytest.mark.parametrize(
    ("flag", "shared"),
    [
        (f"--swarm.listen=/ip4/0.0.0.0/tcp/{PORT}", False),
        (f"--swarm.listen=/ip4/0.0.0.0/tcp/{PORT}", True),
        (f"--swarm.announce=203.0.113.7:{PORT}", True),
    ],
)
def test_node_ends_and_names_the_remedy_if_its_configured_port_is_taken(
    namespace: str, tmp_path: Path, flag: str, shared: bool
) -> None:
    with held(namespace, "0.0.0.0", PORT, shared=shared), Swarm(tmp_path) as swarm:
        founder = plain(swarm, namespace, "founder").start(flag)
        assert founder.wait_end(LONG_S) == 3
        assert "port_in_use" in founder.said()
        assert (
            "another program has the port" in founder.said() and "--swarm.listen /ip4/0.0.0.0/tcp/0" in founder.said()
        )


def test_persistent_node_keeps_its_page_if_its_configured_port_is_taken(namespace: str, tmp_path: Path) -> None:
    with held(namespace, "0.0.0.0", PORT), Swarm(tmp_path) as swarm:
        founder = plain(swarm, namespace, "founder")
        founder.start(f"--swarm.listen=/ip4/0.0.0.0/tcp/{PORT}", "--node.persist=true")
        told = founder.until(lambda s: s["phase"] == "error", LONG_S)
        assert told["code"] == "port_in_use" and "--swarm.listen" in told["reason"]
        assert founder.http.get("/livez").status_code == 200


def test_error_for_an_address_of_another_machine_does_not_blame_a_taken_port(namespace: str, tmp_path: Path) -> None:
    with Swarm(tmp_path) as swarm:
        founder = plain(swarm, namespace, "founder").start("--swarm.listen=/ip4/203.0.113.7/tcp/4001")
        assert founder.wait_end(LONG_S) == 3
        assert "does not have the address 203.0.113.7" in founder.said()
        assert "another program" not in founder.said()


def test_node_on_a_machine_without_ipv6_trains_without_a_warning(namespace: str, tmp_path: Path) -> None:
    subprocess.run(["ip", "netns", "exec", namespace, "sysctl", "-qw", NO_IPV6], check=True, timeout=10)
    with Swarm(tmp_path) as swarm:
        founder = plain(swarm, namespace, "founder").start()
        founder.until_training(LONG_S)
        assert ("0.0.0.0", PORT) in listening_ports(founder)
        assert not notices(founder) and "WARNING" not in founder.said() and "IPv6" not in founder.said()


def test_only_one_of_two_nodes_with_the_same_configured_port_keeps_running(namespace: str, tmp_path: Path) -> None:
    """Both nodes start at the same moment. The one that finds the port taken ends."""
    with Swarm(tmp_path) as swarm:
        flags = (f"--swarm.listen=/ip4/127.0.0.1/tcp/{PORT}", "--api.port=0")
        nodes = [plain(swarm, namespace, name).start(*flags) for name in ("first", "second")]
        deadline_s = time.monotonic() + LONG_S
        while all(node.running.poll() is None for node in nodes):
            assert time.monotonic() < deadline_s, "both run"
            time.sleep(0.1)
        loser = next(node for node in nodes if node.running.poll() is not None)
        (winner,) = (node for node in nodes if node is not loser)
        assert loser.wait_end(1) == 3 and "port_in_use" in loser.said()
        winner.until_training(LONG_S)


def test_a_node_keeps_its_port_while_its_worker_restarts(namespace: str, tmp_path: Path) -> None:
    """Another node starts while the first node's new worker reads its checkpoint and does not listen yet."""
    with Swarm(tmp_path) as swarm:
        plan = tmp_path / "plan"
        founder = plain(swarm, namespace, "founder").start(env={"DILOCO_FAULTS": f"file:{plan}"})
        founder.until_training(LONG_S)
        invite = invite_of(founder)
        plan.write_text("load@*=stall:20")
        founder.find("worker").kill()
        founder.until(lambda s: s["code"] == "worker_crashed", LONG_S)
        joiner = plain(swarm, namespace, "joiner", join=invite).start()
        joiner.until(lambda s: s["peers"]["training"] == 2, 2 * LONG_S)
        assert listening_ports(founder) == both(PORT) and set(notices(founder)) <= {"worker_crashed"}
        assert listening_ports(joiner) == both(PORT + 1)


def test_node_that_listens_on_no_port_trains_with_others(namespace: str, tmp_path: Path) -> None:
    with Swarm(tmp_path) as swarm:
        founder = plain(swarm, namespace, "founder").start()
        joiner = plain(swarm, namespace, "joiner", join=invite_of(founder)).start("--swarm.listen=[]")
        told = joiner.until(
            lambda s: (
                s["training"]["loss"] is not None and s["reachability"] == "relay" and s["peers"]["training"] == 2
            ),
            LONG_S,
        )
        assert "listens on no TCP port" in told["reachability_reason"]
        assert listening_ports_of_worker(joiner) == set()


def listening_ports_of_worker(node: Node) -> set[tuple[str, int]]:
    found = set()
    for process in node.with_word("p2pd"):
        with inside(node.namespace):
            found |= {
                (c.laddr.ip, c.laddr.port)
                for c in process.net_connections(kind="tcp")
                if c.status == psutil.CONN_LISTEN
            }
    return found


def test_bootstrap_peer_can_be_given_as_host_and_port_without_a_peer_id(namespace: str, tmp_path: Path) -> None:
    with Swarm(tmp_path) as swarm:
        founder = plain(swarm, namespace, "founder").start()
        invite = parse_invite(invite_of(founder))
        address = next(a for a in invite.addresses if a.startswith("/ip4/"))
        dead = type(invite)(invite.manifest_hash, (address.replace(f"/tcp/{PORT}/", "/tcp/9/"),))
        joiner = plain(swarm, namespace, "joiner", join=str(dead)).start(f"--swarm.bootstrap=localhost:{PORT}")
        joiner.until(lambda s: s["peers"]["training"] == 2, LONG_S)
