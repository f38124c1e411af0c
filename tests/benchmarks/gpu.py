"""Measures the shipped models on a GPU: tokens/s and utilisation compared with a bare loop, and the cost of a round.

    python -m tests.benchmarks gpu                 exit code 3 without a GPU
    python -m tests.benchmarks.gpu --cpu           the same with tiny models on a CPU, to test the script

1. `llama-150m`: a real worker and a bare PyTorch loop with the same precision, micro-batch and loss take turns (see
   `inner`). The worker must reach 0.97 of the bare loop's rate. The text is the built-in one as bytes. The vocabulary
   has the preset's size, which determines the cost.
2. The same model in this process: the peak memory of its steps; the encoding of the pseudo-gradient by each codec on
   the GPU, from the anchor on the host to bytes on the host; and the parts of a round with the preset's codec. Times
   are wall seconds with an idle device before and after, which is an upper bound of the device's time.
3. A step of `llama-1b` with the micro-batch that fits.

Model FLOP utilisation follows PaLM (arXiv 2204.02311, appendix B): a token costs 6 N + 12 L H Q T operations. N is the
number of weights in matrix products (without the input embedding, unless it is tied to the output), L the number of
layers, H the heads, Q the width of a head, T the sequence length. The half of the attention that the causal mask hides
is not subtracted. Operations that are computed twice (logits in parts, activation checkpointing) count once.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from node.config.loader import load
from node.config.manifest import RunConfig
from node.config.schema import Config
from node.diloco.codec import CODECS, make_codec
from node.diloco.fragments import strided
from node.diloco.outer import mix, pseudo_gradient
from node.errors import MachineError
from node.swarm.allreduce.reducer import ChunkLayout, chunk_layouts
from node.training.device import ComputeDevice, choose_device
from node.training.fit import choose_execution
from node.training.inner import Execution
from node.training.model import build_model, prepare_layers, unit_elements
from node.training.replica import Replica
from tests.benchmarks.figures import Figure, Result, median, spread
from tests.benchmarks.inner import take_turns

LEAST_RATIO = 0.97
PEAK_FLOPS = (
    ("H200 NVL", 836e12), ("H200", 989e12), ("H100 NVL", 836e12), ("H100 PCIe", 756e12), ("H100", 989e12),
    ("A100", 312e12), ("A40", 150e12), ("L40S", 362e12), ("L4", 121e12), ("RTX 4090", 165e12), ("RTX 3090", 71e12),
)  # fmt: skip
"""Peak rate of dense bf16 products with sums in fp32, in operations per second, for the first name that the device's
name contains. Sources: NVIDIA's data sheets (halved if given with sparsity), and its Ada and GA102 whitepapers."""
TEXT = (
    "--run.data.sources=builtin:python-stdlib", "--run.data.tokenizer=bytes", "--run.data.held_out_source=",
    "--run.evaluation.batches=0",
)  # fmt: skip
TINY = (
    "--run.preset=builtin", "--run.model.hidden_size=64", "--run.model.intermediate_size=128",
    "--run.model.num_hidden_layers=2", "--run.inner.sequence_length=64", "--run.inner.batch_size=8",
    "--run.evaluation.batches=0", "--run.sync.codec=int4", "--limits.cpu_threads=1",
)  # fmt: skip
REPEATS = 5
STEPS = 4


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and how this machine computes its steps."""

    name: str
    flags: tuple[str, ...]
    config: Config
    chosen: ComputeDevice
    how: Execution

    @property
    def run(self) -> RunConfig:
        return self.config.run


def case_of(name: str, flags: Sequence[str]) -> Case:
    """Make a case. The micro-batch is found by trying, as in a node."""
    config = load(file=None, environ={}, flags=flags).config
    chosen = choose_device(config.devices, config.limits.cpu_threads)
    model = build_model(config.run.model, seed=0)
    prepare_layers(model, config.devices)
    how = choose_execution(model, config.run, chosen, config.devices)
    del model
    release(chosen.device)
    return Case(name, tuple(flags), config, chosen, how)


def flops_a_token(run: RunConfig) -> float:
    """Operations per token of forward and backward pass, by the formula at the top of this file."""
    model = run.model
    looked_up = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    weights = sum(unit_elements(model)) - looked_up
    attention = 12 * model.num_hidden_layers * model.num_attention_heads * model.head_width * run.inner.sequence_length
    return float(6 * weights + attention)


def peak_flops(name: str) -> float | None:
    """The peak rate of a device in operations per second, or None if PEAK_FLOPS does not contain it."""
    return next((flops for part, flops in PEAK_FLOPS if part in name), None)


def utilization(case: Case, tokens_s: float) -> str:
    """The model FLOP utilisation as text."""
    peak = peak_flops(case.chosen.name)
    made = tokens_s * flops_a_token(case.run)
    if peak is None or case.chosen.precision not in ("bf16", "fp16"):
        return f"{made / 1e12:.3g} TFLOP/s; the peak of {case.chosen.name} in {case.chosen.precision} is unknown here"
    return f"{made / 1e12:.3g} TFLOP/s, {100 * made / peak:.1f} % of {peak / 1e12:.0f}"


# 1: the inner loop


def inner_loop(case: Case, pairs: int, seconds: float) -> tuple[list[Figure], list[str], dict[str, object]]:
    how, device = case.how, case.chosen.device
    flags = [*case.flags, f"--devices.micro_batch={how.micro_batch}", f"--devices.precision={how.precision}"]
    bare = ["--device", str(device), "--precision", how.precision, "--micro-batch", str(how.micro_batch)]
    turns = take_turns(
        pairs, seconds, case.config.limits.cpu_threads, flags, [*bare, *(["--chunked"] if how.chunked_loss else [])]
    )
    (ours, alone), ratios = turns.rates, turns.ratios
    figure = Figure(
        name=f"{case.name}: inner loop, {how.precision}", unit="tokens/s", ours=median(ours), baseline=median(alone),
        baseline_name="bare PyTorch", low=LEAST_RATIO if device.type == "cuda" else None, ratio_measured=median(ratios),
    )  # fmt: skip
    batch = f"micro-batch {how.micro_batch} of {case.run.inner.batch_size} x {case.run.inner.sequence_length}"
    notes = [
        f"{case.name}: {pairs} pairs of turns of {seconds:g} s, {batch}; ratio of a pair {spread(ratios)}",
        f"  node {spread(ours)} tokens/s, {utilization(case, median(ours))}",
        f"  bare {spread(alone)} tokens/s, {utilization(case, median(alone))}",
    ]
    return [figure], notes, {"ours": list(turns.ours), "bare": list(turns.bare)}


# 2 and 3: in this process


def timed_s(device: torch.device, work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median wall seconds of `work`, after one run to warm up. The device is idle before and after each run."""
    work()
    found = []
    for _ in range(repeats):
        synchronize(device)
        began_s = time.perf_counter()
        work()
        synchronize(device)
        found.append(time.perf_counter() - began_s)
    return statistics.median(found)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Return unused GPU memory to the device, so that other processes can use it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def begin(case: Case) -> Replica:
    """Make a replica and one step, so that all its memory is allocated. The peak is counted from before that."""
    release(case.chosen.device)
    if case.chosen.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(case.chosen.device)
    model = build_model(case.run.model, seed=0)
    prepare_layers(model, case.config.devices)
    replica = Replica(model, case.run.inner, case.chosen.device, case.how)
    replica.step(batch_of(case), 1e-4)
    return replica


