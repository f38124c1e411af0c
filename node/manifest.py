"""What all nodes of a run agree on, its hash, and the invite. Knows no file, no network, no torch.

The hash of the manifest identifies the run. It covers a random run id and the digest of the initial outer state, so two
runs of one preset never mix and nobody has to draw the founder's random numbers again.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import zlib
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from node.errors import InviteError, ManifestError, ProtocolError

PROTOCOL_VERSION = 1
"""Raised when old and new nodes can no longer take part in one round."""

INVITE_PREFIX = "diloco1-"
MAX_ROUNDS_WORTH = 64
"""A node that is so many times faster than the typical one weighs in full; a faster one no more than that."""


BUILTIN_TEXT = "builtin:python-stdlib"
SOURCE_KINDS = ("builtin", "hub", "parquet", "json", "text")


class Section(BaseModel):
    """Base of every section of a configuration: closed to unknown keys, frozen, documented under each field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


@dataclass(frozen=True, slots=True)
class Source:
    """One source of text, as `parse_source` reads it."""

    kind: str
    place: str
    """A pattern of files, or OWNER/NAME on the hub."""
    field: str = "text"
    config: str = ""
    split: str = "train"
    revision: str = ""


def is_hub_name(name: str) -> bool:
    """OWNER/NAME, and nothing that could be a folder elsewhere."""
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name))


def stays_inside(place: str) -> bool:
    """Whether a path or pattern stays below the folder that it is relative to: a manifest comes from strangers."""
    parts = place.replace("\\", "/").split("/")
    return bool(place) and not place.startswith(("/", "~")) and ".." not in parts


def parse_source(text: str) -> Source:
    """Read `KIND:PLACE?option=value&..`. ValueError with what is allowed."""
    kind, _, rest = text.partition(":")
    place, _, query = rest.partition("?")
    allowed = {"hub": ("config", "split", "revision", "field"), "builtin": (), "text": ()}.get(kind, ("field",))
    try:
        options = dict(parse_qsl(query, strict_parsing=bool(query)))
    except ValueError as exc:
        raise ValueError(f"{text!r} in sources has no options after its `?`: {query!r}") from exc
    if kind not in SOURCE_KINDS or not place or not options.keys() <= set(allowed):
        raise ValueError(
            f"{text!r} in sources is not KIND:PLACE, with a kind of {', '.join(SOURCE_KINDS)}, "
            f"and of {kind or 'it'} no other options than {', '.join(allowed) or 'none'}"
        )
    if kind == "hub" and not is_hub_name(place):
        raise ValueError(f"{text!r} in sources is no data set of the hub: it is named as hub:OWNER/NAME")
    if kind not in ("hub", "builtin") and not stays_inside(place):
        raise ValueError(f"{text!r} in sources leaves the folder node.text_dir: name files relative to it, without ..")
    if kind == "builtin" and text != BUILTIN_TEXT:
        raise ValueError(f"{text!r} in sources is not known: the only built-in text is {BUILTIN_TEXT}")
    return Source(kind, place, **options)


