"""DiLoCo over torch.distributed in a single file: what the swarm must compute, bit for bit, if no member fails.

    torchrun --nproc-per-node 2 -m node.reference --preset-file r.toml --rounds 3 --stream-ids a b --out end.safetensors

torchrun starts one process per stream id; without torchrun there is one process. A round has H steps, and every member
takes part in all rounds. Each process prints one JSON line a round. A swarm of the same members with policy `steps`,
the same run id, initial parameters, device and thread count reaches the same digests, as the operations and their order
are the same.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from node.config.manifest import RunConfig
from node.diloco.aggregate import clip_scales, square_norm, weighted_mean
from node.diloco.codec import chunk_bounds, make_codec
from node.diloco.digest import state_digest
from node.diloco.feedback import MOST_RESIDUAL_RATIO, ErrorFeedback
from node.diloco.outer import OuterState, credited, genesis, outer_step, pseudo_gradient
from node.diloco.schedule import progress, swarm_tokens_at
from node.errors import ConfigError, NodeError, UsageError
from node.training.algorithm import feedback_of, inner_learning_rate, optimizer_of
from node.training.corpus import Corpus, Stream, load_corpus
from node.training.inner import Execution, InnerLoop
from node.training.model import build_model, flatten, load_flat_, unit_elements


@dataclass(frozen=True, slots=True)
class WeightedUpdate:
    """The contribution that one member sends in a round."""

    stream_id: str
    weight: int
    """Tokens that the member trained on."""
    encoded: bytes
    """The encoded pseudo-gradient, chunk by chunk on the grid of `chunk_bounds`."""


class ReferenceMember:
    """One node of the run. In each round: `contribute`, exchange contributions with all members, `apply`."""

    def __init__(
        self,
        run: RunConfig,
        corpus: Corpus,
        anchor: Tensor,
        *,
        run_id: str,
        stream_id: str,
        device: torch.device,
        precision: str,
    ) -> None:
        """`anchor` has the initial parameters, fp32 [P] on the cpu."""
        self.state: OuterState = genesis(anchor, optimizer_of(run.outer).moments)
        self._run, self._corpus, self._run_id, self._stream_id = run, corpus, run_id, stream_id
        self._codec = make_codec(run.sync.codec)
        self._result_codec = make_codec(run.sync.encoding_of_results)
        self._outer = optimizer_of(run.outer)
        rule = feedback_of(run.sync)
        self._feedback = ErrorFeedback(anchor.numel(), rule) if rule is not None else None
        self._rule = rule
        self._residuals: dict[int, Tensor] = {}
        """What encoding lost of the last mean of each chunk, by the chunk's start, if the run has error feedback."""
        self._model = build_model(run.model, seed=0)
        load_flat_(self._model, anchor)
        # The moments are kept across rounds; only the parameters are reset to the anchor.
        self._inner = InnerLoop(self._model, run.inner, device, Execution(precision))
        self._last_round_tokens = run.round.first_round_tokens or run.tokens_per_inner_step * run.round.inner_steps

    def contribute(self) -> tuple[WeightedUpdate, float]:
        """Make H inner steps from the anchor. Returns the contribution and the mean loss in nats per token.

        The contribution is encode(anchor - local), or with error feedback encode(anchor - local + residual).
        """
        run = self._run
        stream = Stream(self._corpus, self._run_id, self._stream_id, self.state.round + 1)
        loss, tokens = 0.0, 0
        for inner_step in range(run.round.inner_steps):
            batch = stream.next_batch(run.inner.batch_size, run.inner.sequence_length)
            result = self._inner.step(batch, self._learning_rate(inner_step))
            loss += result.loss / run.round.inner_steps
            tokens += result.tokens
        delta = pseudo_gradient(self.state.anchor, flatten(self._model))
        wanted = self._feedback.add(delta) if self._feedback is not None else delta
        encoded = b"".join(self._codec.encode(wanted[start:end]) for start, end in chunk_bounds(delta.numel()))
        contribution = WeightedUpdate(self._stream_id, tokens, encoded)
        if self._feedback is not None:
            self._feedback.record_error(wanted, torch.cat(list(self._chunks(contribution))))
            self._feedback.round_over(self.state.round + 1, included=True)
        return contribution, loss

    def apply(self, contributions: Sequence[WeightedUpdate]) -> None:
        """Make the outer step: the weighted mean in order of stream id, encoded and decoded once, then Nesterov."""
        members = sorted(contributions, key=lambda c: c.stream_id)
        weights = [c.weight for c in members]
        scales = clip_scales([self._norm(c) for c in members], weights)
        mean = torch.empty_like(self.state.anchor)
        for (start, end), *parts in zip(chunk_bounds(mean.numel()), *map(self._chunks, members), strict=True):
            mean[start:end] = self._deliver(start, weighted_mean(parts, weights, scales))
        outer = self._run.outer
        stepped = outer_step(self.state, mean, self._outer, lr=outer.lr, tokens=sum(weights))
        self.state = credited(stepped, {c.stream_id: c.weight for c in members})
        self._last_round_tokens = sum(weights)
        load_flat_(self._model, self.state.anchor)

    def _deliver(self, start: int, mean: Tensor) -> Tensor:
        """The mean of the chunk that starts there, fp32 [n], as all members decode it."""
        codec, rule, n = self._result_codec, self._rule, mean.numel()
        if rule is None:
            return codec.decode(codec.encode(mean), n)
        stored = self._residuals.get(start)
        wanted = rule.add(mean, stored, MOST_RESIDUAL_RATIO[codec.name])
        decoded = codec.decode(codec.encode(wanted), n)
        self._residuals[start] = rule.residual_after(wanted, decoded, stored)
        if rule.is_reset_after(self.state.round + 1):
            del self._residuals[start]
        return decoded

    def _chunks(self, contribution: WeightedUpdate) -> Iterator[Tensor]:
        """The decoded chunks, fp32 [n] each on the cpu."""
        at = 0
        for start, end in chunk_bounds(self.state.anchor.numel()):
            size_bytes = self._codec.encoded_bytes(end - start)
            yield self._codec.decode(memoryview(contribution.encoded)[at : at + size_bytes], end - start)
            at += size_bytes

    def _norm(self, contribution: WeightedUpdate) -> float:
        return math.sqrt(sum(square_norm(chunk) for chunk in self._chunks(contribution)))

    def _learning_rate(self, inner_step: int) -> float:
        """The learning rate of the step after `inner_step` steps of this round."""
        run = self._run
        done = progress("steps", inner_step=inner_step, inner_steps=run.round.inner_steps, elapsed_s=0.0, round_s=None)
        return inner_learning_rate(run, swarm_tokens_at(self.state.tokens, done, self._last_round_tokens))


