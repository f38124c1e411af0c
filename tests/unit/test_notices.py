"""What the owner is told beside the phase."""

from __future__ import annotations

import pytest

from node.config import ApiConfig
from node.daemon.notices import newer_version, no_tls
from node.status import PeerRow


def peers(*versions: str) -> list[PeerRow]:
    own = [("0.2.0", True)]
    return [
        PeerRow(
            peer_id=str(i), short_id=str(i), name="", phase="training", round=0, tokens_per_second=0.0,
            transport="direct", version=version, state_digest="", last_seen_s=0.0, this_node=this_node,
        )
        for i, (version, this_node) in enumerate([*own, *((version, False) for version in versions)])
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("versions", "is_told"),
    [
        ((), False),
        (("0.3.0",), True),
        (("0.10.0", "0.2.0"), False),
        (("0.10.0", "0.2.0", "0.3.0rc1"), True),
        (("0.2.0", "0.1.9", "0.2.0rc1"), False),
        (("<script>", "1" * 40, "v" * 40, "", "0.3.0"), False),
        (("<script>",) * 9, False),
    ],
)
def test_most_must_run_a_newer_version(versions: tuple[str, ...], is_told: bool) -> None:
    notice = newer_version("0.2.0", peers(*versions))
    assert (notice is not None) is is_told
    assert notice is None or "<" not in notice.text
    who = "The other peer runs " if len(versions) == 1 else "2 of 3 peers run "
    assert notice is None or notice.text.startswith(who)


@pytest.mark.parametrize(
    ("host", "also", "cert", "is_told"),
    [
        ("127.0.0.1", "", "", False), ("::1", "", "", False), ("localhost", "", "", False),
        ("127.9.9.9", "", "", False),
        ("192.168.1.5", "", "", True), ("node.example", "", "", True), ("192.168.1.5", "", "a.pem", False),
        # All addresses, and no name that others could call it by: as in a container.
        ("0.0.0.0", "", "", False), ("::", "", "", False), ("0.0.0.0", "localhost", "", False),
        ("0.0.0.0", "node.example", "", True), ("0.0.0.0", "node.example", "a.pem", False),
        # A proxy on this machine, which may have TLS of its own.
        ("127.0.0.1", "node.example", "", False),
    ],
)  # fmt: skip
def test_open_to_others_without_tls_is_told(host: str, also: str, cert: str, is_told: bool) -> None:
    api = ApiConfig(host=host, allowed_hosts=(also,) if also else (), tls_cert=cert, tls_key=cert)
    assert (no_tls(api) is not None) is is_told
