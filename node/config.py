"""How this one node is set up. Knows files, environment and flags; knows no torch and no network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from node.manifest import RunConfig, Section
from node.multiaddress import parse, parse_plain
from node.quota import LEAST_BYTES, quota_bytes
from node.schedule import Hours, check_zone, hours, parse_window, whole_windows

LEAST_MBIT_S = 2.0
"""Bulk calls are given up when they take longer than at about this rate."""


def _check_mbit_s(mbit_s: float) -> float:
    if 0 < mbit_s < LEAST_MBIT_S:
        raise ValueError(f"rounds do not fit through less than {LEAST_MBIT_S:g} Mbit/s: allow that, or 0 for no limit")
    return mbit_s


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


def _bootstrap(texts: tuple[str, ...]) -> tuple[str, ...]:
    addresses = [parse_plain(text) for text in texts]
    for address in addresses:
        if not address.port or address.is_wildcard:
            raise ValueError(f"'{address}' is no address that can be called: name the peer's own address and port")
    return tuple(map(str, addresses))


def _listen(texts: tuple[str, ...]) -> tuple[str, ...]:
    addresses = [parse(text) for text in texts]
    for address in addresses:
        if address.transport != "tcp" or address.is_name or address.peer_id:
            raise ValueError(
                f"'{address}' is nothing to listen on: write an IP address of this machine and a TCP port, such as "
                "/ip4/0.0.0.0/tcp/31337"
            )
    everywhere = {(address.host_type, address.port) for address in addresses if address.is_wildcard}
    for address in addresses:
        if address.port and not address.is_wildcard and (address.host_type, address.port) in everywhere:
            raise ValueError(f"'{address}' is listened on with the wildcard address already: leave it out")
    return tuple(dict.fromkeys(map(str, addresses)))


def _announce(texts: tuple[str, ...]) -> tuple[str, ...]:
    """The peer id is left out, as it is this node's own."""
    addresses = [replace(parse_plain(text, bare_port=0), peer_id="") for text in texts]
    for address in addresses:
        if address.is_wildcard:
            raise ValueError(f"'{address}' is no address that others can call: name the one that they see")
        if address.transport != "tcp":
            raise ValueError(f"'{address}' is not TCP, and nobody dials it: write {address.as_tcp()}")
    return tuple(map(str, addresses))


class SwarmConfig(Section):
    """How the node meets the others."""

    bootstrap: Annotated[tuple[str, ...], AfterValidator(_bootstrap)] = ()
    """Further bootstrap peers, beside those of the invite: HOST:PORT, [IPv6]:PORT or multiaddresses."""
    listen: Annotated[tuple[str, ...], AfterValidator(_listen)] = ("/ip4/0.0.0.0/tcp/31337", "/ip6/::/tcp/31337")
    """Multiaddresses to listen on, IP over TCP; port 0 takes any free one, an empty list listens on nothing. Where
    nobody set this key, or a port in `announce`, and 31337 is taken, the node takes the next free port and keeps it."""
    announce: Annotated[tuple[str, ...], AfterValidator(_announce)] = ()
    """Addresses to tell others instead of those found, for port forwarding: HOST:PORT, [IPv6]:PORT, multiaddresses, or
    HOST alone; without a port, or with port 0, it is the port that the node listens on."""
    relay: bool = True
    """Carry calls between members of the run that cannot reach each other, while others reach this node's port."""
    relay_mbit_s: float = Field(0, ge=0)
    """Most that is carried so, each way; 0: as much as `limits.upload_mbit_s` and `limits.download_mbit_s` leave, else
    at least 2."""
    port_mapping: bool = False
    """Ask the router to open the port (UPnP, NAT-PMP). Switches off direct connections by simultaneous open."""
    lan_discovery: bool = True
    """Announce this node on private networks, by multicast, so that nodes of a run find each other there."""

    @field_validator("relay_mbit_s")
    @classmethod
    def _calls_fit(cls, mbit_s: float) -> float:
        return _check_mbit_s(mbit_s)

    @property
    def announces_port(self) -> bool:
        """Whether `announce` names a port: then a router or firewall leads to the port that is listened on."""
        return any(parse(address).port for address in self.announce)

    @model_validator(mode="after")
    def _announced_is_listened_on(self) -> SwarmConfig:
        if self.announce and not self.listen:
            raise ValueError("announce needs an address in listen: set listen, or leave announce empty")
        return self


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
        return _check_mbit_s(mbit_s)


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
    """Least seconds between checkpoints, written at round ends and clean stops. A crash loses no round, only steps."""


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