class ModelConfig(Section):
    """A model of the Llama family as `transformers` builds it; its code comes from there and from nowhere else."""

    type: Literal["llama", "mistral", "qwen2", "qwen3"] = "llama"
    """Which of the family: `qwen2` has biases in its attention, `qwen3` norms of queries and keys."""
    start: str = ""
    """Where the first parameters come from. Empty: random. Else a folder or `hub:OWNER/NAME`, in safetensors, that the
    founder loads, and the shape with it; joiners get them from the swarm. In a manifest only its name is left."""
    vocab_size: int = Field(258, ge=2)
    """Entries of the embedding. The byte tokenizer needs 258: 256 bytes, begin and end of a document."""
    hidden_size: int = Field(128, ge=8)
    """Width of the residual stream."""
    intermediate_size: int = Field(384, ge=8)
    """Width inside the gated feed-forward layers."""
    num_hidden_layers: int = Field(4, ge=1)
    """Transformer blocks."""
    num_attention_heads: int = Field(4, ge=1)
    """Query heads."""
    num_key_value_heads: int = Field(4, ge=1)
    """Key and value heads; fewer than query heads is grouped-query attention."""
    head_dim: int = Field(0, ge=0)
    """Width of a head; 0: `hidden_size` over the number of query heads."""
    max_position_embeddings: int = Field(1024, ge=8)
    """Longest sequence that the model is made for, tokens."""
    rope_theta: float = Field(10000.0, gt=0)
    """Base of the rotary position embedding."""
    rms_norm_eps: float = Field(1e-5, gt=0)
    """Epsilon of the RMS norms."""
    tie_word_embeddings: bool = True
    """Whether input and output embedding are one matrix."""

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.hidden_size % self.num_attention_heads or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("hidden_size must be a multiple of num_attention_heads, and that of num_key_value_heads")
        return self

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads


class DataConfig(Section):
    """The text that is trained on."""

    sources: tuple[str, ...] = (BUILTIN_TEXT,)
    """Where the text comes from. `builtin:python-stdlib`: the sources of this machine's own Python standard library,
    and nothing beside it. `hub:OWNER/NAME?config=C&split=S&revision=R`: a data set of the Hugging Face hub, streamed.
    `parquet:PATTERN`, `json:PATTERN` (JSON lines), `text:PATTERN` (a file is a document): files on each member's
    machine, relative to its `node.text_dir`. All take `field=F`, the column that holds the text, `text` by default."""
    weights: tuple[float, ...] = ()
    """Share of each source, in any unit; empty: equal shares."""
    tokenizer: str = "bytes"
    """How text becomes tokens. `bytes`: each UTF-8 byte is a token; 256 begins and 257 ends a document. Else a folder,
    relative to `node.text_dir`, or `hub:OWNER/NAME@REVISION`, of a fast tokenizer."""
    held_out_source: str = ""
    """Text that evaluation uses, such as a validation split; empty: held-out documents of the first source."""
    held_out_one_in: int = Field(20, ge=2)
    """Without `held_out_source`, one document in so many, by the hash of its text, is never trained on."""

    @model_validator(mode="after")
    def _readable(self) -> DataConfig:
        parsed = [parse_source(text) for text in (*self.sources, *filter(None, (self.held_out_source,)))]
        name = self.tokenizer
        if not (
            is_hub_name(name.removeprefix("hub:").partition("@")[0]) if name.startswith("hub:") else stays_inside(name)
        ):
            raise ValueError(f"tokenizer {name!r} is neither hub:OWNER/NAME nor a folder below node.text_dir")
        if not self.sources:
            raise ValueError("sources must name at least one")
        if any(source.kind == "builtin" for source in parsed) and (len(parsed) > 1 or self.tokenizer != "bytes"):
            raise ValueError(f"{BUILTIN_TEXT} in sources stands alone, with tokenizer = bytes")
        if self.weights and (len(self.weights) != len(self.sources) or min(self.weights) <= 0):
            raise ValueError("weights must be numbers above 0, as many as sources")
        return self

    @property
    def is_builtin(self) -> bool:
        return self.sources == (BUILTIN_TEXT,)


class InnerConfig(Section):
    """The inner optimizer, clipped, with warm-up and cosine decay over the *swarm's* tokens."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon`: for the layers' matrices, at the size of AdamW's updates; AdamW for the rest."""
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
    """Largest gradient norm; longer gradients are scaled down to it."""
    warmup_tokens: int = Field(0, ge=0)
    """Tokens of the whole swarm over which the rate rises linearly from zero."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Rate at `run.total_tokens` and after, as a share of the peak."""
    batch_size: int = Field(8, ge=1)
    """Sequences per inner step of one node; gradient accumulation makes it from micro-batches."""
    sequence_length: int = Field(256, ge=8)
    """Tokens per sequence."""


