"""Enters a run: founds one, resumes the run of the data folder, or joins one by invite or from the directory.

`RunEntry.enter` runs on the main thread; its waits report to the supervisor and obey orders to stop.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from node import __version__
from node.config.amendments import AmendmentError, rewound_tokens
from node.config.manifest import (
    ANY_RUN,
    Invite,
    Manifest,
    ModelConfig,
    RunConfig,
    find_manifest,
    parse_invite,
    parse_manifest,
)
from node.config.publish_address import parse_publish_address
from node.config.schema import Config
from node.diloco.outer import OuterState, genesis
from node.errors import DataFolderError, MachineError, ManifestError, PeerError, SwarmError, UsageError
from node.host.disk_quota import Room, quota_bytes
from node.host.files import write_whole
from node.publication.model_folder import Publication, read_manifest_in, read_publication
from node.publication.stores import open_store
from node.status import Phase
from node.swarm.chain.chain import Tip
from node.swarm.consensus.context import Rules
from node.swarm.faults import faults_from
from node.swarm.governance.charter import Charter
from node.swarm.identity import load_identity
from node.swarm.member import MemberOptions, SwarmMember
from node.swarm.member_thread import SwarmThread
from node.swarm.membership.directory import NO_BOOTSTRAP
from node.swarm.state_sync.catch_up import ResyncCause
from node.swarm.state_sync.providers import Target
from node.swarm.state_sync.server import verified_tip
from node.swarm.transport.p2pd import DaemonOptions
from node.training.algorithm import optimizer_of
from node.training.checkpoint import Checkpoint, CheckpointStore
from node.training.device import choose_device
from node.training.hub import pinned
from node.training.model import build_model, flatten, has_stated_size
from node.training.pretrained import load_pretrained
from node.worker.checkpointing import CheckpointSource, initial_checkpoint, tip_of_checkpoint
from node.worker.continued_run import continued_run
from node.worker.counters import WorkCounters
from node.worker.orders import Waiter
from node.worker.publisher import read_token
from node.worker.reporter import Reporter
from node.worker.run_choice import choose_run
from node.worker.session import Session, StartingPoint, check_chunks, check_size, rules_of
from node.worker_protocol import FoundFrom, Start

logger = logging.getLogger(__name__)

RETRY_S = 1.0


class RunEntry:
    def __init__(
        self,
        start: Start,
        config: Config,
        reporter: Reporter,
        counters: WorkCounters,
        waiter: Waiter,
        room: Room,
        check_fit: Callable[[RunConfig], None],
        start_loading: Callable[[RunConfig], Future[Any] | None],
    ) -> None:
        """`check_fit` is called as soon as the run is known, before a state is made, read or downloaded; it may raise.

        `start_loading` loads text and model in parallel with the entry. It returns None if this node does not train.
        """
        self._start, self._config, self._reporter, self._counters = start, config, reporter, counters
        self._waiter, self._room = waiter, room
        self._check_fit, self._start_loading = check_fit, start_loading
        self._folder = config.node.data_dir
        self._manifest_file = self._folder / "manifest.json"
        self._store = CheckpointStore(self._folder / "checkpoints", config.checkpoint.keep, room=room)
        self._wants_any = start.join == ANY_RUN and start.mode != "relay"
        self._invite = parse_invite(start.join) if start.join and not self._wants_any else None
        self._faults = faults_from(os.environ)

    def enter(self) -> Session:
        """Enter the run. Raises NodeError, or what the waits raise."""
        start, is_relay = self._start, self._start.mode == "relay"
        manifest = self._read_manifest()
        if manifest is not None:
            self._begin_training(self._amended(manifest))
        elif self._wants_any:
            self._invite = self._choose_run()
        elif self._invite is None:
            if is_relay:
                raise UsageError("A relay serves a run: give it one with --join INVITE.")
            manifest = self._found(self._config.run) if start.found_from is None else self._found_from(start.found_from)
        saved = self._load_checkpoint(manifest) if manifest is not None and not is_relay else None
        swarm = SwarmThread(self._member_options(manifest))
        self._reporter.swarm = swarm
        try:
            self._waiter.wait(swarm.start())
            self._reporter.listening(swarm.listen_addresses)
            if swarm.port_notice:
                logger.info("%s", swarm.port_notice)
                self._reporter.notice("listen_port", swarm.port_notice, level="info")
            return self._enter_swarm(swarm, manifest, saved)
        except BaseException:
            swarm.close(Phase.STOPPED)
            raise

    def _enter_swarm(
        self, swarm: SwarmThread, manifest: Manifest | None, saved: tuple[Checkpoint, Tip] | None
    ) -> Session:
        if manifest is None:
            manifest = self._fetch_manifest(swarm)
        text = manifest.canonical()

        async def serve_manifest(member: SwarmMember) -> None:
            member.serve_manifest(text)
            if self._config.swarm.list_run:
                member.list_run(text)

        self._waiter.wait(swarm.start_call(serve_manifest))
        rules = rules_of(manifest)
        moments = rules.outer.optimizer.moments
        source = CheckpointSource(self._store, manifest.parameters, self._folder / "cache", moments)
        checkpoint, tip = saved if saved is not None else (None, None)
        if tip is not None:
            source.publish(tip)
        elif self._start.mode == "train":
            tip = self.download(swarm, manifest, rules)
        return Session(manifest, rules, swarm, self._store, source, StartingPoint(tip, checkpoint), self._folder)

    def _member_options(self, manifest: Manifest | None) -> MemberOptions:
        config, invite = self._config, self._invite
        key = self._folder / "identity.key"
        identity = load_identity(key)
        return MemberOptions(
            run=manifest.hash if manifest else invite.manifest_hash if invite else "",
            data_dir=self._folder,
            name=config.node.name or identity.peer_id[-6:],
            version=__version__,
            daemon=DaemonOptions(
                identity_file=key,
                listen=config.swarm.listen,
                announce=config.swarm.announce,
                port_mapping=config.swarm.port_mapping,
            ),
            bootstrap=(*config.swarm.bootstrap, *(invite.addresses if invite else ())),
            faults=self._faults,
            upload_mbit_s=config.limits.upload_mbit_s,
            download_mbit_s=config.limits.download_mbit_s,
            may_move_port=self._start.may_move_port,
            held_addresses=self._start.held_addresses,
            lan_discovery=config.swarm.lan_discovery,
            is_relay=self._start.mode == "relay",
            relays=config.swarm.relay or self._start.mode == "relay",
            relay_mbit_s=config.swarm.relay_mbit_s,
            room=self._room,
        )

    def _choose_run(self) -> Invite:
        """Choose a run from the directory. Retries until one is listed and answers."""
        config, limits = self._config, self._config.limits
        if not config.swarm.bootstrap:
            raise UsageError(NO_BOOTSTRAP)
        device = choose_device(config.devices, limits.cpu_threads, gpu_memory_ratio=limits.gpu_memory_ratio)
        self._reporter.enter(Phase.CONNECTING, "Looking for a run in the directory of runs.", "choosing")
        while True:
            try:
                return self._waiter.run(lambda: choose_run(config, device))
            except SwarmError as exc:
                reason = f"No run was chosen from the directory, because {exc}; retrying."
                self._reporter.enter(Phase.CONNECTING, reason, exc.code)
            self._waiter.sleep(RETRY_S)

    # the manifest

    def _read_manifest(self) -> Manifest | None:
        """Read the manifest of the data folder; None if there is none.

        Raises DataFolderError if it is damaged or not that of the invite, ProtocolError if a newer version wrote it.
        """
        manifest = find_manifest(self._folder)
        if manifest is not None and self._invite is not None and self._invite.manifest_hash != manifest.hash:
            raise DataFolderError(
                f"The data folder {self._folder} belongs to another run ({manifest.run.name}, "
                f"{manifest.hash[:12]}): give this invite a folder of its own with --data-dir."
            )
        return manifest

    def _begin_training(self, run: RunConfig) -> Future[Any] | None:
        self._check_fit(run)
        return self._start_loading(run)

    def _begin_joining(self, run: RunConfig) -> None:
        """Load text and model while the state is downloaded, unless amendments in it may ask for others."""
        if run.governance == "fixed":
            self._begin_training(run)
        else:
            self._check_fit(run)  # No amendment changes the model, which is most of what a run needs.

    @property
    def has_trained(self) -> bool:
        """Whether there is a checkpoint after a round. This machine has then been able to train the run."""
        return self._manifest_file.exists() and max(self._store.rounds(), default=-1) >= 0

    def _amended(self, manifest: Manifest) -> RunConfig:
        """The settings of the round after the newest checkpoint. Text and model are loaded for them in advance."""
        amendments, round_ = self._store.newest_amendments()
        try:
            return Charter(manifest.hash, manifest.run).terms_at(amendments.encode(), round_ + 1).run
        except AmendmentError:  # The checkpoint is damaged.
            return manifest.run

    def _found(self, run: RunConfig) -> Manifest:
        """Found a run: make or load the initial parameters, and write them to the disk before any peer sees the run."""
        run = self._waiter.run(lambda: pinned(self._governed(run)))
        if run.model.start:
            shape, parameters = self._waiter.run(
                lambda: load_pretrained(
                    run.model, self._config.node.hub_cache, lambda shape: self._check_fit(_with_model(run, shape))
                )
            )
            run = _with_model(run, shape)
        else:
            self._check_fit(run)
            parameters = self._waiter.run(lambda: flatten(build_model(run.model, seed=secrets.randbits(63))))
        return self._found_at(run, genesis(parameters, optimizer_of(run.outer).moments), secrets.token_hex(16))

    def _found_from(self, origin: FoundFrom) -> Manifest:
        """Found a run that continues a publication. Raises UsageError or MachineError if it cannot."""
        config, address = self._config, parse_publish_address(origin.address, may_have_revision=True)
        downloads = self._folder / "cache" / "publication"

        def check_size(size_bytes: int) -> None:
            quota = quota_bytes(config.limits.disk_gb)
            room = min(shutil.disk_usage(self._folder).free, quota if quota > 0 else math.inf)
            if size_bytes > room:
                raise MachineError(
                    f"The publication has {size_bytes / 1e9:.3g} GB, and {room / 1e9:.3g} GB are free: free disk, "
                    "raise limits.disk_gb, or continue a smaller one.",
                    code="does_not_fit",
                )

        def read() -> Publication:
            try:
                place = open_store(address, token=read_token(config)).fetch(downloads, check_size)
                self._check_fit(read_manifest_in(place).run)
                return read_publication(place, config.node.hub_cache)
            finally:
                shutil.rmtree(downloads, ignore_errors=True)

        self._reporter.enter(Phase.STARTING, f"Reading the publication at {address}.", "founding")
        publication = self._waiter.run(read)
        run = self._waiter.run(lambda: pinned(self._governed(continued_run(publication, config.run, origin))))
        self._check_fit(run)
        logger.info("The run continues round %d of %s.", publication.record.round, address)
        # The text of a member follows from the run id, its peer id and the round, so it goes on as well.
        before = publication.manifest
        rewound = before.rewound_tokens + rewound_tokens(publication.state.amendments)
        state = replace(publication.state, amendments=b"")  # The settings include them now.
        return self._found_at(run, state, before.run_id, rewound)

    def _governed(self, run: RunConfig) -> RunConfig:
        """The settings with this node's key, if the founder may amend the run."""
        if run.governance != "founder":
            return run
        return run.model_copy(update={"governance_keys": (load_identity(self._folder / "identity.key").peer_id,)})

    def _found_at(self, run: RunConfig, state: OuterState, run_id: str, rewound: int = 0) -> Manifest:
        """Found a run whose first round follows this state. The schedules are behind it by the rewound tokens."""
        # Load after the model, as two threads cannot import one library, and before the run exists, as it may fail.
        if (loading := self._start_loading(run)) is not None:
            self._waiter.wait(loading)
        draft = Manifest(
            run_id=run_id,
            initial_digest="0" * 64,
            parameters=state.anchor.numel(),
            rewound_tokens=rewound,
            run=run,
        )
        rules = rules_of(draft)
        check_chunks(rules)
        tip = self._waiter.run(lambda: verified_tip(state, draft.hash, None, rules, time.monotonic()))
        manifest = draft.model_copy(update={"initial_digest": tip.digest})
        self._waiter.run(lambda: self._store.save(initial_checkpoint(manifest, tip)))
        self._write_manifest(manifest.canonical())
        logger.info("Founded the run %r (hash %s, %d parameters).", run.name, manifest.hash[:12], manifest.parameters)
        return manifest

    def _fetch_manifest(self, swarm: SwarmThread) -> Manifest:
        """Fetch the invite's manifest from any peer. Retries for ever, as the swarm may come up later."""
        assert self._invite is not None
        while True:
            problem = swarm.view.problem or "no peer was found"
            reason = f"No member answers yet ({problem}); retrying. Check the network, or ask for a new invite."
            self._reporter.enter(Phase.CONNECTING, reason, "no_peers")
            data = self._waiter.wait(swarm.start_call(lambda member: member.fetch_manifest()))
            if data is not None:
                manifest = parse_manifest(data, self._invite.manifest_hash)
                if not has_stated_size(manifest):
                    raise ManifestError("The run's manifest states a wrong number of parameters: join another run.")
                check_size(manifest)
                self._begin_joining(manifest.run)
                self._write_manifest(data)
                return manifest
            self._waiter.sleep(RETRY_S)

    def _write_manifest(self, text: bytes) -> None:
        try:
            write_whole(self._manifest_file, text)
        except OSError as exc:
            raise MachineError(
                f"{self._manifest_file} could not be written ({exc.strerror}): free some space on that disk."
            ) from exc

    # the state

    def _load_checkpoint(self, manifest: Manifest) -> tuple[Checkpoint, Tip] | None:
        """The newest checkpoint and its tip; None if the node has to download the state."""
        checkpoint = self._waiter.run(self._read_newest)
        if checkpoint is None:
            return None
        if checkpoint.manifest_hash != manifest.hash:
            raise DataFolderError(
                f"The checkpoints in {self._folder} belong to another run than its manifest.json: restore either, "
                "or start with another --data-dir."
            )
        try:
            tip = self._waiter.run(lambda: tip_of_checkpoint(checkpoint, rules_of(manifest)))
        except PeerError as exc:
            logger.warning("The checkpoint of round %d is not used: %s.", checkpoint.round, exc)
            return None
        if "ledger" in checkpoint.extra:
            self._counters.load(checkpoint.extra["ledger"])
        if checkpoint.round >= 0:
            logger.info("Resuming from the checkpoint of round %d.", checkpoint.round)
        return checkpoint, tip

    def _read_newest(self) -> Checkpoint | None:
        self._faults.meet("load", -1)
        return self._store.newest(repair=True, with_local=self._start.mode == "train")

    def download(self, swarm: SwarmThread, manifest: Manifest, rules: Rules) -> Tip:
        """Download the state, retrying until a peer serves it."""
        target = Target(manifest.parameters, manifest.initial_digest, moments=rules.outer.optimizer.moments)
        tip = self._download(swarm, rules, target)
        assert tip is not None
        return tip

    def download_again(self, swarm: SwarmThread, manifest: Manifest, rules: Rules, cause: ResyncCause) -> Tip | None:
        """Download another state in place of this node's. Returns None to go on with this node's own state."""
        target = cause.target(manifest.parameters, manifest.initial_digest, rules.outer.optimizer.moments)
        return self._download(swarm, rules, target, cause)

    def _download(
        self, swarm: SwarmThread, rules: Rules, target: Target, cause: ResyncCause | None = None
    ) -> Tip | None:
        progress_ratio, problem = 0.0, ""

        def set_progress(ratio: float) -> None:
            nonlocal progress_ratio
            progress_ratio = ratio

        def set_problem(text: str) -> None:
            nonlocal problem
            problem = text

        def report() -> None:
            update = {"progress_ratio": round(progress_ratio, 3)}
            self._reporter.sync = self._reporter.sync.model_copy(update=update)
            phase, reason, code = Phase.DOWNLOADING, "Downloading the outer state from peers.", "downloading"
            if problem:
                phase, code = Phase.CONNECTING, "no_state"
                reason = f"{problem} This node retries and keeps verified parts."
            self._reporter.enter(phase, reason, code)

        report()
        call = swarm.start_call(lambda member: member.download(rules, target, set_progress, set_problem, cause))
        try:
            return self._waiter.wait(call, report)
        finally:
            call.cancel()  # The wait may end because the node stops. Otherwise the call has ended already.


def _with_model(run: RunConfig, shape: ModelConfig) -> RunConfig:
    return RunConfig.model_validate(run.model_copy(update={"model": shape}).model_dump())
