"""The manifest that all nodes of a run agree on, the configuration inside it, and the invite.

The manifest's hash identifies the run. It covers a random run id and the digest of the initial outer state, so two runs
of one preset never mix, and joiners do not depend on the founder's random numbers.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import zlib
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import parse_qsl

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from node.errors import DataFolderError, InviteError, ManifestError, ProtocolError
from node.host.printable import printable

PROTOCOL_VERSION = 6
"""Increased when old and new nodes can no longer take part in one round."""

INVITE_PREFIX = "diloco1-"
ANY_RUN = "any"
"""What stands in place of an invite to join the listed run that fits this machine best."""
WEIGHT_RATIO_MAX = 64
"""A contribution counts at most this many times the tokens of a typical node's round."""
BUILTIN_TEXT = "builtin:python-stdlib"
SOURCE_KINDS = ("builtin", "hub", "parquet", "json", "text")
MOST_PHASES = 64
MOST_SOURCES = 1000
MOST_NAME_CHARS = 500
"""Limit on a name of text, tokenizer or model."""
HELD_OUT_ONE_IN = 20
"""The default of `held_out_one_in`, and its value for the built-in text."""
MOST_TOKENS = 2**62
MOST_ROUNDS = 10**6
MOST_MEMBERS = 10**6
MOST_KEYS = 16
"""Limit on the keys that may steer a run."""
SPARSE_CODECS = ("topk", "topk64")
LOSSY_CODECS = (*SPARSE_CODECS, "int2")
"""Codecs that lose so much that they need error feedback."""


Schedule = Literal["cosine", "linear", "constant", "inverse-sqrt", "wsd", "restarts"]
"""Names of learning-rate schedules (`node.diloco.schedule.learning_rate`)."""


