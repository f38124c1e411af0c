"""Tests of the simulated homes themselves, with plain sockets and without nodes."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

import pytest

from tests.homes.home import PORT, Home, Kind
from tests.homes.namespace import NAMES, inside
from tests.homes.world import AttachedHome, Machine, World, remove_orphans, world

ROOT = Path(__file__).parents[2]
ANSWER_S = 5.0
"""Timeout for data that must arrive on a busy machine."""
SILENCE_S = 1.0
"""Time after which data that must not arrive counts as lost."""
LINE_S = 2.5


def listen(machine: Machine, port: int = PORT, family: socket.AddressFamily = socket.AF_INET) -> socket.socket:
    with inside(machine.namespace):
        listener = socket.create_server(("::" if family == socket.AF_INET6 else "0.0.0.0", port), family=family)
    listener.settimeout(ANSWER_S)
    return listener


def dial(
    machine: Machine, address: str, port: int = PORT, *, from_port: int = 0, timeout_s: float = ANSWER_S
) -> socket.socket:
    """Open a TCP connection from this machine. Raises OSError."""
    with inside(machine.namespace):
        calling = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        calling.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        calling.bind(("", from_port))
        calling.settimeout(timeout_s)
        calling.connect((address, port))
    except OSError:
        calling.close()
        raise
    return calling


def reaches(machine: Machine, address: str, port: int = PORT, *, timeout_s: float = ANSWER_S) -> bool:
    with suppress(OSError), dial(machine, address, port, timeout_s=timeout_s):
        return True
    return False


def reached(machine: Machine, addresses: Sequence[str], timeout_s: float = SILENCE_S) -> list[str]:
    """Dial all addresses at the same time. Returns those at which PORT answers."""
    with ThreadPoolExecutor(len(addresses)) as pool:
        answers = list(pool.map(lambda address: reaches(machine, address, timeout_s=timeout_s), addresses))
    return [address for address, answered in zip(addresses, answers, strict=True) if answered]


def datagrams(machine: Machine, port: int = 0) -> socket.socket:
    """Open a UDP socket on this machine, bound to the port."""
    with inside(machine.namespace):
        opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    opened.bind(("0.0.0.0", port))
    opened.settimeout(ANSWER_S)
    return opened


def received(opened: socket.socket, timeout_s: float) -> tuple[bytes, str, int] | None:
    """Receive a datagram. Returns it with the address and the port of its sender, or None at the timeout."""
    opened.settimeout(timeout_s)
    try:
        data, (address, port) = opened.recvfrom(2048)
    except TimeoutError:
        return None
    return data, address, port


def outer_port(opened: socket.socket, observer: socket.socket, home: AttachedHome, port: int) -> int:
    """The source port of this UDP socket, as an observer at the home's address sees it."""
    opened.sendto(b"where am I", (home.address, port))
    seen = received(observer, ANSWER_S)
    assert seen is not None
    return seen[2]


def ask(connection: socket.socket, accepted: socket.socket, timeout_s: float = ANSWER_S) -> bytes:
    """Send a word and return the answer, or b"" if none arrives in time."""
    for end in (connection, accepted):
        end.settimeout(timeout_s)
    try:
        connection.sendall(b"word")
        accepted.sendall(accepted.recv(4))
        return connection.recv(4)
    except OSError:
        return b""


def test_simulated_homes_have_global_outer_and_private_inner_addresses() -> None:
    with world([Home("public", ipv6=True), Home("published"), Home("cone", ipv6=True), Home("ipv6_only")]) as homes:
        assert all(ip_address(home.address).is_global for home in homes if home.address)
        assert all(ip_address(home.machine.ipv6).is_global for home in homes if home.machine.ipv6)
        assert [home.machine.address for home in homes] == ["11.0.1.2", "172.17.0.2", "192.168.1.2", ""]
        assert [bool(home.machine.ipv6) for home in homes] == [True, False, True, True]


