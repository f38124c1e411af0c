"""Hostile listings, the limits of a holder, what listings of one run add up to, and what `diloco-node runs` prints."""

from __future__ import annotations

import io
import json
import time
import zlib
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from rich.console import Console

from node.cli import main
from node.commands import runs as runs_command
from node.config.manifest import ANY_RUN, PROTOCOL_VERSION, Manifest, parse_invite, read_manifest
from node.config.schema import Config
from node.swarm.identity import Identity, new_identity
from node.swarm.membership import directory
from node.swarm.membership.directory import (
    CLOCK_SLACK_S,
    DIRECTORY_KEY,
    LISTING_LIFE_S,
    LISTING_PURPOSE,
    MAX_INVITED,
    MAX_LISTED_ADDRESSES,
    MAX_LISTING_BYTES,
    MAX_TEXT_BYTES,
    DirectoryReader,
    Listing,
    ListingValidator,
    is_listable,
    merge_listings,
    read_listing,
    sign_listing,
)
from node.training.device import ComputeDevice
from node.worker.run_choice import JudgedRun, judge
from tests.unit.listings import ADDRESS, listing_of, manifest_of

NOW = 1_000_000.0
SOON = int(NOW + LISTING_LIFE_S)
CPU = ComputeDevice(torch.device("cpu"), "fp32", "a CPU")
ME = new_identity()


def value_of(text: bytes, *, identity: Identity = ME, purpose: str = LISTING_PURPOSE) -> bytes:
    """A signed value with any text in place of a listing."""
    content = zlib.compress(text)
    signature = identity.sign(purpose, b"%d\n" % SOON + content)
    return bytes(msgpack.packb([SOON, content, signature]))


def changed(**fields: Any) -> bytes:
    return value_of(json.dumps(json.loads(listing_of("run").model_dump_json()) | fields).encode())


def address_of(number: int) -> str:
    return f"/ip4/203.0.113.{number}/tcp/31337/p2p/{new_identity().peer_id}"


# one listing


def test_addresses_that_only_libp2p_can_read_are_not_listed() -> None:
    """A peer that named one ended the swarm of each node that lists the run."""
    for address in ("/dns4/example.com./tcp/4", "/ip4/1.2.3.4/tcp/000004", "/ip4/1.2.3.4/tcp/4/ws"):
        assert not is_listable(f"{address}/p2p/{new_identity().peer_id}")
        with pytest.raises(ValueError, match=r"address|peer id"):
            listing_of("run", addresses=(f"{address}/p2p/{new_identity().peer_id}",))
    assert is_listable(ADDRESS) and listing_of("run", addresses=(ADDRESS,))
    assert not is_listable("/ip4/1.2.3.4/tcp/4")


def test_a_listing_is_read_as_it_was_signed() -> None:
    listing = listing_of("run", purpose="To test.\nThe second line.")
    assert read_listing(ME.peer_id, sign_listing(ME, listing, SOON), NOW) == listing


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xc1",
        msgpack.packb(5),
        msgpack.packb([SOON, b"x"]),
        msgpack.packb([str(SOON), b"x", bytes(64)]),
        msgpack.packb([SOON, b"x", bytes(64)]),
        value_of(b"x", identity=new_identity()),
        value_of(listing_of("run").model_dump_json().encode(), purpose="diloco peer record"),
        value_of(b"not JSON"),
        value_of(b"[" * 10_000),
        value_of(listing_of("run").model_dump_json().encode() + b" " * MAX_TEXT_BYTES),
        sign_listing(ME, listing_of("run", purpose="".join(map(chr, range(0x4E00, 0x4E00 + 2000)))), SOON),
        changed(more=1),
        changed(members=0),
        changed(members=2**40),
        changed(round=-1),
        changed(tokens=2**70),
        changed(members="many"),
        changed(addresses=[]),
        changed(addresses=[ADDRESS] * (MAX_LISTED_ADDRESSES + 1)),
        changed(addresses=["/ip4/203.0.113.5/tcp/31337"]),
        changed(addresses=[ADDRESS + "\n" + ADDRESS]),
        changed(addresses=["/dns4/[red]x/tcp/1/p2p/" + ME.peer_id]),
    ],
    ids=map(str, count()),
)
def test_forged_oversized_and_malformed_listings_are_not_read(value: bytes) -> None:
    assert read_listing(ME.peer_id, value, NOW) is None


