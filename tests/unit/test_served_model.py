"""Answers of a served model: numbers of tokens, ends, formats of conversations, and newer checkpoints."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from node.api.auth import Keys
from node.api.openai_app import Generations, build_openai_app
from node.api.openai_models import ModelFacts, OpenAiError, Piece, PromptRefused, SamplingOptions
from node.commands.serve import NewestModel
from node.commands.served_model import ServedModel, plain_chat
from node.config.manifest import Manifest, RunConfig
from node.config.schema import Config
from node.errors import NodeError
from node.training.checkpoint import OUTER
from node.training.tokenizer import ByteTokenizer, FastTokenizer, Tokenizer, open_tokenizer
from tests.api.test_connections import serving
from tests.event_loop import until
from tests.swarm.harness import tiny
from tests.unit.data_folder import TOKEN, make_data_folder, save_round

RUN = RunConfig.model_validate(tiny())
CONTEXT = RUN.model.max_position_embeddings
USER = {"role": "user", "content": "hi"}


class Scripted(nn.Module):
    """A model that says these tokens after a prompt, one after the other."""

    def __init__(self, says: Sequence[int]) -> None:
        super().__init__()
        self.says, self.heard = says, [0]

    def forward(self, input_ids: torch.Tensor, past_key_values: int | None, **_: Any) -> Any:
        said = 0 if past_key_values is None else past_key_values
        if said == 0:
            self.heard = input_ids[0].tolist()

        class Output:
            logits = torch.nn.functional.one_hot(torch.tensor([[self.says[said]]]), 258).float()
            past_key_values = said + 1

        return Output


def saying(says: str | Sequence[int], tokenizer: Tokenizer | None = None) -> ServedModel:
    tokens = list(says.encode()) if isinstance(says, str) else says
    facts = ModelFacts("tiny", 0, CONTEXT, 3, "ab" * 32)
    manifest = Manifest(run_id="ab" * 16, initial_digest="0" * 64, parameters=1, run=RUN)
    return ServedModel(facts, manifest, tokenizer or ByteTokenizer(), Scripted([*tokens, 257]))


def options(max_tokens: int | None = None, *stop: str) -> SamplingOptions:
    return SamplingOptions(max_tokens, 0.0, 1.0, None, stop)


def told(pieces: Sequence[Piece]) -> tuple[str, int, str | None]:
    """Text, sampled tokens and the reason of the end."""
    assert [piece.finish for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    return "".join(piece.text for piece in pieces), pieces[-1].tokens, pieces[-1].finish


@pytest.mark.parametrize(
    ("says", "limit", "stop", "expected"),
    [
        ("hello", None, (), ("hello", 6, "stop")),
        ("hello", 6, (), ("hello", 6, "stop")),
        ("hello", 5, (), ("hello", 5, "length")),
        ("hello", 3, (), ("hel", 3, "length")),
        ("h€llo", 3, (), ("h\N{REPLACEMENT CHARACTER}", 3, "length")),
        ("hello", None, ("ll", "x"), ("he", 4, "stop")),
        ("hello", 4, ("ll",), ("he", 4, "stop")),
        ("hello", 3, ("ll",), ("hel", 3, "length")),
        ("hello", None, ("lox",), ("hello", 6, "stop")),
        ("", None, (), ("", 1, "stop")),
        ("x" * 2 * CONTEXT, None, (), ("x" * (CONTEXT - 4), CONTEXT - 4, "length")),
        ("x" * 2 * CONTEXT, 10 * CONTEXT, (), ("x" * (CONTEXT - 4), CONTEXT - 4, "length")),
    ],
)  # fmt: skip
def test_tokens_text_and_reason_of_the_end_are_right(
    says: str, limit: int | None, stop: tuple[str, ...], expected: tuple[str, int, str]
) -> None:
    pieces = list(saying(says).complete("abc", options(limit, *stop)))
    assert told(pieces) == expected
    assert {piece.prompt_tokens for piece in pieces} == {4}, "three bytes and the beginning of the document"
    assert pieces[0] == Piece("", 4, 0, None)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_an_error_of_the_model(value: float) -> None:
    def spoil(_model: nn.Module, _inputs: Any, output: Any) -> None:
        output.logits = output.logits * value

    model = saying("hey")
    model._model.register_forward_hook(spoil)
    with pytest.raises(OpenAiError, match="round 3 cannot go on, because its logits are not finite") as failed:
        list(model.complete("abc", options()))
    assert failed.value.status == 500


def test_tokens_that_the_tokenizer_lacks_are_never_sampled() -> None:
    model = saying("abc")

    def add_rows(_model: nn.Module, _inputs: Any, output: Any) -> None:
        output.logits = torch.cat([output.logits, torch.full((1, 1, 42), 9.0)], dim=-1)

    model._model.register_forward_hook(add_rows)
    assert told(list(model.complete("x", options())))[0] == "abc"


def test_a_prompt_must_fit_into_the_context() -> None:
    assert told(list(saying("hello").complete("x" * (CONTEXT - 2), options())))[1:] == (1, "length")
    with pytest.raises(PromptRefused, match=f"has {CONTEXT} tokens") as refused:
        next(saying("hello").complete("x" * (CONTEXT - 1), options()))
    assert refused.value.code == "context_length_exceeded"


def test_a_chat_without_template_is_plain_text_and_ends_before_the_next_turn_of_the_user() -> None:
    model = saying("hey\n\nUser:\nbye")
    assert isinstance(model._model, Scripted)
    messages = [{"role": "system", "content": "Be kind."}, USER]
    assert told(list(model.chat(messages, options())))[0] == "hey"
    assert plain_chat(messages) == "System:\nBe kind.\n\nUser:\nhi\n\nAssistant:\n"
    assert bytes(model._model.heard[1:]).decode() == plain_chat(messages)


def test_a_chat_follows_the_template_of_the_tokenizer(tmp_path: Path) -> None:
    ByteTokenizer().save(tmp_path / "mine")
    inner = open_tokenizer("mine", tmp_path, tmp_path / "cache")
    assert isinstance(inner, FastTokenizer) and inner.chat([USER]) is None, "it has no template yet"
    inner._inner.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ bos_token }}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    inner.save(tmp_path / "chatty")
    model = saying("hey", open_tokenizer("chatty", tmp_path, tmp_path / "cache"))
    assert told(list(model.chat([USER], options()))) == ("hey", 4, "stop")
    assert model._model.heard == [256, *b"[user]hi>"]
    with pytest.raises(PromptRefused, match="no system"):
        next(model.chat([{"role": "system", "content": "x"}], options()))


def test_a_tokenizer_with_several_chat_templates_is_saved_without_subfolders(tmp_path: Path) -> None:
    ByteTokenizer().save(tmp_path / "mine")
    inner = open_tokenizer("mine", tmp_path, tmp_path / "cache")
    assert isinstance(inner, FastTokenizer)
    inner._inner.chat_template = {
        "default": "{% for m in messages %}{{ m.content }}{% endfor %}",
        "tool_use": "{% for m in messages %}tool {{ m.content }}{% endfor %}",
    }
    inner.save(tmp_path / "several")
    assert all(path.is_file() for path in (tmp_path / "several").iterdir())
    again = open_tokenizer("several", tmp_path, tmp_path / "cache")
    assert isinstance(again, FastTokenizer)
    assert again._inner.chat_template == inner._inner.chat_template


# Checkpoints


@pytest.fixture
def config(tmp_path: Path) -> Config:
    make_data_folder(tmp_path, RUN)
    return Config.model_validate({"node": {"data_dir": str(tmp_path)}})


def test_answers_computed_at_the_same_time_are_those_computed_alone(config: Config) -> None:
    model = ServedModel.load(config)

    def answer(seed: int) -> list[Piece]:
        return list(model.complete("abc" * seed, SamplingOptions(40, 1.0, 0.9, seed, ())))

    alone = [answer(seed) for seed in range(1, 9)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(answer, range(1, 9))) == alone


def test_newer_parameters_are_loaded_and_the_old_model_stays_as_it_is(config: Config, tmp_path: Path) -> None:
    newest = NewestModel(config, ServedModel.load(config))
    first = newest._model
    drawn = SamplingOptions(8, 1.0, 1.0, 1, ())
    before = list(first.complete("abc", drawn))
    newest._look()
    assert newest._model is first, "nothing is newer"
    digest = save_round(tmp_path, RUN, 0, seed=6)
    newest._look()
    assert newest._model.facts.fingerprint == f"round-0-{digest[:12]}"
    assert list(newest._model.complete("abc", drawn)) != before == list(first.complete("abc", drawn))
    del first
    save_round(tmp_path, RUN, 0, seed=7)
    newest._look()
    assert newest._model.facts.state_digest == f"{7:064x}", "another state of the same round"


def test_newer_parameters_are_loaded_for_whoever_asks_and_at_most_two_models_are_kept(
    config: Config, tmp_path: Path
) -> None:
    newest = NewestModel(config, ServedModel.load(config))

    async def watch_for_a_moment() -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(newest.watch(0.01), 0.3)

    def save(seed: int) -> str:
        save_round(tmp_path, RUN, seed, seed=seed)
        return f"{seed:064x}"

    answering = newest._model.complete("abc", options())
    next(answering)
    second = save(1)
    asyncio.run(watch_for_a_moment())
    assert newest._model.facts.state_digest == second
    third = save(2)
    asyncio.run(watch_for_a_moment())
    assert newest._model.facts.state_digest == second, "nobody has asked"
    assert asyncio.run(newest.get()).facts.state_digest == second, "an answer of the first model goes on"
    del answering
    asyncio.run(watch_for_a_moment())
    assert newest._model.facts.state_digest == third
    fourth = save(3)
    asyncio.run(watch_for_a_moment())
    assert newest._model.facts.state_digest == third, "nobody has asked"
    assert asyncio.run(newest.get()).facts.state_digest == fourth


def test_a_checkpoint_that_cannot_be_read_leaves_the_model_and_all_files(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = NewestModel(config, ServedModel.load(config))
    first = newest._model
    save_round(tmp_path, RUN, 0, seed=6)
    damaged = tmp_path / "checkpoints" / "round-00000000" / OUTER
    damaged.write_bytes(damaged.read_bytes()[:-1])
    for path in (tmp_path / "checkpoints" / "round--0000001").iterdir():
        path.write_bytes(b"")
    before = sorted(path for path in tmp_path.rglob("*"))
    with pytest.raises(NodeError, match="holds no checkpoint"):
        newest._look()

    async def watch_until_it_warns() -> None:
        watching = asyncio.create_task(newest.watch(0.01))
        await until(lambda: "is still served" in caplog.text)
        await asyncio.sleep(0.2)  # It looks again.
        watching.cancel()

    with caplog.at_level(logging.WARNING, "node.commands.serve"):
        asyncio.run(watch_until_it_warns())
    assert newest._model is first
    assert sum("is still served" in record.message for record in caplog.records) == 1, "said once"
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_requests_are_answered_while_checkpoints_are_replaced(config: Config, tmp_path: Path) -> None:
    newest = NewestModel(config, ServedModel.load(config))
    generations = Generations(4)
    app = build_openai_app(newest.get, generations, Keys(TOKEN, lambda: 0.0), tokens_max=40)

    def replace() -> None:
        for number in range(24):
            save_round(tmp_path, RUN, number // 3, seed=100 + number)

    async def main() -> set[str]:
        seen = set()
        async with serving(app, None) as served, served.http() as http:
            watching = asyncio.create_task(newest.watch(0.01))
            writer = threading.Thread(target=replace)
            writer.start()
            wanted = {"model": "tiny", "prompt": "abc", "max_tokens": 20, "seed": 1}
            while writer.is_alive() or newest._model.facts.state_digest != f"{123:064x}":
                assert not watching.done()
                answers = await asyncio.gather(*(http.post("/v1/completions", json=wanted) for _ in range(2)))
                assert [one.status_code for one in answers] == [200, 200], answers[0].text
                seen |= {one.json()["system_fingerprint"] for one in answers}
            watching.cancel()
        return seen

    try:
        seen = asyncio.run(asyncio.wait_for(main(), 60))
    finally:
        generations.close()
    assert len(seen) > 1
    assert not list((tmp_path / "checkpoints").glob("damaged-*"))