def gather(own: WeightedUpdate, stream_ids: Sequence[str], device: torch.device) -> list[WeightedUpdate]:
    """Gather all contributions. They have the same size and weight, as each process made H steps on the same model."""
    if not dist.is_initialized():
        return [own]
    mine = torch.frombuffer(bytearray(own.encoded), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(mine) for _ in stream_ids]
    dist.all_gather(gathered, mine)
    return [
        WeightedUpdate(stream_id, own.weight, encoded.cpu().numpy().tobytes())
        for stream_id, encoded in zip(stream_ids, gathered, strict=True)
    ]


def initial_anchor(run: RunConfig, *, seed: int, file: Path | None, device: torch.device) -> Tensor:
    """Read the initial parameters, fp32 cpu [P], from `file`, or draw them from `seed`. All ranks get rank 0's."""
    anchor = load_file(file)["anchor"] if file else flatten(build_model(run.model, seed=seed))
    parameters = sum(unit_elements(run.model))
    if anchor.shape != (parameters,) or anchor.dtype != torch.float32:
        raise UsageError(f"{file} must hold {parameters} fp32 parameters, as the preset's model has.")
    if dist.is_initialized():
        shared = anchor.to(device)
        dist.broadcast(shared, src=0)
        anchor = shared.cpu()
    return anchor