@pytest.mark.parametrize("expires_at", [int(NOW) - 1, int(NOW), 10 * SOON])
def test_a_listing_that_is_expired_or_never_expires_is_not_read(expires_at: int) -> None:
    assert read_listing(ME.peer_id, sign_listing(ME, listing_of("run"), expires_at), NOW) is None


def test_a_listing_of_one_signer_is_not_read_as_that_of_another() -> None:
    assert read_listing(new_identity().peer_id, sign_listing(ME, listing_of("run"), SOON), NOW) is None


# what a node holds


def record(identity: Identity = ME, expires_at: float = SOON, **fields: Any) -> DHTRecord:
    content = {
        "key": DHTID.generate(DIRECTORY_KEY).to_bytes(),
        "subkey": msgpack.packb(identity.peer_id),
        "value": msgpack.packb(sign_listing(identity, listing_of("run"), int(expires_at))),
        "expiration_time": expires_at,
    }
    return DHTRecord(**content | fields)


def holder() -> ListingValidator:
    return ListingValidator(clock=lambda: NOW)


@pytest.mark.parametrize(
    "fields",
    [
        {"key": DHTID.generate("another").to_bytes()},
        {"subkey": msgpack.packb(new_identity().peer_id)},
        {"subkey": msgpack.packb(None)},
        {"subkey": b""},
        {"value": msgpack.packb("text")},
        {"value": msgpack.packb(bytes(2 * MAX_LISTING_BYTES))},
        {"expiration_time": SOON + 1.0},
        {"expiration_time": float("inf")},
        {"expiration_time": float("nan")},
    ],
)
def test_a_node_holds_only_signed_listings_for_as_long_as_the_signer_wanted(fields: dict[str, Any]) -> None:
    assert holder().validate(record())
    assert not holder().validate(record(**fields))
    assert not ListingValidator(is_reader=True).validate(record(**fields))


def test_a_node_holds_no_listing_that_is_expired_or_lasts_too_long() -> None:
    too_late = float(int(SOON + CLOCK_SLACK_S) + 1)
    assert not holder().validate(record(expires_at=float(int(NOW) - 1)))
    assert not holder().validate(record(expires_at=too_late))
    assert holder().validate(record(expires_at=too_late - 1))


def test_a_reader_accepts_the_listings_of_a_node_whose_clock_differs() -> None:
    reader = ListingValidator(is_reader=True, clock=lambda: NOW - 60)
    assert reader.validate(record(expires_at=float(int(SOON + CLOCK_SLACK_S))))
    assert reader.validate(record(expires_at=float(int(NOW) - 100)))


def test_a_full_node_renews_listings_and_admits_others_when_some_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "MAX_LISTINGS", 2)
    now = NOW
    validator = ListingValidator(clock=lambda: now)
    first, second, third = (new_identity() for _ in range(3))
    assert validator.validate(record(first, expires_at=float(int(NOW + 10))))
    assert validator.validate(record(second))
    assert not validator.validate(record(third))
    assert validator.validate(record(second, expires_at=float(SOON + 1)))
    now = NOW + 11
    assert validator.validate(record(third))
    assert not validator.validate(record(first))


