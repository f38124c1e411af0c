"""The start of p2pd, and the listen addresses with which it fails."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from node.errors import MachineError
from node.swarm.identity import load_identity
from node.swarm.member import _announced
from node.swarm.transport import p2pd
from node.swarm.transport.p2pd import DaemonOptions, parse_listen_error, start_daemon
from tests.free_ports import free_port

LIMIT_S = 60.0


def options(folder: Path, *listen: str) -> DaemonOptions:
    folder.mkdir()
    load_identity(folder / "identity.key")
    return DaemonOptions(folder / "identity.key", listen)


def start(first: DaemonOptions, *others: DaemonOptions) -> None:
    """Run these daemons at the same time, then stop them."""

    async def live(chosen: Sequence[DaemonOptions]) -> None:
        async with asyncio.timeout(LIMIT_S):
            daemon = await start_daemon(chosen[0])
            try:
                if chosen[1:]:
                    await live(chosen[1:])
            finally:
                await daemon.stop()

    asyncio.run(live([first, *others]))


def test_p2pd_starts_with_the_relaying_of_libp2p_switched_off(tmp_path: Path) -> None:
    arguments = options(tmp_path / "a", "/ip4/127.0.0.1/tcp/0").arguments()
    assert {"-relay=0", "-relayService=0", "-autonat=0"} <= set(arguments)
    assert not any("autoRelay" in argument or "trustedRelays" in argument for argument in arguments)


def test_p2pd_listens_on_a_quic_port_but_does_not_announce_it(tmp_path: Path) -> None:
    both = ("/ip4/0.0.0.0/tcp/31337", "/ip6/::/tcp/31337")
    given = replace(options(tmp_path / "a", *both), hole_punching=True)
    arguments = dict(argument.split("=", 1) for argument in given.arguments() if "=" in argument)
    hidden = ["/ip4/0.0.0.0/udp/0/quic-v1", "/ip6/::/udp/0/quic-v1"]
    assert given.quic_listen == hidden and arguments["-hostAddrs"] == ",".join([*both, *hidden])
    told = arguments["-announceAddrs"].split(",")
    assert "/ip4/127.0.0.1/tcp/31337" in told and all(address.endswith("/tcp/31337") for address in told)
    assert not any("0.0.0.0" in address or "/::/" in address for address in told)


def test_p2pd_opens_no_quic_port_if_it_listens_on_loopback_only(tmp_path: Path) -> None:
    for number, listen in enumerate(((), ("/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/0"))):
        given = replace(options(tmp_path / str(number), *listen), hole_punching=True)
        assert given.quic_listen == [] and not any("announceAddrs" in argument for argument in given.arguments())


def test_failure_of_p2pd_to_listen_on_udp_is_ignored() -> None:
    line = 'listening failed {"on": "/ip4/0.0.0.0/%s", "error": "listen: bind: address already in use"}'
    assert parse_listen_error(line % "udp/31337/quic-v1") is None
    assert (error := parse_listen_error(line % "tcp/31337")) is not None and error.code == "port_in_use"


def test_second_p2pd_on_the_same_port_fails_to_start(tmp_path: Path) -> None:
    address = f"/ip4/127.0.0.1/tcp/{free_port()}"
    with pytest.raises(MachineError) as caught:
        start(options(tmp_path / "a", address), options(tmp_path / "b", address))
    assert caught.value.code == "port_in_use"


def test_p2pd_fails_to_start_if_one_of_its_listen_addresses_is_taken(tmp_path: Path) -> None:
    taken, free = (f"/ip4/127.0.0.1/tcp/{free_port()}" for _ in range(2))
    with pytest.raises(MachineError) as caught:
        start(options(tmp_path / "a", taken), options(tmp_path / "b", free, taken))
    assert caught.value.code == "port_in_use" and taken.rpartition("/")[2] in str(caught.value)


def test_p2pd_fails_to_start_with_a_listen_address_of_another_machine(tmp_path: Path) -> None:
    with pytest.raises(MachineError) as caught:
        start(options(tmp_path / "a", "/ip4/203.0.113.7/tcp/4001"))
    assert caught.value.code == "no_such_address"


def test_missing_room_for_sockets_is_an_error_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_beside: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(p2pd, "open_sockets", refuse)
    with pytest.raises(MachineError, match="set TMPDIR"):
        asyncio.run(start_daemon(DaemonOptions(tmp_path / "identity.key", ())))


def test_p2pd_starts_without_a_listen_address(tmp_path: Path) -> None:
    start(options(tmp_path / "a"))


def test_announced_address_without_port_gets_the_listening_port() -> None:
    given = ("/ip4/203.0.113.7/tcp/0", "/dns4/example.org/tcp/443")
    assert _announced(given, {4: 31338, 6: 31338}) == ("/ip4/203.0.113.7/tcp/31338", "/dns4/example.org/tcp/443")
