"""An encrypted and authenticated stream between two peers over a pipe that a relay carries.

The relay may read, change, replay, cut or redirect all bytes. Even so, it only learns sizes and times, and can only end
the call. The handshake is an ephemeral X25519 exchange. Both Ed25519 identities sign both ephemeral keys and both peer
ids (signed Diffie-Hellman, ISO/IEC 9798-3; Canetti and Krawczyk 2001). HKDF-SHA256 derives one key per direction, and
ChaCha20-Poly1305 encrypts each frame with a counter as nonce.
"""

from __future__ import annotations

import asyncio

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from node.swarm.identity import SIGNATURE_BYTES, Identity, verify
from node.swarm.transport.framing import Reader, Writer, abort, close

KEY_BYTES = 32
FRAME_BYTES = 64 * 1024
"""Maximum length of a frame's plaintext."""
_LENGTH_BYTES, _TAG_BYTES, _NONCE_BYTES = 4, 16, 12
_CALLER, _TARGET = "diloco circuit caller", "diloco circuit target"


class DecryptionFailed(ConnectionError):
    """The other end is not the expected peer, or the relay has changed the bytes."""


class Handshake:
    """One end of a handshake, used once. `hello` is its ephemeral public key, which the other end gets in clear."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._key = X25519PrivateKey.generate()
        raw = serialization.Encoding.Raw, serialization.PublicFormat.Raw
        self.hello = self._key.public_key().public_bytes(*raw)

    async def as_caller(self, target: str, reader: Reader, writer: Writer) -> EncryptedStream:
        """Finish the handshake after `hello` was sent. Raises DecryptionFailed unless the other end is `target`."""
        answer = await reader.readexactly(KEY_BYTES + SIGNATURE_BYTES)
        target_hello, signature = answer[:KEY_BYTES], answer[KEY_BYTES:]
        transcript = _transcript(self._identity.peer_id, target, self.hello, target_hello)
        if not verify(target, _TARGET, transcript, signature):
            raise DecryptionFailed(f"the other end of a circuit is not {target[-6:]}")
        to_target, to_caller = self._keys(target_hello, transcript)
        writer.write(self._identity.sign(_CALLER, transcript))
        return EncryptedStream(reader, writer, send_key=to_target, receive_key=to_caller)

    async def as_target(self, caller: str, hello: bytes, reader: Reader, writer: Writer) -> EncryptedStream:
        """Answer the caller's `hello`. Raises DecryptionFailed unless the other end is `caller`."""
        transcript = _transcript(caller, self._identity.peer_id, hello, self.hello)
        to_target, to_caller = self._keys(hello, transcript)
        writer.write(self.hello + self._identity.sign(_TARGET, transcript))
        await writer.drain()
        if not verify(caller, _CALLER, transcript, await reader.readexactly(SIGNATURE_BYTES)):
            raise DecryptionFailed(f"the other end of a circuit is not {caller[-6:]}")
        return EncryptedStream(reader, writer, send_key=to_caller, receive_key=to_target)

    def _keys(self, other_hello: bytes, transcript: bytes) -> tuple[bytes, bytes]:
        """Derive the key of frames to the target and the key of frames to the caller."""
        try:
            secret = self._key.exchange(X25519PublicKey.from_public_bytes(other_hello))
        except ValueError as exc:  # a wrong length, or a point of low order
            raise DecryptionFailed("the other end of a circuit sends no key") from exc
        keys = HKDF(hashes.SHA256(), 2 * KEY_BYTES, salt=None, info=transcript).derive(secret)
        return keys[:KEY_BYTES], keys[KEY_BYTES:]


def _transcript(caller: str, target: str, caller_hello: bytes, target_hello: bytes) -> bytes:
    """The bytes that both ends sign. They are unambiguous, because peer ids are base58 and contain no space."""
    return f"{caller} {target} ".encode() + caller_hello + target_hello


class EncryptedStream:
    """Reader and writer in one. The bytes read are always a prefix of the bytes that the other end wrote.

    The relay can end the stream after any frame, so the reader must tell from the content whether it is complete.
    """

    def __init__(self, reader: Reader, writer: Writer, *, send_key: bytes, receive_key: bytes) -> None:
        self._reader, self._writer = reader, writer
        self._send_cipher, self._receive_cipher = ChaCha20Poly1305(send_key), ChaCha20Poly1305(receive_key)
        self._sent_frames = self._received_frames = 0
        self._unread = memoryview(b"")
        """The part of the last frame that has not been read yet."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), FRAME_BYTES):
            frame = self._send_cipher.encrypt(_nonce(self._sent_frames), view[start : start + FRAME_BYTES], None)
            self._sent_frames += 1
            self._writer.write(len(frame).to_bytes(_LENGTH_BYTES, "big") + frame)

    async def drain(self) -> None:
        await self._writer.drain()

    def close(self) -> None:
        close(self._writer)

    def abort(self) -> None:
        abort(self._writer)

    async def read(self, n: int) -> bytes:
        """Read up to `n` decrypted bytes; b"" at the end of the stream."""
        if not self._unread:
            self._unread = memoryview(await self._read_frame())
        taken, self._unread = self._unread[:n], self._unread[n:]
        return bytes(taken)

    async def readexactly(self, n: int) -> bytes:
        """Read exactly `n` decrypted bytes. Raises IncompleteReadError if the stream ends early."""
        data = bytearray()
        while len(data) < n:
            piece = await self.read(n - len(data))
            if not piece:
                raise asyncio.IncompleteReadError(bytes(data), n)
            data += piece
        return bytes(data)

    async def _read_frame(self) -> bytes:
        try:
            size = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
        except asyncio.IncompleteReadError as exc:
            if exc.partial:
                raise
            return b""
        if not _TAG_BYTES < size <= FRAME_BYTES + _TAG_BYTES:
            raise DecryptionFailed("a frame of a circuit has an impossible length")
        frame = await self._reader.readexactly(size)
        try:
            data = self._receive_cipher.decrypt(_nonce(self._received_frames), frame, None)
        except InvalidTag as exc:
            raise DecryptionFailed("a frame of a circuit was changed on its way") from exc
        self._received_frames += 1
        return data


def _nonce(count: int) -> bytes:
    return count.to_bytes(_NONCE_BYTES, "big")
