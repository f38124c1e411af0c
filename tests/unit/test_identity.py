"""Keys, peer ids and signatures."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.errors import DataFolderError
from node.swarm.identity import is_peer_id, load_identity, new_identity, verify

ONE, OTHER = new_identity(), new_identity()


def test_signature_is_bound_to_signer_purpose_and_data() -> None:
    signature = ONE.sign("purpose", b"data")
    assert len(signature) == 64
    assert verify(ONE.peer_id, "purpose", b"data", signature)
    assert not verify(OTHER.peer_id, "purpose", b"data", signature)
    assert not verify(ONE.peer_id, "another", b"data", signature)
    assert not verify(ONE.peer_id, "purpose", b"date", signature)
    assert not verify(ONE.peer_id, "purpose", b"data", signature[:-1] + bytes([signature[-1] ^ 1]))


@given(st.text(), st.binary(max_size=100))
def test_malformed_peer_ids_and_signatures_do_not_verify(peer_id: str, signature: bytes) -> None:
    assert not verify(peer_id, "purpose", b"data", signature)
    assert not verify(ONE.peer_id, "purpose", b"data", signature)


@pytest.mark.parametrize("end", [" ", "\n", "\t\x0b", "\x1c"])
def test_a_key_has_one_peer_id_only(end: str) -> None:
    """Two spellings of one id would be two members with one key."""
    signature = ONE.sign("purpose", b"data")
    assert verify(ONE.peer_id, "purpose", b"data", signature)
    assert not verify(ONE.peer_id + end, "purpose", b"data", signature)
    assert not is_peer_id(ONE.peer_id + end)


def test_peer_id_of_another_key_type_verifies_no_signature() -> None:
    # The peer id of an RSA key is a hash, from which the key cannot be read.
    assert not verify("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "purpose", b"data", bytes(64))


def test_key_file_is_created_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    made = load_identity(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = load_identity(path)
    assert again.peer_id == made.peer_id and made.peer_id.startswith("12D3KooW")
    assert verify(made.peer_id, "p", b"d", again.sign("p", b"d"))
    assert load_identity(tmp_path / "other.key").peer_id != made.peer_id


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: b"x" + d[1:], lambda d: b"", lambda d: d + b"x"])
def test_damaged_key_file_is_not_overwritten(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "identity.key"
    load_identity(path)
    damaged = damage(path.read_bytes())  # type: ignore[operator]
    path.write_bytes(damaged)
    with pytest.raises(DataFolderError, match="move it away"):
        load_identity(path)
    assert path.read_bytes() == damaged


def test_key_file_with_a_wrong_bit_is_refused(tmp_path: Path) -> None:
    """Otherwise the node would sign as one peer, and libp2p's daemon would connect as another."""
    path = tmp_path / "identity.key"
    load_identity(path)
    whole = path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(DataFolderError, match="not an identity file"):
            load_identity(path)


def test_key_file_has_the_layout_of_libp2p(tmp_path: Path) -> None:
    """p2pd reads this layout: a protobuf header, the seed, and the public key, which the peer id contains."""
    identity = new_identity()
    data = identity.to_libp2p()
    assert data[:4] == b"\x08\x01\x12\x40" and len(data) == 68
    (tmp_path / "key").write_bytes(data)
    assert load_identity(tmp_path / "key").peer_id == identity.peer_id


def test_key_file_that_could_not_be_written_does_not_stay(tmp_path: Path) -> None:
    """The disk is full at the first start: the next start makes the key."""
    path = tmp_path / "identity.key"
    code = (
        "import resource, signal, sys; from pathlib import Path; from node.swarm.identity import load_identity\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (30, 30))\n"
        "try: load_identity(Path(sys.argv[1]))\n"
        "except Exception as exc: print(exc.exit_code, exc)\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith(f"75 {path} cannot be written (File too large)"), done.stderr
    assert list(tmp_path.iterdir()) == []
    assert load_identity(path).peer_id == load_identity(path).peer_id
