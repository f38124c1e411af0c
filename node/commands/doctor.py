"""Checks whether this machine can run the configured node, and forecasts how busy its device will be.

`run_checks` yields one finding per check. A finding with the verdict "fault" names its remedy.
"""

from __future__ import annotations

import ctypes
import math
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import torch

from node.commands.terminal import short_duration
from node.config.loader import DEFAULT
from node.config.manifest import Invite, Manifest, RunConfig
from node.config.schema import Config, DevicesConfig
from node.daemon.host_sensors import UNTOLD, idle_seconds, on_battery
from node.daemon.http_server import bind_api
from node.diloco.codec import make_codec
from node.diloco.forecast import required_link_mbit_s, round_bytes, transfer_seconds, utilization
from node.diloco.outer import pseudo_gradient
from node.errors import MachineError, UsageError
from node.host.cgroup import memory_limit, quota_cores
from node.host.ports import API_PORT_FILE, LISTEN_PORT_FILE, PortFile, choose
from node.host.revision import installed_version
from node.multiaddress import parse
from node.status import Phase
from node.training.algorithm import payload_bytes
from node.training.device import ComputeDevice, choose_device
from node.training.fit import GB, choose_execution, compare_resources, estimate_requirements, peak_bytes
from node.training.inner import Execution, InnerLoop
from node.training.model import build_model, change_flat_, prepare_layers, take_flat, unit_elements

LINKS_MBIT_S = (10, 20, 100, 500)
"""Speeds for which the forecast is made if no limit is set."""
DIAL_TIMEOUT_S = 3.0
TRIAL_S = 10.0
TRIAL_RUNS_MAX = 5
TRIAL_FLOPS = 3e11
"""Upper bound of one trial step on a CPU: a few seconds on two cores."""
MIN_TRIAL_LENGTH = 64
"""A trial step on a CPU has at least so many tokens."""
TRIAL_ELEMENTS = 1 << 24
"""Upper bound of the parameters copied and encoded in the trial."""
FEW_ROUNDS, HIGH_MOMENTUM = 50, 0.5
"""In a run of fewer rounds, an outer momentum above this one still adds up early rounds when the run ends."""
LONG_ROUND_S = 12 * 3600.0
"""A machine that is lent for one night cannot complete a longer round."""
STA_UNSYNC = 0x40


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    verdict: Literal["ok", "warn", "fault"]
    subject: str
    text: str
    """One sentence. If the verdict is "fault", it names the remedy."""

    def __str__(self) -> str:
        return f"{self.verdict:5} {self.subject:12} {self.text}"


@dataclass(frozen=True, slots=True)
class NodeSetup:
    """The node to check."""

    config: Config
    manifest: Manifest | None
    """The manifest of the data folder's run; None means a run founded with this configuration."""
    invite: Invite | None
    members: int
    """Assumed number of members of a round."""
    phase: Phase | None
    """Phase of the node that runs on this data folder now; None without one."""
    origins: Mapping[str, str]
    """Source of each configured key."""

    def is_default(self, key: str) -> bool:
        return self.origins.get(key) == DEFAULT

    @property
    def is_running(self) -> bool:
        return self.phase is not None

    @property
    def has_memory(self) -> bool:
        """Whether the node that runs has the memory that its run needs."""
        return self.phase in (Phase.TRAINING, Phase.SYNCING)

    @property
    def run(self) -> RunConfig:
        return self.manifest.run if self.manifest else self.config.run


def run_checks(setup: NodeSetup) -> Iterator[Finding]:
    """Yield each finding as soon as it is known; the last ones take some seconds of computing."""
    yield _check_packages()
    yield _check_clock()
    yield from _check_container()
    yield from _check_schedule(setup.config)
    yield check_rounds(setup.run, setup.members, is_member=setup.manifest is not None)
    yield from _check_ports(setup)
    yield from _check_bootstrap(setup)
    run, config = setup.run, setup.config
    try:
        limits = config.limits
        device = choose_device(config.devices, limits.cpu_threads, gpu_memory_ratio=limits.gpu_memory_ratio)
        resources = list(_check_resources(setup, device))
        yield from resources
        if not is_healthy(resources):
            return
        if any(finding.verdict == "warn" for finding in resources):
            yield Finding("warn", "device", "Not measured, because the node needs its memory: pause it first.")
            return
        yield Finding("ok", "device", f"Computing a few inner steps on {device.name}, which may take a minute.")
        step_s, stall_s, how = _measure(run, device, config.devices)
        if device.device.type != "cpu":
            yield Finding("ok", "memory", _describe_steps(setup, how))
    except MachineError as exc:
        yield Finding("fault", "device", str(exc))
        return
    speed = f"{step_s:.3g} s an inner step, {run.tokens_per_inner_step / step_s:,.0f} tokens/s"
    if setup.is_running:
        speed += ", measured while the node runs: pause it for its full speed"
    verdict: Literal["ok", "warn"] = "warn" if setup.is_running else "ok"
    yield Finding(verdict, "device", f"{device.name}, {device.precision}: {speed}.")
    yield from forecast(setup, sum(unit_elements(run.model)), step_s, stall_s)


