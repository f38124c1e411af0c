"""Models as Hugging Face folders. `diloco-node export` writes them, and a run may start from one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from node.config.manifest import ModelConfig
from node.errors import ConfigError, DataFolderError, MachineError
from node.host.files import expand_user, whole_folder
from node.host.printable import printable
from node.training.hub import is_on_hub, require_no_folder, split_name, translate_errors
from node.training.model import build_model, flatten, load_flat_, silence_transformers
from node.training.tokenizer import Tokenizer

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
SHAPE_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
)  # fmt: skip


def export_model(
    cfg: ModelConfig,
    flat: Tensor,
    folder: Path,
    *,
    card: str,
    tokenizer: Tokenizer,
    add: Callable[[Path, nn.Module], None] = lambda _folder, _model: None,
) -> None:
    """Write a folder for `AutoModelForCausalLM` and `AutoTokenizer`, with `card` as README.md.

    `flat` is fp32 cpu [P]. `add` may write further files to the folder that it gets. The folder is written whole or not
    at all. Raises DataFolderError if it holds files already, and MachineError if it cannot be written.
    """
    folder = folder.resolve()
    with _translated(folder):
        if folder.is_mount() or folder == Path.cwd():
            raise DataFolderError(f"{folder} cannot be replaced by another folder: name a new folder inside it.")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise DataFolderError(f"{folder} holds files already: name another folder for the export, or remove it.")
    model: Any = build_model(cfg, seed=0)
    load_flat_(model, flat)
    for settings in (model.config, model.generation_config):
        settings.bos_token_id, settings.eos_token_id = tokenizer.begin, tokenizer.end
        settings.use_cache = True  # Training needs no cache, but each user who generates text does.
    with _translated(folder), whole_folder(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save(temporary)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        add(temporary, model)


@contextmanager
def _translated(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise MachineError(
            f"{folder} cannot be written ({exc.strerror or exc}): free disk, or name a folder that you may write to."
        ) from exc


def load_pretrained(
    cfg: ModelConfig, cache: Path, check: Callable[[ModelConfig], None] = lambda _shape: None
) -> tuple[ModelConfig, Tensor]:
    """Load the model that `cfg.start` names. Returns its configuration and parameters, fp32 cpu [P].

    `start` is a folder or `hub:OWNER/NAME`. The returned `start` has no path of this machine. Only configuration and
    safetensors are read, no code. `check` gets the configuration before the parameters are read, and may refuse it.
    Raises ConfigError for a model that is not of the Llama family or lacks parameters, and MachineError for one that
    cannot be read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    silence_transformers()
    start, is_remote = cfg.start, is_on_hub(cfg.start)
    folder = expand_user(start)
    if not is_remote and not folder.is_dir():
        raise MachineError(
            f"run.model.start {start}: there is no such folder: name one, or a model as hub:OWNER/NAME.", code="no_data"
        )
    place, revision = split_name(start) if is_remote else (str(folder), "main")
    if is_remote:
        require_no_folder(place, f"run.model.start {start}")
    options = {"revision": revision, "cache_dir": str(cache), "trust_remote_code": False}
    with translate_errors(
        f"run.model.start {start}",
        check="the name, its safetensors file and this machine's network",
        remedy="name a model of the Llama family that needs no code of its own",
    ):
        config = AutoConfig.from_pretrained(place, **options)
        own_cfg = _convert_config(cfg, config)
        check(own_cfg)
        # A configuration may name another implementation of attention, which may be code on the hub.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            place, config=config, dtype="float32", use_safetensors=True, attn_implementation="sdpa",
            output_loading_info=True, **options
        )  # fmt: skip
        model, found = loaded
        lacking = sorted({*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])})
        if lacking:  # They have random values.
            raise ConfigError(
                f"run.model.start {start} lacks {len(lacking)} of its parameters, such as "
                f"{printable(lacking[0], 100)}: name a complete model."
            )
        own = build_model(own_cfg, seed=0)
        own.load_state_dict(model.state_dict())
    return own_cfg.model_copy(update={"start": start if is_remote else folder.name}), flatten(own)


def _convert_config(cfg: ModelConfig, config: Any) -> ModelConfig:
    """Convert a configuration of `transformers`. Raises ConfigError for a feature that ours cannot express."""
    if config.model_type not in MODEL_TYPES:
        raise ConfigError(
            f"run.model.start {cfg.start} is of type {config.model_type!r}: name a model of type llama, mistral, qwen2 "
            "or qwen3."
        )
    rope = dict(getattr(config, "rope_parameters", None) or {})
    has_window = getattr(config, "use_sliding_window", config.model_type == "mistral")
    unsupported = {
        "rope scaling": rope.get("rope_type", "default") != "default",
        "another activation than SiLU": getattr(config, "hidden_act", "silu") != "silu",
        "biases": getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False),
        "a sliding window": has_window and getattr(config, "sliding_window", None) is not None,
        "quantized parameters": getattr(config, "quantization_config", None) is not None,
    }
    if found := [name for name, is_present in unsupported.items() if is_present]:
        raise ConfigError(
            f"run.model.start {cfg.start} has {' and '.join(found)}, which this program does not support: name a model "
            "without that."
        )
    values = {name: getattr(config, name) for name in SHAPE_FIELDS}
    head = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    values["head_dim"] = 0 if head * config.num_attention_heads == config.hidden_size else head
    values["rope_theta"] = float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0)))
    return ModelConfig(type=config.model_type, **values)
