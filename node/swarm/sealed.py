"""An encrypted and authenticated stream between two peers over a pipe that a third one carries. Knows bytes and keys.

The carrier may read, change, replay, cut or redirect everything: it learns sizes and times, and can end the call. The
handshake is an ephemeral X25519 exchange, signed by both Ed25519 identities over both ephemeral keys and both peer ids
(signed Diffie-Hellman, ISO/IEC 9798-3; Canetti and Krawczyk 2001). HKDF-SHA256 makes one key for each direction;
frames are ChaCha20-Poly1305 with a counter for a nonce.
"""

from __future__ import annotations

import asyncio

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from node.swarm.identity import SIGNATURE_BYTES, Identity, verify
from node.swarm.streams import Reader, Writer

KEY_BYTES = 32
FRAME_BYTES = 64 * 1024
"""Longest plaintext of a frame."""
_LENGTH_BYTES, _TAG_BYTES, _NONCE_BYTES = 4, 16, 12
_CALLER, _TARGET = "diloco circuit caller", "diloco circuit target"


class SealBroken(ConnectionError):
    """The other end is not who it should be, or the carrier has changed the bytes."""


class Handshake:
    """One end's ephemeral key; `hello` goes to the other end in clear. Used once."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._key = X25519PrivateKey.generate()
        raw = serialization.Encoding.Raw, serialization.PublicFormat.Raw
        self.hello = self._key.public_key().public_bytes(*raw)

    async def as_caller(self, target: str, reader: Reader, writer: Writer) -> SealedStream:
        """Go on after the target has been given `hello`. Raises SealBroken unless the other end is `target`."""
        answer = await reader.readexactly(KEY_BYTES + SIGNATURE_BYTES)
        theirs, signature = answer[:KEY_BYTES], answer[KEY_BYTES:]
        transcript = _transcript(self._identity.peer_id, target, self.hello, theirs)
        if not verify(target, _TARGET, transcript, signature):
            raise SealBroken(f"the other end of a circuit is not {target[-6:]}")
        forth, back = self._keys(theirs, transcript)
        writer.write(self._identity.sign(_CALLER, transcript))
        return SealedStream(reader, writer, send_key=forth, receive_key=back)

    async def as_target(self, caller: str, hello: bytes, reader: Reader, writer: Writer) -> SealedStream:
        """Answer the caller's `hello`. Raises SealBroken unless the other end is `caller`."""
        transcript = _transcript(caller, self._identity.peer_id, hello, self.hello)
        forth, back = self._keys(hello, transcript)
        writer.write(self.hello + self._identity.sign(_TARGET, transcript))
        await writer.drain()
        if not verify(caller, _CALLER, transcript, await reader.readexactly(SIGNATURE_BYTES)):
            raise SealBroken(f"the other end of a circuit is not {caller[-6:]}")
        return SealedStream(reader, writer, send_key=back, receive_key=forth)

    def _keys(self, theirs: bytes, transcript: bytes) -> tuple[bytes, bytes]:
        """Of the frames from caller to target, and of those back."""
        try:
            secret = self._key.exchange(X25519PublicKey.from_public_bytes(theirs))
        except ValueError as exc:  # a wrong length, or a point of low order
            raise SealBroken("the other end of a circuit sends no key") from exc
        keys = HKDF(hashes.SHA256(), 2 * KEY_BYTES, salt=None, info=transcript).derive(secret)
        return keys[:KEY_BYTES], keys[KEY_BYTES:]


def _transcript(caller: str, target: str, caller_hello: bytes, target_hello: bytes) -> bytes:
    """Peer ids are base58, so neither contains the space that ends it."""
    return f"{caller} {target} ".encode() + caller_hello + target_hello


class SealedStream:
    """Reader and writer in one. What is read was written by the other end, in this order, and nothing is missing so
    far; that nothing follows is for the reader to know, as a carrier can end a stream at any frame."""

    def __init__(self, reader: Reader, writer: Writer, *, send_key: bytes, receive_key: bytes) -> None:
        self._reader, self._writer = reader, writer
        self._seal, self._open = ChaCha20Poly1305(send_key), ChaCha20Poly1305(receive_key)
        self._sent, self._received = 0, 0
        self._rest = memoryview(b"")
        """Of the last frame, what has not been read yet."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), FRAME_BYTES):
            sealed = self._seal.encrypt(_nonce(self._sent), view[start : start + FRAME_BYTES], None)
            self._sent += 1
            self._writer.write(len(sealed).to_bytes(_LENGTH_BYTES, "big") + sealed)

    async def drain(self) -> None:
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()

    async def read(self, n: int) -> bytes:
        """Up to n bytes; nothing at the end of the stream."""
        if not self._rest:
            self._rest = memoryview(await self._read_frame())
        taken, self._rest = self._rest[:n], self._rest[n:]
        return bytes(taken)

    async def readexactly(self, n: int) -> bytes:
        """Raises IncompleteReadError where the stream ends before."""
        pieces: list[bytes] = []
        left = n
        while left:
            piece = await self.read(left)
            if not piece:
                raise asyncio.IncompleteReadError(b"".join(pieces), n)
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)

    async def _read_frame(self) -> bytes:
        try:
            size = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
        except asyncio.IncompleteReadError as exc:
            if exc.partial:
                raise
            return b""
        if not _TAG_BYTES < size <= FRAME_BYTES + _TAG_BYTES:
            raise SealBroken("a frame of a circuit has an impossible length")
        try:
            data = self._open.decrypt(_nonce(self._received), await self._reader.readexactly(size), None)
        except InvalidTag as exc:
            raise SealBroken("a frame of a circuit was changed on its way") from exc
        self._received += 1
        return data


def _nonce(count: int) -> bytes:
    return count.to_bytes(_NONCE_BYTES, "big")
