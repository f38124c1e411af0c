"""Tokenizers: UTF-8 bytes, or a fast tokenizer of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from node.errors import ConfigError, Damaged, MachineError, cause_of
from node.training.hub import is_on_hub, require_no_folder, split_name, translate_errors

BEGIN = 256
"""The byte tokenizer's token before each document."""
END = 257
"""The byte tokenizer's token after each document."""

Messages = Sequence[Mapping[str, str]]
"""A conversation: `role` and `content` of each message."""


class ByteTokenizer:
    """Each byte of the text in UTF-8 is a token."""

    size = 258
    """All token ids are below this number."""
    begin, end = BEGIN, END

    def document(self, text: str) -> npt.NDArray[np.int32]:
        """The tokens of a document, with BEGIN before and END after them."""
        body = np.frombuffer(text.encode("utf-8", "surrogateescape"), dtype=np.uint8)
        return np.concatenate(([BEGIN], body, [END])).astype(np.int32)

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))

    def prompt(self, text: str) -> list[int]:
        """The tokens of the beginning of a document."""
        return [BEGIN, *self.encode(text)]

    def chat(self, messages: Messages) -> list[int] | None:
        """The tokens of a conversation in the tokenizer's own format. None, as bytes have no such format."""
        return None

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < BEGIN).decode("utf-8", "replace")

    def save(self, folder: Path) -> None:
        """Write the files of a byte-level BPE without merges, which `AutoTokenizer.from_pretrained(folder)` reads."""
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        letters = _letters_of_bytes()
        backend = Backend(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        names = {"bos_token": "<begin>", "eos_token": "<end>"}
        tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, **names)  # type: ignore[no-untyped-call]
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BEGIN, END)
        tokenizer.save_pretrained(folder)


def _letters_of_bytes() -> list[str]:
    """The letter that byte-level tokenizers use for each byte: the byte itself if it prints, else one from 256 on."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in prints else chr(next(others)) for byte in range(256)]


class FastTokenizer:
    """A `PreTrainedTokenizerFast` with an end-of-sequence token."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        # A saved tokenizer may cut or fill up each text, and `encode` passes by what would turn that off.
        inner.backend_tokenizer.no_truncation()
        inner.backend_tokenizer.no_padding()
        self.size = int(max(inner.get_vocab().values())) + 1
        self.begin: int | None = inner.bos_token_id
        """The token before each document, if there is one."""
        self.end = int(inner.eos_token_id)

    def document(self, text: str) -> npt.NDArray[np.int32]:
        return np.asarray([*self.prompt(text), self.end], dtype=np.int32)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text. Raises Damaged if the tokenizer fails, as on a character that its vocabulary lacks."""
        try:
            tokens: list[int] = self._inner.backend_tokenizer.encode(text, add_special_tokens=False).ids
        except BaseException as exc:
            # The Rust library does not export the class of its panics, which is no Exception.
            if not isinstance(exc, Exception) and type(exc).__name__ != "PanicException":
                raise
            raise Damaged(f"the tokenizer has failed on a document ({exc})") from exc
        return tokens

    def prompt(self, text: str) -> list[int]:
        return [*([] if self.begin is None else [self.begin]), *self.encode(text)]

    def chat(self, messages: Messages) -> list[int] | None:
        """The tokens of a conversation by the tokenizer's chat template; None if it has none.

        `transformers` renders the template in a sandbox. Raises ValueError if the template refuses the messages.
        """
        if not self._inner.chat_template:
            return None
        try:
            text = self._inner.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as exc:  # the template is foreign, so it may fail in any way
            raise ValueError(f"the tokenizer's chat template refuses these messages ({cause_of(exc)})") from exc
        return self.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._inner.decode(tokens, skip_special_tokens=True)
        return text

    def save(self, folder: Path) -> None:
        """Write the tokenizer. Several chat templates go into tokenizer_config.json, not into a subfolder."""
        self._inner.save_pretrained(folder, save_jinja_files=not isinstance(self._inner.chat_template, dict))


Tokenizer = ByteTokenizer | FastTokenizer


def open_tokenizer(name: str, text_dir: Path, cache: Path) -> Tokenizer:
    """Open `run.data.tokenizer`. Raises ConfigError if it is not a fast tokenizer, MachineError if it is missing."""
    if name == "bytes":
        return ByteTokenizer()
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    place, revision = split_name(name) if is_on_hub(name) else ((text_dir / name).as_posix(), "main")
    if not is_on_hub(name) and not Path(place).is_dir():
        raise MachineError(
            f"run.data.tokenizer {name}: there is no folder {place} on this machine: put the tokenizer there, "
            "or set node.text_dir.",
            code="no_data",
        )
    if is_on_hub(name):
        require_no_folder(place, f"run.data.tokenizer {name}")
    with translate_errors(
        f"run.data.tokenizer {name}",
        check="the name and this machine's network, then start again",
        remedy="name a fast tokenizer that needs no code of its own",
    ):
        inner = AutoTokenizer.from_pretrained(
            place, revision=revision, cache_dir=str(cache), trust_remote_code=False, token=False
        )
    if not isinstance(inner, PreTrainedTokenizerFast) or inner.eos_token_id is None:
        raise ConfigError(
            f"run.data.tokenizer {name} is no fast tokenizer with an end-of-sequence token: name another one."
        )
    return FastTokenizer(inner)
