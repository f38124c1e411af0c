"""How this one node is set up. Knows files, environment and flags; knows no torch and no network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from node.manifest import RunConfig, Section
from node.quota import LEAST_BYTES, quota_bytes
from node.schedule import Hours, check_zone, hours, parse_window, whole_windows

LEAST_MBIT_S = 2.0
"""Bulk calls are given up when they take longer than at about this rate."""


class NodeConfig(Section):
    """This node."""

    name: str = Field("", max_length=64)
    """Shown to the other members; empty: a short form of the peer id."""
    data_dir: Path = Path("~/.local/share/diloco-node")
    """Folder for identity, checkpoints and history. One node owns it at a time."""
    text_dir: Path = Path("text")
    """Where files that a run's sources name are looked for; relative to `data_dir`."""
    persist: bool = False
    """Whether page and API stay up after `leave`, `drain`, the run's end or a fatal error, until `resume`. The image
    sets it: a container that ends is started again."""

    @property
    def text_folder(self) -> Path:
        return self.data_dir / self.text_dir.expanduser()

    @property
    def hub_cache(self) -> Path:
        """What is fetched from the hub."""
        return self.data_dir / "cache" / "hub"


class DevicesConfig(Section):
    """What the node may compute on."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: the first GPU, else the CPU."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Of the inner step's matrix products; `auto`: on a GPU bf16 where it has it, else fp16; fp32 on a CPU."""
    micro_batch: int = Field(0, ge=0)
    """Sequences per forward pass; 0: as many as fit, found by trying. Several passes make the batch of the run."""
    ranks: int = Field(1, ge=1, le=64)
    """Processes that share an inner step, each with a GPU of its own (without GPUs, with a share of the threads)."""
    sharding: Literal["data-parallel", "fsdp"] = "data-parallel"
    """With several ranks: `data-parallel`: each has all of the model; `fsdp`: each has a part of it."""
    activation_checkpointing: bool = False
    """Keep a layer's input only and compute the rest again on the way back: less memory, a third more time."""
    compile: bool = False
    """Compile the layers (torch.compile): minutes at the start, faster steps after."""
    chunked_loss: Literal["auto", "on", "off"] = "auto"
    """Make the logits for a part of the tokens at a time; `auto`: where all of them would take over 1 GB."""


class SwarmConfig(Section):
    """How the node meets the others."""

    bootstrap: tuple[str, ...] = ()
    """Multiaddresses of further bootstrap peers, beside those of the invite."""
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/31337",)
    """Multiaddresses to listen on; port 0 takes any free one."""
    announce: tuple[str, ...] = ()
    """Multiaddresses to tell others instead of those found; for port forwarding."""
    relay: bool = True
    """Use and offer circuit relays, for nodes without an inbound port."""
    port_mapping: bool = False
    """Ask the router to open the port (UPnP, NAT-PMP)."""
    lan_discovery: bool = True
    """Announce this node on private networks, by multicast, so that nodes of a run find each other there."""


class ApiConfig(Section):
    """The HTTP port."""

    host: str = "127.0.0.1"
    """Address to bind. Other than loopback: reachable from elsewhere; the token is needed all the same."""
    port: int = Field(8080, ge=0, le=65535)
    """Port to bind; 0: any free one."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names the API answers to, beside localhost, loopback addresses and the bound address."""
    metrics_public: bool = False
    """Whether /metrics needs no token for callers that are not on loopback."""
    tls_cert: str = ""
    """PEM file with the certificate, and what leads to its issuer; with `tls_key` the API speaks HTTPS only."""
    tls_key: str = ""
    """PEM file with the certificate's key, without a password."""

    @model_validator(mode="after")
    def _both_or_none(self) -> ApiConfig:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key go together: set both, or none")
        return self


class LimitsConfig(Section):
    """What the node may take from the machine."""

    cpu_threads: int = Field(0, ge=0)
    """Threads for computing; 0: all cores."""
    gpu_memory_ratio: float = Field(0, ge=0, le=1)
    """Most of the GPU's memory that the node's tensors may take, as a share of all of it; 0: no limit."""
    gpu_power_watts: float = Field(0, ge=0)
    """Most that the GPU may draw, where the driver lets this user say so; 0: no cap. What was set before comes back."""
    disk_gb: float = Field(0, ge=0)
    """Most that the data folder may hold, your own text aside, 10^9 bytes; the oldest goes first. 0: no limit."""
    upload_mbit_s: float = Field(0, ge=0)
    """Most that is sent to other peers, all together, headers included; 0: no limit, else at least 2."""
    download_mbit_s: float = Field(0, ge=0)
    """Most that is received from other peers; 0: no limit, else at least 2."""

    @field_validator("disk_gb")
    @classmethod
    def _holds_something(cls, disk_gb: float) -> float:
        if 0 < quota_bytes(disk_gb) < LEAST_BYTES:
            raise ValueError(f"less than {LEAST_BYTES / 1e9:g} hold nothing: allow that, or 0 for no limit")
        return disk_gb

    @field_validator("upload_mbit_s", "download_mbit_s")
    @classmethod
    def _rounds_fit(cls, mbit_s: float) -> float:
        if 0 < mbit_s < LEAST_MBIT_S:
            raise ValueError(
                f"rounds do not fit through less than {LEAST_MBIT_S:g} Mbit/s: allow that, or 0 for no limit"
            )
        return mbit_s


def _windows(texts: tuple[str, ...]) -> tuple[str, ...]:
    texts = whole_windows(texts)
    for text in texts:
        parse_window(text)
    return texts


class ScheduleConfig(Section):
    """When the node trains; else it is paused, and the machine its owner's. `resume` and `pause` go before it all."""

    timezone: Annotated[str, AfterValidator(check_zone)] = ""
    """Time zone of the hours, such as Europe/Berlin; empty: this machine's."""
    active: Annotated[tuple[str, ...], AfterValidator(_windows)] = ()
    """Hours in which it trains, such as "mon-fri 22:00-08:00" and "sat,sun 00:00-24:00"; none: always."""
    on_battery: Literal["pause", "run"] = "pause"
    """What a notebook's node does without mains power."""
    user_active: Literal["run", "pause"] = "run"
    """What the node does while somebody uses this machine, as far as it can tell."""
    user_idle_s: float = Field(300.0, ge=1)
    """Seconds without input after which the user counts as away."""

    @property
    def hours(self) -> Hours:
        return hours(self.active, self.timezone)


class CheckpointConfig(Section):
    """What is kept on disk."""

    keep: int = Field(2, ge=1)
    """Newest checkpoints to keep."""
    every_s: float = Field(60.0, gt=0)
    """Seconds from one checkpoint to the next at least; they are written at round ends, and at a clean stop."""


class LogConfig(Section):
    """What the node writes."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is written."""
    format: Literal["console", "json"] = "console"
    """`console`: for people; `json`: one object a line."""


class Config(Section):
    """Everything that can be set. `run` holds for a founder only; a joiner gets it from the swarm."""

    node: NodeConfig = NodeConfig()
    run: RunConfig = RunConfig()
    devices: DevicesConfig = DevicesConfig()
    swarm: SwarmConfig = SwarmConfig()
    api: ApiConfig = ApiConfig()
    limits: LimitsConfig = LimitsConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
