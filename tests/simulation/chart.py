"""Draws the messages of a simulation as a sequence chart with a column for each node and a line for each message."""

from __future__ import annotations

from tests.simulation.run import World

HIDDEN: tuple[str, ...] = ("gossip",)
WIDTH = 9


def chart(world: World) -> str:
    """Each line has the time, an arrow from sender to receiver, and the verb. Heartbeats are left out."""
    names = {node.peer_id: node.number for node in world.nodes}
    lines = ["  time    " + "".join(f"n{number}".ljust(WIDTH) for number in range(len(names)))]
    for sent in world.network.trace or ():
        if sent.text.split()[0] in HIDDEN and sent.sender != sent.receiver:
            continue
        if sent.sender == sent.receiver:
            lines.append(f"{sent.at_s:8.3f}  n{names[sent.sender]}: {sent.text}")
            continue
        here, there = names[sent.sender], names[sent.receiver]
        row = [" "] * (WIDTH * len(names))
        left, right = sorted((here * WIDTH, there * WIDTH))
        row[left:right] = "-" * (right - left)
        row[here * WIDTH] = "+"
        row[there * WIDTH] = ">" if there > here else "<"
        lines.append(f"{sent.at_s:8.3f}  {''.join(row)} {sent.text}")
    return "\n".join(lines)
