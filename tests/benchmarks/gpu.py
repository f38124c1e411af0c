"""Measures the shipped models on a GPU: tokens/s and utilisation compared with a bare loop, and the cost of a round.

    python -m tests.benchmarks gpu                 exit code 3 without a GPU
    python -m tests.benchmarks.gpu --cpu --cases tiny,tiny:compiled,less-tiny
                                                   the same with tiny models on a CPU, to test the script

For `llama-150m` and `llama-1b`, each with layers as they are and compiled:

1. The time of a step in this process, and the peak of its memory compared with the forecast of `doctor`.
2. A real worker and a bare PyTorch loop with the same precision, micro-batch, loss and compilation take turns (see
   `inner`). The worker must reach 0.97 of the bare loop's rate. The text is the built-in one as bytes. The vocabulary
   has the preset's size, which determines the cost.
3. The encoding of the pseudo-gradient by each codec on the GPU, from the anchor on the host to bytes on the host, the
   parts of a round with the preset's codec, and the outer step on the host. Times are wall seconds with an idle device
   before and after, which is an upper bound of the device's time.

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
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version

import torch
from torch import Tensor, nn

from node.config.loader import load
from node.config.manifest import RunConfig
from node.config.schema import Config
from node.diloco.codec import CODECS, make_codec
from node.diloco.fragments import strided
from node.diloco.outer import OuterOptimizer, genesis, mix, outer_step, pseudo_gradient
from node.errors import MachineError
from node.swarm.allreduce.reducer import ChunkLayout, chunk_layouts
from node.training.device import ComputeDevice, choose_device
from node.training.fit import GB, choose_execution, peak_bytes
from node.training.inner import Execution
from node.training.model import CPU, build_model, prepare_layers, unit_elements
from node.training.replica import Replica
from tests.benchmarks.figures import RESULTS, Figure, Result, median, spread
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
LAYERS = {"tiny": 2, "less-tiny": 4}
"""With `--cpu`, the layers of each model."""
REPEATS = 2
STEPS = 4


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and how this machine computes its steps."""

    name: str
    flags: tuple[str, ...]
    config: Config
    chosen: ComputeDevice
    how: Execution
    model: nn.Module
    """Prepared, with the initial parameters of the run or later ones."""

    @property
    def run(self) -> RunConfig:
        return self.config.run


def case_of(name: str, flags: Sequence[str], model: nn.Module | None = None) -> Case:
    """Make a case. The micro-batch is found by trying, as in a node. `model` replaces a new one."""
    config = load(file=None, environ={}, flags=flags).config
    chosen = choose_device(config.devices, config.limits.cpu_threads)
    if model is None:
        model = build_model(config.run.model, seed=0)
    prepare_layers(model, config.devices)
    how = choose_execution(model, config.run, chosen, config.devices)
    release(chosen.device)
    return Case(name, tuple(flags), config, chosen, how, model)


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
    flags.append("--checkpoint.keep=1")  # The disk of a lent machine may be small.
    bare = ["--device", str(device), "--precision", how.precision, "--micro-batch", str(how.micro_batch)]
    options = ["--loss", how.loss] + ["--compile"] * how.compiled
    turns = take_turns(pairs, seconds, case.config.limits.cpu_threads, flags, [*bare, *options])
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
    replica = Replica(case.model, case.run.inner, case.chosen.device, case.how)
    replica.step(batch_of(case), 1e-4)
    return replica


def batch_of(case: Case) -> Tensor:
    """A random batch, int64 cpu [B, T + 1]."""
    inner = case.run.inner
    return torch.randint(case.run.model.vocab_size, (inner.batch_size, inner.sequence_length + 1))


def steps(case: Case, replica: Replica) -> tuple[float, Tensor, list[Figure], list[str]]:
    """Measure a step with the whole batch while a copy of the parameters is being sent.

    Returns its median seconds, that copy, the peak of memory compared with the forecast, and lines that describe it.
    """
    batch, device = batch_of(case), case.chosen.device
    sent = replica.take(((0, sum(unit_elements(case.run.model))),), on_host=False)
    step_s = timed_s(device, lambda: replica.step(batch, 1e-4), STEPS)
    tokens_s = case.run.tokens_per_inner_step / step_s
    said = f"{case.name}: a step of {case.run.inner.batch_size} x {case.run.inner.sequence_length} in {step_s:.3f} s"
    rows = f"micro-batch {replica.inner.micro_batch}, {case.how.precision}"
    lines = [f"{said}, {rows}; {tokens_s:,.0f} tokens/s, {utilization(case, tokens_s)}"]
    if device.type != "cuda":
        return step_s, sent, [], [*lines, "  peak memory not measured on a CPU"]
    used, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    lines.append(f"  peak memory {used / GB:.2f} GB of tensors, {reserved / GB:.2f} GB with the allocator's gaps")
    return step_s, sent, [memory_figure(case, used)], lines