class OuterConfig(Section):
    """The outer optimizer: SGD with Nesterov momentum on the averaged pseudo-gradient."""

    lr: float = Field(0.7, gt=0)
    """Outer learning rate."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Nesterov momentum."""


class RoundConfig(Section):
    """When a round is due, and with whom."""

    policy: Literal["time", "steps"] = "time"
    """`steps`: every node does `inner_steps` inner steps. `time`: rounds by the clock, weighted by tokens."""
    inner_steps: int = Field(500, ge=1)
    """Inner steps H of a typical node between two outer steps."""
    most_inner_steps: int = Field(0, ge=0)
    """With `sync.auto`, the most that H may come to; 0: four times `inner_steps`."""
    min_peers: int = Field(2, ge=1)
    """Fewest members that may take an outer step; 1 lets a lone node go on by itself."""
    quorum_ratio: float = Field(0.5, gt=0, le=1)
    """Share of the last record's live weight that must be ready before the late get their grace."""
    first_round_tokens: int = Field(0, ge=0)
    """Estimate of the swarm's tokens in round 0, for the learning rate; 0: this one node's H steps."""
    max_tokens: int = Field(0, ge=0)
    """Most tokens that one contribution may weigh, as members count their own; 0: 64 times those of H steps."""


class SyncConfig(Section):
    """How contributions travel."""

    mode: Literal["blocking", "overlapped", "streaming"] = "blocking"
    """`blocking`: the trainer waits for the round's result. `overlapped`: it goes on, for at most one round.
    `streaming`: so, too, and each round moves one fragment of the parameters."""
    fragments: int = Field(4, ge=1, le=64)
    """`streaming`: strided fragments of layers, each of which is averaged once in `round.inner_steps`."""
    codec: Literal["fp32", "fp16", "int8", "int4", "e3m0", "topk"] = "fp16"
    """Encoding of pseudo-gradients on the wire. `fp16` to `e3m0` have a scale per block, so tiny values survive; `topk`
    is an experiment."""
    feedback: Literal["auto", "on", "off"] = "auto"
    """Whether what encoding loses is added to the next contribution. `auto`: for codecs below 4 bits."""
    feedback_beta: float = Field(1.0, gt=0, le=1)
    """Weight of the newest loss in the feedback's moving average; 1: all of it."""
    merge: Literal["mix", "correction"] = "mix"
    """`overlapped`: how the steps since sending are kept. `mix`: a share of the local parameters; `correction`: all."""
    mix_alpha: float = Field(0.5, ge=0, le=1)
    """Share of the local parameters in the mix with the new anchor."""

    auto: bool = False
    """Whether H follows the time that transfers take, from `round.inner_steps` up, and the outer learning rate, in
    place of `outer.lr`, the number of contributors."""

    @property
    def fragment_count(self) -> int:
        return self.fragments if self.mode == "streaming" else 1

    @property
    def has_feedback(self) -> bool:
        return self.feedback == "on" or (self.feedback == "auto" and self.codec == "topk")


class EvaluationConfig(Section):
    """Loss of the anchor on the held-out split, at round ends."""

    batches: int = Field(4, ge=0)
    """Batches of `inner.batch_size` sequences; 0 turns evaluation off."""
    every_rounds: int = Field(1, ge=1)
    """Rounds from one evaluation to the next."""
    members: int = Field(0, ge=0)
    """How many of a round's members evaluate, drawn anew each time; 0: all of them."""
    budget_s: float = Field(30.0, gt=0)
    """An evaluation ends after so long, with the batches that it came to."""


