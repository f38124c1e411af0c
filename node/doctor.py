"""Whether this machine can do what it is asked for, before the first step. Each fault comes with its mend.

Knows the machine, the configuration and the run of the data folder; of the swarm, whether its first peers answer.
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
from importlib import metadata
from typing import Literal

import torch

from node.config import Config, DevicesConfig
from node.daemon.probes import idle_seconds, on_battery
from node.daemon.server import bind_api
from node.diloco.codec import make_codec
from node.diloco.forecast import least_line_mbit_s, round_bytes, transfer_seconds, utilization
from node.diloco.outer import pseudo_gradient
from node.errors import MachineError, UsageError
from node.manifest import Invite, Manifest, RunConfig
from node.multiaddress import parse
from node.ports import API_PORT_FILE, LISTEN_PORT_FILE, PortFile, choose
from node.settings import DEFAULT
from node.training.device import Chosen, choose_device
from node.training.fit import GB, needs_of, settle_execution, shape_execution, shortages
from node.training.inner import InnerLoop
from node.training.model import build_model, change_flat_, take_flat, unit_elements

Verdict = Literal["ok", "warn", "fault"]
LINES_MBIT_S = (10, 20, 100, 500)
DIAL_S = 3.0
TIMED_S = 10.0
MAX_STEPS = 5
TIMED_FLOPS = 3e11
"""Of one trial step on a CPU: a few seconds on two cores."""
ENCODED_ELEMENTS = 1 << 24
STA_UNSYNC = 0x40


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's: what was looked at, and what it comes to."""

    verdict: Verdict
    about: str
    text: str
    """One sentence; a fault's names the mend."""

    def __str__(self) -> str:
        return f"{self.verdict:5} {self.about:12} {self.text}"


@dataclass(frozen=True, slots=True)
class Patient:
    """What is examined."""

    config: Config
    manifest: Manifest | None
    """Of the data folder's run; None: a run founded with this configuration."""
    invite: Invite | None
    members: int
    is_running: bool
    """A node runs on this data folder just now."""
    origins: Mapping[str, str]
    """Where each configured key came from."""

    def is_default(self, key: str) -> bool:
        return self.origins.get(key) == DEFAULT

    @property
    def run(self) -> RunConfig:
        return self.manifest.run if self.manifest else self.config.run


def examine(patient: Patient) -> Iterator[Finding]:
    """All findings, each as soon as it is known; the last ones take some seconds of computing."""
    yield _versions()
    yield _clock()
    yield from _schedule(patient.config)
    yield from _ports(patient)
    yield from _bootstrap(patient)
    try:
        chosen = _device(patient.config)
    except MachineError as exc:
        yield Finding("fault", "device", str(exc))
        return
    parameters = sum(unit_elements(patient.run.model))
    lacking = list(_shortages(patient, chosen))
    yield from lacking
    if not is_healthy(lacking):
        return
    try:
        step_s, still_s = _trial(patient.run, chosen, patient.config.devices)
    except MachineError as exc:
        yield Finding("fault", "device", str(exc))
        return
    per_step = patient.run.tokens_per_inner_step
    speed = f"{chosen.name}, {chosen.precision}: {step_s:.3g} s an inner step, {per_step / step_s:,.0f} tokens/s"
    if patient.is_running:
        yield Finding("warn", "device", f"{speed}, beside the node that runs: pause it to see all of its speed.")
    else:
        yield Finding("ok", "device", f"{speed}.")
    yield from forecast(patient, parameters, step_s, still_s)


def _device(config: Config) -> Chosen:
    limits = config.limits
    return choose_device(config.devices, limits.cpu_threads, gpu_memory_ratio=limits.gpu_memory_ratio)


# The machine


def _versions() -> Finding:
    found = [f"Python {platform.python_version()}"]
    for package in ("torch", "hivemind"):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            return Finding(
                "fault", "packages", f"{package} is not installed: install diloco-node with its dependencies."
            )
    return Finding("ok", "packages", f"{', '.join(found)}.")


class _Timex(ctypes.Structure):
    """adjtimex(2), as far as its `status`; the rest is room."""

    _fields_ = [
        ("modes", ctypes.c_uint), ("offset", ctypes.c_long), ("freq", ctypes.c_long), ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long), ("status", ctypes.c_int), ("room", ctypes.c_char * 256),
    ]  # fmt: skip


