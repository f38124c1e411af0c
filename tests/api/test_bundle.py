"""The support bundle is of use, and holds nothing that lets anybody in or says where somebody is."""

from __future__ import annotations

import asyncio
import io
import logging
import zipfile
from pathlib import Path

import httpx
import pytest
from starlette.types import ASGIApp

from node.api import bundle
from node.api.app import build_app
from node.api.bundle import Facts, make_bundle
from node.api.routes import Served
from node.api.scrub import Scrubber
from node.config import Config
from node.manifest import Invite
from node.status import Outcome, PeerRow, Report, RoundRecord, RunInfo
from tests.api.conftest import BASE, TOKEN, StillNode

INVITE = str(Invite("ab" * 32, ("/ip4/203.0.113.7/tcp/31337/p2p/QmPeer",)))
SECRETS = [
    TOKEN,
    INVITE,
    "203.0.113.7",
    "198.51.100.9",
    "2001:db8::7",
    "my.home.example",
    "nas:31338",
    "SESAME",
    "MIIBVQIBADAN",
]
SECRETS += ["hf_AbCdEfGhIjKlMn", "correct-horse", "s3ss10n-key"]


def setup(node: StillNode, folder: Path) -> Config:
    """A node that has heard every secret, in the places where they would be."""
    row = PeerRow(
        peer_id="QmPeer", short_id="QmPeer", name="Ada", phase="training", round=1, tokens_per_second=1.0,
        transport="direct", version="1", state_digest="", last_seen_s=0.0,
    )  # fmt: skip
    node.board.told(
        Report(run=RunInfo(invite=INVITE), swarm=(row,), reachability_reason="my.home.example:31337, nas:31338")
    )
    node.board.add_round(RoundRecord(round=1, outcome=Outcome.COMPLETE, reason="[2001:db8::7]:1 was late"))
    lines = [
        f"Authorization: Bearer {TOKEN}", f"http://127.0.0.1:8080/#token={TOKEN}", f"joined by {INVITE}",
        "dialling /dns4/my.home.example/tcp/1/p2p/QmX and 198.51.100.9", "proxy http://me:SESAME@my.home.example:3128/x",
        "-----BEGIN PRIVATE KEY-----\nMIIBVQIBADAN\n-----END PRIVATE KEY-----", "at 12:34:56 version 2.13.0 of torch",
        "HF_TOKEN hf_AbCdEfGhIjKlMn", "password=correct-horse, Cookie: diloco_session_ab12=s3ss10n-key; x",
    ]  # fmt: skip
    for line in lines:
        node.board.add_log(logging.LogRecord("node.x", logging.INFO, "", 0, "%s", (line,), None))
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "node.log").write_text("\n".join(lines))
    return Config.model_validate(
        {
            "node": {"data_dir": folder},
            "api": {"allowed_hosts": ["my.home.example"], "host": "198.51.100.9"},
            "swarm": {
                "bootstrap": ["/ip4/203.0.113.7/tcp/1/p2p/12D3KooWGEVDG5YficKKDjpxnKSAb8vCRcfopTSgPHF5LsHdpY3V"],
                "announce": ["/dns4/my.home.example/tcp/1", "nas:31338"],
            },
        }
    )


def opened(packed: bytes) -> dict[str, str]:
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        assert archive.testzip() is None
        return {name.rpartition("/")[2]: archive.read(name).decode() for name in archive.namelist()}


def test_no_secret_and_no_address_is_inside(still_node: StillNode, tmp_path: Path) -> None:
    config = setup(still_node, tmp_path / "data")
    assert still_node.past is not None
    still_node.config = config
    served = Served(
        still_node, still_node.past, still_node.metrics, still_node.keys, still_node, config, bundle.Build("1")
    )
    app: ASGIApp = build_app(served)

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(transport=transport, base_url=BASE, headers=headers, timeout=30) as http:
            first, second = await asyncio.gather(*(http.get("/api/v1/support-bundle") for _ in range(2)))
            assert first.status_code == second.status_code == 200
            return first

    answer = asyncio.run(main())
    assert answer.headers["content-type"] == "application/zip"
    assert "attachment; filename=" in answer.headers["content-disposition"]
    parts = opened(answer.content)
    assert set(parts) == {
        "README.txt", "status.json", "swarm.json", "rounds.jsonl", "config.json", "versions.json", "machine.json",
        "metrics.txt", "log.jsonl", "node.log",
    }  # fmt: skip
    for name, text in parts.items():
        for secret in SECRETS:
            assert secret not in text, (name, secret)
        assert str(tmp_path) not in text, name
    assert "Ada" in parts["swarm.json"]
    assert "at 12:34:56 version 2.13.0 of torch" in parts["node.log"]
    assert '"round":1' in parts["rounds.jsonl"]
    assert "torch" in parts["versions.json"]


def test_its_size_is_bounded_however_much_there_is(
    still_node: StillNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "PART_BYTES_MAX", 20_000)
    config = setup(still_node, tmp_path / "data")
    (tmp_path / "data" / "logs" / "node.log").write_bytes(b"first line\n" + b"x" * 100_000 + b"\nlast line\n")
    for number in range(500):
        still_node.board.add_log(logging.LogRecord("node.x", logging.INFO, "", 0, f"{number} " + "y" * 500, (), None))
    facts = Facts(still_node.view(), config, {}, bundle.Build("1"), b"", (TOKEN,))
    parts = opened(make_bundle(facts))
    assert max(map(len, parts.values())) <= 20_000
    assert "last line" in parts["node.log"] and "first line" not in parts["node.log"]
    assert "499 y" in parts["log.jsonl"]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("from 10.0.0.1:80 to fe80::1", "from (address) to (address)"),
        ("at 2026-11-22T01:02:03.456Z", "at 2026-11-22T01:02:03.456Z"),
        ("12:34:56 INFO", "12:34:56 INFO"),
        ("torch 2.13.0, 0.1", "torch 2.13.0, 0.1"),
        ("(192.0.2.1)", "((address))"),
        ("http://[::1]:8080/x", "http://(address):8080/x"),
        ("/ip6/2001:db8::1/tcp/1/p2p/Qm x", "(address) x"),
        ("reach this node at home.example:31337 (2 of 2)", "reach this node at (address) (2 of 2)"),
        ("'my.nas.home.example:1', x.y", "'(address)', x.y"),
        ("node/worker/work.py:31 and work.py:31", "node/worker/work.py:31 and work.py:31"),
        ("diloco1-abc_-9 x", "(hidden) x"),
        ("Bearer abc.def", "Bearer (hidden)"),
        ("s3cret and more", "(hidden) and more"),
    ],
)
def test_what_is_taken_out_and_what_stays(text: str, left: str) -> None:
    assert Scrubber(["s3cret"], [])(text) == left


def test_long_lines_are_scrubbed_in_no_time() -> None:
    scrub = Scrubber(["s3cret"], [])
    for text in ("a" * 10**6, ":." * 500_000, "1.1.1.1:" * 100_000, "-----BEGIN X-----" * 1000, "/ip4/" * 10**5):
        scrub(text)
