"""Samples text from the newest checkpoint of a data folder. Knows files and the model; no swarm."""

from __future__ import annotations

from pathlib import Path

import torch

from node.errors import UsageError
from node.export import newest
from node.training.data import BEGIN, END
from node.training.model import build_model, load_flat_


def generate(data_dir: Path, text: str, *, keep: int, tokens: int, temperature: float, seed: int | None) -> str:
    """A continuation of `text` by the outer parameters of the newest round, at most `tokens` tokens.

    `temperature`: 0 takes the likeliest token each time. `keep`: as in `checkpoint.keep`. DataFolderError without a
    checkpoint; UsageError for a text that leaves no room.
    """
    if tokens < 1 or temperature < 0:
        raise UsageError("--tokens must be at least 1, and --temperature not below 0.")
    manifest, checkpoint = newest(data_dir, keep=keep)
    cfg = manifest.run.model
    prompt = torch.tensor([[BEGIN, *text.encode("utf-8")]])
    room = cfg.max_position_embeddings - prompt.shape[1]
    if room < 1:
        raise UsageError(f"The text is too long: this model sees {cfg.max_position_embeddings - 2} bytes at once.")
    model = build_model(cfg, seed=0).eval()
    load_flat_(model, checkpoint.anchor)
    if seed is not None:
        torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    with torch.inference_mode():
        said = model.generate(  # type: ignore[operator]  # nn.Module's __getattr__ hides it
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=min(tokens, room),
            use_cache=True,
            eos_token_id=END,
            pad_token_id=END,
            **sampling,
        )
    continued = [token for token in said[0, prompt.shape[1] :].tolist() if token < BEGIN]
    return bytes(continued).decode("utf-8", errors="replace")