def batch_of(case: Case) -> Tensor:
    """A random batch, int64 cpu [B, T + 1]."""
    inner = case.run.inner
    return torch.randint(case.run.model.vocab_size, (inner.batch_size, inner.sequence_length + 1))


def peak(case: Case) -> str:
    if case.chosen.device.type != "cuda":
        return "peak memory not measured on a CPU"
    used = torch.cuda.max_memory_allocated(case.chosen.device)
    parameters = sum(unit_elements(case.run.model))
    return f"peak memory {used / 1e9:.2f} GB, {used / parameters:.1f} bytes a parameter with activations"


def steps(case: Case, replica: Replica) -> tuple[float, list[str]]:
    """The median seconds of a step with the whole batch, and lines that describe it."""
    batch = batch_of(case)
    step_s = timed_s(case.chosen.device, lambda: replica.step(batch, 1e-4), STEPS)
    tokens_s = case.run.tokens_per_inner_step / step_s
    said = f"{case.name}: a step of {case.run.inner.batch_size} x {case.run.inner.sequence_length} in {step_s:.3f} s"
    rows = f"micro-batch {replica.inner.micro_batch}, {case.how.precision}"
    return step_s, [f"{said}, {rows}; {tokens_s:,.0f} tokens/s, {utilization(case, tokens_s)}; {peak(case)}"]