class Section(BaseModel):
    """Base class of all configuration sections. They are frozen and refuse unknown keys. The docstring under a field
    describes its key."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Source:
    """One source of text."""

    kind: str
    place: str
    """A file pattern, or OWNER/NAME on the hub."""
    field: str = "text"
    config: str = ""
    split: str = "train"
    revision: str = ""


def is_hub_name(name: str) -> bool:
    """Whether the name is OWNER/NAME and cannot be a path."""
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name))


def stays_inside(place: str) -> bool:
    """Whether a relative path or pattern stays below its folder. Manifests come from strangers."""
    parts = place.replace("\\", "/").split("/")
    return bool(place) and not place.startswith(("/", "~")) and ".." not in parts


def parse_source(text: str) -> Source:
    """Parse `KIND:PLACE?option=value&..`. Raises ValueError with the accepted form."""
    kind, _, rest = text.partition(":")
    place, _, query = rest.partition("?")
    allowed = {"hub": ("config", "split", "revision", "field"), "builtin": (), "text": ()}.get(kind, ("field",))
    try:
        options = dict(parse_qsl(query, strict_parsing=bool(query)))
    except ValueError as exc:
        raise ValueError(f"{text!r} in sources has malformed options {query!r}: write option=value&..") from exc
    if kind not in SOURCE_KINDS or not place or not options.keys() <= set(allowed):
        raise ValueError(
            f"{text!r} in sources is not KIND:PLACE; the kinds are {', '.join(SOURCE_KINDS)}, "
            f"and the options of {kind or 'this kind'} are {', '.join(allowed) or 'none'}"
        )
    if kind == "hub" and not is_hub_name(place):
        raise ValueError(f"{text!r} in sources is not a data set of the hub: write hub:OWNER/NAME")
    if kind not in ("hub", "builtin") and not stays_inside(place):
        raise ValueError(
            f"{text!r} in sources is outside of node.text_dir: name files relative to that folder, without .."
        )
    if kind == "builtin" and text != BUILTIN_TEXT:
        raise ValueError(f"{text!r} in sources does not exist: the only built-in text is {BUILTIN_TEXT}")
    return Source(kind, place, **options)


def _check_place(name: str) -> str:
    if name != printable(name, len(name)):
        raise ValueError("a name has a control character: use plain text")
    return name


PlaceName = Annotated[str, Field(max_length=MOST_NAME_CHARS), AfterValidator(_check_place)]


class ModelConfig(Section):
    """A model of the Llama family, built by `transformers`; no other model code is loaded."""

    type: Literal["llama", "mistral", "qwen2", "qwen3"] = "llama"
    """Model type. `qwen2` has biases in its attention, and `qwen3` has norms of queries and keys."""
    start: PlaceName = ""
    """Source of the initial parameters: a folder or `hub:OWNER/NAME` with safetensors; empty means random parameters.
    The founder loads parameters and shape from it, and joiners get both from the swarm. The manifest holds only its
    name."""
    vocab_size: int = Field(258, ge=2, le=2**24)
    """Number of entries of the embedding. The byte tokenizer needs 258: 256 bytes, and begin and end of document."""
    hidden_size: int = Field(128, ge=8, le=2**20)
    """Width of the residual stream."""
    intermediate_size: int = Field(384, ge=8, le=2**22)
    """Width inside the gated feed-forward layers."""
    num_hidden_layers: int = Field(4, ge=1, le=10_000)
    """Number of transformer blocks."""
    num_attention_heads: int = Field(4, ge=1, le=2**14)
    """Number of query heads."""
    num_key_value_heads: int = Field(4, ge=1, le=2**14)
    """Number of key and value heads. Fewer than query heads means grouped-query attention."""
    head_dim: int = Field(0, ge=0, le=2**14)
    """Width of a head; 0 means `hidden_size` divided by the number of query heads."""
    max_position_embeddings: int = Field(1024, ge=8, le=2**24)
    """Longest sequence of the model in tokens."""
    rope_theta: float = Field(10000.0, gt=0)
    """Base of the rotary position embedding."""
    rms_norm_eps: float = Field(1e-5, gt=0)
    """Epsilon of the RMS norms."""
    tie_word_embeddings: bool = True
    """Whether the input and output embeddings are one matrix."""

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.hidden_size % self.num_attention_heads or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("hidden_size must be a multiple of num_attention_heads, and that of num_key_value_heads")
        if self.head_width % 2:
            raise ValueError("the width of a head (head_dim, or hidden_size / num_attention_heads) must be even")
        return self

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads


class DataConfig(Section):
    """The training text."""

    sources: Annotated[tuple[PlaceName, ...], Field(max_length=MOST_SOURCES)] = (BUILTIN_TEXT,)
    """Sources of text. `builtin:python-stdlib` is the source code of this machine's Python standard library; it
    cannot be combined with others. `hub:OWNER/NAME?config=C&split=S&revision=R` streams a data set of the Hugging Face
    hub. `parquet:PATTERN`, `json:PATTERN` (JSON lines) and `text:PATTERN` (one document per file) name files on each
    member's machine, relative to its `node.text_dir`. The option `field=F` names the column with the text; the
    default is `text`."""
    weights: Annotated[tuple[float, ...], Field(max_length=MOST_SOURCES)] = ()
    """Relative share of each source; empty means equal shares."""
    sources_per_member: int = Field(0, ge=0)
    """Number of sources that each member reads, drawn by its peer id; 0 means all. With fewer, members train on
    different text on purpose (non-i.i.d. in DiLoCo, arXiv 2311.08105). All members need all sources."""
    tokenizer: PlaceName = "bytes"
    """Tokenizer. With `bytes`, each UTF-8 byte is a token; 256 begins and 257 ends a document. Any other value is the
    folder of a fast tokenizer, relative to `node.text_dir`, or `hub:OWNER/NAME@REVISION`."""
    held_out_source: PlaceName = ""
    """Source of the evaluation text, such as a validation split; empty means held-out documents of the first source."""
    held_out_one_in: int = Field(HELD_OUT_ONE_IN, ge=2, le=10**6)
    """Without `held_out_source`, one document in this many, chosen by the hash of its text, is used only for
    evaluation. The built-in text holds out one file in 20."""

    @model_validator(mode="after")
    def _readable(self) -> DataConfig:
        parsed = [parse_source(text) for text in (*self.sources, *filter(None, (self.held_out_source,)))]
        name = self.tokenizer
        if not (
            is_hub_name(name.removeprefix("hub:").partition("@")[0]) if name.startswith("hub:") else stays_inside(name)
        ):
            raise ValueError(f"tokenizer {name!r} is neither hub:OWNER/NAME nor a folder below node.text_dir")
        if not self.sources:
            raise ValueError("sources must name at least one source")
        if any(source.kind == "builtin" for source in parsed) and (len(parsed) > 1 or self.tokenizer != "bytes"):
            raise ValueError(f"{BUILTIN_TEXT} in sources must be the only source, with tokenizer = bytes")
        if parsed and parsed[0].kind == "builtin" and self.held_out_one_in != HELD_OUT_ONE_IN:
            raise ValueError(f"held_out_one_in does not change {BUILTIN_TEXT}: remove it, or name other sources")
        if self.sources_per_member > len(self.sources):
            raise ValueError(
                f"sources_per_member {self.sources_per_member} is more than the sources: name more sources"
            )
        if self.weights and (len(self.weights) != len(self.sources) or min(self.weights) <= 0):
            raise ValueError("weights must be as many numbers above 0 as there are sources")
        return self

    @property
    def is_builtin(self) -> bool:
        return self.sources == (BUILTIN_TEXT,)


class InnerConfig(Section):
    """The inner optimizer: clipped gradients, and a learning rate that follows the *swarm's* tokens."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` uses Muon for the layers' matrices, scaled to the size of AdamW's updates, and AdamW for the rest."""
    lr: float = Field(4e-4, gt=0)
    """Peak learning rate (DiLoCo, arXiv 2311.08105: 4e-4)."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay, on matrices only."""
    clip_norm: float = Field(1.0, gt=0)
    """Largest gradient norm; larger gradients are scaled down to it."""
    warmup_tokens: int = Field(0, ge=0, le=MOST_TOKENS)
    """Tokens of the whole swarm during which the rate rises linearly from zero."""
    schedule: Schedule = "cosine"
    """Learning rate after the warm-up. `cosine` and `linear` fall until `run.total_tokens`; `wsd` is constant and falls
    in the last `decay_ratio` of these tokens; `inverse-sqrt` falls with the square root of the tokens; `constant` does
    not fall; `restarts` falls as a cosine in each of `cycles` equal cycles, and then starts again from the peak."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Lowest learning rate after the warm-up, as a share of the peak."""
    decay_ratio: float = Field(0.1, gt=0, le=1)
    """Share of `run.total_tokens` in which `wsd` falls (arXiv 2404.06395: 0.1)."""
    cycles: int = Field(4, ge=1, le=10_000)
    """Number of cycles of `restarts`."""
    batch_size: int = Field(8, ge=1, le=2**20)
    """Sequences per inner step of one node, accumulated over micro-batches."""
    sequence_length: int = Field(256, ge=8, le=2**24)
    """Tokens per sequence."""


