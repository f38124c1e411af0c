"""Tests of the TLS probe on valid and false certificates, on other servers, and on p2pd."""

from __future__ import annotations

import asyncio
import datetime as dt
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from node.errors import PeerError
from node.swarm.identity import Identity, load_identity, new_identity
from node.swarm.transport.p2pd import DaemonOptions, start_daemon
from node.swarm.transport.tls_probe import EXTENSION, SIGNED_PREFIX, peer_at, peer_id_of, read_signed_key
from tests.event_loop import in_loop
from tests.free_ports import free_port

WAIT_S = 20.0
DAY = dt.timedelta(days=1)


def protobuf_key(identity: Identity) -> bytes:
    return b"\x08\x01\x12\x20" + identity.key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def signed_key(public_key: bytes, signature: bytes) -> bytes:
    body = b"\x04" + bytes([len(public_key)]) + public_key + b"\x04" + bytes([len(signature)]) + signature
    return b"\x30" + bytes([len(body)]) + body


def certificate(
    extension: Callable[[bytes], bytes] | None,
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """A self-signed certificate. `extension` makes the SignedKey from the certificate's own public key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name, now = x509.Name([]), dt.datetime.now(dt.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now - DAY).not_valid_after(now + DAY)
    if extension is not None:
        spki = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        builder = builder.add_extension(x509.UnrecognizedExtension(EXTENSION, extension(spki)), critical=False)
    return builder.sign(key, hashes.SHA256()), key


def proof_of(identity: Identity) -> Callable[[bytes], bytes]:
    return lambda spki: signed_key(protobuf_key(identity), identity.key.sign(SIGNED_PREFIX + spki))


def test_valid_libp2p_certificate_yields_the_peer_id_of_its_signer() -> None:
    identity = new_identity()
    assert peer_id_of(certificate(proof_of(identity))[0].public_bytes(Encoding.DER)) == identity.peer_id


IDENTITY, OTHER = new_identity(), new_identity()
FALSE_CERTIFICATES: dict[str, Callable[[bytes], bytes] | None] = {
    "without the extension": None,
    "signed by another key": lambda spki: signed_key(protobuf_key(IDENTITY), OTHER.key.sign(SIGNED_PREFIX + spki)),
    "signed for another certificate": lambda _: proof_of(IDENTITY)(b"another"),
    "signed for another purpose": lambda spki: signed_key(protobuf_key(IDENTITY), IDENTITY.key.sign(spki)),
    "a short key": lambda spki: signed_key(protobuf_key(IDENTITY)[:-1], IDENTITY.key.sign(SIGNED_PREFIX + spki)),
    "a key of another kind": lambda spki: signed_key(b"\x08\x02\x12\x20" + bytes(32), bytes(64)),
    "a key that is no point": lambda spki: signed_key(b"\x08\x01\x12\x20" + b"\xff" * 32, bytes(64)),
    "an empty extension": lambda _: b"",
}


@pytest.mark.parametrize("what", FALSE_CERTIFICATES)
def test_false_libp2p_certificate_is_refused(what: str) -> None:
    with pytest.raises(PeerError) as caught:
        peer_id_of(certificate(FALSE_CERTIFICATES[what])[0].public_bytes(Encoding.DER))
    assert caught.value.code == "not_libp2p"


def test_certificate_parsers_raise_only_peer_errors() -> None:
    good = signed_key(protobuf_key(IDENTITY), bytes(64))
    assert read_signed_key(good) == (protobuf_key(IDENTITY), bytes(64))
    whole = certificate(proof_of(IDENTITY))[0].public_bytes(Encoding.DER)
    for parse, data in ((read_signed_key, good), (peer_id_of, whole)):
        for bad in (b"", b"\x30", b"\x30\x82", *(data[:end] for end in range(0, len(data), 7)), data + b"\0"):
            with pytest.raises(PeerError):
                parse(bad)


def test_certificate_whose_version_does_not_exist_is_refused() -> None:
    """The parser's error for it is no ValueError, so it ended the swarm of a node that probed such an address."""
    whole = certificate(proof_of(IDENTITY))[0].public_bytes(Encoding.DER)
    version_3, version_6 = b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x05"
    assert version_3 in whole
    with pytest.raises(PeerError) as caught:
        peer_id_of(whole.replace(version_3, version_6, 1))
    assert caught.value.code == "not_libp2p"


# listeners


async def listen(answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]) -> Any:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        except (OSError, EOFError, ssl.SSLError):
            pass
        finally:
            writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0)


async def why_nobody(port: int, timeout_s: float = WAIT_S) -> str:
    with pytest.raises(PeerError) as caught:
        await peer_at("127.0.0.1", port, timeout_s)
    return caught.value.code


async def as_web_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
    await writer.drain()
    await reader.read()


async def as_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def as_hanging_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)


async def as_endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Negotiates TLS, then sends records that never complete a handshake."""
    writer.write(await reader.readexactly(20 + 12))
    await reader.read(1000)
    while True:
        writer.write(b"\x16\x03\x03\x40\x00\x0b\xff\xff\xff" + bytes(0x4000 - 4))
        await writer.drain()


@pytest.mark.parametrize("answer", [as_web_server, as_hanging_up, as_endless], ids=lambda answer: answer.__name__)
@in_loop
async def test_tls_probe_reports_servers_of_other_protocols_as_not_libp2p(answer: Any) -> None:
    async with await listen(answer) as server:
        assert await why_nobody(server.sockets[0].getsockname()[1]) == "not_libp2p"


@in_loop
async def test_tls_probe_of_a_silent_listener_times_out() -> None:
    async with await listen(as_silent) as server:
        assert await why_nobody(server.sockets[0].getsockname()[1], 0.3) == "timeout"


@in_loop
async def test_tls_probe_reports_a_closed_port_as_refused() -> None:
    assert await why_nobody(free_port()) == "refused"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # hivemind is imported when the daemon starts.
@in_loop
async def test_tls_probe_identifies_p2pd_by_its_peer_id(tmp_path: Path) -> None:
    key = tmp_path / "identity.key"
    peer_id = load_identity(key).peer_id
    port = free_port()
    daemon = await start_daemon(DaemonOptions(key, (f"/ip4/127.0.0.1/tcp/{port}", f"/ip6/::1/tcp/{port}")))
    try:
        assert await peer_at("127.0.0.1", port, WAIT_S) == peer_id
        assert await peer_at("::1", port, WAIT_S) == peer_id
    finally:
        await daemon.stop()
