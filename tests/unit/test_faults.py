"""Tests of fault plans: their syntax, stages and roles, and the data that they damage."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path

import pytest
import torch

from node.diloco.codec import Codec, make_codec
from node.errors import ConfigError, PeerError
from node.swarm.allreduce.reducer import ChunkLayout
from node.swarm.consensus.leader_election import leader_of, role_of
from node.swarm.faults import DAMAGES, Faults, InjectedFault, PlannedFault, damage_blobs, faults_from, parse_faults


def test_a_fault_plan_is_parsed_from_text_or_environment() -> None:
    plan = parse_faults("reduce@3=stall:2.5, commit@5=die,serve@*=fail , inner@2!other=nan,apply@*!leader=hang:1").plan
    assert plan == (
        PlannedFault("reduce", 3, "stall", 2.5),
        PlannedFault("commit", 5, "die"),
        PlannedFault("serve", None, "fail"),
        PlannedFault("inner", 2, "nan", role="other"),
        PlannedFault("apply", None, "hang", 1.0, "leader"),
    )
    assert parse_faults("").plan == () == faults_from({}).plan
    assert faults_from({"DILOCO_FAULTS": "reduce@0=stop"}).plan == (PlannedFault("reduce", 0, "stop"),)


def test_a_fault_plan_in_a_file_is_read_again_for_each_decision(tmp_path: Path) -> None:
    file = tmp_path / "plan"
    faults = faults_from({"DILOCO_FAULTS": f"file:{file}"})
    assert faults.slowness() == 1.0
    file.write_text("inner@*=slow:3")
    assert faults.slowness() == 3.0
    file.unlink()
    assert faults.damage_kind("reduce", 1) == ""
    file.write_text("reduce@1=nan")
    assert [faults.damage_kind("reduce", 1), faults.damage_kind("reduce", 1)] == ["nan", ""]
    file.write_text("reduce@2=shape")
    assert faults.damage_kind("reduce", 2) == "shape"
    file.unlink()
    assert faults.damage_kind("reduce", 2) == ""


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
def test_an_invalid_fault_plan_is_refused_with_the_expected_syntax(text: str) -> None:
    with pytest.raises(ConfigError, match="STAGE@ROUND"):
        parse_faults(text)


def test_a_planned_fault_applies_to_its_stage_and_round_only() -> None:
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

    assert asyncio.run(all_of_them()) == [True, False, False, True, True, False], (
        "a fault of one round applies once, of all rounds always"
    )


def test_a_planned_fault_with_a_role_applies_to_that_role_only() -> None:
    for role in ("leader", "other", ""):
        faults = parse_faults("reduce@1!leader=garbage,reduce@2!other=shape,reduce@3=nan")
        found = [faults.damage_kind("reduce", round_, lambda role=role: role) for round_ in (1, 2, 3)]  # type: ignore[misc]
        assert found == ["garbage" if role == "leader" else "", "shape" if role == "other" else "", "nan"]


def test_roles_of_a_fault_plan_are_the_leaders_of_the_first_two_attempts() -> None:
    peers = ["a", "b", "c", "d"]
    for parent, last in (("x", ""), ("y", "a"), ("z", "d")):
        roles = {peer: role_of(peer, parent, peers, last) for peer in peers}
        first, second = (leader_of(parent, peers, [], attempt, [last]) for attempt in (0, 1))
        assert roles[first] == "leader" and roles[second] == "other"
        assert sorted(roles.values()) == ["", "", "leader", "other"]
    assert role_of("e", "x", peers, "") == "", "members outside of the last record have no role"


def test_several_faults_that_are_planned_for_one_stage_apply_independently() -> None:
    """A plan may hold several faults for one stage."""
    faults = parse_faults("apply@1=corrupt,apply@1=fail,apply@1=nan")
    with pytest.raises(InjectedFault):
        faults.meet("apply", 1)
    assert faults.corrupts("apply", 1) and not faults.corrupts("apply", 1)
    assert (faults.damage_kind("apply", 1), faults.damage_kind("apply", 1)) == ("nan", "")


def test_a_planned_stall_delays_its_stage_and_an_empty_plan_does_not() -> None:
    began_s = time.monotonic()
    asyncio.run(Faults().at("reduce", 0))
    asyncio.run(parse_faults("reduce@0=stall:0.2").at("reduce", 0))
    assert 0.2 <= time.monotonic() - began_s < 5


def test_a_planned_hang_blocks_the_event_loop_and_a_stall_does_not() -> None:
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

    assert asyncio.run(ticks("reduce@0=stall:1.0")) > 5
    assert asyncio.run(ticks("reduce@0=hang:0.3")) == 0


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("codec", [make_codec("fp32"), make_codec("fp16")], ids=lambda codec: str(codec.name))
def test_chunks_damaged_by_a_fault_are_refused_with_the_right_error_code(codec: Codec, kind: str) -> None:
    layout = ChunkLayout(codec, [(0, 4096), (4096, 8192), (8192, 8193)], ((0, 8193),))
    good = [codec.encode(torch.ones(end - start)) for start, end in layout.bounds]
    bad = damage_blobs(kind, good)
    assert damage_blobs(kind, good) == bad and damage_blobs("", good) == good
    assert len(bad) == len(good)
    for chunk, (before, after) in enumerate(zip(good, bad, strict=True)):
        assert (len(before) == len(after)) == (kind != "shape")
        if kind == "garbage" and len(after) < 100:
            continue  # A few random bytes may be a valid number.
        with pytest.raises(PeerError) as caught:
            layout.check(chunk, after)
        assert caught.value.code == ("bad_size" if kind == "shape" else "not_finite")


def test_a_chunk_that_a_fault_damages_with_nan_keeps_its_size() -> None:
    bad = damage_blobs("nan", [make_codec("fp32").encode(torch.ones(8))])
    values = torch.frombuffer(bytearray(bad[0]), dtype=torch.float32)
    assert math.isnan(values[-1]) and (values[:-1] == 1).all()


def test_the_fault_slow_applies_to_the_inner_stage_only() -> None:
    assert parse_faults("inner@*=slow:3").slowness() == 3
    assert parse_faults("reduce@*=slow:3,inner@*=stall:3").slowness() == 1 == Faults().slowness()