class RunConfig(Section):
    """The part of a manifest that a founder chooses."""

    name: str = Field("unnamed", max_length=64)
    """What people call the run."""
    total_tokens: int = Field(2_000_000_000, ge=1)
    """Tokens of the whole swarm after which nodes export and stop; also the length of the cosine."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    inner: InnerConfig = InnerConfig()
    outer: OuterConfig = OuterConfig()
    round: RoundConfig = RoundConfig()
    sync: SyncConfig = SyncConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

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
                f"sync.fragments {self.sync.fragments} is more than the model's {self.model.num_hidden_layers} layers "
                "and 2 allow"
            )
        if self.data.tokenizer == "bytes" and self.model.vocab_size < 258:
            raise ValueError("data.tokenizer = bytes needs model.vocab_size of at least 258")
        return self

    @property
    def tokens_per_inner_step(self) -> int:
        return self.inner.batch_size * self.inner.sequence_length

    @property
    def max_contribution_tokens(self) -> int:
        """Most tokens that one contribution may weigh."""
        return self.round.max_tokens or MAX_ROUNDS_WORTH * self.round.inner_steps * self.tokens_per_inner_step


class Manifest(Section):
    """All that the nodes of one run must agree on."""

    protocol_version: int = PROTOCOL_VERSION
    run_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    """Random, drawn by the founder."""
    initial_digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Digest of the initial outer state, hex."""
    parameters: int = Field(ge=1)
    """Number of model parameters."""
    run: RunConfig

    def canonical(self) -> bytes:
        """The bytes that are hashed: JSON, keys sorted, no spaces, UTF-8."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()

    @property
    def hash(self) -> str:
        """SHA-256 of `canonical()`, hex. It identifies the run, and is the head of the empty chain of rounds."""
        return hashlib.sha256(self.canonical()).hexdigest()


def parse_manifest(data: bytes, expected_hash: str) -> Manifest:
    """Read a manifest that came from elsewhere. Raises as `read_manifest` does."""
    if hashlib.sha256(data).hexdigest() != expected_hash:
        raise ManifestError(
            "The swarm's manifest does not have the hash of the invite: ask for a new invite, or leave it alone."
        )
    return read_manifest(data)


def read_manifest(data: bytes) -> Manifest:
    """Raises ProtocolError before it looks at fields it cannot know, and ManifestError."""
    try:
        raw = json.loads(data)
        version = int(raw["protocol_version"])
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise ManifestError("The manifest is not readable: ask for a new invite.") from exc
    if version > PROTOCOL_VERSION:
        raise ProtocolError(
            f"This run speaks protocol {version}, this node {PROTOCOL_VERSION}: upgrade diloco-node and start it again."
        )
    try:
        return Manifest.model_validate(raw)
    except ValidationError as exc:
        raise ManifestError(f"The manifest is not valid (faults: {exc.error_count()}): ask its founder.") from exc


@dataclass(frozen=True, slots=True)
class Invite:
    """All that a volunteer pastes."""

    manifest_hash: str
    addresses: tuple[str, ...]
    """libp2p multiaddresses of bootstrap peers, each ending in /p2p/PEER_ID."""

    def __str__(self) -> str:
        body = bytes.fromhex(self.manifest_hash) + "\n".join(self.addresses).encode()
        packed = zlib.compress(body + zlib.crc32(body).to_bytes(4, "big"), 9)
        return INVITE_PREFIX + base64.urlsafe_b64encode(packed).decode().rstrip("=")


def parse_invite(text: str) -> Invite:
    """Read what `str(invite)` wrote. Raises InviteError, which says what to do."""
    text = "".join(text.split())
    damaged = InviteError("The invite is damaged or cut short: copy the whole string again, it starts with diloco1-.")
    if not text.startswith(INVITE_PREFIX):
        raise damaged
    coded = text.removeprefix(INVITE_PREFIX)
    try:
        opener = zlib.decompressobj()
        packed = base64.b64decode(coded + "=" * (-len(coded) % 4), altchars=b"-_", validate=True)
        body = opener.decompress(packed, 64 * 1024)
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
