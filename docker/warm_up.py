"""Imports and calls what a node does, so that Python compiles these modules while the image is built, and no others.

A container does not write compiled modules. Those that are missing here still work; Python compiles them at each start.
"""

from __future__ import annotations

import importlib

import torch
import transformers

MODULES = (
    "base58", "blake3", "cryptography.hazmat.primitives.asymmetric.ed25519",
    "cryptography.hazmat.primitives.asymmetric.x25519", "cryptography.hazmat.primitives.ciphers.aead",
    "cryptography.hazmat.primitives.kdf.hkdf", "cryptography.hazmat.primitives.serialization",
    "fastapi.openapi.utils", "fastapi.responses", "fsspec", "hivemind.dht.node", "hivemind.dht.routing",
    "hivemind.dht.validation", "hivemind.p2p.p2p_daemon_bindings.p2pclient", "hivemind.utils.timed_storage",
    "huggingface_hub.hf_api", "msgpack", "packaging.version", "prometheus_client.registry", "psutil",
    "rich.live", "rich.progress_bar", "rich.table", "safetensors.torch", "tokenizers", "torch._dynamo",
    "torch._inductor.compile_fx", "torch.distributed.device_mesh", "torch.distributed.fsdp",
    "torch.distributed.tensor", "torch.utils.checkpoint", "transformers.models.auto.tokenization_auto", "uvicorn",
    "uvicorn.lifespan.on", "uvicorn.loops.auto", "uvicorn.protocols.http.h11_impl",
)  # fmt: skip
DATASETS = ("datasets", "datasets.packaged_modules.json.json", "datasets.packaged_modules.parquet.parquet")


MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def train_one_step(model_type: str) -> None:
    """Train a tiny model by one step, and generate from it."""
    config = transformers.AutoConfig.for_model(
        model_type, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=16, vocab_size=16,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.optim.AdamW(model.parameters()).step()
    model.generate(tokens, max_new_tokens=1, do_sample=False, pad_token_id=0)


if __name__ == "__main__":
    for name in (*MODULES, *DATASETS):
        importlib.import_module(name)
    for model_type in MODEL_TYPES:
        train_one_step(model_type)
