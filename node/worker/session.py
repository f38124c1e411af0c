"""From an order to a place in the swarm: found a run, go on with one, or join one. Knows folders, manifests, states.

The main thread; every wait tells the supervisor what is waited for and ends when the worker is asked to stop.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from node import __version__
from node.config import Config
from node.diloco.codec import make_codec
from node.diloco.digest import leaf_bounds
from node.diloco.fragments import strided
from node.diloco.outer import OuterState, genesis
from node.errors import DataFolderError, MachineError, ManifestError, PeerError, TransferFailed, UsageError
from node.files import write_whole
from node.link import Start
from node.manifest import Invite, Manifest, RunConfig, parse_invite, parse_manifest, read_manifest
from node.quota import Room
from node.status import Phase
from node.swarm.chain import Outer, Tip
from node.swarm.faults import faults_from
from node.swarm.identity import load_identity
from node.swarm.member import Member, MemberOptions
from node.swarm.offers import Target
from node.swarm.p2pd import DaemonOptions
from node.swarm.partial import forget
from node.swarm.reduce import grids_of
from node.swarm.rendezvous import Quorum
from node.swarm.rounds import Rules
from node.swarm.state import Snapshot, tip_of
from node.swarm.thread import SwarmThread
from node.training.checkpoint import Checkpoint, CheckpointStore
from node.training.model import unit_elements
from node.training.tensorfile import read_slice
from node.worker.ledger import Ledger
from node.worker.snapshot import initial_checkpoint, load_line, load_proof
from node.worker.teller import Teller

logger = logging.getLogger(__name__)

T = TypeVar("T")
POLL_S = 0.1
RETRY_S = 1.0
NOBODY_REASON = "No peer answers yet ({problem}); trying on: is the bootstrap peer up, and its port open?"


class CheckpointSource:
    """The checkpoints, as joiners are served: in memory their hash trees, on disk their tensors."""

    def __init__(self, store: CheckpointStore, parameters: int, cache: Path) -> None:
        self._store = store
        self._parameters = parameters
        self._cache = cache
        self._kept: tuple[Snapshot, ...] = ()
        """The newest first."""

    def publish(self, tip: Tip) -> None:
        """A checkpoint of this tip is on disk; what was downloaded for it is of no more use."""
        new = Snapshot(tip.round, tip.head, tip.state.tokens, tip.digest, tip.leaves, tip.proof)
        on_disk = set(self._store.rounds())
        self._kept = (new, *(old for old in self._kept if old.round != new.round and old.round in on_disk))
        forget(self._cache)

    def find(self, name: str = "", *, hold: bool = False) -> Snapshot | None:
        for snapshot in self._kept:
            if not name or snapshot.head == name or snapshot.digest.startswith(name):
                if hold:
                    self._store.pin(snapshot.round)
                return snapshot
        return None

    def wanted_since(self) -> int | None:
        """The oldest state from which somebody replays: a joiner, or this node itself after a crash."""
        return min((*(snapshot.round for snapshot in self._kept[:1]), *self._store.pinned()), default=None)

    def leaf(self, digest: str, index: int) -> bytes:
        snapshot = self.find(digest, hold=True)
        path = self._store.outer_file(snapshot.round) if snapshot is not None else None
        if path is None:
            raise LookupError("that state is not kept")
        per_vector = len(leaf_bounds(self._parameters))
        which, place = divmod(index, per_vector)
        start, end = leaf_bounds(self._parameters)[place]
        return read_slice(path, ("anchor", "momentum")[which], 4 * start, 4 * (end - start))


@dataclass(slots=True)
class Session:
    """A node's place in a run."""

    manifest: Manifest
    rules: Rules
    swarm: SwarmThread
    store: CheckpointStore
    source: CheckpointSource
    tip: Tip | None
    """None for a node that holds no state: a relay, or one that was paused before it had any."""
    checkpoint: Checkpoint | None
    """What this node goes on from; None where it starts from a downloaded state."""