@pytest.mark.parametrize("kind", ["public", "published", "forwarded"])
def test_an_open_port_can_be_dialled_from_another_home(kind: Kind) -> None:
    with world([Home(kind), Home("cone")]) as homes:
        there, here = homes
        with listen(there.machine) as listener, dial(here.machine, there.address) as connection:
            accepted, (address, _) = listener.accept()
            assert address == here.address, "the machine sees the caller's outer address"
            assert ask(connection, accepted) == b"word"
            accepted.close()
        assert there.announce == [f"/ip4/{there.address}/tcp/{PORT}"]
        with datagrams(there.machine, PORT) as waiting, datagrams(here.machine) as sending:
            sending.sendto(b"word", (there.address, PORT))
            assert received(waiting, ANSWER_S) is not None


def test_a_home_without_a_forwarded_port_cannot_be_dialled() -> None:
    with world([Home("cone"), Home("symmetric"), Home("public")]) as homes:
        *hidden, outside = homes
        assert [home.announce for home in hidden] == [[], []]
        with listen(hidden[0].machine), listen(hidden[1].machine), listen(outside.machine):
            private = hidden[0].machine.address
            assert reached(outside.machine, [private, *(home.address for home in hidden)]) == []
            assert all(reaches(home.machine, outside.address) for home in hidden)


def test_router_opens_only_the_forwarded_port() -> None:
    with world([Home("forwarded"), Home("cone")]) as homes, listen(homes[0].machine, PORT + 1):
        assert not reaches(homes[1].machine, homes[0].address, PORT + 1, timeout_s=SILENCE_S)


@pytest.mark.parametrize("kind", ["published", "forwarded"])
@pytest.mark.parametrize("hairpin", [True, False])
def test_machine_reaches_its_own_outer_address_only_through_a_router_with_hairpin_nat(
    kind: Kind, hairpin: bool
) -> None:
    with world([Home(kind, hairpin=hairpin)]) as homes, listen(homes[0].machine) as listener:
        machine = homes[0].machine
        if hairpin:
            with dial(machine, homes[0].address):
                accepted, (address, _) = listener.accept()
                accepted.close()
                assert address == f"{homes[0].home.subnet}.1", "as from the router"
        else:
            assert not reaches(machine, homes[0].address, timeout_s=SILENCE_S)


def outer_ports(home: AttachedHome, outside: Sequence[AttachedHome]) -> dict[str, list[int]]:
    """The source ports of one UDP socket and one TCP port of this home, as observers in the other homes see them."""
    ports: dict[str, list[int]] = {"udp": [], "tcp": []}
    with datagrams(home.machine, 5000) as sending:
        for observing in outside:
            with datagrams(observing.machine, PORT) as observer:
                ports["udp"].append(outer_port(sending, observer, observing, PORT))
    for observing in outside:
        with listen(observing.machine) as listener, dial(home.machine, observing.address, from_port=6000):
            accepted, (_, port) = listener.accept()
            accepted.close()
            ports["tcp"].append(port)
    return ports


def test_cone_nat_keeps_one_outer_port_for_all_destinations_and_a_symmetric_nat_does_not() -> None:
    with world([Home("cone"), Home("symmetric"), Home("public"), Home("public")]) as homes:
        cone, symmetric, *outside = homes
        assert outer_ports(cone, outside) == {"udp": [5000, 5000], "tcp": [6000, 6000]}
        assert all(one != other for one, other in outer_ports(symmetric, outside).values())


def open_simultaneously(
    homes: Sequence[AttachedHome], observer_home: AttachedHome, seconds: float
) -> list[bytes | None]:
    """Two homes learn their outer UDP ports from an observer and send to each other. Returns what each received."""
    with (
        datagrams(homes[0].machine, 5000) as left,
        datagrams(homes[1].machine, 5000) as right,
        datagrams(observer_home.machine, PORT) as observer,
    ):
        ports = [outer_port(opened, observer, observer_home, PORT) for opened in (left, right)]
        got: list[bytes | None] = [None, None]
        end_s = time.monotonic() + seconds
        while None in got and time.monotonic() < end_s:
            left.sendto(b"from left", (homes[1].address, ports[1]))
            right.sendto(b"from right", (homes[0].address, ports[0]))
            for i, opened in enumerate((left, right)):
                arrived = received(opened, 0.2)
                got[i] = arrived[0] if arrived else got[i]
        return got


