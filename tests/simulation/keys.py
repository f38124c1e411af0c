"""Signatures for simulated nodes. They are checked like real ones, and take a hundredth of the time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from cryptography.exceptions import InvalidSignature

from node.swarm import identity
from node.swarm.identity import Identity, peer_id_of_key

_HEADER = b"\x08\x01\x12\x20"


@dataclass(frozen=True, slots=True)
class SimulatedKey:
    """Stands for both halves of an Ed25519 key. Only the simulation's nodes hold it, so none can forge a signature."""

    seed: bytes
    on_signed: Callable[[bytes], None] = lambda _data: None
    """Called with everything that the node signs."""

    def sign(self, data: bytes) -> bytes:
        self.on_signed(data)
        return self._signature(data)

    def verify(self, signature: bytes, data: bytes) -> None:
        if signature != self._signature(data):
            raise InvalidSignature

    def _signature(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self.seed).digest()


_keys: dict[str, SimulatedKey] = {}


def simulated_identity(number: int, on_signed: Callable[[bytes], None] = lambda _data: None) -> Identity:
    """The identity of a node. The same number always gives the same key and peer id."""
    seed = hashlib.sha256(f"node {number}".encode()).digest()
    made = Identity(cast(Any, SimulatedKey(seed, on_signed)), peer_id_of_key(_HEADER + seed))
    _keys[made.peer_id] = SimulatedKey(seed)
    return made


@contextmanager
def simulated_keys() -> Iterator[None]:
    """Check all signatures with simulated keys inside this context."""
    before = identity._public_key
    identity._public_key = _keys.get  # type: ignore[assignment]
    try:
        yield
    finally:
        identity._public_key = before
