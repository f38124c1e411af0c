"""The configuration of one node: sections, keys, defaults and the rules between them."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from node.config.manifest import RunConfig, Section, check_name
from node.config.publish_address import parse_publish_address
from node.config.weekly_hours import Hours, check_zone, parse_hours, parse_window, rejoin_windows
from node.host.disk_quota import LEAST_BYTES, quota_bytes
from node.host.files import expand_user
from node.multiaddress import parse, parse_plain

MBIT_S_MIN = 2.0
"""Bulk transfers time out at about this rate."""


def _check_mbit_s(mbit_s: float) -> float:
    if 0 < mbit_s < MBIT_S_MIN:
        raise ValueError(f"rounds time out at less than {MBIT_S_MIN:g} Mbit/s: allow that much, or 0 for no limit")
    return mbit_s


def _on_or_off(value: object) -> object:
    names = {True: "on", "true": "on", False: "off", "false": "off"}
    return names.get(value, value) if isinstance(value, bool | str) else value


ON_OFF = BeforeValidator(_on_or_off)
"""Also takes true and false, as for a boolean key."""
MbitPerSecond = Annotated[float, Field(ge=0, le=1e6), AfterValidator(_check_mbit_s)]


def _check_folder_name(folder: object) -> object:
    """Refuse an empty name, which would mean the working folder."""
    if folder == "":
        raise ValueError("it should name a folder")
    return folder


class NodeConfig(Section):
    """This node."""

    name: Annotated[str, Field(max_length=64), AfterValidator(check_name)] = ""
    """Name shown to the other members; empty means a short form of the peer id."""
    data_dir: Annotated[Path, BeforeValidator(_check_folder_name)] = Path("~/.local/share/diloco-node")
    """Folder for identity, checkpoints and history. Only one node at a time can use it."""
    text_dir: Path = Path("text")
    """Folder of the files that a run's sources name. A relative path is below `data_dir`. It must not contain
    `data_dir`."""
    persist: bool = False
    """Keep the dashboard and API running after `leave`, `drain`, the run's end or a fatal error, until `resume`. The
    container image sets it, because an engine restarts a container that ends."""

    @property
    def text_folder(self) -> Path:
        return self.data_dir / expand_user(self.text_dir)

    @property
    def hub_cache(self) -> Path:
        """Folder of downloads from the hub."""
        return self.data_dir / "cache" / "hub"


class DevicesConfig(Section):
    """The devices that the node computes on."""

    device: Literal["auto", "cpu", "cuda", "rocm", "xpu", "mps"] = "auto"
    """`auto` means the first GPU, or the CPU if there is none. `cuda` is NVIDIA, `rocm` AMD, `xpu` Intel and `mps`
    Apple; each needs the build of torch for it."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of the inner step's matrix products. `auto` means bf16 on GPUs that support it, fp16 on other GPUs, and
    fp32 on a CPU."""
    micro_batch: int = Field(0, ge=0, le=65_536)
    """Sequences per forward pass; 0 means as many as fit, found by trial. Gradients accumulate to the run's batch
    size."""
    ranks: int = Field(1, ge=1, le=64)
    """Number of processes that share an inner step. Each has its own GPU or, without GPUs, a share of the threads."""
    sharding: Literal["data-parallel", "fsdp"] = "data-parallel"
    """What each of several ranks holds: the whole model (`data-parallel`) or a part of it (`fsdp`)."""
    activation_checkpointing: bool = False
    """Store only each layer's input and recompute the rest in the backward pass. It takes less memory and a third more
    time."""
    compile: Annotated[Literal["auto", "on", "off"], ON_OFF] = "auto"
    """Compile the layers and the loss with torch.compile. Steps on an NVIDIA H200 are then 1.6 to 2 times as fast, and
    the first start takes half a minute longer. `auto` does so for one NVIDIA GPU with bf16 if a C compiler is there."""
    chunked_loss: Literal["auto", "on", "off"] = "auto"
    """Compute the logits for a part of the tokens at a time. `auto` does so if all logits would take over 1 GB."""


def _bootstrap(texts: tuple[str, ...]) -> tuple[str, ...]:
    addresses = [parse_plain(text) for text in texts]
    for address in addresses:
        if not address.port or address.is_wildcard:
            raise ValueError(f"'{address}' cannot be dialed: name the peer's own address and port")
    return tuple(map(str, addresses))


def _listen(texts: tuple[str, ...]) -> tuple[str, ...]:
    addresses = [parse(text) for text in texts]
    for address in addresses:
        if address.transport != "tcp" or address.is_name or address.peer_id:
            raise ValueError(
                f"'{address}' is not an address to listen on: write an IP address of this machine and a TCP port, such "
                "as /ip4/0.0.0.0/tcp/31337"
            )
    wildcards = {(address.host_type, address.port) for address in addresses if address.is_wildcard}
    for address in addresses:
        if address.port and not address.is_wildcard and (address.host_type, address.port) in wildcards:
            raise ValueError(f"'{address}' is already covered by the wildcard address: leave it out")
    return tuple(dict.fromkeys(map(str, addresses)))


def _announce(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Check and normalise addresses to announce. The peer id is removed, because it is this node's own."""
    addresses = [replace(parse_plain(text, bare_port=0), peer_id="") for text in texts]
    for address in addresses:
        if address.is_wildcard:
            raise ValueError(f"'{address}' cannot be dialed by others: name the address that they see")
        if address.transport != "tcp":
            raise ValueError(f"'{address}' is not TCP, so no peer dials it: write {address.as_tcp()}")
    return tuple(map(str, addresses))


