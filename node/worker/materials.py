"""What a trainer needs beside the state: text and model. Loaded on a thread while the state is still on its way.

Knows no swarm. What has been downloaded grows old while text and model are loaded, so that comes first, or beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor, nn

from node.config import Config
from node.manifest import RunConfig
from node.training.text import Library


@dataclass(frozen=True, slots=True)
class Materials:
    library: Library
    held_out: Sequence[Tensor]
    """Batches for evaluation, int64 cpu [B, T + 1]."""
    model: nn.Module


def load_materials(run: RunConfig, config: Config) -> Materials:
    """Raises MachineError or ConfigError as `open_library` does."""
    from node.training.fit import shape_execution
    from node.training.model import build_model
    from node.training.text import open_library

    library = open_library(run, config.node.text_folder, config.node.hub_cache)
    model = build_model(run.model, seed=0)
    shape_execution(model, config.devices)
    return Materials(library, library.held_out(), model)


def begin_loading(run: RunConfig, config: Config) -> Future[Materials]:
    """The same on a thread of its own, that ends with it."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="loading")
    loading = pool.submit(load_materials, run, config)
    pool.shutdown(wait=False)
    return loading
