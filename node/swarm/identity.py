"""A node's identity: an Ed25519 key and the libp2p peer id that contains its public key.

A peer id is the identity multihash of the public key, so a signature can be verified with the peer id alone. Source:
libp2p specs, peer-ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from node.errors import DataFolderError, MachineError, RestartError
from node.host.files import NO_SPACE, write_whole

_PRIVATE_HEADER = b"\x08\x01\x12\x40"
"""Start of libp2p's PrivateKey protobuf of type Ed25519. 64 bytes follow: seed and public key."""
_PUBLIC_HEADER = b"\x08\x01\x12\x20"
_ID_HEADER = b"\x00\x24" + _PUBLIC_HEADER
"""Start of the identity multihash of a PublicKey protobuf, which has 36 bytes."""
SIGNATURE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Identity:
    """A signing key and its peer id (base58)."""

    key: Ed25519PrivateKey
    peer_id: str

    def sign(self, purpose: str, data: bytes) -> bytes:
        """Return the signature, 64 bytes. Because of `purpose`, it is not valid for another kind of message."""
        return self.key.sign(purpose.encode() + b"\0" + data)

    @property
    def seed(self) -> bytes:
        """The secret, 32 bytes."""
        raw = serialization.Encoding.Raw
        return self.key.private_bytes(raw, serialization.PrivateFormat.Raw, serialization.NoEncryption())

    def to_libp2p(self) -> bytes:
        raw = serialization.Encoding.Raw
        public = self.key.public_key().public_bytes(raw, serialization.PublicFormat.Raw)
        return _PRIVATE_HEADER + self.seed + public


def new_identity() -> Identity:
    return _from_key(Ed25519PrivateKey.generate())


def load_identity(path: Path) -> Identity:
    """Read the key file, or create it with mode 0600. Raises DataFolderError if the file is damaged, and MachineError
    or RestartError if it cannot be written.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        identity = new_identity()
        try:
            write_whole(path, identity.to_libp2p())
        except OSError as exc:
            error = RestartError if exc.errno in NO_SPACE else MachineError
            raise error(
                f"{path} cannot be written ({exc.strerror}): free some space on that disk, or repair its permissions.",
                code="disk",
            ) from exc
        return identity
    saved = _from_key(Ed25519PrivateKey.from_private_bytes(data[4:36])) if len(data) == 68 else None
    if saved is None or saved.to_libp2p() != data:  # p2pd takes the public key from the file.
        raise DataFolderError(f"{path} is not an identity file: move it away, and the node makes a new identity.")
    return saved


def identity_of_seed(seed: bytes) -> Identity:
    """The identity of a seed of 32 bytes. Raises ValueError for any other length."""
    return _from_key(Ed25519PrivateKey.from_private_bytes(seed))


def _from_key(key: Ed25519PrivateKey) -> Identity:
    public = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return Identity(key, peer_id_of_key(_PUBLIC_HEADER + public))


def peer_id_of_key(public_key: bytes) -> str:
    """The peer id, in base58, of an Ed25519 public key. The key is a libp2p protobuf of 36 bytes."""
    return base58.b58encode(_ID_HEADER.removesuffix(_PUBLIC_HEADER) + public_key).decode()


def read_public_key(public_key: bytes) -> bytes:
    """Read the 32 bytes of an Ed25519 public key from libp2p's protobuf. Raises ValueError for anything else."""
    if len(public_key) != 36 or not public_key.startswith(_PUBLIC_HEADER):
        raise ValueError("no Ed25519 public key")
    return public_key[len(_PUBLIC_HEADER) :]


@lru_cache(maxsize=4096)
def _public_key(peer_id: str) -> Ed25519PublicKey | None:
    try:
        data = base58.b58decode(peer_id)
    except ValueError:
        return None
    if len(data) != 38 or not data.startswith(_ID_HEADER) or base58.b58encode(data).decode() != peer_id:
        return None  # The decoder ignores white space at the end, so one key would have several ids.
    return Ed25519PublicKey.from_public_bytes(data[6:])


def is_peer_id(text: str) -> bool:
    """Whether this is the id of an Ed25519 key."""
    return _public_key(text) is not None


def verify(peer_id: str, purpose: str, data: bytes, signature: bytes) -> bool:
    """Whether `peer_id` signed `data` for this purpose. False for anything malformed."""
    key = _public_key(peer_id)
    if key is None:
        return False
    try:
        key.verify(signature, purpose.encode() + b"\0" + data)
    except InvalidSignature:
        return False
    return True