class SwarmConfig(Section):
    """How the node connects to its peers."""

    bootstrap: Annotated[tuple[str, ...], AfterValidator(_bootstrap)] = ()
    """Bootstrap peers besides those of the invite: HOST:PORT, [IPv6]:PORT or multiaddresses."""
    listen: Annotated[tuple[str, ...], AfterValidator(_listen)] = ("/ip4/0.0.0.0/tcp/31337", "/ip6/::/tcp/31337")
    """TCP multiaddresses to listen on. Port 0 means any free port; with an empty list the node does not listen. If
    31337 is in use, and neither this key nor a port in `announce` is set, the node takes the next free port and keeps
    it."""
    announce: Annotated[tuple[str, ...], AfterValidator(_announce)] = ()
    """Addresses to announce, for port forwarding, instead of those that the node finds: HOST, HOST:PORT,
    [IPv6]:PORT or multiaddresses. Without a port, or with port 0, the port is the one that the node listens on."""
    relay: bool = True
    """Relay traffic between members of the run that cannot reach each other, as long as others can reach this node's
    port."""
    relay_mbit_s: MbitPerSecond = 0
    """Limit of relayed traffic in each direction, at least 2; 0 means as much as `limits.upload_mbit_s` and
    `limits.download_mbit_s` allow."""
    port_mapping: bool = False
    """Ask the router to open the port (UPnP, NAT-PMP). Disables hole punching by TCP simultaneous open."""
    lan_discovery: bool = True
    """Announce this node by multicast on private networks, so that nodes of a run find each other there."""
    list_run: bool = False
    """List the run in the directory of runs, which `diloco-node runs` and `run --any` read. A listing tells everybody
    the manifest with the run's name and purpose, the number of members, the progress, and the addresses of some
    members. A few nodes of a run that list it are enough."""

    @property
    def announces_port(self) -> bool:
        """Whether `announce` names a port. A router or firewall then forwards it to the port of `listen`."""
        return any(parse(address).port for address in self.announce)

    @model_validator(mode="after")
    def _listens_to_announce(self) -> SwarmConfig:
        if self.announce and not self.listen:
            raise ValueError("announce needs an address in listen: set listen, or leave announce empty")
        return self


def _check_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        _ = parts.port  # Raises for a port that is no number.
    except ValueError as exc:
        raise ValueError(f"it is not a URL ({exc}): write one that begins with http:// or https://") from exc
    if url and (parts.scheme not in ("http", "https") or not parts.hostname or not url.isprintable() or " " in url):
        raise ValueError("write a URL that begins with http:// or https://")
    if parts.username is not None:
        raise ValueError("a URL with a user name is not supported: put the key into its path or query")
    return url


def _public_url(url: str) -> str:
    parts = urlsplit(_check_url(url))
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError("the page is at the root: write only scheme, host and port, such as http://nas.local:8080")
    return url.rstrip("/")


