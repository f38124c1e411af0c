"""Samples text from the newest checkpoint of a data folder. Knows files and the model; no swarm."""

from __future__ import annotations

import torch

from node.config import Config
from node.errors import UsageError
from node.export import newest, tokenizer_of
from node.training.model import build_model, load_flat_


def generate(config: Config, text: str, *, tokens: int, temperature: float, seed: int | None) -> str:
    """A continuation of `text` by the outer parameters of the newest round, at most `tokens` tokens.

    `temperature`: 0 takes the likeliest token each time. DataFolderError without a checkpoint; UsageError for a text
    that leaves no room; MachineError if the run's tokenizer is not to be had here.
    """
    if tokens < 1 or temperature < 0:
        raise UsageError("--tokens must be at least 1, and --temperature not below 0.")
    manifest, checkpoint = newest(config)
    cfg, tokenizer = manifest.run.model, tokenizer_of(manifest.run, config)
    begin = [] if tokenizer.begin is None else [tokenizer.begin]
    prompt = torch.tensor([[*begin, *tokenizer.encode(text)]], dtype=torch.long)
    room = cfg.max_position_embeddings - prompt.shape[1]
    if room < 1 or not prompt.shape[1]:
        raise UsageError(
            f"The text is too long or empty: of its {prompt.shape[1]} tokens this model sees at most "
            f"{cfg.max_position_embeddings - 1} at once."
        )
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
            eos_token_id=tokenizer.end,
            pad_token_id=tokenizer.end,
            **sampling,
        )
    return tokenizer.decode(said[0, prompt.shape[1] :].tolist())
