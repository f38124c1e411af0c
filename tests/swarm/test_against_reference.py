"""A swarm of real nodes reaches the same state digests as the reference implementation and ends with the run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from node.diloco.digest import state_digest
from node.reference import ReferenceMember, initial_anchor, read_run
from node.training.corpus import load_corpus
from tests.swarm.harness import START_S, Swarm, checkpoint_meta, checkpoint_round, environment, tiny

INNER_STEPS = 5
ROUNDS = 3


@pytest.mark.parametrize(
    ("size", "sync", "optimizer"),
    [
        (2, {"codec": "fp32"}, "nesterov"),
        (2, {"codec": "int2", "result_codec": "int4", "feedback": "classic"}, "adam"),
        (4, {"codec": "int4", "feedback": "loco"}, "nesterov"),
    ],
    ids=["fp32", "int2 and adam", "loco"],
)
def test_swarm_reaches_bit_for_bit_the_state_of_the_reference_implementation(
    size: int, sync: dict[str, str], optimizer: str, tmp_path: Path
) -> None:
    """With limited uplinks all shares are equal, so every chunk keeps its reducer and the residual of its mean."""
    run = tiny(
        total_tokens=ROUNDS * size * INNER_STEPS * 4 * 64,
        inner={"warmup_tokens": 2 * INNER_STEPS * 4 * 64},
        round={"inner_steps": INNER_STEPS, "min_peers": size},
        outer={"optimizer": optimizer},
        sync=sync,
    )
    with Swarm(tmp_path, run) as swarm:
        flags = ["--checkpoint.every_s=0.001", "--limits.upload_mbit_s=2"]
        swarm.found("--checkpoint.keep=9", *flags)
        swarm.join(*(f"node{number}" for number in range(1, size)), flags=flags)
        assert [node.wait_end(2 * START_S) for node in swarm.nodes] == [0] * size
        for node in swarm.nodes:
            assert "run_complete" in node.said()
        founder = swarm.nodes[0]
        metas = {checkpoint_round(path): checkpoint_meta(path) for path in founder.checkpoints()}
        ends = {checkpoint_meta(node.checkpoints()[0])["state_digest"] for node in swarm.nodes}
    expected = reference(swarm) if size == 2 else members_of_reference(swarm)
    # A round that ends while the previous checkpoint is still being written has no checkpoint.
    saved = {number: meta["state_digest"] for number, meta in metas.items() if number >= 0}
    assert saved == {number: expected[number] for number in saved} and ROUNDS - 1 in saved
    assert ends == {expected[ROUNDS - 1]}


def begin(swarm: Swarm) -> tuple[str, Path, list[str]]:
    """Return the run id, the file with the initial parameters, and the peer ids of the swarm."""
    founder = swarm.nodes[0]
    run_id = json.loads((founder.folder / "manifest.json").read_text())["run_id"]
    initial = founder.checkpoints()[-1]
    assert checkpoint_round(initial) == -1
    proof = checkpoint_meta(founder.checkpoints()[0])["extra"]["proof"]
    peer_ids = [join["signer"] for join in json.loads(proof["outcome"]["text"])["plan"]["joins"]]
    assert len(peer_ids) == len(swarm.nodes)
    return run_id, initial / "outer.safetensors", peer_ids


def members_of_reference(swarm: Swarm) -> dict[int, str]:
    """Run all members of the reference in this process. Returns the state digest of each round."""
    run_id, initial, peer_ids = begin(swarm)
    run = read_run(swarm.preset)
    cpu = torch.device("cpu")
    anchor = initial_anchor(run, seed=0, file=initial, device=cpu)
    corpus = load_corpus()
    members = [
        ReferenceMember(run, corpus, anchor, run_id=run_id, stream_id=peer_id, device=cpu, precision="fp32")
        for peer_id in peer_ids
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    digests = {}
    for number in range(ROUNDS):
        contributions = [member.contribute()[0] for member in members]
        for member in members:
            member.apply(contributions)
        digests[number] = state_digest(members[0].state)
    torch.set_num_threads(threads)
    return digests


def reference(swarm: Swarm) -> dict[int, str]:
    """Run the reference under torchrun, with one process for each node. Returns the state digest of each round."""
    run_id, initial, peer_ids = begin(swarm)
    size = len(peer_ids)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    words += ["-m", "node.reference", f"--preset-file={swarm.preset}", f"--rounds={ROUNDS}", "--run-id", run_id]
    words += ["--initial", str(initial), "--device=cpu", "--threads=1"]
    done = subprocess.run(
        [*words, "--stream-ids", *peer_ids],
        env=environment({}), cwd=swarm.folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    digests = {(line["round"], line["digest"]) for line in told}
    assert len(told) == ROUNDS * size and len(digests) == ROUNDS
    return dict(digests)