class ApiConfig(Section):
    """The HTTP port."""

    host: str = "127.0.0.1"
    """Address to bind. Addresses other than loopback are reachable from elsewhere; the token is still required."""
    port: int = Field(8080, ge=0, le=65535)
    """Port to bind; 0 means any free port."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names that the API answers to besides localhost, loopback addresses and the bound address."""
    public_url: Annotated[str, AfterValidator(_public_url)] = ""
    """Address of the page for browsers, such as http://nas.local:8081, if it differs from the bound one: a published
    port of a container, or a proxy. The printed link has it, and the API answers to its host name."""
    public: bool = False
    """Serve a read-only page about the run at /public/ to everybody who reaches the port, without a token. It shows the
    names that members chose, and no address but those of `swarm.announce`. Without them it shows no invite."""
    metrics_public: bool = False
    """Serve /metrics without a token to all callers, not only to those on loopback."""
    tls_cert: str = ""
    """PEM file with the certificate and its intermediate ones. With it and `tls_key`, the API speaks only HTTPS."""
    tls_key: str = ""
    """PEM file with the certificate's key, without a password."""

    @property
    def host_names(self) -> tuple[str, ...]:
        """All host names that are allowed by name."""
        public = urlsplit(self.public_url).hostname
        return (*self.allowed_hosts, *((public,) if public else ()))

    @model_validator(mode="after")
    def _certificate_has_key(self) -> ApiConfig:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key go together: set both or neither")
        return self


def _check_disk_gb(disk_gb: float) -> float:
    if 0 < quota_bytes(disk_gb) < LEAST_BYTES:
        raise ValueError(f"a node needs at least {LEAST_BYTES / 1e9:g}: allow that much, or 0 for no limit")
    return disk_gb


class LimitsConfig(Section):
    """How much of the machine the node may use."""

    cpu_threads: int = Field(0, ge=0, le=4096)
    """Number of compute threads; 0 means one per core."""
    gpu_memory_ratio: float = Field(0, ge=0, le=1)
    """Largest share of the GPU's memory for the node's tensors; 0 means no limit."""
    gpu_power_watts: float = Field(0, ge=0, le=10_000)
    """Power limit of the GPU, if the driver lets this user set it; 0 leaves it unchanged. The node restores the
    previous limit when its worker ends."""
    disk_gb: Annotated[float, Field(ge=0, le=1e6), AfterValidator(_check_disk_gb)] = 0
    """Largest size of the data folder without your own text, in 10^9 bytes; 0 means no limit. The oldest files are
    removed first."""
    upload_mbit_s: MbitPerSecond = 0
    """Limit of data sent to all peers together, headers included, at least 2; 0 means no limit."""
    download_mbit_s: MbitPerSecond = 0
    """Limit of data received from all peers together, at least 2; 0 means no limit."""
    month_gb: float = Field(0, ge=0, le=1e9)
    """Traffic in a calendar month, sent and received together, in 10^9 bytes; 0 means no limit. When it is reached, the
    node leaves the swarm until the next month, or until `resume`. A relay does not obey it."""


def _active(texts: tuple[str, ...]) -> tuple[str, ...]:
    windows = rejoin_windows(texts)
    for window in windows:
        parse_window(window)
    return windows


class ScheduleConfig(Section):
    """When the node trains; outside of these hours it is paused. The commands `resume` and `pause` override the
    schedule."""

    timezone: Annotated[str, AfterValidator(check_zone)] = ""
    """Time zone of the training hours, such as Europe/Berlin; empty means this machine's."""
    active: Annotated[tuple[str, ...], AfterValidator(_active)] = ()
    """Training hours, such as "mon-fri 22:00-08:00" and "sat,sun 00:00-24:00"; empty means always."""
    on_battery: Literal["pause", "run"] = "pause"
    """What the node does on battery power."""
    user_active: Literal["run", "pause"] = "run"
    """What the node does while somebody uses this machine, as far as it can detect that."""
    user_idle_s: float = Field(300.0, ge=1, le=604_800)
    """Seconds without input after which the user counts as absent."""

    @property
    def zone(self) -> ZoneInfo:
        return Hours(timezone=self.timezone).zone

    @property
    def hours(self) -> Hours:
        return parse_hours(self.active, self.timezone)


class CheckpointConfig(Section):
    """Checkpoints on disk."""

    keep: int = Field(2, ge=1, le=1000)
    """Number of newest checkpoints to keep."""
    every_s: float = Field(300.0, gt=0, le=604_800)
    """Time between two checkpoints, also within a round. It is at least 20 times as long as writing a checkpoint takes.
    A crash loses the inner steps since the newest checkpoint, but no round."""


