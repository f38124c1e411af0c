"""Faults on purpose: what a plan may say, and when it strikes."""

from __future__ import annotations

import asyncio
import time

import pytest

from node.errors import ConfigError
from node.swarm.faults import Fault, Faults, InjectedFault, faults_from, parse_faults


def test_a_plan_is_read() -> None:
    plan = parse_faults("reduce@3=stall:2.5, commit@5=die,serve@*=fail ,").plan
    assert plan == (Fault("reduce", 3, "stall", 2.5), Fault("commit", 5, "die"), Fault("serve", None, "fail"))
    assert parse_faults("").plan == () == faults_from({}).plan
    assert faults_from({"DILOCO_FAULTS": "reduce@0=stop"}).plan == (Fault("reduce", 0, "stop"),)


@pytest.mark.parametrize(
    "text",
    ["reduce", "reduce=die", "reduce@=die", "reduce@x=die", "nowhere@1=die", "reduce@1=explode", "reduce@1=stall:x"],
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
            for place in (("reduce", 3), ("reduce", 2), ("average", 3), ("commit", 0), ("commit", 9))
        ]

    assert asyncio.run(all_of_them()) == [True, False, False, True, True]


def test_a_stall_lasts_and_no_plan_costs_nothing() -> None:
    began_s = time.monotonic()
    asyncio.run(Faults().at("reduce", 0))
    asyncio.run(parse_faults("reduce@0=stall:0.2").at("reduce", 0))
    assert 0.2 <= time.monotonic() - began_s < 5
