"""The small run that several benchmarks train. Its loss falls within a minute, and a step takes milliseconds."""

from __future__ import annotations

from typing import Any


def small_run(
    name: str, *, batch_size: int = 8, sequence_length: int = 128, **tables: dict[str, Any]
) -> dict[str, Any]:
    """Return the table `[run]` of a preset. `tables` are added to it unchanged."""
    return {
        "name": name,
        "total_tokens": 10**9,
        "model": {
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": sequence_length,
        },
        "inner": {"batch_size": batch_size, "sequence_length": sequence_length, "lr": 2e-3},
        **tables,
    }