def _clock() -> Finding:
    """Peers' records expire by the wall clock, so it may be off by some seconds and no more."""
    try:
        timex = _Timex()
        answer = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):
        return Finding("warn", "clock", "This system does not say whether its clock is kept in time: look at it once.")
    if answer < 0 or timex.status & STA_UNSYNC:
        return Finding(
            "warn",
            "clock",
            "Nothing keeps the clock in time here: turn on NTP; the others bear at most 3 s.",
        )
    return Finding("ok", "clock", "Kept in time.")


def _schedule(config: Config) -> Iterator[Finding]:
    """When the node may train, and whether this machine can tell what that goes by."""
    schedule, now = config.schedule, datetime.now(UTC)
    if schedule.active:
        turn = schedule.hours.next_change(now)
        now_is = "trains now" if schedule.hours.is_active(now) else "does not train now"
        zone = schedule.hours.zone.key or "this machine's"
        until = f", until {schedule.hours.local(turn)}" if turn is not None else ""
        yield Finding("ok", "hours", f"{', '.join(schedule.active)}, time zone {zone}: it {now_is}{until}.")
    if schedule.user_active == "pause":
        idle_s, source = idle_seconds()
        if idle_s is None:
            yield Finding("warn", "user", f"schedule.user_active has no effect here: {source}.")
        else:
            yield Finding("ok", "user", f"Last seen {idle_s:.0f} s ago, as {source} says.")
    if schedule.on_battery == "pause" and (battery := on_battery()) is not None:
        yield Finding("ok", "battery", "On battery: the node would pause." if battery else "On mains power.")


def _ports(patient: Patient) -> Iterator[Finding]:
    """By the rules that `run` goes by."""
    if patient.is_running:
        yield Finding("ok", "ports", "In use by the node that runs on this data folder.")
        return
    config, cache = patient.config, patient.config.node.data_dir / "cache"
    try:
        file = PortFile(cache / API_PORT_FILE)
        with bind_api(config.api, file, is_default=patient.is_default("api.port"), keep=False) as sock:
            yield _port("api.port", config.api.port, sock.getsockname()[1], file)
    except (MachineError, UsageError) as exc:
        yield Finding("fault", "ports", f"api.port: {exc}")
    try:
        listen = [parse(address) for address in config.swarm.listen]
        may_move = patient.is_default("swarm.listen") and not config.swarm.announces_port
        file = PortFile(cache / LISTEN_PORT_FILE)
        with choose(listen, file, may_move=may_move) as reserved:
            if not reserved.addresses:
                yield Finding("warn", "ports", "swarm.listen is empty: nobody can call this node.")
            wanted = {address.host: address.port for address in listen}
            for address in reserved.addresses:
                yield _port(f"swarm.listen on {address.host}", wanted[address.host], address.port, file)
    except MachineError as exc:
        yield Finding("fault", "ports", f"swarm.listen: {exc}")


def _port(key: str, wanted: int, port: int, file: PortFile) -> Finding:
    if wanted == 0:
        return Finding("ok", "ports", f"{key}: any free one.")
    if wanted != port and file.recall(wanted) == port:
        return Finding("ok", "ports", f"{key}: the node keeps {port}, which it took when {wanted} was in use.")
    if wanted != port:
        return Finding("ok", "ports", f"{key}: {wanted} is in use by another program; the node takes {port}.")
    return Finding("ok", "ports", f"{key}: {port} is free.")


def _bootstrap(patient: Patient) -> Iterator[Finding]:
    addresses = [*patient.config.swarm.bootstrap, *(patient.invite.addresses if patient.invite else ())]
    answered, places = 0, set()
    for text in addresses:
        try:
            address = parse(text)
        except ValueError as exc:
            yield Finding("warn", "bootstrap", f"{exc}: not tried.")
            continue
        if address.transport == "tcp":
            places.add((address.host, address.port))
        else:
            yield Finding("warn", "bootstrap", f"{text} is not TCP: not tried.")
    for place in sorted(places):
        try:
            with socket.create_connection(place, timeout=DIAL_S):
                answered += 1
        except OSError as exc:
            why = exc.strerror or "no answer"
            yield Finding("warn", "bootstrap", f"{place[0]} port {place[1]} does not answer ({why}).")
    if answered:
        yield Finding("ok", "bootstrap", f"{answered} of {len(places)} addresses answer.")
    elif places:
        yield Finding("fault", "bootstrap", "Nobody answers: check the network, or ask for a newer invite.")


# What the run needs


def _shortages(patient: Patient, chosen: Chosen) -> Iterator[Finding]:
    needs = needs_of(patient.run, patient.config, chosen.precision)
    for what, needed, free, mend in shortages(needs, patient.config, chosen):
        text = f"{needed / GB:.2f} GB of {what}, {free / GB:.3g} GB free"
        about = what.split()[-1]
        yield Finding("ok", about, f"{text}.") if needed <= free else Finding("fault", about, f"{text}: {mend}.")


