"""Evaluates a model folder on tasks of lm-eval, as members of the run do."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from node.config.schema import Config
from node.errors import UsageError
from node.publication.tasks import evaluate_folder
from node.training.device import threads_per_rank
from node.training.model import silence_transformers


def evaluate(config: Config, folder: Path) -> dict[str, float]:
    """Return the scores by TASK/METRIC. Raises UsageError if the folder has no model, and as `evaluate_folder`."""
    try:
        has_model = (folder / "config.json").is_file()
    except OSError as exc:
        raise UsageError(f"{folder} cannot be read ({exc.strerror}): check its permissions.") from exc
    if not has_model:
        raise UsageError(f"{folder} has no model: name a folder that `export` or a publication has written.")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    silence_transformers()
    torch.set_num_threads(threads_per_rank(config.limits.cpu_threads, 1))
    return evaluate_folder(folder, config.evaluate)