def read_run(file: Path) -> RunConfig:
    """Read the `run` table of a TOML or JSON file, or the whole file if it has none. Raises ConfigError."""
    try:
        text = file.read_text(encoding="utf-8")
        raw = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
        return RunConfig.model_validate(raw.get("run", raw))
    except (OSError, json.JSONDecodeError, tomllib.TOMLDecodeError, ValidationError) as exc:
        raise ConfigError(f"{file} is not a readable preset: {exc}") from exc


def save(state: OuterState, file: Path) -> None:
    """Write `anchor` and `momentum`, fp32 [P], with round, tokens and digest as metadata."""
    metadata = {"round": str(state.round), "tokens": str(state.tokens), "digest": state_digest(state)}
    save_file({"anchor": state.anchor, "momentum": state.momentum}, file, metadata)


def run_rounds(
    member: ReferenceMember, rounds: int, exchange: Callable[[WeightedUpdate], list[WeightedUpdate]]
) -> None:
    """Run this many rounds of DiLoCo, algorithm 1. Prints one line a round."""
    for _ in range(rounds):
        own, loss = member.contribute()
        member.apply(exchange(own))
        line = {
            "round": member.state.round,
            "stream_id": own.stream_id,
            "loss": loss,
            "swarm_tokens": member.state.tokens,
            "digest": state_digest(member.state),
        }
        # One write a line, so that lines of several processes do not mix.
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="node.reference", description="DiLoCo over torch.distributed.")
    parser.add_argument("--preset-file", type=Path, required=True, help="TOML or JSON with [run] tables")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--stream-ids", nargs="+", required=True, help="one per process: the data stream that it reads")
    parser.add_argument("--run-id", default="0" * 32, help="the manifest's run id; the data streams depend on it")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial parameters")
    parser.add_argument("--initial", type=Path, help="safetensors file with the initial parameters as `anchor`")
    parser.add_argument("--out", type=Path, help="safetensors file for the final outer state")
    parser.add_argument("--device", default=str(torch.accelerator.current_accelerator(check_available=True) or "cpu"))
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=0, help="number of compute threads; 0 means torch's default")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="longest wait for the other processes")
    return parser.parse_args(arguments)


def train(options: argparse.Namespace, rank: int, device: torch.device) -> None:
    run = read_run(options.preset_file)
    if not run.data.is_builtin:
        raise UsageError("The reference trains on the built-in text: leave run.data.sources as they are.")
    if run.sync.mode != "blocking" or run.sync.auto:
        raise UsageError("The reference has blocking rounds of fixed length: leave run.sync.mode and auto as they are.")
    member = ReferenceMember(
        run,
        load_corpus(),
        initial_anchor(run, seed=options.seed, file=options.initial, device=device),
        run_id=options.run_id,
        stream_id=options.stream_ids[rank],
        device=device,
        precision=options.precision,
    )
    run_rounds(member, options.rounds, lambda own: gather(own, options.stream_ids, device))
    if options.out and rank == 0:
        save(member.state, options.out)
    if dist.is_initialized():
        dist.barrier()  # No process may close its connections while another still receives.


def main(arguments: Sequence[str]) -> int:
    """Run one process and return an exit code of `node.errors`. Rank and world size are in torchrun's environment."""
    options = parse_arguments(arguments)
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu") if options.device == "cpu" else torch.device(options.device, local_rank)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        if len(set(options.stream_ids)) != world_size or len(options.stream_ids) != world_size:
            raise UsageError(
                f"{world_size} processes need {world_size} different --stream-ids, not {options.stream_ids}."
            )
        if "WORLD_SIZE" in os.environ:
            backend = dist.get_default_backend_for_device(device)
            if device.type != "cpu":
                torch.accelerator.set_device_index(local_rank)
            dist.init_process_group(backend, timeout=timedelta(seconds=options.timeout_s))
        train(options, rank, device)
    except NodeError as exc:
        sys.stderr.write(f"{exc}\n")
        return exc.exit_code
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the interpreter's teardown, where gloo's threads occasionally abort a process that has finished its work.
    os._exit(status)
