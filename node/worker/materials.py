"""What a trainer needs beside the state: text and model. Loaded on a thread while the state is still on its way.

Knows no swarm. What has been downloaded grows old while text and model are loaded, so that comes first, or beside.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import nn

from node.manifest import RunConfig
from node.training.data import Corpus


@dataclass(frozen=True, slots=True)
class Materials:
    corpus: Corpus
    model: nn.Module


def load_materials(run: RunConfig) -> Materials:
    """Raises MachineError or ConfigError as `load_corpus` does."""
    from node.training.data import load_corpus
    from node.training.model import build_model

    return Materials(load_corpus(run.data), build_model(run.model, seed=0))


def begin_loading(run: RunConfig) -> Future[Materials]:
    """The same on a thread of its own, that ends with it."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="loading")
    loading = pool.submit(load_materials, run)
    pool.shutdown(wait=False)
    return loading
