"""Measures how many tokens per second one core makes from text, compared with how many a device consumes.

Parquet files of the standard library's text are read, tokenised (bytes, and byte-level BPE with 8,192 tokens) and
packed on one thread by the node's classes. The baseline is the inner step of the built-in preset on all cores. A note
says how fast a device one core can feed with the 150M preset.
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from node.config.loader import load
from node.config.manifest import parse_source
from node.host.cores import usable_cores
from node.training.documents import Documents
from node.training.inner import InnerLoop
from node.training.model import build_model
from node.training.packing import RowPacker
from node.training.tokenizer import ByteTokenizer, FastTokenizer, Tokenizer
from tests.benchmarks.figures import Figure, Result, median, spread

FILES, CHARACTERS = 16, 2000
VOCABULARY = 8192
BATCH, LENGTH = 8, 1024
LEAST_RATIO = 10.0
FLOPS_150M = 6 * 182e6
"""Operations per token of the 150M preset, for all weights except the input embedding."""


def write_text(folder: Path) -> list[str]:
    found: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in path.parts:
            text = path.read_text(encoding="utf-8", errors="replace")
            found += [text[i : i + CHARACTERS] for i in range(0, len(text), CHARACTERS)]
    for i in range(FILES):
        pq.write_table(pa.table({"text": found[i::FILES]}), folder / f"{i}.parquet")
    return found


def bpe(texts: list[str]) -> Tokenizer:
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    inner = ByteLevelBPETokenizer()
    inner.train_from_iterator(texts[::20], VOCABULARY, special_tokens=["</s>"], show_progress=False)
    return FastTokenizer(PreTrainedTokenizerFast(tokenizer_object=inner._tokenizer, eos_token="</s>"))


def tokens_s(documents: Documents, tokenizer: Tokenizer, seconds: float) -> float:
    rows = RowPacker([documents], [1.0], tokenizer, seed="run peer", held_out_one_in=20)
    rows.next_batch(BATCH, LENGTH)
    began_s, count = time.perf_counter(), 0
    while time.perf_counter() - began_s < seconds:
        count += rows.next_batch(BATCH, LENGTH)[:, 1:].numel()
    return count / (time.perf_counter() - began_s)


def need_s(steps: int) -> float:
    """The tokens per second that the built-in preset trains on this machine."""
    run = load(file=None, environ={}, flags=[]).config.run
    torch.set_num_threads(usable_cores())
    inner = InnerLoop(build_model(run.model, seed=0), run.inner, torch.device("cpu"))
    batch = torch.randint(258, (run.inner.batch_size, run.inner.sequence_length + 1))
    inner.step(batch, 1e-3)
    began_s = time.perf_counter()
    for _ in range(steps):
        inner.step(batch, 1e-3)
    return steps * run.tokens_per_inner_step / (time.perf_counter() - began_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    figures, notes = [], []
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name:
        folder = Path(name)
        texts = write_text(folder)
        documents = Documents(parse_source("parquet:*.parquet"), folder, folder / "cache")
        for what, tokenizer in (("bytes", ByteTokenizer()), (f"BPE of {VOCABULARY}", bpe(texts))):
            ours, needs = [], []
            for _ in range(options.turns):
                ours.append(tokens_s(documents, tokenizer, options.seconds))
                needs.append(need_s(steps=10))
            figures.append(
                Figure(
                    name=f"text, {what}, one core", unit="tokens/s", ours=median(ours), baseline=median(needs),
                    baseline_name="eaten by the built-in preset", low=LEAST_RATIO,
                )
            )  # fmt: skip
            tera = median(ours) * FLOPS_150M / 1e12
            notes.append(f"text, {what}: {spread(ours)} tokens/s; feeds {tera:,.0f} TFLOP/s of the 150M preset")
    return Result("data", figures, notes).conclude()


if __name__ == "__main__":
    raise SystemExit(main())