def is_healthy(findings: Sequence[Finding]) -> bool:
    return all(finding.verdict != "fault" for finding in findings)


# The machine


def _check_packages() -> Finding:
    versions = [f"Python {platform.python_version()}"]
    for package in ("torch", "hivemind"):
        if (version := installed_version(package)) is None:
            text = f"{package} is not installed: install diloco-node with its dependencies."
            return Finding("fault", "packages", text)
        versions.append(f"{package} {version}")
    return Finding("ok", "packages", f"{', '.join(versions)}.")


class _Timex(ctypes.Structure):
    """The beginning of adjtimex(2)'s structure; `rest` covers the remainder."""

    _fields_ = [
        ("modes", ctypes.c_uint), ("offset", ctypes.c_long), ("freq", ctypes.c_long), ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long), ("status", ctypes.c_int), ("rest", ctypes.c_char * 256),
    ]  # fmt: skip


def _check_clock() -> Finding:
    """Check the wall clock. Peer records expire by it, so it may be off by only a few seconds."""
    try:
        timex = _Timex()
        result = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):
        return Finding("warn", "clock", "This system does not tell whether its clock is synchronized: check it once.")
    if result < 0 or timex.status & STA_UNSYNC:
        return Finding(
            "warn", "clock", "The clock is not synchronized: turn on NTP, because peers accept clocks at most 3 s off."
        )
    return Finding("ok", "clock", "Synchronized.")


def _check_container() -> Iterator[Finding]:
    """Name the limits of the container or service, which psutil and torch do not see."""
    limit, cores = memory_limit(), quota_cores()
    if limit is not None:
        text = f"The container or service limits memory to {limit}, of which {limit.free_bytes / 1e9:.3g} GB are free."
        yield Finding("ok", "container", text)
    if cores is not None:
        yield Finding("ok", "container", f"The container or service limits the processor to {cores} cores.")


def _check_schedule(config: Config) -> Iterator[Finding]:
    schedule, now = config.schedule, datetime.now(UTC)
    if schedule.active:
        hours = schedule.hours
        change = hours.next_change(now)
        state = "trains now" if hours.is_active(now) else "does not train now"
        until = f", until {hours.local(change)}" if change is not None else ""
        zone = schedule.timezone or "of this machine"
        yield Finding("ok", "hours", f"{', '.join(schedule.active)}, time zone {zone}: the node {state}{until}.")
    if schedule.user_active == "pause":
        idle_s, source = idle_seconds()
        if idle_s is None:
            yield Finding("warn", "user", f"schedule.user_active has no effect here: {source}.")
        else:
            verdict: Literal["ok", "warn"] = "warn" if UNTOLD in source else "ok"
            yield Finding(verdict, "user", f"Somebody was active {idle_s:.0f} s ago, according to {source}.")
    if schedule.on_battery == "pause" and (battery := on_battery()) is not None:
        yield Finding("ok", "battery", "On battery: the node would pause." if battery else "On mains power.")


def _check_ports(setup: NodeSetup) -> Iterator[Finding]:
    """Check the ports by the same rules as `run`."""
    if setup.is_running:
        yield Finding("ok", "ports", "In use by the node that runs on this data folder.")
        return
    config, cache = setup.config, setup.config.node.data_dir / "cache"
    try:
        file = PortFile(cache / API_PORT_FILE)
        with bind_api(config.api, file, is_default=setup.is_default("api.port"), keep=False) as sock:
            yield _describe_port("api.port", config.api.port, sock.getsockname()[1], file)
    except (MachineError, UsageError) as exc:
        yield Finding("fault", "ports", f"api.port: {exc}")
    try:
        listen = [parse(address) for address in config.swarm.listen]
        may_move = setup.is_default("swarm.listen") and not config.swarm.announces_port
        file = PortFile(cache / LISTEN_PORT_FILE)
        with choose(listen, file, may_move=may_move) as reserved:
            if not reserved.addresses:
                yield Finding("warn", "ports", "swarm.listen is empty: no peer can dial this node.")
            hosts = {address.host for address in reserved.addresses}  # Without IPv6, "::" may be left out.
            kept = (address for address in listen if address.host in hosts)
            for wanted, address in zip(kept, reserved.addresses, strict=True):
                yield _describe_port(f"swarm.listen on {address.host}", wanted.port, address.port, file)
    except MachineError as exc:
        yield Finding("fault", "ports", f"swarm.listen: {exc}")