def _check_command(command: str) -> str:
    try:
        words = shlex.split(command)
    except ValueError as exc:
        raise ValueError(f"the words of the command cannot be told apart ({exc}): close its quotes") from exc
    if command and not words:
        raise ValueError("the command is blank: name a program, or leave it empty")
    return command


class NotifyConfig(Section):
    """Messages to the owner when the node needs them: an error, a warning, a port that nobody reaches, an update, or
    five minutes in which it cannot start, for example for lack of memory."""

    webhook: Annotated[str, AfterValidator(_check_url)] = ""
    """URL that gets a POST with JSON: `node`, `run`, `code`, `text` and `at`."""
    ntfy: Annotated[str, AfterValidator(_check_url)] = ""
    """URL of an ntfy topic, such as https://ntfy.sh/my-topic."""
    command: Annotated[str, AfterValidator(_check_command)] = ""
    """Command to run, without a shell. Its environment has DILOCO_TITLE, DILOCO_CODE and DILOCO_TEXT."""


def _check_publish_address(text: str) -> str:
    return str(parse_publish_address(text)) if text else ""


class PublishConfig(Section):
    """Publications of the run: the model with a card, and all that `run --from` needs. The nodes of a run that publish
    draw by hash whose turn it is, so one that dies is followed by the next, and nothing is published twice."""

    to: Annotated[str, AfterValidator(_check_publish_address)] = ""
    """Where this node publishes the run: `hub:OWNER/NAME`, a folder, or a URL that fsspec opens, such as
    s3://bucket/folder. Empty means that it does not. All nodes that publish a run name the same place. Keys of a URL
    come from the environment."""
    every_rounds: int = Field(100, ge=1)
    """Rounds from one publication to the next. The last round of the run is published as well."""
    turn_s: float = Field(600.0, ge=1, le=86_400)
    """Seconds after which the next drawn node publishes a round that the ones before it have not published."""
    token_file: str = ""
    """File with the token of the hub, which must be allowed to write. Empty means HF_TOKEN, or the login of this
    user."""


TaskName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,40}$")]


class EvaluateConfig(Section):
    """Evaluation of the model on tasks of lm-eval, on the CPU and at low priority. It needs
    the extra `eval` (configs/README.md). The nodes of a run that name tasks are drawn by hash. All members see the
    medians."""

    tasks: tuple[TaskName, ...] = ()
    """Tasks of lm-eval, or of files in `task_dir`. Empty means that this node does not evaluate on tasks. Many data
    sets come from the hub."""
    task_dir: str = ""
    """Folder with own task files (YAML) of lm-eval. Such a file can run code, so use only files that you trust."""
    every_rounds: int = Field(100, ge=1)
    """Rounds from one evaluation to the next."""
    members: int = Field(3, ge=1)
    """Number of nodes that are drawn for each evaluation, of those that name tasks."""
    limit: int = Field(0, ge=0)
    """Most examples of each task; 0 means all."""


class MetricsConfig(Section):
    """The curves of the run: losses, learning rate, norms, members, bytes and seconds by round."""

    sinks: tuple[Literal["jsonl", "tensorboard", "trackio", "wandb", "otlp"], ...] = ()
    """Where this node writes the curves of the whole run, below `metrics/` in its data folder. `otlp` sends them to
    OTEL_EXPORTER_OTLP_ENDPOINT. `wandb` is offline unless WANDB_MODE says otherwise. All but `jsonl` need
    the extra of the same name (configs/README.md)."""


class LogConfig(Section):
    """The log."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""
    format: Literal["console", "json"] = "console"
    """`console` is text for people; `json` is one object per line."""


class Config(Section):
    """All settings. `run` is used by a founder; a joiner gets it from the swarm."""

    node: NodeConfig = NodeConfig()
    run: RunConfig = RunConfig()
    devices: DevicesConfig = DevicesConfig()
    swarm: SwarmConfig = SwarmConfig()
    api: ApiConfig = ApiConfig()
    limits: LimitsConfig = LimitsConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    notify: NotifyConfig = NotifyConfig()
    publish: PublishConfig = PublishConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    metrics: MetricsConfig = MetricsConfig()
    log: LogConfig = LogConfig()
