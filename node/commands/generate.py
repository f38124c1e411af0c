"""Samples text from the newest checkpoint of a data folder."""

from __future__ import annotations

from itertools import islice, takewhile

from node.commands.export import newest, tokenizer_of
from node.config.schema import Config
from node.errors import UsageError
from node.training.model import build_model, load_flat_
from node.training.sampling import sample


def generate(config: Config, text: str, *, tokens: int, temperature: float, seed: int | None) -> str:
    """Continue `text` by at most `tokens` tokens with the outer parameters of the newest round.

    With `temperature` 0, each token is the likeliest. Raises DataFolderError without a checkpoint, UsageError if the
    text leaves no room, and MachineError without the run's tokenizer.
    """
    if tokens < 1 or temperature < 0:
        raise UsageError("--tokens must be at least 1, and --temperature not below 0.")
    manifest, checkpoint = newest(config)
    shape, tokenizer = manifest.run.model, tokenizer_of(manifest.run, config)
    prompt = tokenizer.prompt(text)
    room = shape.max_position_embeddings - len(prompt)
    if room < 1 or not prompt:
        raise UsageError(
            f"The text is too long or empty: it has {len(prompt)} tokens, and this model takes 1 to "
            f"{shape.max_position_embeddings - 1}; give a shorter one, or one that is not empty."
        )
    model = build_model(shape, seed=0).eval()
    load_flat_(model, checkpoint.anchor)
    sampled = islice(sample(model, prompt, temperature=temperature, seed=seed), min(tokens, room))
    return tokenizer.decode(list(takewhile(lambda token: token != tokenizer.end, sampled)))
