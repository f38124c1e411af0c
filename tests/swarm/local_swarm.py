"""Starts N nodes on this machine: a founder, then nodes that join with its invite.

Ctrl-C or the end of the founder ends all nodes. Each node has its own data folder and free ports, and logs to node.log
in that folder. An earlier swarm in the data folder continues.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

INVITE_WAIT_S = 180.0
STOP_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    folder: Path
    process: subprocess.Popen[bytes]

    def ask(self, command: str) -> str:
        """Send one command to this node. Returns its output, or an empty string if the node does not answer."""
        line = [sys.executable, "-m", "node.cli", command, "--data-dir", str(self.folder)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=30, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    def link(self) -> str:
        try:
            url = json.loads((self.folder / "api.json").read_text(encoding="utf-8"))["url"]
            token = (self.folder / "api-token").read_text(encoding="utf-8").strip()
        except (OSError, ValueError, KeyError):
            return ""
        return f"{url}/#token={token}"


def start(name: str, folder: Path, invite: str, threads: int, extra: Sequence[str]) -> Member:
    folder.mkdir(parents=True, exist_ok=True)
    flags = ["--data-dir", str(folder), "--name", name, "--api.port=0", "--swarm.listen=/ip4/127.0.0.1/tcp/0"]
    flags += [f"--limits.cpu_threads={threads}", *(["--join", invite] if invite else []), *extra]
    with (folder / "node.log").open("ab") as log:
        # Each node has its own session, so Ctrl-C reaches only this script, which then stops the nodes in order.
        process = subprocess.Popen(
            [sys.executable, "-m", "node.cli", "run", *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Member(name, folder, process)


def wait_for_invite(founder: Member) -> str:
    deadline = time.monotonic() + INVITE_WAIT_S
    while time.monotonic() < deadline:
        if founder.process.poll() is not None:
            raise SystemExit(f"The founder ended early: see {founder.folder / 'node.log'}.")
        invite = founder.ask("invite")
        if invite:
            return invite
        time.sleep(0.5)
    raise SystemExit(f"The founder had no invite after {INVITE_WAIT_S:.0f} s: see {founder.folder / 'node.log'}.")


def watch(members: Sequence[Member]) -> None:
    """Print the founder's link, and a line for each node that ends. Returns when the founder has ended."""
    founder = members[0]
    linked = False
    ended: set[str] = set()
    while founder.name not in ended:
        for member in members:
            code = member.process.poll()
            if code is not None and member.name not in ended:
                ended.add(member.name)
                print(f"{member.name} ended with exit code {code}: see {member.folder / 'node.log'}", flush=True)
        link = "" if linked else founder.link()
        if link:
            linked = True
            print(f"Dashboard: {link}", flush=True)
        time.sleep(0.5)


def stop(members: Sequence[Member]) -> None:
    for member in members:
        if member.process.poll() is None:
            member.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + STOP_WAIT_S
    for member in members:
        try:
            member.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            print(f"{member.name} did not stop in {STOP_WAIT_S:.0f} s: killed", flush=True)
            member.process.kill()
            member.process.wait(10)


def interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description="N nodes on this machine; further flags go to every node.")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--data-dir", type=Path, default=Path(".data/swarm"))
    args, extra = parser.parse_known_args()
    if args.nodes < 1:
        parser.error("--nodes must be at least 1")
    signal.signal(signal.SIGTERM, interrupt)
    threads = max(1, (os.cpu_count() or 1) // args.nodes)
    members: list[Member] = []
    try:
        members.append(start("node-1", args.data_dir / "node-1", "", threads, extra))
        invite = wait_for_invite(members[0])
        print(f"Invite: {invite}", flush=True)
        for number in range(2, args.nodes + 1):
            name = f"node-{number}"
            members.append(start(name, args.data_dir / name, invite, threads, extra))
        watch(members)
    except KeyboardInterrupt:
        print("Stopping ...", flush=True)
    finally:
        stop(members)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