class PhaseConfig(Section):
    """A part of a run, from a number of swarm tokens until the next phase or the end. Settings that it does not name
    are those of [run]."""

    from_tokens: int = Field(ge=1, le=MOST_TOKENS)
    """Tokens of the whole swarm at which the phase begins."""
    lr_ratio: float = Field(1.0, gt=0, le=1000)
    """Factor on the learning rate."""
    schedule: Schedule | None = None
    """A schedule over the tokens of this phase alone, with a peak of `lr_ratio` times `run.inner.lr`; None goes on with
    `run.inner.schedule`."""
    warmup_tokens: int = Field(0, ge=0, le=MOST_TOKENS)
    """Warm-up of the phase's own schedule (arXiv 2403.08763)."""
    weights: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(max_length=MOST_SOURCES)] = ()
    """`run.data.weights` of rounds that begin in this phase."""


class OuterConfig(Section):
    """The outer optimizer, which applies the averaged pseudo-gradient to the anchor."""

    optimizer: Literal["nesterov", "momentum", "sgd", "adam"] = "nesterov"
    """`nesterov` is SGD with Nesterov momentum, `momentum` with classical momentum, and `sgd` without momentum. `adam`
    keeps a second moment, so the outer state is half as large again."""
    lr: float = Field(0.7, gt=0)
    """Outer learning rate."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of `nesterov` and `momentum`, and decay of `adam`'s first moment."""
    beta2: float = Field(0.99, ge=0, lt=1)
    """Decay of `adam`'s second moment."""
    eps: float = Field(0.1, ge=1e-30)
    """Added to the root of `adam`'s second moment (DiLoCo, arXiv 2311.08105, section 3.1, raises it to 0.1)."""


