"""The baseline of the inner loop, in plain PyTorch. The benchmarks `inner` and `gpu` run it.

It uses the worker's model, batches, optimizer and number of threads, and on a GPU the same precision, micro-batch,
loss and compilation. All batches are on the device before the measurement. The loop reads only the last loss of a turn.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from node.config.manifest import RunConfig
from node.host.cores import usable_cores
from node.training.corpus import Stream, load_corpus
from node.training.model import autocast, build_model, compile_layers, next_token_loss
from tests.benchmarks.processes import answer, orders

BATCHES = 64
"""Number of batches on the device. 64 batches of 64 x 1,025 tokens take 34 MB."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, required=True, help="the settings of the run, as JSON")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--micro-batch", type=int, default=0)
    parser.add_argument("--loss", default="whole")
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    device, rows = torch.device(arguments.device), arguments.micro_batch
    torch.set_num_threads(arguments.threads or usable_cores())
    run = RunConfig.model_validate_json(arguments.run.read_bytes())
    inner = run.inner
    stream = Stream(load_corpus(), "bare", "loop", 0)
    batches = [stream.next_batch(inner.batch_size, inner.sequence_length).to(device) for _ in range(BATCHES)]
    model = build_model(run.model, seed=0).to(device).train()
    compile_layers(model, compiled=arguments.compile)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=inner.lr,
        betas=(inner.beta1, inner.beta2),
        eps=inner.eps,
        weight_decay=inner.weight_decay,
        fused=True,
    )
    step = 0
    answer({"ready": True, "threads": torch.get_num_threads()})
    for order in orders():
        began_s, cpu_began_s = time.monotonic(), time.process_time()
        tokens = 0
        while time.monotonic() - began_s < order["seconds"]:
            batch = batches[step % BATCHES]
            for part in torch.split(batch, rows or len(batch)):
                with autocast(device, arguments.precision):
                    loss = next_token_loss(model, part, arguments.loss)
                (loss * (len(part) / len(batch))).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), inner.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            tokens += batch[:, 1:].numel()
        loss.item()
        answer({"tokens": tokens, "seconds": time.monotonic() - began_s, "cpu_s": time.process_time() - cpu_began_s})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
