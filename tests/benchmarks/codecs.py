"""Measures the error of each codec and its speed on one core, in GB/s of fp32 and compared with a plain copy.

    python -m tests.benchmarks.codecs [--parameters 15000000] [--repeats 9]

The input is Gaussian, at the scale of pseudo-gradients. Encoding to 8 and 4 bits must reach 2 GB/s of fp32 input.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from node.diloco.codec import CODECS, make_codec
from tests.benchmarks.figures import Figure, Result

PROMISED_GB_S = 2.0
PROMISED = ("int8", "int4", "e3m0")


def gb_per_s(work: Callable[[], object], size_bytes: int, repeats: int) -> list[float]:
    """The rates of `repeats` runs, after one run to warm up."""
    work()
    rates = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        work()
        rates.append(size_bytes / (time.perf_counter() - began_s) / 1e9)
    return rates


def measure(parameters: int, repeats: int) -> Result:
    torch.set_num_threads(1)
    x = torch.randn(parameters, generator=torch.Generator().manual_seed(0)) * 1e-3
    size_bytes, target = 4 * parameters, torch.empty_like(x)
    copies = gb_per_s(lambda: target.copy_(x), size_bytes, repeats)
    figures, samples, notes = [], {"copy": copies}, []
    notes.append("| codec | bits an element | relative error | encode GB/s | decode GB/s |\n|---|---|---|---|---|")
    for name in CODECS:
        codec = make_codec(name)
        data = codec.encode(x)
        few = repeats if name != "topk" else 2
        encode = gb_per_s(partial(codec.encode, x), size_bytes, few)
        decode = gb_per_s(partial(codec.decode, data, parameters), size_bytes, few)
        error = float((codec.decode(data, parameters) - x).norm() / x.norm())
        samples |= {f"{name}.encode": encode, f"{name}.decode": decode}
        rates = (statistics.median(encode), statistics.median(decode))
        notes.append(f"| {name} | {8 * len(data) / parameters:.2f} | {error:.4f} | {rates[0]:.2f} | {rates[1]:.2f} |")
        if name in PROMISED:
            figures.append(
                Figure(f"{name}: encoding, one core", "GB/s", rates[0], PROMISED_GB_S, "GB/s promised", low=1.0)
            )
    notes.append(f"A copy of the same vector: {statistics.median(copies):.2f} GB/s.")
    return Result("codecs", figures, notes, samples)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=15_000_000)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    result = measure(options.parameters, options.repeats)
    return result.conclude()


if __name__ == "__main__":
    raise SystemExit(main())
