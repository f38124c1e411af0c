"""Samples text from the newest checkpoint of a data folder.

`python -m node.commands.generate` does so for `daemon.text_generator`: it reads one line of JSON with configuration and
request from stdin, and writes a line of JSON with the text or the problem to stdout.
"""

from __future__ import annotations

import json
import sys
from itertools import islice, takewhile

import torch

from node.api.node_interface import GeneratedText, TextRequest
from node.commands.export import newest, tokenizer_of
from node.config.schema import Config
from node.errors import NodeError, UsageError
from node.host.priority import serve_parent
from node.training.device import threads_per_rank
from node.training.model import build_model, load_flat_
from node.training.sampling import sample


def generate(config: Config, text: str, *, tokens: int, temperature: float, seed: int | None) -> GeneratedText:
    """Continue `text` by at most `tokens` tokens with the outer parameters of the newest round.

    With `temperature` 0, each token is the likeliest. Raises DataFolderError without a checkpoint, UsageError if the
    text leaves no room, and MachineError without the run's tokenizer.
    """
    if tokens < 1 or not 0 <= temperature <= 100 or not 0 <= (seed or 0) < 2**63:
        raise UsageError("--tokens must be at least 1, --temperature from 0 to 100, and --seed from 0 to 2^63 - 1.")
    manifest, checkpoint = newest(config)
    shape, tokenizer = manifest.run.model, tokenizer_of(manifest.run, config)
    prompt = tokenizer.prompt(text)
    room = shape.max_position_embeddings - len(prompt)
    if room < 1 or not prompt:
        raise UsageError(
            f"The text is too long or empty: it has {len(prompt)} tokens, and this model takes 1 to "
            f"{shape.max_position_embeddings - 1}; give a shorter one, or one that is not empty."
        )
    torch.set_num_threads(threads_per_rank(config.limits.cpu_threads, 1))
    model = build_model(shape, seed=0).eval()
    load_flat_(model, checkpoint.anchor)
    found = sample(model, prompt, temperature=temperature, seed=seed, vocabulary=tokenizer.size)
    sampled = islice(found, min(tokens, room))
    text = tokenizer.decode(list(takewhile(lambda token: token != tokenizer.end, sampled)))
    return GeneratedText(text=text, round=checkpoint.round)


def main() -> int:
    with serve_parent() as answers:
        order = json.loads(sys.stdin.readline())
        config, request = Config.model_validate(order["config"]), TextRequest.model_validate(order["request"])
        try:
            made = generate(config, request.prompt, tokens=request.tokens, temperature=request.temperature, seed=None)
            answer = made.model_dump_json()
        except NodeError as exc:
            answer = json.dumps({"problem": str(exc)})
        answers.write(f"{answer}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