class Opening:
    """The steps to a session. `check` raises when the worker is asked to stop.

    `fits` is called as soon as it is known what will be trained, before a state is drawn, read or downloaded, and may
    raise, too; `prepare` then, beside all that, but not beside the drawing: two threads cannot load the same library.
    """

    def __init__(
        self,
        start: Start,
        config: Config,
        teller: Teller,
        ledger: Ledger,
        check: Callable[[], None],
        fits: Callable[[RunConfig], None],
        prepare: Callable[[RunConfig], Future[Any] | None],
        room: Room,
    ) -> None:
        self._start, self._config, self._teller, self._ledger, self._check = start, config, teller, ledger, check
        self._fits, self._prepare, self._room = fits, prepare, room
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="beside")
        self._folder = config.node.data_dir
        self._store = CheckpointStore(self._folder / "checkpoints", config.checkpoint.keep, room=room)
        self._invite = parse_invite(start.join) if start.join else None
        self._faults = faults_from(os.environ)

    def open(self) -> Session:
        """Raises NodeError with the mend, or whatever `check` raises."""
        manifest = self._known_manifest()
        if manifest is None and self._invite is None:
            if self._start.mode == "relay":
                raise UsageError("A relay serves a run: give it one with --join INVITE.")
            manifest = self._found(self._config.run)
        elif manifest is not None:
            self._begin_training(manifest.run)
        saved = self._resume(manifest) if manifest is not None and self._start.mode != "relay" else None
        run = manifest.hash if manifest else self._invite.manifest_hash if self._invite else ""
        swarm = SwarmThread(self._member_options(run))
        self._teller.swarm = swarm
        swarm.open()
        if swarm.port_notice:
            logger.info("%s", swarm.port_notice)
            self._teller.notice("listen_port", swarm.port_notice, level="info")
        try:
            return self._enter(swarm, manifest, saved)
        except BaseException:
            swarm.close(Phase.STOPPED)
            raise

    def _enter(self, swarm: SwarmThread, manifest: Manifest | None, saved: tuple[Checkpoint, Tip] | None) -> Session:
        if manifest is None:
            manifest = self._fetch_manifest(swarm)
        text = manifest.canonical()
        swarm.start_call(lambda member: _serve_manifest(member, text)).result(RETRY_S * 5)
        rules = rules_of(manifest)
        source = CheckpointSource(self._store, manifest.parameters, self._folder / "cache")
        session = Session(manifest, rules, swarm, self._store, source, None, None)
        if saved is not None:
            session.checkpoint, session.tip = saved
            source.publish(session.tip)
        elif self._start.mode == "train":
            session.tip = self.download(swarm, manifest, rules)
        return session

    # manifests

    @property
    def _manifest_file(self) -> Path:
        return self._folder / "manifest.json"

    def _known_manifest(self) -> Manifest | None:
        """The run of this data folder. Raises DataFolderError if that is not the run that is to be joined, and
        ProtocolError where a newer version joined it."""
        try:
            data = self._manifest_file.read_bytes()
        except FileNotFoundError:
            return None
        try:
            manifest = read_manifest(data)
        except ManifestError as exc:
            raise DataFolderError(
                f"{self._manifest_file} is damaged: restore it, or start with another --data-dir."
            ) from exc
        if self._invite is not None and self._invite.manifest_hash != manifest.hash:
            raise DataFolderError(
                f"The data folder {self._folder} belongs to another run ({manifest.run.name}, "
                f"{manifest.hash[:12]}): give this invite a folder of its own with --data-dir."
            )
        return manifest

    def _begin_training(self, run: RunConfig) -> None:
        self._fits(run)
        self._prepare(run)

    def close(self) -> None:
        """End the thread of `beside`, and so what was started there; work that is under way is not waited for."""
        self._beside.shutdown(wait=False, cancel_futures=True)

    def _found(self, run: RunConfig) -> Manifest:
        """A new run: draw or load the initial parameters, and write them down before anybody hears of it."""
        from node.training.folder import load_start
        from node.training.hub import pinned
        from node.training.model import build_model, flatten

        run = self.beside(lambda: pinned(run))
        if run.model.start:
            shape, first = self.beside(lambda: load_start(run.model, self._config.node.hub_cache))
            run = RunConfig.model_validate(run.model_copy(update={"model": shape}).model_dump())
            self._fits(run)
        else:
            self._fits(run)
            first = self.beside(lambda: flatten(build_model(run.model, seed=secrets.randbits(63))))
        if (loading := self._prepare(run)) is not None:
            self.wait(loading)  # What is wrong with the text is said before there is a run that has it.
        state = genesis(first)
        draft = Manifest(
            run_id=secrets.token_hex(16), initial_digest="0" * 64, parameters=state.anchor.numel(), run=run
        )
        tip = self.beside(lambda: tip_of(state, draft.hash, None, rules_of(draft), time.monotonic()))
        manifest = draft.model_copy(update={"initial_digest": tip.digest})
        self.beside(lambda: self._store.save(initial_checkpoint(manifest, tip)))
        self._keep_manifest(manifest.canonical())
        logger.info("Founded the run %r, %s: %d parameters.", run.name, manifest.hash[:12], manifest.parameters)
        return manifest

    def _fetch_manifest(self, swarm: SwarmThread) -> Manifest:
        """From whoever answers; for ever, as an unreachable swarm may come up later."""
        assert self._invite is not None
        while True:
            problem = swarm.view.problem or "nobody was found"
            self._teller.enter(Phase.CONNECTING, NOBODY_REASON.format(problem=problem), "no_peers")
            data = self.wait(swarm.start_call(lambda member: member.fetch_manifest()))
            if data is not None:
                manifest = parse_manifest(data, self._invite.manifest_hash)
                self._begin_training(manifest.run)
                self._keep_manifest(data)
                return manifest
            self.pause(RETRY_S)

    def _keep_manifest(self, text: bytes) -> None:
        try:
            write_whole(self._manifest_file, text)
        except OSError as exc:
            raise MachineError(
                f"{self._manifest_file} could not be written ({exc.strerror}): free some space on that disk."
            ) from exc

    # states

    def _resume(self, manifest: Manifest) -> tuple[Checkpoint, Tip] | None:
        """Where this node was when it last saved; None where it has to begin with a download."""
        checkpoint = self.beside(self._load_newest)
        if checkpoint is None:
            return None
        if checkpoint.manifest_hash != manifest.hash:
            raise DataFolderError(
                f"The checkpoints in {self._folder} are of another run than its manifest.json: restore either, "
                "or start with another --data-dir."
            )
        state = OuterState(checkpoint.anchor, checkpoint.momentum, checkpoint.round, checkpoint.tokens)
        try:
            proof, line = load_proof(checkpoint), load_line(checkpoint)
            head, rules = checkpoint.head, rules_of(manifest)
            tip = self.beside(lambda: tip_of(state, head, proof, rules, time.monotonic(), line))
        except PeerError as exc:
            logger.warning("The checkpoint of round %d is not used: %s.", checkpoint.round, exc)
            return None
        if "ledger" in checkpoint.extra:
            self._ledger.load(checkpoint.extra["ledger"])
        if checkpoint.round >= 0:
            logger.info("Going on from the checkpoint of round %d.", checkpoint.round)
        return checkpoint, tip

    def _load_newest(self) -> Checkpoint | None:
        self._faults.meet("load", -1)
        return self._store.newest(mend=True)

    def download(self, swarm: SwarmThread, manifest: Manifest, rules: Rules, avoid: Collection[str] = ()) -> Tip:
        """The swarm's state, however long it takes until somebody serves one; none of those to `avoid`."""
        done, said = [0.0], ""
        target = Target(manifest.parameters, manifest.initial_digest, frozenset(avoid))

        def progress(ratio: float) -> None:
            done[0] = ratio

        while True:
            self._teller.enter(Phase.DOWNLOADING, "Fetching the outer state from the peers.", "downloading")
            call = swarm.start_call(lambda member: member.download(rules, target, progress))
            try:
                return self.wait(call, lambda: self._show_progress(done[0]))
            except TransferFailed as exc:
                if str(exc) != said:
                    logger.info("The state could not be fetched yet: %s", exc)
                said = str(exc)
                reason = f"{exc} Trying on; what was verified is asked for again."
                self._teller.enter(Phase.CONNECTING, reason, "no_state")
                self.pause(RETRY_S)

    def _show_progress(self, ratio: float) -> None:
        self._teller.sync = self._teller.sync.model_copy(update={"progress_ratio": round(ratio, 3)})

    # waiting

    def wait(self, future: Future[T], look: Callable[[], None] = lambda: None) -> T:
        """The future's result; meanwhile the supervisor is told, and orders are obeyed."""
        while True:
            try:
                return future.result(POLL_S)
            except TimeoutError:
                if future.done():
                    raise
                look()
                self._breathe()

    def beside(self, work: Callable[[], T]) -> T:
        """Its result, made on a thread that lives on: processes that it starts end with their thread."""
        return self.wait(self._beside.submit(work))

    def pause(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self._breathe()
            time.sleep(POLL_S)

    def _breathe(self) -> None:
        """Raises SwarmError where the swarm's thread has ended: what is waited for would never come."""
        self._teller.tell()
        self._check()
        if self._teller.swarm is not None:
            self._teller.swarm.check()

    def _member_options(self, run: str) -> MemberOptions:
        config = self._config
        key = self._folder / "identity.key"
        identity = load_identity(key)
        return MemberOptions(
            run=run,
            data_dir=self._folder,
            name=config.node.name or identity.peer_id[-6:],
            version=__version__,
            daemon=DaemonOptions(
                identity_file=key,
                listen=config.swarm.listen,
                announce=config.swarm.announce,
                port_mapping=config.swarm.port_mapping,
            ),
            bootstrap=(*config.swarm.bootstrap, *(self._invite.addresses if self._invite else ())),
            faults=self._faults,
            upload_mbit_s=config.limits.upload_mbit_s,
            download_mbit_s=config.limits.download_mbit_s,
            may_move_port=self._start.may_move_port,
            lan_discovery=config.swarm.lan_discovery,
            is_relay=self._start.mode == "relay",
            relays=config.swarm.relay or self._start.mode == "relay",
            relay_mbit_s=config.swarm.relay_mbit_s,
            room=self._room,
        )


def rules_of(manifest: Manifest) -> Rules:
    run, count = manifest.run, manifest.run.sync.fragment_count
    units = unit_elements(run.model) if count > 1 else [manifest.parameters]
    return Rules(
        run=manifest.hash,
        grids=grids_of(make_codec(run.sync.codec), strided(units, count)),
        quorum=Quorum(run.round.policy, run.round.min_peers, run.round.quorum_ratio),
        outer=_outer_of(run),
        max_tokens=run.max_contribution_tokens,
        overlapped=run.sync.mode != "blocking",
    )


def _outer_of(run: RunConfig) -> Outer:
    """H of a fragment's round is an F-th."""
    count, auto = run.sync.fragment_count, run.sync.auto
    least, most = run.round.inner_steps, run.round.most_inner_steps or 4 * run.round.inner_steps
    return Outer(
        lr=run.outer.lr,
        momentum=run.outer.momentum,
        inner_steps=max(1, least // count),
        fragments=count,
        most_inner_steps=max(1, most // count) if auto else 0,
        follows_peers=auto,
    )


def invite_of(manifest: Manifest, addresses: tuple[str, ...]) -> str:
    return str(Invite(manifest.hash, addresses)) if addresses else ""


async def _serve_manifest(member: Member, text: bytes) -> None:
    member.serve_manifest(text)