def _trial(run: RunConfig, chosen: Chosen, devices: DevicesConfig) -> tuple[float, float]:
    """Median seconds of an inner step, and those for which the device stands still at an outer step."""
    rows, length = run.inner.batch_size, run.inner.sequence_length
    model = build_model(run.model, seed=0)
    shape_execution(model, devices)
    parameters = sum(p.numel() for p in model.parameters())
    if chosen.device.type == "cpu":
        rows = max(1, min(rows, int(TIMED_FLOPS / (6 * parameters * length))))
    inner = InnerLoop(model, run.inner, chosen.device, settle_execution(model, run, chosen, devices))
    batch = torch.randint(run.model.vocab_size, (rows, length + 1))
    inner.step(batch, run.inner.lr)
    step_s = _median_s(lambda: inner.step(batch, run.inner.lr)) * run.inner.batch_size / rows
    # A share of the parameters stands for all of them.
    ranges = ((0, min(parameters, ENCODED_ELEMENTS)),)
    share = parameters / ranges[0][1]
    sent = take_flat(model, ranges)
    still_s = _median_s(lambda: take_flat(model, ranges))
    still_s += _median_s(lambda: change_flat_(model, ranges, lambda part, at, _: sent[at].to(part.device)))
    if run.sync.mode == "blocking":
        codec = make_codec(run.sync.codec)
        still_s += _median_s(lambda: codec.decode(codec.encode(pseudo_gradient(sent, sent)), sent.numel()))
    return step_s, share * still_s


def _median_s(work: Callable[[], object]) -> float:
    """Of a few runs, or of one that is slow."""
    seconds: list[float] = []
    while len(seconds) < MAX_STEPS and sum(seconds) < TIMED_S:
        began_s = time.monotonic()
        work()
        seconds.append(time.monotonic() - began_s)
    return sorted(seconds)[len(seconds) // 2]


def forecast(patient: Patient, parameters: int, step_s: float, still_s: float) -> Iterator[Finding]:
    """How busy this device will be, by formula; on the line of the limits, or on usual ones where there are none."""
    run, limits = patient.run, patient.config.limits
    payload = make_codec(run.sync.codec).encoded_bytes(parameters)
    size_bytes, inner_s = round_bytes(payload, patient.members), run.round.inner_steps * step_s
    yield Finding(
        "ok",
        "rounds",
        f"{run.sync.mode}, {run.sync.codec}, {patient.members} members: {size_bytes / 1e6:.1f} MB each way for "
        f"{run.round.inner_steps} inner steps of {inner_s:.0f} s in all.",
    )
    known = [rate for rate in (limits.upload_mbit_s, limits.download_mbit_s) if rate > 0]
    yield _least_line(patient.run, payload, step_s, still_s, min(known, default=math.inf))
    for mbit_s in (min(known),) if known else LINES_MBIT_S:
        transfer_s = transfer_seconds(size_bytes, mbit_s)
        busy = utilization(inner_s, transfer_s, overlapped=run.sync.mode != "blocking", still_s=still_s)
        yield Finding(
            "ok", "forecast", f"{busy:.1%} busy at {mbit_s:g} Mbit/s (transfers of {_rounded(transfer_s)} s)."
        )


def _least_line(run: RunConfig, payload: int, step_s: float, still_s: float, limit_mbit_s: float) -> Finding:
    """What line the run demands of its members, if they are as fast as this device."""
    overlapped, steps = run.sync.mode != "blocking", run.round.inner_steps
    least = least_line_mbit_s(payload, inner_steps=steps, step_s=step_s, overlapped=overlapped, still_s=still_s)
    if math.isinf(least):
        return Finding("warn", "line", "A round of one inner step leaves no time for a transfer: raise inner_steps.")
    text = f"A member contributes to every round on a line of {_rounded(least)} Mbit/s up and down, or a faster one"
    if limit_mbit_s < least:
        mend = "raise the limits, or choose a smaller codec, overlapped sync or more inner steps"
        return Finding("warn", "line", f"{text}; this node's limit is {limit_mbit_s:g}: {mend}.")
    return Finding("ok", "line", f"{text}.")


def _rounded(number: float) -> str:
    """To two digits, without an exponent."""
    return f"{float(f'{number:.2g}'):,.10g}"


def is_healthy(findings: Sequence[Finding]) -> bool:
    return all(finding.verdict != "fault" for finding in findings)