class RoundConfig(Section):
    """When a round takes place, and with which members."""

    policy: Literal["time", "steps"] = "time"
    """With `steps`, every node makes `inner_steps` inner steps a round. With `time`, rounds end by the clock, and a
    contribution's weight is its number of tokens."""
    inner_steps: int = Field(500, ge=1, le=10**7)
    """Inner steps H of a typical node between two outer steps."""
    most_inner_steps: int = Field(0, ge=0, le=10**7)
    """Upper bound of H with `sync.auto`; 0 means four times `inner_steps`."""
    min_peers: int = Field(2, ge=1, le=MOST_MEMBERS)
    """Fewest members for an outer step; with 1 a lone node continues by itself."""
    quorum_ratio: float = Field(0.5, gt=0, le=1)
    """The grace period for late members begins when the ready members have this share of the live members' tokens in
    the last round."""
    first_round_tokens: int = Field(0, ge=0, le=MOST_TOKENS)
    """Estimated tokens of the swarm in round 0, for the learning rate; 0 means the tokens of this node's H steps."""
    max_tokens: int = Field(0, ge=0, le=MOST_TOKENS)
    """Upper bound of a contribution's weight in tokens, as members count their own; 0 means 64 times the tokens of H
    steps."""


class SyncConfig(Section):
    """How contributions are exchanged."""

    mode: Literal["blocking", "overlapped", "streaming"] = "blocking"
    """With `blocking`, the trainer waits for the round's result. With `overlapped`, it trains on for at most one round.
    `streaming` is like `overlapped`, but each round averages only one fragment of the parameters."""
    fragments: int = Field(4, ge=1, le=64)
    """Number of strided fragments of layers with `streaming`. Each is averaged once per `round.inner_steps`."""
    codec: Literal["fp32", "fp16", "int8", "int4", "e3m0", "int2", "topk", "topk64"] = "fp16"
    """Encoding of pseudo-gradients on the wire. All but `fp32` have a scale per block, which keeps tiny values. `topk`
    and `topk64` send only the largest elements, 1 of 16 and 64 of 4,096. They and `int2` need error feedback."""
    result_codec: Literal["auto", "fp32", "fp16", "int8", "int4", "e3m0"] = "auto"
    """Encoding of the mean that the reducers send. `auto` is `int8` for codecs below 4 bits, else `codec`."""
    feedback: Literal["none", "classic", "loco"] = "none"
    """Error feedback adds the encoding error to the next contribution, and at the reducers to the next mean. `classic`
    adds all of the newest error. `loco` adds a moving average of the errors, stored in 8 bits (LoCo, arXiv 2407.04480);
    it suits codecs that send every element."""
    feedback_decay: float = Field(1.0, gt=0, le=1)
    """Factor on the error when it is added; below 1 forgets old errors (SparseLoCo, arXiv 2508.15706: 0.95)."""
    err_beta: float = Field(0.8, ge=0, lt=1)
    """Weight of the old average in the moving average of `loco`."""
    feedback_reset_rounds: int = Field(512, ge=0, le=MOST_ROUNDS)
    """Rounds after which `loco` forgets all errors; 0 means never."""
    merge: Literal["mix", "correction"] = "mix"
    """What a node keeps, with `overlapped`, of the steps that it made during the averaging. `mix` keeps a
    share of the local parameters; `correction` keeps all of these steps."""
    mix_alpha: float = Field(0.5, ge=0, le=1)
    """Share of the local parameters in the mix with the new anchor."""
    auto: bool = False
    """Increase H above `round.inner_steps` when transfers take longer, and choose the outer learning rate by the number
    of contributors instead of using `outer.lr`."""

    @property
    def fragment_count(self) -> int:
        return self.fragments if self.mode == "streaming" else 1

    @property
    def encoding_of_results(self) -> str:
        """The name of the codec of the mean."""
        if self.result_codec != "auto":
            return self.result_codec
        return "int8" if self.codec in LOSSY_CODECS else self.codec

    @model_validator(mode="after")
    def _makes_sense(self) -> SyncConfig:
        if self.codec == self.encoding_of_results == "fp32" and self.feedback != "none":
            raise ValueError("codec fp32 loses nothing that could be fed back: set feedback to none")
        if self.codec in LOSSY_CODECS and self.feedback == "none":
            raise ValueError(f"codec {self.codec} loses too much without error feedback: set feedback to classic")
        if self.codec in SPARSE_CODECS and self.feedback == "loco":
            raise ValueError(f"feedback loco repays too slowly what {self.codec} leaves out: set feedback to classic")
        return self