def test_a_reader_draws_a_limited_number_of_listings_from_a_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each listing has the same chance, so no choice of keys keeps others from being read."""
    monkeypatch.setattr(directory, "MAX_READ", 10)
    soon, found = int(time.time() + 60), {}
    for number in range(30):
        identity = new_identity()
        found[identity.peer_id] = sign_listing(identity, listing_of(f"run {number}"), soon)
    reader, seen = DirectoryReader(None), set()  # type: ignore[arg-type]
    for _ in range(40):
        drawn = [listing.manifest for listing in reader._valid(found)]
        assert len(drawn) == 10
        seen.update(drawn)
    assert len(seen) == 30


# all listings of a run


def test_the_smallest_claim_counts_and_each_lister_gives_an_address() -> None:
    """A hostile lister can neither make a run look complete nor crowd out the addresses of the others."""
    flood = tuple(address_of(number) for number in range(MAX_LISTED_ADDRESSES))
    honest = listing_of("run", members=3)
    hostile = honest.model_copy(update={"members": 10**6, "tokens": 10**12, "round": 10**6, "addresses": flood})
    (run,) = merge_listings([hostile, honest, hostile]).runs
    assert (run.members, run.tokens, run.round) == (3, 1000, 3)
    assert ADDRESS in run.addresses[:2]
    assert run.progress_ratio < 0.01


def test_an_invite_names_the_run_and_a_limited_number_of_addresses() -> None:
    many = [listing_of("run", addresses=(address_of(number),)) for number in range(40)]
    (run,) = merge_listings(many).runs
    invite = parse_invite(run.invite)
    assert invite.manifest_hash == manifest_of("run").hash
    assert invite.addresses == run.addresses[:MAX_INVITED] and len(run.addresses) == 40


def test_runs_with_invalid_or_respelled_manifests_are_dropped_and_other_protocols_counted() -> None:
    good = listing_of("run")
    fields = json.loads(good.manifest)

    def with_manifest(text: str) -> Listing:
        return good.model_copy(update={"manifest": text})

    def spelled(manifest: dict[str, Any]) -> str:
        return json.dumps(manifest, sort_keys=True, separators=(",", ":"))

    name = fields["run"] | {"name": "\x1b[2Jrun"}
    deep = fields["run"] | {"model": fields["run"]["model"] | {"num_hidden_layers": 10**9}}
    found = merge_listings(
        [
            good,
            with_manifest(json.dumps(fields)),
            with_manifest(spelled(fields | {"run": name})),
            with_manifest(spelled(fields | {"run": deep})),
            with_manifest("[]"),
            with_manifest("[" * 5000),
            *(with_manifest(f'{{"protocol_version":{text}}}') for text in ("1e400", "Infinity", "NaN", "true", '"3"')),
            with_manifest(spelled(fields | {"protocol_version": PROTOCOL_VERSION + 1})),
        ]
    )
    assert [run.manifest.hash for run in found.runs] == [manifest_of("run").hash]
    assert found.other_protocols == 1


def test_a_listing_that_shows_a_bug_of_ours_hides_no_other_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = listing_of("good"), listing_of("bad")

    def read(data: bytes) -> Manifest:
        if data == bad.manifest.encode():
            raise OverflowError("cannot convert float infinity to integer")
        return read_manifest(data)

    monkeypatch.setattr(directory, "read_manifest", read)
    assert [run.manifest.run.name for run in merge_listings([bad, good]).runs] == ["good"]
    assert "is skipped" in caplog.text


def test_progress_does_not_count_tokens_that_the_founder_has_taken_back() -> None:
    text = manifest_of("run", total_tokens=4000).model_copy(update={"rewound_tokens": 600}).canonical().decode()
    (run,) = merge_listings([listing_of("run").model_copy(update={"manifest": text})]).runs
    assert (run.tokens, run.progress_ratio) == (1000, 0.1)


# fit


SHAPES: dict[str, dict[str, Any]] = {
    "small": {},
    "medium": {"model": {"hidden_size": 64}},
    "large": {"model": {"hidden_size": 128}},
    "huge": {"model": {"hidden_size": 8192, "intermediate_size": 32768, "num_hidden_layers": 100}},
    "giant": {"model": {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 100}},
    "complete": {"model": {"hidden_size": 128}, "total_tokens": 1000},
    "own files": {"model": {"hidden_size": 128}, "data": {"sources": ["text:*.txt"]}},
}


def judged(tmp_path: Path, *more: Listing) -> list[JudgedRun]:
    listings = [listing_of(name, **tables) for name, tables in reversed(SHAPES.items())]
    config = Config.model_validate({"node": {"data_dir": tmp_path}})
    return judge(merge_listings([*listings, *more]).runs, config, CPU)


def names(found: list[JudgedRun], *, fitting: bool) -> list[str]:
    return [one.listed.manifest.run.name for one in found if fitting is not bool(one.lack)]


def test_the_largest_run_that_fits_comes_first_and_of_equal_ones_that_with_more_members(tmp_path: Path) -> None:
    found = judged(tmp_path, listing_of("large, more members", members=5, model={"hidden_size": 128}))
    assert names(found, fitting=True) == ["large, more members", "large", "medium", "small"]
    assert names(found, fitting=False)[-2:] == ["huge", "giant"]
    lacks = {one.listed.manifest.run.name: one.lack for one in found}
    assert lacks["complete"] == "is complete"
    assert lacks["own files"] == "needs files that its founder gives to the members"
    assert "GB of memory here" in lacks["huge"]


def test_a_run_whose_founder_may_add_tokens_fits_also_after_those_of_its_manifest(tmp_path: Path) -> None:
    """A listing does not tell amendments, and a run that is complete is no longer listed."""
    key = new_identity().peer_id
    steered = listing_of("steered", total_tokens=1000, governance="founder", governance_keys=[key])
    assert "steered" in names(judged(tmp_path, steered), fitting=True)


def test_a_run_that_states_a_wrong_size_is_dropped(tmp_path: Path) -> None:
    lie = manifest_of("lie").model_copy(update={"parameters": 10**15})
    listing = listing_of("lie").model_copy(update={"manifest": lie.canonical().decode()})
    assert "lie" not in names(judged(tmp_path, listing), fitting=False) + names(judged(tmp_path), fitting=True)


# the command


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Call `diloco-node runs` with these listings in the directory."""

    def call(*argv: str, listings: list[Listing] | None = None) -> int:
        found = merge_listings(listings if listings is not None else [listing_of(n, **t) for n, t in SHAPES.items()])

        async def read(_config: Config, _folder: Path) -> Any:
            return found

        monkeypatch.setattr(runs_command, "_read", read)
        return main(["runs", *argv, "--data-dir", str(tmp_path)], {})

    return call


