"""Tests of the hashing and copying of manifests and invites, and of the refusal of invalid ones."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from node.config.manifest import (
    INVITE_PREFIX,
    PROTOCOL_VERSION,
    InnerConfig,
    Invite,
    Manifest,
    ModelConfig,
    OuterConfig,
    RunConfig,
    SyncConfig,
    parse_invite,
    parse_manifest,
)
from node.errors import InviteError, ManifestError, ProtocolError

ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
GOLDEN_HASH = "09b57a069cfb1ffb8b7255598c36272b83026b06a8c8ca07ddd4e61244d38db1"
HASH = hashlib.sha256(b"a run").hexdigest()


def manifest(run: RunConfig | None = None, run_id: str = "0" * 32) -> Manifest:
    return Manifest(run_id=run_id, initial_digest="1" * 64, parameters=1000, run=run or RunConfig())


def test_a_manifest_in_another_form_than_the_canonical_one_is_refused() -> None:
    """The node would compute another hash than the invite's."""
    data = json.dumps(json.loads(manifest().canonical()), indent=1).encode()
    with pytest.raises(ManifestError, match="another form"):
        parse_manifest(data, hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize(
    "data", [{"sources": ["json:a"] * 1001}, {"sources": ["json:" + "a" * 500]}, {"tokenizer": "a" * 501}]
)
def test_lists_and_names_in_a_manifest_are_bounded(data: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RunConfig.model_validate({"data": data})


def test_the_share_of_held_out_text_is_not_set_for_the_built_in_text() -> None:
    with pytest.raises(ValidationError, match="held_out_one_in does not change builtin"):
        RunConfig.model_validate({"data": {"held_out_one_in": 10}})


def offered(**changes: object) -> tuple[bytes, str]:
    """A manifest's bytes with top-level fields changed, and their hash."""
    raw = {**json.loads(manifest().canonical()), **changes}
    data = json.dumps(raw, sort_keys=True, separators=(",", ":")).encode()
    return data, hashlib.sha256(data).hexdigest()


def test_a_manifest_survives_serialisation() -> None:
    one = manifest(RunConfig(name="ärger", inner=InnerConfig(lr=1e-3)))
    again = parse_manifest(one.canonical(), one.hash)
    assert again == one
    assert again.canonical() == one.canonical()


def test_manifest_hash_covers_every_field() -> None:
    hashes = {
        manifest().hash,
        manifest(run_id="2" * 32).hash,
        manifest(RunConfig(name="other")).hash,
        manifest(RunConfig(inner=InnerConfig(lr=4.1e-4))).hash,
        manifest().model_copy(update={"initial_digest": "2" * 64}).hash,
        manifest().model_copy(update={"parameters": 1001}).hash,
        manifest().model_copy(update={"protocol_version": PROTOCOL_VERSION + 1}).hash,
    }
    assert len(hashes) == 7


def test_manifest_hash_is_the_same_in_every_version() -> None:
    """If this value changes, this version cannot join runs of the previous one, so increase PROTOCOL_VERSION."""
    model = ModelConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    assert manifest(RunConfig(name="golden", model=model)).hash == GOLDEN_HASH


def test_manifest_with_another_hash_than_the_invite_names_is_refused() -> None:
    with pytest.raises(ManifestError, match="hash of the invite"):
        parse_manifest(manifest().canonical() + b" ", manifest().hash)


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[]", b"{}", b'{"protocol_version": null}', b"[" * 100_000])
def test_invalid_manifest_bytes_with_the_right_hash_are_refused(data: bytes) -> None:
    with pytest.raises(ManifestError):
        parse_manifest(data, hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize(
    "changes", [{"parameters": 0}, {"run_id": "../../etc"}, {"extra": 1}, {"run": {"data": {"source": 5}}}]
)
def test_manifest_with_wrong_fields_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ManifestError, match="not valid"):
        parse_manifest(*offered(**changes))


def test_newer_protocol_of_a_manifest_is_reported_before_its_unknown_fields() -> None:
    with pytest.raises(ProtocolError, match="upgrade"):
        parse_manifest(*offered(protocol_version=PROTOCOL_VERSION + 1, novelty={"a": 1}))


def test_a_run_of_an_older_protocol_is_not_continued() -> None:
    with pytest.raises(ProtocolError, match="found a new run"):
        parse_manifest(*offered(protocol_version=PROTOCOL_VERSION - 1))


def test_run_configuration_with_fields_that_contradict_each_other_is_refused() -> None:
    for make, message in (
        (lambda: RunConfig(inner=InnerConfig(sequence_length=2048)), "longer than"),
        (lambda: ModelConfig(num_attention_heads=3), "multiple"),
        (lambda: ModelConfig(hidden_size=36, num_attention_heads=4, num_key_value_heads=4), "must be even"),
        (lambda: RunConfig(model=ModelConfig(vocab_size=257)), "258"),
        (lambda: SyncConfig(codec="topk"), "set feedback to classic"),
        (lambda: SyncConfig(codec="int2"), "set feedback to classic"),
        (lambda: SyncConfig(codec="topk64", feedback="loco"), "too slowly what topk64 leaves out"),
        (lambda: SyncConfig(result_codec="int2"), "fp32"),
        (lambda: SyncConfig(codec="fp32", feedback="loco"), "set feedback to none"),
        (lambda: RunConfig(outer=OuterConfig(optimizer="adam"), sync=SyncConfig(auto=True)), "turn sync.auto off"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        (
            [{"from_tokens": 500, "lr_ratio": 2}, {"from_tokens": 500, "lr_ratio": 3}],
            "list phases by rising from_tokens",
        ),
        (
            [{"from_tokens": 700, "lr_ratio": 2}, {"from_tokens": 500, "lr_ratio": 3}],
            "list phases by rising from_tokens",
        ),
        ([{"from_tokens": 1000, "lr_ratio": 2}], "does not begin before total_tokens"),
        ([{"from_tokens": 500}], "changes nothing: set its lr_ratio, schedule or weights"),
        ([{"from_tokens": 500, "weights": [1.0, 2.0]}], "has 2 weights: give one for each of data.sources"),
        ([{"from_tokens": 500, "lr_ratio": 2, "warmup_tokens": 5}], "set its schedule"),
        ([{"from_tokens": 500, "schedule": "linear", "warmup_tokens": 500}], "reduce its warmup_tokens"),
        ([{"from_tokens": 500, "schedule": "inverse-sqrt"}], "set its warmup_tokens"),
        ([{"from_tokens": 0, "lr_ratio": 2}], "greater than or equal to 1"),
        ([{"from_tokens": 500, "weights": [0.0]}], "greater than 0"),
        ([{"from_tokens": 500, "lr": 2}], "lr"),
    ],
)
def test_phases_that_make_no_sense_are_refused(phases: list[dict[str, object]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate({"total_tokens": 1000, "phases": phases})


def test_an_inverse_square_root_needs_a_warm_up() -> None:
    with pytest.raises(ValueError, match=r"set inner\.warmup_tokens"):
        RunConfig(inner=InnerConfig(schedule="inverse-sqrt"))


multiaddresses = st.from_regex(r"/ip4/[0-9]{1,3}\.0\.0\.1/tcp/[0-9]{1,5}/p2p/[A-Za-z0-9]{10,52}", fullmatch=True)


@given(st.binary(min_size=32, max_size=32), st.lists(multiaddresses, min_size=1, max_size=8))
def test_an_invite_survives_serialisation(digest: bytes, addresses: list[str]) -> None:
    one = Invite(digest.hex(), tuple(addresses))
    assert parse_invite(str(one)) == one


def test_an_invite_survives_line_breaks_and_spaces() -> None:
    text = str(Invite(HASH, (ADDRESS,)))
    broken = "  " + "\n".join(text[i : i + 40] for i in range(0, len(text), 40)) + " \n"
    assert parse_invite(broken).addresses == (ADDRESS,)


def test_every_damaged_letter_of_an_invite_is_detected() -> None:
    text = str(Invite(HASH, (ADDRESS,)))
    for at in range(len(text)):
        for other in "Aa0_":
            damaged = text[:at] + other + text[at + 1 :]
            try:
                found = parse_invite(damaged)
            except InviteError:
                continue
            # The last letter of base64 may hold spare bits. If only these are damaged, the content is intact.
            assert found == parse_invite(text), at


@pytest.mark.parametrize("cut", [10, 20, 60])
def test_a_cut_invite_is_refused(cut: int) -> None:
    """A shorter cut removes only zlib's checksum, and the content with its own checksum is intact."""
    with pytest.raises(InviteError, match="damaged or cut short"):
        parse_invite(str(Invite(HASH, (ADDRESS,)))[:-cut])


def pack(body: bytes) -> str:
    compressed = zlib.compress(body + zlib.crc32(body).to_bytes(4, "big"))
    return INVITE_PREFIX + base64.urlsafe_b64encode(compressed).decode().rstrip("=")


@pytest.mark.parametrize(
    "text",
    [
        "", "hello", INVITE_PREFIX, INVITE_PREFIX + "é", pack(b""), pack(b"x" * 32),
        pack(b"x" * 32 + b"not an address"), pack(b"x" * 32 + b"/ip4/1.2.3.4/tcp/1"),
        pack(b"x" * 32 + b"/\xff/p2p/x"),
    ],
)  # fmt: skip
def test_an_invalid_invite_is_refused(text: str) -> None:
    with pytest.raises(InviteError):
        parse_invite(text)


def test_an_invite_that_is_a_decompression_bomb_is_refused() -> None:
    with pytest.raises(InviteError):
        parse_invite(pack(b"x" * 32 + b"/p2p/" * 20_000_000))


@pytest.mark.parametrize(
    ("codec", "results", "encoding"),
    [("fp16", "auto", "fp16"), ("int4", "auto", "int4"), ("topk64", "auto", "int8"), ("int2", "int4", "int4")],
)
def test_encoding_of_the_mean_has_at_least_four_bits_unless_the_manifest_names_another(
    codec: Any, results: Any, encoding: str
) -> None:
    assert SyncConfig(codec=codec, result_codec=results, feedback="classic").encoding_of_results == encoding


def test_manifest_from_before_there_was_governance_keeps_its_hash_and_is_fixed() -> None:
    tree = json.loads(manifest().canonical())
    assert not [key for key in tree["run"] if key.startswith("governance")]
    data = json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()
    old = parse_manifest(data, hashlib.sha256(data).hexdigest())
    assert old.hash == hashlib.sha256(data).hexdigest()
    assert (old.run.governance, old.run.governance_keys) == ("fixed", ())


KEYS = tuple(f"12D3KooW{letter * 44}" for letter in "abc")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"governance": "keys"}, "name the peer ids of the keys"),
        ({"governance": "keys", "governance_keys": KEYS, "governance_threshold": 4}, "more than the 3"),
        ({"governance": "keys", "governance_keys": (KEYS[0], KEYS[0])}, "twice"),
        ({"governance": "founder", "governance_keys": KEYS[:2]}, "too many"),
        ({"governance": "founder", "governance_threshold": 2}, "belongs to governance keys"),
        ({"governance": "fixed", "governance_keys": KEYS[:1]}, "too many"),
        ({"governance": "keys", "governance_keys": ("somebody",)}, "pattern"),
        ({"governance": "everybody"}, "Input should be"),
    ],
)
def test_governance_without_sense_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        RunConfig.model_validate(settings)


def test_manifest_names_the_founder_and_hashes_the_keys() -> None:
    with pytest.raises(ValidationError, match="founder's key"):
        manifest(run=RunConfig(governance="founder"))
    one, other = (manifest(run=RunConfig(governance="founder", governance_keys=(key,))) for key in KEYS[:2])
    assert len({one.hash, other.hash, manifest().hash}) == 3
    assert parse_manifest(one.canonical(), one.hash) == one