class EvaluationConfig(Section):
    """Evaluation of the anchor on the held-out split at the end of rounds."""

    batches: int = Field(4, ge=0, le=10**5)
    """Batches of `inner.batch_size` sequences; 0 turns evaluation off."""
    every_rounds: int = Field(1, ge=1, le=MOST_ROUNDS)
    """Rounds from one evaluation to the next."""
    members: int = Field(0, ge=0, le=MOST_MEMBERS)
    """Number of a round's members that evaluate, drawn anew each time; 0 means all of them."""
    budget_s: float = Field(30.0, gt=0)
    """Time limit of an evaluation, seconds; the batches finished by then count."""


def _check_prompt(prompt: str) -> str:
    if not prompt.strip() or prompt != printable(prompt, len(prompt)):
        raise ValueError("a prompt is one line of text without control characters")
    return prompt


Prompt = Annotated[str, Field(max_length=200), AfterValidator(_check_prompt)]


class SampleConfig(Section):
    """Samples of the model's text, which show everybody what the model has learned."""

    prompts: Annotated[tuple[Prompt, ...], Field(max_length=4)] = ("def main(", "The ")
    """Beginnings that the anchor continues, at most four; empty turns samples off."""
    every_rounds: int = Field(10, ge=1, le=MOST_ROUNDS)
    """Rounds from one sample to the next. The first round has one as well. A node that is too slow makes none."""
    tokens: int = Field(64, ge=1, le=256)
    """Most tokens of a continuation."""
    temperature: float = Field(0.7, ge=0, le=10)
    """Randomness of the choice of tokens, with a fixed seed; 0 means always the likeliest token."""


def check_name(name: str) -> str:
    if name != printable(name, len(name)):
        raise ValueError("a name has no control characters: use letters, digits and spaces")
    return name


def _check_purpose(purpose: str) -> str:
    lines = purpose.split("\n")
    if lines != [printable(line, len(line)) for line in lines]:
        raise ValueError("run.purpose has a control character: use plain text and line feeds")
    return purpose


PEER_ID_FORM = r"^12D3KooW[1-9A-HJ-NP-Za-km-z]{44}$"
GOVERNANCE_KEYS = ("governance", "governance_keys", "governance_threshold")