def test_runs_are_printed_as_a_table_of_80_columns_without_markup_of_strangers(
    listed: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    bad = listing_of("[bold]a very long name[/bold] " + "x" * 34, purpose="[link=http://x]y[/link] " + "word " * 100)
    assert listed(listings=[bad, listing_of("huge", **SHAPES["huge"])]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert "[bold]" in out and "[link=" in out and "…" in out
    assert lines[0].split() == ["Run", "Id", "Size", "Members", "Done", "Memory", "This", "machine"]
    assert manifest_of("huge", **SHAPES["huge"]).hash[:8] in out
    assert "fits" in out and "diloco-node run --any" in lines[-1]


def test_runs_are_printed_as_json_best_first(listed: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert listed("--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["other_protocols"] == 0
    first = found["runs"][0]
    assert first["name"] == "large" and first["fits"] and first["reason"] == ""
    assert first["parameters"] == manifest_of("large", **SHAPES["large"]).parameters
    assert first["needs_bytes"]["memory"] > 5e8
    assert parse_invite(first["invite"]).manifest_hash == first["manifest_hash"]
    assert [one["fits"] for one in found["runs"]] == [True] * 3 + [False] * 4


def test_one_run_is_shown_by_its_name_or_id_with_its_invite(
    listed: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("medium", manifest_of("medium", **SHAPES["medium"]).hash[:10]):
        assert listed(name) == 0
        out = capsys.readouterr().out
        invite = out.split("--join ")[1].strip()
        assert parse_invite(invite).manifest_hash == manifest_of("medium", **SHAPES["medium"]).hash
    assert listed("none") == 2
    assert "lists no run 'none'" in capsys.readouterr().err
    twins = [listing_of("twin"), listing_of("twin", model={"hidden_size": 64})]
    assert listed("twin", listings=twins) == 2
    assert "2 listed runs are named 'twin'" in capsys.readouterr().err


def test_an_empty_directory_is_said_to_be_empty(listed: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(listings=[]) == 0
    assert "No run is listed now" in capsys.readouterr().out


@pytest.mark.parametrize(("argv", "code"), [((), 2), (("--bootstrap", "x"), 2)])
def test_runs_without_a_usable_bootstrap_peer_end_with_one_line(
    argv: tuple[str, ...], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", *argv, "--data-dir", str(tmp_path)], {}) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert "bootstrap" in line


def test_run_takes_either_an_invite_or_any(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--any", "--join", "diloco1-x"], {}) == 2
    assert "not allowed with argument" in capsys.readouterr().err
    assert main(["relay", "--join", ANY_RUN], {}) == 2


def test_no_run_can_take_the_id_of_another_run_as_its_name(
    listed: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = manifest_of("wanted").hash
    for name in (wanted[:8], wanted):
        assert listed(name, listings=[listing_of(name), listing_of("wanted")]) == 0
        invite = capsys.readouterr().out.split("--join ")[1].strip()
        assert parse_invite(invite).manifest_hash == wanted
        assert listed(name, listings=[listing_of(name)]) == 2
        assert "lists no run" in capsys.readouterr().err
    assert listed(wanted[:7], listings=[listing_of("wanted")]) == 2, "an id needs eight characters"


def test_the_table_of_a_thousand_runs_is_made_in_seconds(tmp_path: Path) -> None:
    listings = [listing_of(f"run {number}") for number in range(directory.MAX_READ)]
    began_s = time.monotonic()
    found = judge(merge_listings(listings).runs, Config.model_validate({"node": {"data_dir": tmp_path}}), CPU)
    Console(width=80, file=io.StringIO()).print(runs_command.describe_runs(found))
    assert time.monotonic() - began_s < 20.0
