"""Samples text from the newest checkpoint of a data folder."""

from __future__ import annotations

import torch

from node.commands.export import newest, tokenizer_of
from node.config.schema import Config
from node.errors import UsageError
from node.training.model import build_model, load_flat_


def generate(config: Config, text: str, *, tokens: int, temperature: float, seed: int | None) -> str:
    """Continue `text` by at most `tokens` tokens with the outer parameters of the newest round.

    With `temperature` 0, each token is the likeliest. Raises DataFolderError without a checkpoint, UsageError if the
    text leaves no room, and MachineError without the run's tokenizer.
    """
    if tokens < 1 or temperature < 0:
        raise UsageError("--tokens must be at least 1, and --temperature not below 0.")
    manifest, checkpoint = newest(config)
    shape, tokenizer = manifest.run.model, tokenizer_of(manifest.run, config)
    begin = [] if tokenizer.begin is None else [tokenizer.begin]
    prompt = torch.tensor([[*begin, *tokenizer.encode(text)]], dtype=torch.long)
    room = shape.max_position_embeddings - prompt.shape[1]
    if room < 1 or not prompt.shape[1]:
        raise UsageError(
            f"The text is too long or empty: it has {prompt.shape[1]} tokens, and this model takes 1 to "
            f"{shape.max_position_embeddings - 1}; give a shorter one, or one that is not empty."
        )
    model = build_model(shape, seed=0).eval()
    load_flat_(model, checkpoint.anchor)
    if seed is not None:
        torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    with torch.inference_mode():
        output = model.generate(  # type: ignore[operator]  # nn.Module's __getattr__ hides it
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=min(tokens, room),
            use_cache=True,
            eos_token_id=tokenizer.end,
            pad_token_id=tokenizer.end,
            **sampling,
        )
    return tokenizer.decode(output[0, prompt.shape[1] :].tolist())