def _describe_port(key: str, wanted: int, port: int, file: PortFile) -> Finding:
    if wanted == 0:
        text = "any free one"
    elif wanted == port:
        text = f"{port} is free"
    elif file.recall(wanted) == port:
        text = f"the node keeps {port}, which it took when {wanted} was in use"
    else:
        text = f"{wanted} is in use by another program; the node takes {port}"
    return Finding("ok", "ports", f"{key}: {text}.")


def _check_bootstrap(setup: NodeSetup) -> Iterator[Finding]:
    answered, endpoints = 0, set()
    for text in [*setup.config.swarm.bootstrap, *(setup.invite.addresses if setup.invite else ())]:
        try:
            address = parse(text)
        except ValueError as exc:
            yield Finding("warn", "bootstrap", f"{exc}: not tried.")
            continue
        if address.transport == "tcp":
            endpoints.add((address.host, address.port))
        else:
            yield Finding("warn", "bootstrap", f"{text} is not TCP: not tried.")
    for host, port in sorted(endpoints):
        try:
            with socket.create_connection((host, port), timeout=DIAL_TIMEOUT_S):
                answered += 1
        except OSError as exc:
            yield Finding("warn", "bootstrap", f"{host} port {port} does not answer ({exc.strerror or 'no answer'}).")
    if answered:
        yield Finding("ok", "bootstrap", f"{answered} of {len(endpoints)} addresses answer.")
    elif endpoints:
        yield Finding("fault", "bootstrap", "No bootstrap peer answers: check the network, or ask for a newer invite.")


# The requirements of the run


def check_rounds(run: RunConfig, members: int, *, is_member: bool) -> Finding:
    """Compare the number of the run's rounds, if all members make H steps in each, with the outer momentum."""
    rounds = run.total_tokens / (run.round.inner_steps * run.tokens_per_inner_step * members)
    text = f"The whole run has about {_two_digits(rounds)} rounds with {members} members"
    if rounds < FEW_ROUNDS and run.outer.momentum > HIGH_MOMENTUM:
        remedy = f"set run.outer.momentum to {HIGH_MOMENTUM:g}, or lower run.round.inner_steps"
        remedy = "only those who steer the run can change this" if is_member else remedy
        return Finding("warn", "rounds", f"{text}, too few for an outer momentum of {run.outer.momentum:g}: {remedy}.")
    return Finding("ok", "rounds", f"{text}.")


def _check_resources(setup: NodeSetup, device: ComputeDevice) -> Iterator[Finding]:
    needs = estimate_requirements(setup.run, setup.config, device.precision)
    for what, needed, free, remedy in compare_resources(needs, setup.config, device):
        subject, text = what.split()[-1], f"{needed / GB:.2f} GB of {what}, {free / GB:.3g} GB free"
        if needed <= free:
            yield Finding("ok", subject, f"{text}.")
        elif setup.has_memory and what in ("memory", "GPU memory"):
            yield Finding("warn", subject, f"{text}, besides what the node that trains here uses.")
        else:
            yield Finding("fault", subject, f"{text}: {remedy}.")


def _describe_steps(setup: NodeSetup, how: Execution) -> str:
    needed_gb = peak_bytes(setup.run, setup.config, how) / GB
    compiled = "compiled layers" if how.compiled else "layers that are not compiled"
    return (
        f"The steps need about {needed_gb:.3g} GB of GPU memory, with {how.micro_batch} sequences at once in "
        f"{how.precision} and {compiled}."
    )