@pytest.mark.parametrize(
    ("kinds", "meet"),
    [(("cone", "cone"), True), (("cone", "symmetric"), False), (("symmetric", "symmetric"), False)],
    ids=["two cones", "cone and symmetric", "two symmetric"],
)
def test_simultaneous_udp_packets_pass_between_two_cone_nats_only(kinds: tuple[Kind, Kind], meet: bool) -> None:
    with world([Home(kinds[0]), Home(kinds[1]), Home("public")]) as homes:
        got = open_simultaneously(homes[:2], homes[2], ANSWER_S if meet else SILENCE_S)
        assert got == ([b"from right", b"from left"] if meet else [None, None])


def test_simultaneous_tcp_dials_connect_two_homes_behind_cone_nats() -> None:
    with world([Home("cone"), Home("cone")]) as homes:
        made: list[socket.socket | None] = [None, None]

        def call(me: int) -> None:
            other = homes[1 - me].address
            end_s = time.monotonic() + 2 * ANSWER_S
            while made[me] is None and time.monotonic() < end_s:
                with suppress(OSError):
                    made[me] = dial(homes[me].machine, other, 6000, from_port=6000)

        callers = [threading.Thread(target=call, args=(me,)) for me in range(2)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(4 * ANSWER_S)
        left, right = made
        assert left is not None and right is not None
        with left, right:
            assert ask(left, right) == b"word"


def test_home_with_ipv6_only_reaches_dual_stack_homes_and_no_others() -> None:
    with world([Home("ipv6_only"), Home("public", ipv6=True), Home("published")]) as homes:
        alone, dual, old = homes
        with listen(dual.machine, family=socket.AF_INET6), listen(old.machine):
            assert reaches(alone.machine, dual.machine.ipv6)
            assert not reaches(alone.machine, dual.address)
            assert not reaches(alone.machine, old.address)
            assert reaches(dual.machine, old.address)


def test_ipv6_firewall_admits_inbound_connections_only_where_it_is_opened() -> None:
    kinds: list[Kind] = ["ipv6_only", "cone", "published"]
    wanted = [Home(kind, ipv6=True, inbound_ipv6=inbound) for kind in kinds for inbound in (True, False)]
    with world([*wanted, Home("public", ipv6=True)]) as homes, ExitStack() as stack:
        *others, outside = homes
        for home in others:
            stack.enter_context(listen(home.machine, family=socket.AF_INET6))
        for _ in range(2):
            opened = [home.machine.ipv6 for home in others if home.home.inbound_ipv6]
            assert reached(outside.machine, [home.machine.ipv6 for home in others]) == opened
            told = [address for home in others for address in home.announce if address.startswith("/ip6/")]
            assert told == [f"/ip6/{address}/tcp/{PORT}" for address in opened]
            for home in others:
                home.change_address()


@contextmanager
def pouring(sender: Machine, receiver: Machine, address: str, port: int = PORT) -> Iterator[None]:
    """Keep a TCP connection that sends as fast as it can."""
    with (
        listen(receiver, port) as listener,
        dial(sender, address, port) as connection,
        listener.accept()[0] as accepted,
    ):

        def pour() -> None:
            with suppress(OSError):
                while True:
                    connection.sendall(b"\0" * 65536)

        def drink() -> None:
            with suppress(OSError):
                while accepted.recv(1 << 20):
                    pass

        threads = [threading.Thread(target=work) for work in (pour, drink)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            for end in (connection, accepted):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(ANSWER_S)


TRIES = 5
"""Number of measurements, because a busy machine may fail to fill a line."""


def rates_mbit_s(counts: Sequence[Callable[[], int]], seconds: float = LINE_S) -> list[float]:
    """Measure the rates of these byte counters, after one second for TCP slow start."""
    time.sleep(1.0)
    since_s, before = time.monotonic(), [count() for count in counts]
    time.sleep(seconds)
    return [(count() - old) * 8e-6 / (time.monotonic() - since_s) for count, old in zip(counts, before, strict=True)]


@pytest.mark.parametrize("way", ["up", "down"])
def test_simulated_line_carries_its_configured_rate(way: str) -> None:
    lines = [(2.0, 2.0), (10.0, 50.0), (100.0, 20.0)]
    with world([Home("public", lines=None), *(Home("forwarded", lines=rates) for rates in lines)]) as homes:
        outside, *others = homes
        with ExitStack() as stack:
            for home in others:
                pair = (home.machine, outside.machine, outside.address, PORT + home.number)
                back = (outside.machine, home.machine, home.address)
                stack.enter_context(pouring(*pair) if way == "up" else pouring(*back))
            counts = [home.sent_bytes if way == "up" else home.received_bytes for home in others]
            rates = [up_mbit_s if way == "up" else down_mbit_s for up_mbit_s, down_mbit_s in lines]
            for _ in range(TRIES):
                carried = rates_mbit_s(counts)
                assert all(got < 1.1 * rate for got, rate in zip(carried, rates, strict=True)), f"{lines}: {carried}"
                if are_full := all(0.9 * rate < got for got, rate in zip(carried, rates, strict=True)):
                    break
            assert are_full, f"{lines}: {carried}"


def test_rate_of_a_simulated_line_can_change_while_it_is_used() -> None:
    with world([Home("cone", lines=(50.0, 50.0)), Home("public", lines=None)]) as homes:
        home, outside = homes
        with pouring(home.machine, outside.machine, outside.address):
            home.limit((5.0, 50.0))
            (slow,) = rates_mbit_s([home.sent_bytes])
            assert 0.8 * 5.0 < slow < 1.1 * 5.0, "a busy machine may not fill the line"
            home.limit(None)
            fast, back = rates_mbit_s([home.sent_bytes, home.received_bytes], 0.5)
            assert fast > 50.0 and back < 0.2 * fast, "what is sent, and what is acknowledged"


@pytest.mark.parametrize("kind", ["public", "published", "forwarded"])
def test_inbound_connection_ends_when_a_home_changes_its_address_and_the_new_one_works(kind: Kind) -> None:
    with world([Home(kind, ipv6=True), Home("cone")]) as homes, listen(homes[0].machine) as listener:
        home, other = homes
        before = home.address, home.machine.ipv6
        with dial(other.machine, home.address) as connection, listener.accept()[0] as accepted:
            assert ask(connection, accepted) == b"word"
            home.change_address()
            assert home.address != before[0] and home.machine.ipv6 != before[1]
            connection.sendall(b"word")
            accepted.settimeout(SILENCE_S)
            with suppress(OSError):  # The connection is dropped or reset.
                assert accepted.recv(4) == b""
        assert not reaches(other.machine, before[0], timeout_s=SILENCE_S)
        with dial(other.machine, home.address) as connection, listener.accept()[0] as accepted:
            assert ask(connection, accepted) == b"word"


def test_outbound_connection_ends_when_its_home_changes_its_address() -> None:
    with world([Home("cone"), Home("public")]) as homes, listen(homes[1].machine) as listener:
        with dial(homes[0].machine, homes[1].address) as connection, listener.accept()[0] as accepted:
            assert ask(connection, accepted) == b"word"
            homes[0].change_address()
            assert ask(connection, accepted, SILENCE_S) == b""
        with dial(homes[0].machine, homes[1].address), listener.accept()[0] as accepted:
            assert accepted.getpeername()[0] == homes[0].address


def test_home_that_is_cut_off_exchanges_no_data_with_others_until_it_is_reconnected() -> None:
    with world([Home("published"), Home("cone"), Home("cone")]) as homes, listen(homes[0].machine) as listener:
        with dial(homes[1].machine, homes[0].address) as connection, listener.accept()[0] as accepted:
            homes.cut_off(homes[:2])
            assert ask(connection, accepted) == b"word", "those who are cut off together reach one another"
            assert not reaches(homes[2].machine, homes[0].address, timeout_s=SILENCE_S)
            homes[1].cut_off()
            connection.sendall(b"late")
            accepted.settimeout(SILENCE_S)
            with pytest.raises(TimeoutError):
                accepted.recv(4)
            homes.reconnect(homes)
            accepted.settimeout(2 * ANSWER_S)
            assert accepted.recv(4) == b"late", "what was sent meanwhile arrives by TCP's own repetition"
        assert reaches(homes[2].machine, homes[0].address)


def test_machines_of_one_home_share_its_network_and_its_outer_address() -> None:
    with world([Home("forwarded", machines=2, ipv6=True), Home("public")]) as homes:
        first, second = homes[0].machines
        with listen(first) as listener, listen(second), listen(homes[1].machine) as outside:
            for address in (first.address, homes[0].address):
                with dial(second, address):
                    listener.accept()[0].close()
            assert reaches(first, second.address)
            for machine in (first, second):
                with dial(machine, homes[1].address), outside.accept()[0] as accepted:
                    assert accepted.getpeername()[0] == homes[0].address


def test_simulated_network_is_removed_completely_even_after_a_failure() -> None:
    def fail() -> None:
        with world([Home("published"), Home("cone", machines=2)]) as homes:
            names.extend(path.name for path in NAMES.glob(f"{homes.internet.rpartition('-')[0]}-*"))
            there = ["ip", "netns", "exec", homes[1].machines[1].namespace, sys.executable, "-c"]
            sleep = [*there, "import time; print(flush=True); time.sleep(600)"]
            started.append(subprocess.Popen(sleep, start_new_session=True, stdout=subprocess.PIPE))
            assert started[0].stdout is not None
            with started[0].stdout as said:
                assert said.readline(), "it is in its namespace"
            raise RuntimeError("on purpose")

    names: list[str] = []
    started: list[subprocess.Popen[bytes]] = []
    rules = subprocess.run(["iptables-save"], capture_output=True, check=True, timeout=10).stdout
    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert len(names) == 6
    assert not {path.name for path in NAMES.iterdir()} & set(names)
    assert started[0].wait(ANSWER_S) != 0
    after = subprocess.run(["iptables-save"], capture_output=True, check=True, timeout=10).stdout
    assert [line for line in after.splitlines() if line[:1] not in (b"#", b":")] == [
        line for line in rules.splitlines() if line[:1] not in (b"#", b":")
    ], "the machine's own firewall was touched"


def test_simulated_network_of_a_killed_process_can_be_removed() -> None:
    build = "from tests.homes.world import World; print(World().__enter__().internet, flush=True); input()"
    words = [sys.executable, "-c", build]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as builder:
        assert builder.stdout is not None
        name = builder.stdout.readline().decode().strip()
        assert Path(NAMES, name).exists() and name not in remove_orphans()
        builder.kill()
    assert name in remove_orphans()
    assert not Path(NAMES, name).exists()


def test_simulated_network_that_cannot_be_built_leaves_no_namespace() -> None:
    with pytest.raises(ValueError, match="no kind of home"):
        Home("castle")  # type: ignore[arg-type]

    def clash() -> None:
        with World() as homes:
            made.append(homes.internet)
            homes.make(homes.internet)  # This namespace already exists.

    made: list[str] = []
    with pytest.raises(subprocess.CalledProcessError):
        clash()
    assert made and not Path(NAMES, made[0]).exists()
