"""The support bundle contains the data that helps to find a fault, but no secret and no address."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import zipfile
from pathlib import Path

import httpx
import pytest

from node.api import support_bundle
from node.api.redaction import Redactor
from node.api.support_bundle import BundleSource, make_bundle
from node.config.manifest import Invite
from node.config.schema import Config
from node.status import Outcome, Report, RoundRecord, RunInfo
from tests.api.conftest import BASE, BUILD, TOKEN, FakeNode, HttpClient, make_app
from tests.peer_row import peer_row

INVITE = str(Invite("ab" * 32, ("/ip4/203.0.113.7/tcp/31337/p2p/QmPeer",)))
SECRETS = [
    TOKEN, INVITE, "203.0.113.7", "198.51.100.9", "2001:db8::7", "my.home.example", "nas:31338", "SESAME",
    "MIIBVQIBADAN", "hf_AbCdEfGhIjKlMn", "correct-horse", "s3ss10n-key",
]  # fmt: skip


def plant_secrets(node: FakeNode, folder: Path) -> None:
    """Put each secret into every place of a node where it can occur."""
    reason = "my.home.example:31337, nas:31338"
    node.board.set_phase(None)
    node.board.apply_report(
        Report(run=RunInfo(invite=INVITE), swarm=(peer_row("QmPeer", name="Ada"),), reachability_reason=reason)
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
    node.config = Config.model_validate(
        {
            "node": {"data_dir": folder},
            "api": {"allowed_hosts": ["my.home.example"], "host": "198.51.100.9"},
            "swarm": {
                "bootstrap": ["/ip4/203.0.113.7/tcp/1/p2p/12D3KooWGEVDG5YficKKDjpxnKSAb8vCRcfopTSgPHF5LsHdpY3V"],
                "announce": ["/dns4/my.home.example/tcp/1", "nas:31338"],
            },
        }
    )


def unpack(content: bytes) -> dict[str, str]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None
        return {name.rpartition("/")[2]: archive.read(name).decode() for name in archive.namelist()}


def test_support_bundle_contains_no_secret_and_no_address(fake_node: FakeNode, tmp_path: Path) -> None:
    plant_secrets(fake_node, tmp_path / "data")

    async def download_twice() -> list[httpx.Response]:
        transport = httpx.ASGITransport(make_app(fake_node))
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(transport=transport, base_url=BASE, headers=headers, timeout=30) as http:
            return await asyncio.gather(*(http.get("/api/v1/support-bundle") for _ in range(2)))

    first, second = asyncio.run(download_twice())
    assert first.status_code == second.status_code == 200
    assert first.headers["content-type"] == "application/zip"
    assert "attachment; filename=" in first.headers["content-disposition"]
    parts = unpack(first.content)
    assert set(parts) == {
        "README.txt", "status.json", "swarm.json", "rounds.jsonl", "config.json", "versions.json", "machine.json",
        "metrics.txt", "log.jsonl", "node.log",
    }  # fmt: skip
    for name, text in parts.items():
        assert [secret for secret in (*SECRETS, str(tmp_path)) if secret in text] == [], name
    for name in ("status.json", "config.json", "versions.json", "machine.json"):
        assert isinstance(json.loads(parts[name]), dict), name
    assert "Ada" in parts["swarm.json"]
    assert "at 12:34:56 version 2.13.0 of torch" in parts["node.log"]
    assert '"round":1' in parts["rounds.jsonl"]
    assert "torch" in parts["versions.json"]


def test_support_bundle_names_a_file_whose_name_is_not_utf_8(fake_node: FakeNode, tmp_path: Path) -> None:
    fake_node.config = Config.model_validate({"node": {"data_dir": tmp_path}})
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).touch()
    answer = HttpClient(make_app(fake_node), TOKEN, "127.0.0.1").get("/api/v1/support-bundle")
    assert answer.status_code == 200
    assert "caf?.txt" in unpack(answer.content)["machine.json"]


def test_size_of_the_support_bundle_is_limited(
    fake_node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support_bundle, "PART_BYTES_MAX", 20_000)
    plant_secrets(fake_node, tmp_path / "data")
    (tmp_path / "data" / "logs" / "node.log").write_bytes(b"first line\n" + b"x" * 100_000 + b"\nlast line\n")
    for number in range(500):
        record = logging.LogRecord("node.x", logging.INFO, "", 0, f"{number} " + "y" * 500, (), None)
        fake_node.board.add_log(record)
    parts = unpack(make_bundle(BundleSource(fake_node.view(), fake_node.config, {}, BUILD, b"", (TOKEN,))))
    assert max(map(len, parts.values())) <= 20_000
    assert "last line" in parts["node.log"] and "first line" not in parts["node.log"]
    assert "499 y" in parts["log.jsonl"]


@pytest.mark.parametrize(
    ("text", "expected"),
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
        ("node/worker/bootstrap.py:31 and work.py:31", "node/worker/bootstrap.py:31 and work.py:31"),
        ("dial tcp4 203.0.113.5:31337: connect: refused", "dial tcp4 (address): connect: refused"),
        ("0.0.0.0:31337->203.0.113.5:31337: i/o timeout", "(address)->(address): i/o timeout"),
        ("host home.example:31337: refused", "host (address): refused"),
        ("peer:203.0.113.5 is gone", "peer:(address) is gone"),
        ("ip4:203.0.113.5:443", "ip4:(address)"),
        ("version 1.2.3.4.5 and 0.1.2", "version 1.2.3.4.5 and 0.1.2"),
        ("diloco1-abc_-9 x", "(hidden) x"),
        ("Bearer abc.def", "Bearer (hidden)"),
        ("s3cret and more", "(hidden) and more"),
    ],
)
def test_redaction_replaces_secrets_and_addresses_in_text(text: str, expected: str) -> None:
    assert Redactor(["s3cret"], [])(text) == expected


def test_redaction_of_very_long_lines_is_fast() -> None:
    redact = Redactor(["s3cret"], [])
    for text in ("a" * 10**6, ":." * 500_000, "1.1.1.1:" * 100_000, "-----BEGIN X-----" * 1000, "/ip4/" * 10**5):
        redact(text)
