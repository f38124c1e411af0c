"""Faults on purpose: what a plan may say, when it strikes and whom, and how it spoils what is sent."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path

import pytest
import torch

from node.diloco.codec import Codec, make_codec
from node.errors import ConfigError, PeerError
from node.swarm.faults import SPOILS, Fault, Faults, InjectedFault, faults_from, parse_faults, spoil_blobs
from node.swarm.reduce import Grid
from node.swarm.rendezvous import leader_of, role_of


def test_a_plan_is_read() -> None:
    plan = parse_faults("reduce@3=stall:2.5, commit@5=die,serve@*=fail , inner@2!other=nan,apply@*!leader=hang:1").plan
    assert plan == (
        Fault("reduce", 3, "stall", 2.5),
        Fault("commit", 5, "die"),
        Fault("serve", None, "fail"),
        Fault("inner", 2, "nan", role="other"),
        Fault("apply", None, "hang", 1.0, "leader"),
    )
    assert parse_faults("").plan == () == faults_from({}).plan
    assert faults_from({"DILOCO_FAULTS": "reduce@0=stop"}).plan == (Fault("reduce", 0, "stop"),)


def test_a_plan_in_a_file_comes_and_goes(tmp_path: Path) -> None:
    file = tmp_path / "plan"
    faults = faults_from({"DILOCO_FAULTS": f"file:{file}"})
    assert faults.spoils("reduce", 1) == ""
    file.write_text("reduce@1=nan")
    assert [faults.spoils("reduce", 1), faults.spoils("reduce", 1)] == ["nan", ""]
    file.write_text("reduce@2=shape")
    assert faults.spoils("reduce", 2) == "shape"
    file.unlink()
    assert faults.spoils("reduce", 2) == ""


@pytest.mark.parametrize(
    "text",
    [
        "reduce",
        "reduce=die",
        "reduce@=die",
        "reduce@x=die",
        "nowhere@1=die",
        "reduce@1=explode",
        "reduce@1=stall:x",
        "reduce@1!=die",
        "reduce@1!king=die",
        "reduce!leader@1=die",
    ],
)
def test_a_wrong_plan_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match="STAGE@ROUND"):
        parse_faults(text)


def test_a_fault_strikes_at_its_stage_and_round_only() -> None:
    faults = parse_faults("reduce@3=fail,commit@*=fail")

    async def struck(stage: str, round_: int) -> bool:
        try:
            await faults.at(stage, round_)  # type: ignore[arg-type]
        except InjectedFault:
            return True
        return False

    async def all_of_them() -> list[bool]:
        return [
            await struck(*place)
            for place in (("reduce", 3), ("reduce", 2), ("average", 3), ("commit", 0), ("commit", 9), ("reduce", 3))
        ]

    assert asyncio.run(all_of_them()) == [True, False, False, True, True, False], "of a round: once; of all: always"


def test_a_fault_for_a_role_strikes_who_has_it() -> None:
    for role in ("leader", "other", ""):
        faults = parse_faults("reduce@1!leader=garbage,reduce@2!other=shape,reduce@3=nan")
        found = [faults.spoils("reduce", round_, lambda role=role: role) for round_ in (1, 2, 3)]  # type: ignore[misc]
        assert found == ["garbage" if role == "leader" else "", "shape" if role == "other" else "", "nan"]


def test_roles_are_the_first_two_that_would_lead() -> None:
    peers = ["a", "b", "c", "d"]
    for parent in ("x", "y", "z"):
        roles = {peer: role_of(peer, parent, peers) for peer in peers}
        assert roles[leader_of(parent, peers, 0)] == "leader" and roles[leader_of(parent, peers, 1)] == "other"
        assert sorted(roles.values()) == ["", "", "leader", "other"]
    assert role_of("e", "x", peers) == "", "who was not in the last record has none"


def test_what_is_suffered_is_not_what_is_spoilt() -> None:
    """A plan may hold several faults for one place; each is met where it belongs."""
    faults = parse_faults("apply@1=corrupt,apply@1=fail,apply@1=nan")
    with pytest.raises(InjectedFault):
        faults.meet("apply", 1)
    assert faults.corrupts("apply", 1) and not faults.corrupts("apply", 1)
    assert (faults.spoils("apply", 1), faults.spoils("apply", 1)) == ("nan", "")


def test_a_stall_lasts_and_no_plan_costs_nothing() -> None:
    began_s = time.monotonic()
    asyncio.run(Faults().at("reduce", 0))
    asyncio.run(parse_faults("reduce@0=stall:0.2").at("reduce", 0))
    assert 0.2 <= time.monotonic() - began_s < 5


def test_a_stall_lets_others_go_on_and_a_hang_does_not() -> None:
    async def ticks(plan: str) -> int:
        count = 0

        async def tick() -> None:
            nonlocal count
            while True:
                await asyncio.sleep(0.01)
                count += 1

        ticking = asyncio.create_task(tick())
        await asyncio.sleep(0)
        await parse_faults(plan).at("reduce", 0)
        ticking.cancel()
        return count

    assert asyncio.run(ticks("reduce@0=stall:0.3")) > 5
    assert asyncio.run(ticks("reduce@0=hang:0.3")) == 0


@pytest.mark.parametrize("kind", SPOILS)
@pytest.mark.parametrize("codec", [make_codec("fp32"), make_codec("fp16")], ids=lambda codec: str(codec.name))
def test_spoilt_chunks_are_refused_for_what_they_are(codec: Codec, kind: str) -> None:
    grid = Grid(codec, [(0, 4096), (4096, 8192), (8192, 8193)], ((0, 8193),))
    good = [codec.encode(torch.ones(end - start)) for start, end in grid.bounds]
    bad = spoil_blobs(kind, good)
    assert spoil_blobs(kind, good) == bad and spoil_blobs("", good) == good
    assert len(bad) == len(good)
    for chunk, (before, after) in enumerate(zip(good, bad, strict=True)):
        assert (len(before) == len(after)) == (kind != "shape")
        if kind == "garbage" and len(after) < 100:
            continue  # So few random bytes may well be a number.
        with pytest.raises(PeerError) as caught:
            grid.check(chunk, after)
        assert caught.value.code == ("bad_size" if kind == "shape" else "not_finite")


def test_a_chunk_of_not_numbers_is_right_in_form() -> None:
    bad = spoil_blobs("nan", [make_codec("fp32").encode(torch.ones(8))])
    values = torch.frombuffer(bytearray(bad[0]), dtype=torch.float32)
    assert math.isnan(values[-1]) and (values[:-1] == 1).all()


def test_a_slow_device_is_one_for_every_round_and_no_other_stage_is() -> None:
    assert parse_faults("inner@*=slow:3").slowness() == 3
    assert parse_faults("reduce@*=slow:3,inner@*=stall:3").slowness() == 1 == Faults().slowness()
