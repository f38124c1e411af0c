"""The newest outer parameters of a data folder as a model that answers requests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from torch import nn

from node.api.openai_models import Finish, ModelFacts, OpenAiError, Piece, PromptRefused, SamplingOptions
from node.commands.export import newest, tokenizer_of
from node.config.manifest import Manifest
from node.config.schema import Config
from node.training.model import build_model, load_flat_
from node.training.sampling import TextStream, sample
from node.training.tokenizer import Tokenizer

PLAIN_TURN = "{role}:\n{content}"
PLAIN_SEPARATOR = "\n\n"
PLAIN_STOP = "\n\nUser:\n"
"""In the plain format of conversations, the next turn of the user ends an answer."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ServedModel:
    """A model and its tokenizer. Nothing changes them, so a running answer is not disturbed by a newer model."""

    facts: ModelFacts
    manifest: Manifest
    _tokenizer: Tokenizer
    _model: nn.Module

    @classmethod
    def load(cls, config: Config, before: ServedModel | None = None) -> ServedModel:
        """Load the newest outer parameters of the data folder. Returns `before` if they are those.

        Raises as `newest` does, and MachineError without the run's tokenizer.
        """
        manifest, checkpoint = newest(config)
        is_same_run = before is not None and before.manifest.hash == manifest.hash
        if before is not None and is_same_run and before.facts.state_digest == checkpoint.state_digest:
            return before
        tokenizer = before._tokenizer if before is not None and is_same_run else tokenizer_of(manifest.run, config)
        shape = manifest.run.model
        model = build_model(shape, seed=0).eval()
        load_flat_(model, checkpoint.anchor)
        facts = ModelFacts(
            name=manifest.run.name,
            loaded_at=int(time.time()),
            context_tokens=shape.max_position_embeddings,
            round=checkpoint.round,
            state_digest=checkpoint.state_digest,
        )
        return cls(facts, manifest, tokenizer, model)

    def complete(self, text: str, options: SamplingOptions) -> Iterator[Piece]:
        """Continue a text. Like `chat`, this is a generator, so its thread does the encoding as well."""
        yield from self._continue(self._tokenizer.prompt(text), options, options.stop, param="prompt")

    def chat(self, messages: Sequence[Mapping[str, str]], options: SamplingOptions) -> Iterator[Piece]:
        """Answer a conversation, in the format of the tokenizer's chat template, or else in `plain_chat`."""
        stop = options.stop
        try:
            prompt = self._tokenizer.chat(messages)
        except ValueError as exc:
            raise PromptRefused(f"{exc}.", param="messages") from exc
        if prompt is None:
            prompt, stop = self._tokenizer.prompt(plain_chat(messages)), (*stop, PLAIN_STOP)
        yield from self._continue(prompt, options, stop, param="messages")

    def _continue(
        self, prompt: list[int], options: SamplingOptions, stop: Sequence[str], *, param: str
    ) -> Iterator[Piece]:
        room = self.facts.context_tokens - len(prompt)
        if room < 1 or not prompt:
            raise PromptRefused(
                f"The prompt has {len(prompt)} tokens, and this model takes 1 to {self.facts.context_tokens - 1}.",
                param=param,
                code="context_length_exceeded",
            )
        yield Piece("", len(prompt), 0, None)
        most = min(room, options.max_tokens or room)
        stream = TextStream(self._tokenizer.decode, prompt, stop)
        tokens = sample(
            self._model,
            prompt,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
            vocabulary=self._tokenizer.size,
        )
        for number, token in enumerate(islice(tokens, most), 1):
            is_end = token == self._tokenizer.end
            text = "" if is_end else stream.add(token)
            is_last = is_end or stream.is_stopped or number == most
            text += stream.rest() if is_last else ""
            finish: Finish = "stop" if is_end or stream.is_stopped else "length"
            yield Piece(text, len(prompt), number, finish if is_last else None)
            if is_last:
                return
        text = f"The model after round {self.facts.round} cannot go on, because its logits are not finite."
        raise OpenAiError(500, text, code="not_finite")


def plain_chat(messages: Sequence[Mapping[str, str]]) -> str:
    """A conversation as plain text, for models that know no chat format. It ends where the answer begins."""
    turns = [PLAIN_TURN.format(role=m["role"].capitalize(), content=m["content"]) for m in messages]
    return PLAIN_SEPARATOR.join([*turns, PLAIN_TURN.format(role="Assistant", content="")])
