"""Tests of the choice of a port to listen on. Taken ports are detected, and the choice is remembered."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from node.errors import MachineError
from node.host.ports import PORTS_TRIED, PortFile, PortHold, candidates, choose, listen_error, reserve
from node.multiaddress import Multiaddress, parse
from node.swarm.transport.p2pd import parse_listen_error
from tests import free_ports


@pytest.fixture
def free_port() -> int:
    return free_ports.free_port()


def at(port: int, *hosts: str) -> list[Multiaddress]:
    hosts = hosts or ("127.0.0.1",)
    return [parse(f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}") for host in hosts]


def held(stack: ExitStack, host: str, port: int, *, shared: bool) -> None:
    server = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
    if shared:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    server.bind((host, port))
    server.listen()


def code_of(addresses: list[Multiaddress]) -> str:
    with pytest.raises(MachineError) as caught, reserve(addresses):
        pass
    assert caught.value.exit_code == 3
    return caught.value.code


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("holder", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("wanted", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_another_program_holds_is_detected(free_port: int, holder: str, wanted: str, shared: bool) -> None:
    with ExitStack() as stack:
        held(stack, holder, free_port, shared=shared)
        assert code_of(at(free_port, wanted)) == "port_in_use"
    with reserve(at(free_port, wanted)) as reserved:
        assert reserved.port == free_port


@pytest.mark.parametrize("holder", ["::1", "::"])
def test_a_port_that_is_held_for_ipv6_only_is_detected(free_port: int, holder: str) -> None:
    with ExitStack() as stack:
        try:
            held(stack, holder, free_port, shared=True)
        except OSError:
            pytest.skip("this machine has no IPv6")
        assert code_of(at(free_port, "0.0.0.0", "::")) == "port_in_use"


def test_reservation_of_a_port_excludes_other_nodes_until_it_ends(free_port: int) -> None:
    with reserve(at(free_port)):
        assert code_of(at(free_port)) == "port_in_use"
    with reserve(at(free_port)):
        pass


def test_held_listen_addresses_are_free_only_for_the_node_that_holds_them(free_port: int) -> None:
    with closing(PortHold()) as hold:
        hold.hold([str(address) for address in at(free_port)])
        assert code_of(at(free_port)) == "port_in_use"
        with reserve(at(free_port), held=hold.addresses) as own:
            assert own.port == free_port
        with reserve(at(free_port, "127.0.0.2")) as other:
            assert other.port == free_port, "another address of the machine is free"
        hold.hold([])
        with reserve(at(free_port)):
            pass


def test_the_next_port_replaces_a_default_port_that_is_taken(tmp_path: Path, free_port: int) -> None:
    file = PortFile(tmp_path / "cache" / "port")
    with reserve(at(free_port)), choose(at(free_port), file, may_move=True) as chosen:
        assert chosen.wanted == free_port < chosen.chosen == chosen.port
        file.remember(chosen.wanted, chosen.chosen)
        with pytest.raises(MachineError):
            choose(at(free_port), file, may_move=False)
    with choose(at(free_port), file, may_move=True) as again:
        assert again.port == chosen.chosen, "kept although the default one is free again"


def test_all_listen_addresses_get_the_same_port(tmp_path: Path, free_port: int) -> None:
    with choose(at(0, "127.0.0.1", "127.0.0.2"), PortFile(tmp_path / "port"), may_move=False) as chosen:
        assert len({address.port for address in chosen.addresses}) == 1 and chosen.port > 0
    with ExitStack() as stack:
        held(stack, "127.0.0.2", free_port, shared=False)
        both = at(free_port, "127.0.0.1", "127.0.0.2")
        with choose(both, PortFile(tmp_path / "port"), may_move=True) as moved:
            assert [address.port for address in moved.addresses] == [moved.port] * 2 and moved.port != free_port


def test_port_0_takes_the_remembered_port_while_it_is_free(tmp_path: Path, free_port: int) -> None:
    file = PortFile(tmp_path / "port")
    file.remember(0, free_port)
    with choose(at(0), file, may_move=False) as chosen:
        assert chosen.port == free_port
    with reserve(at(free_port)), choose(at(0), file, may_move=False) as other:
        assert other.port not in (0, free_port)


def test_a_port_that_was_remembered_for_another_wanted_port_is_not_used(tmp_path: Path) -> None:
    file = PortFile(tmp_path / "cache" / "port")
    assert file.recall(31337) == 0
    file.remember(31337, 31339)
    assert (file.recall(31337), file.recall(0)) == (31339, 0)


@pytest.mark.parametrize("content", ["", "0", "0 0", "0 -3", "0 70000", "0 x", "0 1 2", "\ufffd"])
def test_an_invalid_port_file_is_ignored(tmp_path: Path, content: str) -> None:
    (tmp_path / "port").write_text(content)
    assert PortFile(tmp_path / "port").recall(0) == 0


def test_port_candidates_begin_with_the_remembered_port_and_end_with_any_port() -> None:
    assert list(candidates(31337, 0)) == [*range(31337, 31337 + PORTS_TRIED), 0]
    assert list(candidates(31337, 31339))[:4] == [31339, 31337, 31338, 31340]
    assert list(candidates(65535, 0)) == [65535, 0]


def test_listening_on_no_address_is_allowed(tmp_path: Path) -> None:
    with choose([], PortFile(tmp_path / "port"), may_move=False) as chosen:
        assert (chosen.addresses, chosen.port) == ((), 0)


def test_listening_on_an_address_of_another_machine_has_its_own_error_code() -> None:
    assert code_of(at(40123, "203.0.113.7")) == "no_such_address"


@pytest.mark.parametrize(
    ("number", "host", "code", "message"),
    [
        (errno.EADDRINUSE, "0.0.0.0", "port_in_use", "another program has the port"),
        (errno.EADDRNOTAVAIL, "203.0.113.7", "no_such_address", "does not have the address 203.0.113.7"),
        (errno.EAFNOSUPPORT, "::", "no_such_address", "does not have IPv6"),
        (errno.EACCES, "0.0.0.0", "port_not_permitted", "ports below 1024"),
        (errno.EIO, "0.0.0.0", "cannot_listen", "EIO"),
        (None, "0.0.0.0", "cannot_listen", "unknown"),
    ],
)
def test_each_listen_error_is_a_sentence_with_a_remedy(number: int | None, host: str, code: str, message: str) -> None:
    error = listen_error(number, at(80, host)[0])
    assert (error.code, error.exit_code) == (code, 3)
    assert message in str(error) and "swarm.listen" in str(error) and str(error).endswith(".")


LOG = "2026-11-22T15:02:18.955Z\tWARN\tswarm2\tswarm/swarm_listen.go:30\tlistening failed\t"


def test_listen_errors_are_read_from_the_log_of_p2pd() -> None:
    line = LOG + '{"on": "/ip4/0.0.0.0/tcp/80", "error": "listen tcp4 0.0.0.0:80: bind: %s"}'
    codes = {"address already in use": "port_in_use", "cannot assign requested address": "no_such_address"}
    codes |= {"permission denied": "port_not_permitted", "no idea": "cannot_listen"}
    for words, code in codes.items():
        error = parse_listen_error(line % words)
        assert error is not None and error.code == code
    assert parse_listen_error("Peer ID: 12D3") is None
    broken = parse_listen_error(LOG + "{")
    assert broken is not None and broken.code == "cannot_listen"