def memory_figure(case: Case, used_bytes: int) -> Figure:
    """Compare the peak of memory with the formulas of `fit`, which `doctor` and the node use."""
    return Figure(
        name=f"{case.name}: peak memory, micro-batch {case.how.micro_batch}", unit="GB", ours=used_bytes / GB,
        baseline=peak_bytes(case.run, case.config, case.how) / GB, baseline_name="GB forecast", low=0.9, high=1.1,
    )  # fmt: skip


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


def outer(case: Case, anchor: Tensor) -> list[str]:
    """Measure the outer step, which the host makes."""
    state, mean = genesis(anchor), anchor * 1e-3
    took_s = timed_s(CPU, lambda: outer_step(state, mean, OuterOptimizer(), lr=0.7, tokens=1), 1)
    return [f"{case.name}: the outer step on the host with {torch.get_num_threads()} threads in {took_s:.2f} s"]


@dataclass
class Report:
    """What has been measured so far. It is saved after each part, as a lent machine may be taken away."""

    name: str
    device: str
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    samples: dict[str, object] = field(default_factory=dict)

    def add(self, figures: Sequence[Figure], notes: Sequence[str]) -> None:
        self.figures += figures
        self.notes += notes
        self.result().save(RESULTS)

    def result(self) -> Result:
        versions = f"torch {torch.__version__}, transformers {version('transformers')}"
        return Result(self.name, self.figures, [f"on {self.device}, {versions}", *self.notes], self.samples)


def measure(report: Report, case: Case, pairs: int, seconds: float, *, has_codecs: bool, has_round: bool) -> None:
    """Measure one case. Its model is on the host afterwards, so that another case may use it."""
    replica = begin(case)
    step_s, sent, figures, notes = steps(case, replica)
    report.add(figures, notes)
    if has_codecs or has_round:
        anchor = sent.cpu().mul_(1.001)
        if has_codecs:
            report.add([], codecs(case, anchor, sent))
        report.add(*round_cost(case, replica, anchor, step_s))
        report.add([], outer(case, anchor))
        del anchor
    del replica, sent
    case.model.to("cpu")
    release(case.chosen.device)
    if pairs:
        figures, notes, samples = inner_loop(case, pairs, seconds)
        report.samples[case.name] = samples
        report.add(figures, notes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="tiny models on a CPU; no figure that says anything")
    parser.add_argument("--cases", default="llama-150m,llama-150m:compiled,llama-1b,llama-1b:compiled")
    parser.add_argument("--turns", default="", help="the cases in which worker and bare loop take turns; default: all")
    parser.add_argument("--pairs", type=int, default=6, help="of turns")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a turn")
    parser.add_argument("--rows", type=int, default=64, help="sequences of an inner step, in as many passes as needed")
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        print("no GPU here: not measured")
        return MachineError.exit_code
    turns = (options.turns or options.cases).split(",")
    report: Report | None = None
    models: dict[str, nn.Module] = {}
    for title in options.cases.split(","):
        name, _, compiled = title.partition(":")
        flags = [f"--devices.compile={'on' if compiled else 'off'}"]
        if options.cpu:
            flags += [*TINY, "--devices.device=cpu", f"--run.model.num_hidden_layers={LAYERS[name]}"]
        else:
            flags += [f"--run.preset={name}", *TEXT, f"--run.inner.batch_size={options.rows}"]
        case = case_of(title, flags, models.get(name))
        report = report or Report("gpu_on_a_cpu" if options.cpu else "gpu", case.chosen.name)
        pairs = options.pairs if title in turns else 0
        measure(report, case, pairs, options.seconds, has_codecs=not models, has_round=name not in models)
        models = {name: case.model}
    assert report is not None
    return report.result().conclude()


if __name__ == "__main__":
    raise SystemExit(main())