class RunConfig(Section):
    """The part of a manifest that the founder chooses."""

    name: Annotated[str, Field(max_length=64), AfterValidator(check_name)] = "unnamed"
    """Name of the run for people."""
    purpose: Annotated[str, Field(max_length=2000), AfterValidator(_check_purpose)] = ""
    """What the run is for, in the founder's words, as its public page shows it."""
    total_tokens: int = Field(2_000_000_000, ge=1, le=MOST_TOKENS)
    """Tokens of the whole swarm after which the run is complete. The learning-rate schedule ends there."""
    phases: Annotated[tuple[PhaseConfig, ...], Field(max_length=MOST_PHASES)] = ()
    """Changes of the learning rate and of the mix of sources in mid-run, as tables [[run.phases]] with `from_tokens`
    and one or more of `lr_ratio`, `schedule`, `warmup_tokens` and `weights`; as a flag, a JSON list of such objects."""
    governance: Literal["founder", "keys", "fixed"] = "fixed"
    """Who may change the run while it runs. With `founder`, the key of the node that founds it; with `keys`,
    `governance_threshold` of `governance_keys`; with `fixed`, nobody."""
    governance_keys: Annotated[
        tuple[Annotated[str, Field(pattern=PEER_ID_FORM)], ...], Field(max_length=MOST_KEYS)
    ] = ()
    """Peer ids of the keys that may change the run. With `founder`, the founding node writes its own."""
    governance_threshold: int = Field(1, ge=1, le=MOST_KEYS)
    """How many of `governance_keys` must sign a change."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    inner: InnerConfig = InnerConfig()
    outer: OuterConfig = OuterConfig()
    round: RoundConfig = RoundConfig()
    sync: SyncConfig = SyncConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    sample: SampleConfig = SampleConfig()

    @model_validator(mode="after")
    def _fits(self) -> RunConfig:
        if self.inner.sequence_length > self.model.max_position_embeddings:
            raise ValueError(
                f"inner.sequence_length {self.inner.sequence_length} is longer than "
                f"model.max_position_embeddings {self.model.max_position_embeddings}"
            )
        if 0 < self.round.most_inner_steps < self.round.inner_steps:
            raise ValueError(
                f"round.most_inner_steps {self.round.most_inner_steps} is less than "
                f"round.inner_steps {self.round.inner_steps}"
            )
        if self.sync.fragment_count > self.model.num_hidden_layers + 2:
            raise ValueError(
                f"sync.fragments {self.sync.fragments} is more than the {self.model.num_hidden_layers} layers of "
                "model.num_hidden_layers plus 2"
            )
        if self.outer.optimizer != "nesterov" and self.sync.auto:
            raise ValueError(
                f"sync.auto chooses the learning rate of outer.optimizer nesterov, not of {self.outer.optimizer}: "
                "turn sync.auto off"
            )
        if self.data.tokenizer == "bytes" and self.model.vocab_size < 258:
            raise ValueError("data.tokenizer = bytes needs model.vocab_size of at least 258")
        if self.inner.schedule == "inverse-sqrt" and not self.inner.warmup_tokens:
            raise ValueError("inner.schedule inverse-sqrt falls from the end of a warm-up: set inner.warmup_tokens")
        return self

    @model_validator(mode="after")
    def _is_governed(self) -> RunConfig:
        keys, threshold = self.governance_keys, self.governance_threshold
        if len(set(keys)) < len(keys):
            raise ValueError("governance_keys names a key twice")
        if self.governance == "keys" and not keys:
            raise ValueError(
                "governance keys needs governance_keys: name the peer ids of the keys that may amend the run"
            )
        if self.governance == "keys" and threshold > len(keys):
            raise ValueError(f"governance_threshold {threshold} is more than the {len(keys)} governance_keys")
        if self.governance != "keys" and threshold > 1:
            raise ValueError(f"governance_threshold belongs to governance keys, not to {self.governance}")
        if len(keys) > {"keys": MOST_KEYS, "founder": 1, "fixed": 0}[self.governance]:
            raise ValueError(f"governance {self.governance} has too many governance_keys: set governance to keys")
        return self

    @model_validator(mode="after")
    def _phases_fit(self) -> RunConfig:
        ends = [*(phase.from_tokens for phase in self.phases[1:]), self.total_tokens]
        for number, (phase, end) in enumerate(zip(self.phases, ends, strict=False), 1):
            name = f"phases: number {number} (from_tokens {phase.from_tokens})"
            if phase.from_tokens >= end:
                limit = "total_tokens" if number == len(self.phases) else "the next phase"
                raise ValueError(f"{name} does not begin before {limit}: list phases by rising from_tokens")
            if phase.lr_ratio == 1 and not phase.schedule and not phase.weights:
                raise ValueError(f"{name} changes nothing: set its lr_ratio, schedule or weights, or remove it")
            if phase.weights and len(phase.weights) != len(self.data.sources):
                raise ValueError(f"{name} has {len(phase.weights)} weights: give one for each of data.sources")
            if phase.warmup_tokens and not phase.schedule:
                raise ValueError(f"{name} has a warm-up without a schedule: set its schedule")
            if phase.from_tokens + phase.warmup_tokens >= end:
                raise ValueError(f"{name} ends before its warm-up: reduce its warmup_tokens")
            if phase.schedule == "inverse-sqrt" and not phase.warmup_tokens:
                raise ValueError(f"{name} falls from the end of a warm-up: set its warmup_tokens")
        return self

    def phase_at(self, tokens: int) -> int:
        """The number of the phase that holds at so many swarm tokens, from 1 on; 0 before the first phase."""
        return bisect_right([phase.from_tokens for phase in self.phases], tokens)

    def weights_at(self, tokens: int) -> tuple[float, ...]:
        """The relative share of each source in a round that begins at so many swarm tokens."""
        number = self.phase_at(tokens)
        own = self.phases[number - 1].weights if number else ()
        return own or self.data.weights or (1.0,) * len(self.data.sources)

    @property
    def tokens_per_inner_step(self) -> int:
        return self.inner.batch_size * self.inner.sequence_length

    @property
    def max_contribution_tokens(self) -> int:
        """Upper bound of a contribution's weight."""
        return self.round.max_tokens or WEIGHT_RATIO_MAX * self.round.inner_steps * self.tokens_per_inner_step


