"""The digest of the outer state is the root of a hash tree, so that a downloaded slice can be checked alone.

Leaves are the BLAKE3 hashes of 4 MiB slices, first of the anchor, then of the momentum (fp32, little-endian); no slice
covers parts of both. The root is the hash of round, tokens, parameter count, the hash of all leaves, the credit's root,
and the hash of the amendments, if there are any. So a member's credit can be proved without the leaves. Leaves,
amendments and root are hashed with different key contexts.
BLAKE3 is used because all members hash the whole state in every round: one Xeon core hashes 5.7 GB/s with BLAKE3, 1.0
with BLAKE2b, and with SHA-256 1.4 (0.4 without the SHA instructions).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from blake3 import blake3
from torch import Tensor

from node.diloco.credit import EMPTY
from node.diloco.outer import OuterState

LEAF_BYTES = 4 * 2**20
LEAF_ELEMENTS = LEAF_BYTES // 4
HASH_BYTES = 32
THREADS = 4
"""blake3 releases the interpreter's lock while it hashes; more threads would only take cores from training."""
ROOT_HEADER = struct.Struct("<qQQ")
"""Round, tokens, parameters."""
LEAF_CONTEXT = "diloco-node outer state leaf v1"
LEAVES_CONTEXT = "diloco-node outer state leaves v1"
AMENDMENTS_CONTEXT = "diloco-node amendments v1"
ROOT_CONTEXT = "diloco-node outer state root v2"


def leaf_hash(data: bytes | memoryview) -> bytes:
    """The hash of one slice, 32 bytes."""
    return blake3(data, derive_key_context=LEAF_CONTEXT).digest()


def leaf_bounds(elements: int) -> list[tuple[int, int]]:
    """Element ranges of the slices of one vector."""
    return [(start, min(start + LEAF_ELEMENTS, elements)) for start in range(0, elements, LEAF_ELEMENTS)]


def count_leaves(parameters: int, moments: int = 1) -> int:
    """The number of leaves of a state, without a list of them."""
    return sum(-(-size // LEAF_ELEMENTS) for size in (parameters, moments * parameters))


def tree_slices(parameters: int, moments: int = 1) -> list[tuple[int, int, int]]:
    """Vector (0 the anchor, 1 the momentum), first element and end of each leaf of a state with so many moments."""
    sizes = (parameters, moments * parameters)
    return [(vector, start, end) for vector, size in enumerate(sizes) for start, end in leaf_bounds(size)]


def leaf_hashes(state: OuterState) -> list[bytes]:
    """All leaves, those of the anchor first. Copies nothing on a little-endian machine."""
    vectors = state.anchor, state.momentum
    places = tree_slices(state.anchor.numel(), state.moments)
    slices = [_little_endian(vectors[vector][start:end]) for vector, start, end in places]
    if len(slices) < 2 * THREADS:
        return [leaf_hash(data) for data in slices]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="digest") as pool:
        return list(pool.map(leaf_hash, slices))


def root_digest(
    round: int,
    tokens: int,
    parameters: int,
    leaves: Sequence[bytes],
    credit_root: bytes = EMPTY.root,
    moments: int = 1,
    amendments: bytes = b"",
) -> str:
    """Return the digest of a state with these leaves, 64 hex characters. Raises ValueError for wrong leaves."""
    if len(leaves) != count_leaves(parameters, moments) or any(len(leaf) != HASH_BYTES for leaf in leaves):
        raise ValueError(f"{len(leaves)} leaves do not make the tree of {parameters} parameters.")
    return root_digest_of(round, tokens, parameters, leaves_hash(leaves), credit_root, amendments)


def root_digest_of(
    round: int, tokens: int, parameters: int, leaves: bytes, credit_root: bytes, amendments: bytes = b""
) -> str:
    """As `root_digest`, from the hash of all leaves. Raises ValueError for numbers that do not fit."""
    try:
        header = ROOT_HEADER.pack(round, tokens, parameters)
    except struct.error as exc:
        raise ValueError(f"Round {round} and tokens {tokens} do not fit into 64 bits.") from exc
    parts = header + leaves + credit_root + amendments_hash(amendments)
    return blake3(parts, derive_key_context=ROOT_CONTEXT).hexdigest()


def amendments_hash(amendments: bytes) -> bytes:
    """The hash of an encoded list of amendments, 32 bytes; empty for no amendment, as in runs that have none."""
    return blake3(amendments, derive_key_context=AMENDMENTS_CONTEXT).digest() if amendments else b""


def leaves_hash(leaves: Sequence[bytes]) -> bytes:
    """The hash of all leaves, 32 bytes."""
    return blake3(b"".join(leaves), derive_key_context=LEAVES_CONTEXT).digest()


def state_digest(state: OuterState) -> str:
    """The digest that identifies this outer state, 64 hex characters."""
    return digest_of(state, leaf_hashes(state))


def digest_of(state: OuterState, leaves: Sequence[bytes]) -> str:
    """The digest of a state whose leaves are known."""
    parameters, moments = state.anchor.numel(), state.moments
    return root_digest(state.round, state.tokens, parameters, leaves, state.credit.root, moments, state.amendments)


def _little_endian(values: Tensor) -> memoryview:
    return values.detach().numpy().astype("<f4", copy=False).view(np.uint8).data
