"""Publishes the newest checkpoint of a data folder now. A node may run on the folder at the same time."""

from __future__ import annotations

import secrets

from node.commands.export import newest, tokenizer_of
from node.config.publish_address import parse_publish_address
from node.config.schema import Config
from node.errors import DataFolderError, UsageError
from node.host.disk_quota import Quota, quota_bytes
from node.host.files import scratch_folder
from node.publication.model_card import read_curve
from node.publication.model_folder import write_model_folder
from node.publication.stores import Superseded, open_store, revision_of
from node.worker.publisher import CURVE_FILE, FOLDER, publish_command, read_token


def publish_now(config: Config) -> str:
    """Publish the newest round to `publish.to`. Returns a sentence that says what was done.

    Raises UsageError without an address, DataFolderError without a committed round, MachineError if the place does not
    work, and QuotaError if `limits.disk_gb` leaves no room for a copy of the model.
    """
    if not config.publish.to:
        raise UsageError("There is no place to publish to: write `diloco-node publish ADDRESS`, or set publish.to.")
    address = parse_publish_address(config.publish.to)
    manifest, checkpoint = newest(config)
    if checkpoint.round < 0:
        raise UsageError(
            "No checkpoint has a committed round yet: wait until the node has written one, which takes a few minutes."
        )
    store = open_store(address, token=read_token(config), part=f"byhand{secrets.token_hex(8)}")
    revision = revision_of(checkpoint.round, checkpoint.state_digest)
    try:
        if store.has(revision):
            return f"Round {checkpoint.round} is at {address} already, as {revision}."
        cache = config.node.data_dir / "cache"
        try:
            cache.mkdir(exist_ok=True)
        except OSError as exc:
            raise DataFolderError(
                f"{cache} cannot be used ({exc.strerror}): repair its permissions or remove it."
            ) from exc
        quota = Quota(config.node.data_dir, quota_bytes(config.limits.disk_gb), config.node.text_folder)
        copy_bytes = checkpoint.anchor.nbytes + checkpoint.momentum.nbytes + checkpoint.credit.nbytes
        with quota.room(copy_bytes), scratch_folder(cache, "publish") as scratch:
            folder = scratch / revision
            write_model_folder(
                manifest,
                checkpoint,
                folder,
                tokenizer=tokenizer_of(manifest.run, config),
                command=publish_command(config),
                curve=read_curve(config.node.data_dir / FOLDER / CURVE_FILE, until_round=checkpoint.round),
                with_state=True,
            )
            is_first = store.put(revision, folder)
    except Superseded:
        return f"Round {checkpoint.round} is not published, because {address} has a later one."
    by = "" if is_first else " by another node"
    return f"Round {checkpoint.round} is published{by} at {address}, as {revision}."