class Manifest(Section):
    """Everything that the nodes of one run must agree on."""

    protocol_version: int = PROTOCOL_VERSION
    run_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    """Random, drawn by the founder."""
    initial_digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Digest of the initial outer state, hex."""
    parameters: int = Field(ge=1, lt=2**60)
    """Number of model parameters."""
    rewound_tokens: int = Field(0, ge=-MOST_TOKENS, le=MOST_TOKENS)
    """By how many tokens the schedules are behind the tokens of the swarm from the start on. It is not 0 if the run
    continues one that had gone back to an earlier state."""
    run: RunConfig

    @model_validator(mode="after")
    def _has_founder(self) -> Manifest:
        if self.run.governance == "founder" and not self.run.governance_keys:
            raise ValueError("governance founder needs the founder's key in governance_keys")
        return self

    def canonical(self) -> bytes:
        """The bytes under the hash: UTF-8 JSON with sorted keys and no spaces.

        What a run does not use is left out, so the manifests of runs from before these fields have the same hash.
        """
        tree = self.model_dump(mode="json")
        if not self.rewound_tokens:
            del tree["rewound_tokens"]
        if self.run.governance == "fixed":
            for key in GOVERNANCE_KEYS:
                del tree["run"][key]
        return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()

    @property
    def hash(self) -> str:
        """SHA-256 of `canonical()`, hex. It identifies the run and is the head of the empty chain of rounds."""
        return hashlib.sha256(self.canonical()).hexdigest()


def parse_manifest(data: bytes, expected_hash: str) -> Manifest:
    """Check the hash of a manifest from a peer and read it. Raises the same errors as `read_manifest`.

    A manifest in another form than `Manifest.canonical` is refused, because this node would compute another hash.
    """
    if hashlib.sha256(data).hexdigest() != expected_hash:
        raise ManifestError(
            "The swarm's manifest does not have the hash of the invite: ask a member you trust for a new invite."
        )
    manifest = read_manifest(data)
    if manifest.canonical() != data:
        raise ManifestError(
            "The run's manifest has another form than this version of diloco-node writes: install the version with "
            "which its founder founded it."
        )
    return manifest


def read_manifest(data: bytes) -> Manifest:
    """Read a manifest. Raises ProtocolError for another protocol version, and ManifestError if it is invalid."""
    try:
        raw = json.loads(data)
        version = raw["protocol_version"]
        if type(version) is not int:
            raise TypeError("the protocol version is not a whole number")
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise ManifestError("The manifest cannot be read: ask for a new invite.") from exc
    if version > PROTOCOL_VERSION:
        raise ProtocolError(
            f"This run uses protocol {version}, this node {PROTOCOL_VERSION}: upgrade diloco-node and start it again."
        )
    if version < PROTOCOL_VERSION:
        raise ProtocolError(
            f"This run uses protocol {version}, this node {PROTOCOL_VERSION}: continue it with the version "
            "of diloco-node that founded it, or found a new run."
        )
    try:
        return Manifest.model_validate(raw)
    except ValidationError as exc:
        raise ManifestError(f"The manifest is not valid ({exc.error_count()} errors): ask its founder.") from exc


def find_manifest(data_dir: Path) -> Manifest | None:
    """The manifest of the folder's run; None if the folder belongs to no run yet. Raises DataFolderError."""
    path = data_dir / "manifest.json"
    try:
        return read_manifest(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as exc:
        raise DataFolderError.of_another_user(data_dir) from exc
    except (OSError, ManifestError) as exc:
        raise DataFolderError(f"{path} cannot be read: restore it, or join the run with a new data folder.") from exc


def manifest_of(data_dir: Path) -> Manifest:
    """The manifest of the folder's run. Raises DataFolderError if there is none, or it is damaged."""
    if (manifest := find_manifest(data_dir)) is None:
        raise DataFolderError(f"The data folder {data_dir} belongs to no run yet: start a node on it first.")
    return manifest


@dataclass(frozen=True, slots=True)
class Invite:
    """What a volunteer needs to join a run."""

    manifest_hash: str
    addresses: tuple[str, ...]
    """libp2p multiaddresses of bootstrap peers, each ending in /p2p/PEER_ID."""

    def __str__(self) -> str:
        body = bytes.fromhex(self.manifest_hash) + "\n".join(self.addresses).encode()
        compressed = zlib.compress(body + zlib.crc32(body).to_bytes(4, "big"), 9)
        return INVITE_PREFIX + base64.urlsafe_b64encode(compressed).decode().rstrip("=")


def parse_invite(text: str) -> Invite:
    """Parse the text of an invite; white space is ignored. Raises InviteError."""
    text = "".join(text.split())
    damaged = InviteError("The invite is damaged or cut short: copy the whole text again, it starts with diloco1-.")
    if not text.startswith(INVITE_PREFIX):
        raise damaged
    coded = text.removeprefix(INVITE_PREFIX)
    try:
        compressed = base64.b64decode(coded + "=" * (-len(coded) % 4), altchars=b"-_", validate=True)
        body = zlib.decompressobj().decompress(compressed, 64 * 1024)
    except (binascii.Error, ValueError, zlib.error) as exc:
        raise damaged from exc
    body, crc = body[:-4], body[-4:]
    if len(body) < 33 or zlib.crc32(body).to_bytes(4, "big") != crc:
        raise damaged
    try:
        addresses = tuple(body[32:].decode().split("\n"))
    except UnicodeDecodeError as exc:
        raise damaged from exc
    if not all(a.startswith("/") and "/p2p/" in a for a in addresses):
        raise damaged
    return Invite(manifest_hash=body[:32].hex(), addresses=addresses)
