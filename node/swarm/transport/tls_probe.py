"""Learns from a TLS handshake which peer listens at a TCP address, then closes the connection.

p2pd does not dial a peer to which it is connected, so it cannot tell whether a second connection would reach the same
peer. Sources: libp2p specs, `tls/tls.md` and `connections/README.md`; multistream-select.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from functools import cache

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from node.errors import PeerError
from node.swarm.identity import SIGNATURE_BYTES, peer_id_of_key, read_public_key

EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
"""The certificate extension with a SignedKey: the peer's public key, and its signature over the certificate's key."""
SIGNED_PREFIX = b"libp2p-tls-handshake:"
MULTISTREAM, TLS = "/multistream/1.0.0", "/tls/1.0.0"
MAX_BYTES = 64 * 1024
"""Limit on the bytes of a whole handshake. The handshake of p2pd has about 1 kB."""
_CHUNK_BYTES = 16 * 1024
_SEQUENCE, _OCTETS = 0x30, 0x04
"""DER tags."""


async def peer_at(host: str, port: int, timeout_s: float) -> str:
    """Return the id of the peer that listens at an IP address and TCP port.

    Raises PeerError with code `refused`, `timeout` or `not_libp2p`. The handshake proves that the listener holds the
    peer's key: in TLS 1.3 the listener signs with the certificate's key, which the peer's key has signed.
    """
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            await _select_tls(reader, writer)
            return peer_id_of(await _certificate(reader, writer))
    except TimeoutError as exc:
        raise PeerError(f"nothing answers at {host} port {port}", code="timeout") from exc
    except OSError as exc:
        if writer is not None:
            raise _not_libp2p(f"the connection broke off: {exc}") from exc
        raise PeerError(f"{host} port {port} refuses connections", code="refused") from exc
    except EOFError as exc:
        raise _not_libp2p("the connection was closed") from exc
    finally:
        if writer is not None:
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()


def peer_id_of(certificate: bytes) -> str:
    """The id of the peer whose key signed this certificate (DER). Raises PeerError with code `not_libp2p`."""
    try:
        parsed = x509.load_der_x509_certificate(certificate)
        extension = parsed.extensions.get_extension_for_oid(EXTENSION).value
        subject_key = parsed.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except Exception as exc:  # A stranger's certificate makes the parser raise errors of many kinds.
        raise _not_libp2p("its certificate is no libp2p certificate") from exc
    if not isinstance(extension, x509.UnrecognizedExtension):
        raise _not_libp2p("its certificate is no libp2p certificate")
    public_key, signature = read_signed_key(extension.value)
    try:
        Ed25519PublicKey.from_public_bytes(read_public_key(public_key)).verify(signature, SIGNED_PREFIX + subject_key)
    except (ValueError, InvalidSignature) as exc:
        raise _not_libp2p("its certificate is not signed by an Ed25519 key") from exc
    return peer_id_of_key(public_key)


def read_signed_key(data: bytes) -> tuple[bytes, bytes]:
    """Read key (protobuf) and signature of a SignedKey, a DER sequence of two octet strings. Raises PeerError."""
    # Ed25519, the only key type here, has 36 and 64 bytes, so the lengths take one byte each.
    body = _der(data, _SEQUENCE)
    key_end = 2 + (body[1] if len(body) > 1 else 0)
    public_key, signature = _der(body[:key_end], _OCTETS), _der(body[key_end:], _OCTETS)
    if len(signature) != SIGNATURE_BYTES:
        raise _not_libp2p("its certificate is not signed by an Ed25519 key")
    return public_key, signature


def _der(data: bytes, tag: int) -> bytes:
    if len(data) < 2 or data[0] != tag or data[1] >= 0x80 or len(data) != 2 + data[1]:
        raise _not_libp2p("its certificate names no Ed25519 key")
    return data[2:]


def _not_libp2p(what: str) -> PeerError:
    return PeerError(f"no libp2p peer answers: {what}", code="not_libp2p")


async def _select_tls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Negotiate TLS, with both messages in one packet. Each length is a varint that fits into one byte."""
    protocols = [f"{name}\n".encode() for name in (MULTISTREAM, TLS)]
    writer.write(b"".join(bytes([len(name)]) + name for name in protocols))
    for name in protocols:
        if await reader.readexactly(1 + len(name)) != bytes([len(name)]) + name:
            raise _not_libp2p("it does not speak libp2p's TLS")


async def _certificate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Get the server's certificate by a handshake without a client certificate. The server proves its key first."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = _context().wrap_bio(incoming, outgoing)
    read_bytes = 0
    while True:
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            writer.write(outgoing.read())
        except ssl.SSLError as exc:
            raise _not_libp2p("it does not speak TLS 1.3") from exc
        data = await reader.read(_CHUNK_BYTES)
        read_bytes += len(data)
        if not data or read_bytes > MAX_BYTES:
            raise _not_libp2p("the TLS handshake does not end")
        incoming.write(data)
    certificate = tls.getpeercert(binary_form=True)
    if certificate is None:
        raise _not_libp2p("it has no certificate")
    return certificate


@cache
def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # libp2p certificates are self-signed; `peer_id_of` checks the signer.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["libp2p"])
    return context
