"""Valid and invalid multiaddresses."""

from __future__ import annotations

import pytest

from node.multiaddress import parse, parse_plain

ED25519 = "12D3KooWGEVDG5YficKKDjpxnKSAb8vCRcfopTSgPHF5LsHdpY3V"
RSA = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.mark.parametrize(
    "text",
    [
        "/ip4/1.2.3.4/tcp/31337",
        f"/ip4/1.2.3.4/tcp/0/p2p/{ED25519}",
        f"/ip6/2001:db8::1/tcp/1/p2p/{RSA}",
        "/ip6/::/tcp/65535",
        "/dns4/example.org/udp/443/quic-v1",
        "/dns6/example.org/udp/443",
        "/dns/peer/tcp/1",
    ],
)
def test_valid_multiaddress_is_unchanged_by_parsing_and_formatting(text: str) -> None:
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("foo", "is not a multiaddress"),
        ("", "is not a multiaddress"),
        ("/", "is not a multiaddress"),
        ("/ip4/1.2.3.4", "is not a multiaddress"),
        ("/ip4/1.2.3.4/tcp", "is not a multiaddress"),
        ("/ip4/1.2.3.4/tcp/1/", "is not a multiaddress"),
        ("/ip4/1.2.3.4/sctp/1", "is not a multiaddress"),
        ("/ip4/1.2.3.4/tcp/1/quic-v1", "is not a multiaddress"),
        ("/ip4/1.2.3.4/tcp/1/ws", "is not a multiaddress"),
        (f"/ip4/1.2.3.4/tcp/1/p2p/{RSA}/p2p-circuit", "is not a multiaddress"),
        ("/unix/tmp/x", "is not a multiaddress"),
        ("/ip4/1.2.3/tcp/1", "is not an IPv4 address"),
        ("/ip4/01.2.3.4/tcp/1", "is not an IPv4 address"),
        ("/ip6/1.2.3.4/tcp/1", "is not an IPv6 address"),
        ("/ip6/fe80::1%eth0/tcp/1", "is not a host"),
        ("/dns4/-x.org/tcp/1", "is not a host"),
        ("/dns4/a..org/tcp/1", "is not a host"),
        ("/ip4/1.2.3.4/tcp/65536", "is not a port"),
        ("/ip4/1.2.3.4/tcp/-1", "is not a port"),
        ("/ip4/1.2.3.4/tcp/٣", "is not a port"),
        ("/ip4/1.2.3.4/tcp/1/p2p/Qm", "is not a peer id"),
        (f"/ip4/1.2.3.4/tcp/1/p2p/{ED25519[:-1]}", "is not a peer id"),
        (f"/ip4/1.2.3.4/tcp/1/p2p/{ED25519}" + "1" * 9999, "is not a peer id"),
    ],
)
def test_invalid_multiaddress_is_refused_with_a_reason(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(text)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("203.0.113.7:4001", "/ip4/203.0.113.7/tcp/4001"),
        ("[2001:db8::1]:4001", "/ip6/2001:db8::1/tcp/4001"),
        ("example.org:4001", "/dns4/example.org/tcp/4001"),
        ("peer:4001", "/dns4/peer/tcp/4001"),
        ("/dns6/example.org/tcp/1", "/dns6/example.org/tcp/1"),
    ],
)
def test_plain_host_and_port_are_parsed_as_a_multiaddress(text: str, read: str) -> None:
    assert str(parse_plain(text)) == str(parse_plain(text, bare_port=5)) == read


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("203.0.113.7", "/ip4/203.0.113.7/tcp/5"),
        ("2001:db8::1", "/ip6/2001:db8::1/tcp/5"),
        ("example.org", "/dns4/example.org/tcp/5"),
    ],
)
def test_host_without_a_port_is_parsed_only_if_there_is_a_default_port(text: str, read: str) -> None:
    assert str(parse_plain(text, bare_port=5)) == read
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_plain(text)


@pytest.mark.parametrize("text", ["foo", "", "1.2.3", "1.2.3:4", "[::1]", "[::1:5", "::1]:5", "host:", ":5", "a b:5"])
def test_invalid_host_and_port_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not an? "):
        parse_plain(text, bare_port=5)