def _measure(run: RunConfig, device: ComputeDevice, devices: DevicesConfig) -> tuple[float, float, Execution]:
    """Return the median seconds of an inner step, the seconds for which an outer step stalls the device, and how steps
    are computed."""
    rows, length = run.inner.batch_size, run.inner.sequence_length
    model = build_model(run.model, seed=0)
    prepare_layers(model, devices)
    parameters = sum(p.numel() for p in model.parameters())
    if device.device.type == "cpu":
        tokens = TRIAL_FLOPS / (6 * parameters)
        length = min(length, max(MIN_TRIAL_LENGTH, int(tokens)))
        rows = max(1, min(rows, int(tokens / length)))
    how = choose_execution(model, run, device, devices)
    inner = InnerLoop(model, run.inner, device.device, how)
    batch = torch.randint(run.model.vocab_size, (rows, length + 1))
    inner.step(batch, run.inner.lr)
    step_s = _median_s(lambda: inner.step(batch, run.inner.lr)) * run.tokens_per_inner_step / (rows * length)
    # Copy and encode a part of the parameters, and scale the time to all of them.
    ranges = ((0, min(parameters, TRIAL_ELEMENTS)),)
    sent = take_flat(model, ranges)
    stall_s = _median_s(lambda: take_flat(model, ranges))
    stall_s += _median_s(lambda: change_flat_(model, ranges, lambda part, at, _: sent[at].to(part.device)))
    if run.sync.mode == "blocking":
        codec, results = make_codec(run.sync.codec), make_codec(run.sync.encoding_of_results)
        mean = results.encode(sent)
        stall_s += _median_s(lambda: codec.encode(pseudo_gradient(sent, sent)))
        stall_s += _median_s(lambda: results.decode(mean, sent.numel()))
    return step_s, stall_s * parameters / ranges[0][1], how


def _median_s(work: Callable[[], object]) -> float:
    """Return the median time of up to TRIAL_RUNS_MAX calls; no call begins after TRIAL_S."""
    seconds: list[float] = []
    while len(seconds) < TRIAL_RUNS_MAX and sum(seconds) < TRIAL_S:
        started_s = time.monotonic()
        work()
        seconds.append(time.monotonic() - started_s)
    return sorted(seconds)[len(seconds) // 2]


def forecast(setup: NodeSetup, parameters: int, step_s: float, stall_s: float) -> Iterator[Finding]:
    """Yield how busy the device will be on a link with the set limits, or, without limits, on LINKS_MBIT_S."""
    run, limits = setup.run, setup.config.limits
    payload = payload_bytes(run.sync, parameters)
    size_bytes, inner_s = round_bytes(payload, setup.members), run.round.inner_steps * step_s
    yield _check_round_length(setup, size_bytes, inner_s)
    set_limits = [rate for rate in (limits.upload_mbit_s, limits.download_mbit_s) if rate > 0]
    yield _check_link(run, payload, step_s, stall_s, min(set_limits, default=math.inf))
    for mbit_s in (min(set_limits),) if set_limits else LINKS_MBIT_S:
        transfer_s = transfer_seconds(size_bytes, mbit_s)
        busy = utilization(inner_s, transfer_s, overlapped=run.sync.mode != "blocking", stall_s=stall_s)
        text = f"{busy:.1%} busy at {mbit_s:g} Mbit/s (transfers of {_two_digits(transfer_s)} s)."
        yield Finding("ok", "forecast", text)


def _check_round_length(setup: NodeSetup, size_bytes: float, inner_s: float) -> Finding:
    """Say what a round costs, and whether this machine takes too long for the inner steps of one round.

    In a round of fixed length, a slow member makes fewer steps, so only the founder's speed counts.
    """
    run = setup.run
    text = (
        f"{run.sync.mode}, {run.sync.codec}, {setup.members} members: {size_bytes / 1e6:.1f} MB each way for "
        f"{run.round.inner_steps} inner steps of {short_duration(inner_s)} in all"
    )
    if inner_s > LONG_ROUND_S and (run.round.policy == "steps" or setup.manifest is None):
        remedy = "choose a smaller model, fewer inner steps or a faster device"
        return Finding("warn", "rounds", f"{text}, which is too long for a machine that is lent for a night: {remedy}.")
    return Finding("ok", "rounds", f"{text}.")


def _check_link(run: RunConfig, payload: float, step_s: float, stall_s: float, limit_mbit_s: float) -> Finding:
    """Compare the limits with the link that a member as fast as this device needs."""
    overlapped, steps = run.sync.mode != "blocking", run.round.inner_steps
    needed_mbit_s = required_link_mbit_s(
        payload, inner_steps=steps, step_s=step_s, overlapped=overlapped, stall_s=stall_s
    )
    if math.isinf(needed_mbit_s):
        return Finding("warn", "link", "A round of one inner step leaves no time for a transfer: raise inner_steps.")
    text = f"To contribute to every round a member needs at least {_two_digits(needed_mbit_s)} Mbit/s up and down"
    if limit_mbit_s < needed_mbit_s:
        remedy = "raise the limits; those who steer the run can choose fewer bits, overlapped sync or more inner steps"
        return Finding("warn", "link", f"{text}; this node's limit is {limit_mbit_s:g}: {remedy}.")
    return Finding("ok", "link", f"{text}.")


def _two_digits(number: float) -> str:
    """Format a number with two significant digits and without an exponent."""
    return f"{float(f'{number:.2g}'):,.10g}"
