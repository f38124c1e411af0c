"""Text to tokens and back: bytes, or a fast tokenizer of Hugging Face. Knows no documents and no model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from node.errors import ConfigError, MachineError
from node.training.hub import is_on_hub, reading, split_name

BEGIN = 256
"""Of bytes: the token before each document."""
END = 257
"""Of bytes: the token after each document."""


class Tokenizer(Protocol):
    @property
    def size(self) -> int:
        """All token ids are below it."""
        ...

    @property
    def begin(self) -> int | None:
        """The token before each document, where there is one."""
        ...

    @property
    def end(self) -> int:
        """The token after each document."""
        ...

    def document(self, text: str) -> npt.NDArray[np.int32]:
        """The tokens of a document, with those before and after it."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def save(self, folder: Path) -> None:
        """What `AutoTokenizer.from_pretrained(folder)` reads."""
        ...


class Bytes:
    """Each byte of the text in UTF-8 is a token."""

    size, begin, end = 258, BEGIN, END

    def document(self, text: str) -> npt.NDArray[np.int32]:
        body = np.frombuffer(text.encode("utf-8", "surrogateescape"), dtype=np.uint8)
        return np.concatenate(([BEGIN], body, [END])).astype(np.int32)

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < BEGIN).decode("utf-8", "replace")

    def save(self, folder: Path) -> None:
        """As a byte-level BPE without merges, so that the library's own class reads it."""
        from tokenizers import Tokenizer as Fast
        from tokenizers import decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        letters = _letters_of_bytes()
        fast = Fast(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
        names = {"bos_token": "<begin>", "eos_token": "<end>"}
        whole: Any = PreTrainedTokenizerFast(tokenizer_object=fast, **names)  # type: ignore[no-untyped-call]
        assert (whole.bos_token_id, whole.eos_token_id) == (BEGIN, END)
        whole.save_pretrained(folder)


def _letters_of_bytes() -> list[str]:
    """The letter that byte-level tokenizers write for each byte: itself where it prints, else one from 256 on."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in prints else chr(next(others)) for byte in range(256)]


class Fast:
    """A fast tokenizer of Hugging Face's."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.size = int(max(inner.get_vocab().values())) + 1
        self.begin: int | None = inner.bos_token_id
        self.end = int(inner.eos_token_id)

    def document(self, text: str) -> npt.NDArray[np.int32]:
        begin = [] if self.begin is None else [self.begin]
        return np.asarray([*begin, *self.encode(text), self.end], dtype=np.int32)

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self._inner.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._inner.decode(tokens, skip_special_tokens=True)
        return text

    def save(self, folder: Path) -> None:
        self._inner.save_pretrained(folder)


def open_tokenizer(name: str, text_dir: Path, cache: Path) -> Tokenizer:
    """`name` as in `run.data.tokenizer`. ConfigError: it is no fast tokenizer; MachineError: it is not here."""
    if name == "bytes":
        return Bytes()
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    place, revision = split_name(name) if is_on_hub(name) else ((text_dir / name).as_posix(), "main")
    if not is_on_hub(name) and not Path(place).is_dir():
        raise MachineError(
            f"run.data.tokenizer {name}: there is no folder {place} on this machine: put the tokenizer there, "
            "or set node.text_dir.",
            code="no_data",
        )
    with reading(
        f"run.data.tokenizer {name}",
        check="the name and this machine's network, then start again",
        mend="name a fast tokenizer that needs no code of its own",
    ):
        inner = AutoTokenizer.from_pretrained(
            place, revision=revision, cache_dir=str(cache), trust_remote_code=False, token=False
        )
    if not isinstance(inner, PreTrainedTokenizerFast) or inner.eos_token_id is None:
        raise ConfigError(
            f"run.data.tokenizer {name} is no fast tokenizer with an end-of-sequence token: name another one."
        )
    return Fast(inner)
