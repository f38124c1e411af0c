"""Starts real nodes in homes as a volunteer would start them, and reads their records of the rounds.

A `Swarm` owns the processes and ends them. `status()`, `rounds()`, `peers()` and `logs()` of a `Node` query it from
inside its namespace. `stop()` ends a node by SIGTERM, and `end_by_force()` kills all its processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from node.swarm.identity import load_identity
from tests.homes.world import AttachedHome, Machine, World
from tests.swarm.harness import Node, Swarm, assert_agreed, wait_for

START_S = 240.0
"""Timeout until a node trains. Eight nodes may start at the same time on two cores."""
ROUND_S = 90.0
"""Timeout for the end of a round on a busy machine."""
PRESET = Path("builtin")
"""The preset of the run. A contribution has 1.8 MB."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast nodes train. Their inner steps sleep, so that eight nodes fit on two cores."""

    step_s: float = 0.2
    inner_steps: int = 100

    @property
    def round_s(self) -> float:
        return self.step_s * self.inner_steps

    @property
    def environment(self) -> dict[str, str]:
        return {"DILOCO_FAULTS": f"inner@*=rest:{self.step_s}"}

    @property
    def flags(self) -> list[str]:
        """The founder's flags, which set the length of the run's rounds."""
        return [f"--run.round.inner_steps={self.inner_steps}", "--run.evaluation.batches=0"]


FAST_PACE = Pace(step_s=0.1, inner_steps=100)


def found(
    swarm: Swarm,
    home: AttachedHome,
    *flags: str,
    pace: Pace | None = None,
    preset: Path = PRESET,
    announce: bool = True,
) -> Node:
    """Start the founder of a run on the first machine of this home.

    If `announce` is true, the owner has set `swarm.announce` to the home's reachable outer addresses.
    """
    pace = pace or Pace()
    node = _node(swarm, home, home.machine)
    node.preset = preset
    return node.start(*pace.flags, *_announced(home, announce), *flags, env=pace.environment)


def join(
    swarm: Swarm,
    home: AttachedHome,
    invite: str,
    *flags: str,
    pace: Pace | None = None,
    machine: Machine | None = None,
    announce: bool = False,
    order: Literal["run", "relay"] = "run",
) -> Node:
    """Start a node with the invite only, on the first machine of this home or on another one.

    Each node may have its own pace. `announce` has the same meaning as for `found`.
    """
    node = _node(swarm, home, machine or home.machine)
    node.join, node.order = invite, order
    return node.start(*_announced(home, announce), *flags, env=(pace or Pace()).environment)


def _node(swarm: Swarm, home: AttachedHome, machine: Machine) -> Node:
    name = f"home{home.number}"
    if machine is not home.machine:
        name += f"-{home.machines.index(machine) + 1}"
    node = swarm.node(name)
    node.preset, node.namespace = None, machine.namespace
    node.listen = ""  # The tests use the default listen addresses.
    return node


def _announced(home: AttachedHome, announce: bool) -> list[str]:
    return [f"--swarm.announce={','.join(home.announce)}"] if announce and home.announce else []


def included(records: Iterable[Mapping[str, Any]], peer: str) -> dict[int, bool]:
    """For each committed round in these records, whether it includes this peer's contribution."""
    held = (record for record in records if record["outcome"] != "failed" and not record["dropped"])
    return {r["round"]: any(m["peer_id"] == peer and m["included"] for m in r["members"]) for r in held}


def inclusion(records: Iterable[Mapping[str, Any]], peer: str, last: int) -> tuple[int, int]:
    """The number of rounds among the last `last` that included this peer, and the number of rounds looked at."""
    rounds = included(records, peer)
    newest = sorted(rounds)[-last:]
    return sum(rounds[number] for number in newest), len(newest)


def start_behind_relays(swarm: Swarm, homes: World, *relay_flags: str, count: int = 3) -> tuple[list[Node], list[Node]]:
    """Start members in the first `count` homes, behind NATs without a port, and a relay in each other home.

    They discover each other through the relays. Returns members and relays once a round has included all members.
    """
    inside, outside = homes[:count], homes[count:]
    relays = [_new_relay(swarm, home) for home in outside]
    at = ",".join(
        f"{address}/p2p/{_stored_peer_id(relay)}"
        for home, relay in zip(outside, relays, strict=True)
        for address in home.announce
    )
    members = [found(swarm, inside[0], f"--swarm.bootstrap={at}", "--run.round.min_peers=2", pace=FAST_PACE)]
    for relay in relays:
        relay.join = str(members[0].until(lambda s: s["run"]["invite"], START_S)["run"]["invite"])
        relay.start(f"--swarm.bootstrap={at}", *relay_flags)
    invite = wait_for(lambda: _public_invite(relays[0], outside[0]), START_S, "the relay's invite names no address")
    members += [join(swarm, home, invite, f"--swarm.bootstrap={at}", pace=FAST_PACE) for home in inside[1:]]
    for node in members:
        node.until(lambda s: s["reachability"] == "relay", START_S)
    everybody = {node.peer_id() for node in members}
    wait_for(lambda: members[0].rounds_with(everybody), START_S, "no round of all members")
    return members, relays


def _new_relay(swarm: Swarm, home: AttachedHome) -> Node:
    node = swarm.node(f"relay{home.number}")
    node.preset, node.order, node.namespace, node.listen = None, "relay", home.machine.namespace, ""
    node.folder.mkdir()
    load_identity(node.folder / "identity.key")
    return node


def _stored_peer_id(node: Node) -> str:
    return load_identity(node.folder / "identity.key").peer_id


def _public_invite(relay: Node, home: AttachedHome) -> str:
    status = relay.status()
    return str(status["run"]["invite"]) if status["reachability"] == "direct" else ""


def relayed_bytes(relays: Sequence[Node]) -> int:
    return sum(int(relay.status()["contribution"]["bytes_relayed"]) for relay in relays)


def relayed_in_rounds(members: Sequence[Node], relay: Node, count: int) -> tuple[int, int]:
    """Wait for `count` rounds. Returns the bytes that the relay carried, and the number of attempts at those rounds.

    Asserts that each round included all members and that the members' states agree.
    """
    everybody = {node.peer_id() for node in members}
    first, before = members[0].status()["run"]["round"], relayed_bytes([relay])
    members[0].until_round(first + count, count * ROUND_S)
    carried, last = relayed_bytes([relay]) - before, members[0].status()["run"]["round"]
    assert set(range(first + 1, last + 1)) <= set(members[0].rounds_with(everybody, first)), "a round missed a member"
    assert_agreed(members)
    attempts = sum(first < record["round"] <= last for record in members[0].rounds())
    print(f"{carried} bytes carried in {last - first} rounds, {attempts} attempts")
    return carried, attempts