def encoded(layout: ChunkLayout, anchor: Tensor, sent: Tensor) -> list[bytes]:
    """Encode as `worker.encoder` does: chunk by chunk, the anchor comes from the host and only bytes return to it."""
    return [
        layout.codec.encode(pseudo_gradient(anchor[low:high].to(sent.device), sent[low:high]))
        for low, high in layout.bounds
    ]


def codecs(case: Case, anchor: Tensor, sent: Tensor) -> list[str]:
    """Measure how long each codec takes to encode the whole pseudo-gradient, fp32 [P]. Returns lines of text."""
    notes = [f"{case.name}: a pseudo-gradient of {anchor.numel():,} parameters encoded on {case.chosen.name}"]
    for name in CODECS:
        (layout,) = chunk_layouts(make_codec(name), [((0, anchor.numel()),)])
        took_s = timed_s(sent.device, partial(encoded, layout, anchor, sent))
        size_mb = layout.encoded_bytes() / 1e6
        notes.append(
            f"  {name:5} {1e3 * took_s:9.2f} ms, {4e-9 * anchor.numel() / took_s:7.2f} GB/s, {size_mb:,.1f} MB"
        )
    return notes


def round_cost(case: Case, replica: Replica, anchor: Tensor, step_s: float) -> tuple[list[Figure], list[str]]:
    """Measure the parts of a round that use the device or its data, compared with the round's H inner steps."""
    run, device = case.run, case.chosen.device
    units = unit_elements(run.model)
    layout = chunk_layouts(make_codec(run.sync.codec), strided(units, run.sync.fragment_count))[0]
    sent = replica.take(layout.ranges, on_host=False)
    chunks = encoded(layout, anchor, sent)

    def merged(part: Tensor, at: slice, place: slice) -> Tensor:
        return mix(part, anchor[place].to(part.device), run.sync.mix_alpha)

    parts = {
        "snapshot": timed_s(device, lambda: replica.take(layout.ranges, on_host=False)),
        "encode": timed_s(device, lambda: encoded(layout, anchor, sent)),
        "decode (host)": timed_s(device, lambda: layout.decode(chunks)),
        "merge": timed_s(device, lambda: replica.change(layout.ranges, merged)),
    }
    on_device_s = sum(took_s for name, took_s in parts.items() if name != "decode (host)")
    round_s = run.round.inner_steps * step_s
    figure = Figure(
        name=f"{case.name}: a round on the device, {run.sync.codec}", unit="ms", ours=1e3 * on_device_s,
        baseline=1e3 * round_s, baseline_name=f"ms of {run.round.inner_steps} inner steps",
    )  # fmt: skip
    told = ", ".join(f"{name} {1e3 * took_s:.2f} ms" for name, took_s in parts.items())
    return [figure], [f"{case.name}: of a round {told}; {100 * on_device_s / round_s:.4f} % of its inner steps"]


def measure(small: Case, large: Case, pairs: int, seconds: float) -> Result:
    figures, notes, samples = inner_loop(small, pairs, seconds)
    replica = begin(small)
    step_s, said = steps(small, replica)
    sent = replica.take(((0, sum(unit_elements(small.run.model))),), on_host=False)
    anchor = sent.cpu() + 1e-3 * torch.randn(sent.numel())
    notes += [*said, *codecs(small, anchor, sent)]
    cost, said = round_cost(small, replica, anchor, step_s)
    figures, notes = [*figures, *cost], [*notes, *said]
    del replica, sent, anchor
    notes += steps(large, begin(large))[1]
    name = "gpu" if small.chosen.device.type == "cuda" else "gpu_on_a_cpu"
    return Result(name, figures, [f"on {small.chosen.name}", *notes], samples | {"device": small.chosen.name})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="tiny models on a CPU; no figure that says anything")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a turn")
    parser.add_argument("--rows", type=int, default=64, help="sequences of an inner step, in as many passes as needed")
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        print("no GPU here: not measured")
        return MachineError.exit_code
    if options.cpu:
        flags = [*TINY, "--devices.device=cpu"]
        small, large = case_of("tiny", flags), case_of("less tiny", [*flags, "--run.model.num_hidden_layers=4"])
    else:
        rows = f"--run.inner.batch_size={options.rows}"
        small = case_of("llama-150m", ["--run.preset=llama-150m", *TEXT, rows])
        large = case_of("llama-1b", ["--run.preset=llama-1b", *TEXT, rows])
    return measure(small, large, options.pairs, options.seconds).conclude()


if __name__ == "__main__":
    raise SystemExit(main())
