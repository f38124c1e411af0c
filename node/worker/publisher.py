"""The process that publishes waiting rounds: `python -m node.worker.publisher`.

It reads one line of JSON from stdin, a `PublisherStart`, writes a `PublishEvent` as a line of JSON to stdout for each
result, and ends when no round waits. The last line of stderr says why it failed. Torch is imported only when a round is
written, as a process that waits for its turn should be small.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from node.config.manifest import manifest_of
from node.config.publish_address import parse_publish_address
from node.config.schema import Config
from node.errors import NodeError, UsageError
from node.host.disk_quota import Quota, quota_bytes, size_of
from node.host.files import expand_user
from node.host.priority import serve_parent
from node.publication.publisher import Publisher, PublishEvent
from node.publication.stores import open_store
from node.publication.waiting_rounds import SCRATCH, WaitingRound, WaitingRounds
from node.status import Value

FOLDER = "publish"
"""Folder of the waiting rounds, in the data folder."""
CURVE_FILE = "curve.json"
"""File in FOLDER with the losses of the run's rounds (`model_card.Curve`)."""


class PublisherStart(Value):
    config: Config
    peer_id: str


def read_token(config: Config) -> str | None:
    """The hub's token in `publish.token_file`; None without such a file. Raises UsageError if it cannot be read."""
    name = config.publish.token_file
    if not name:
        return None
    try:
        token = expand_user(name).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as exc:
        raise UsageError(f"publish.token_file {name} cannot be read: name a file with the hub's token.") from exc
    if not token:
        raise UsageError(f"publish.token_file {name} is empty: write the hub's token into it.")
    return token


def publish_command(config: Config) -> str:
    """The command that makes such publications, without folders of this machine."""
    place = shlex.quote(parse_publish_address(config.publish.to).public_name)
    return f"diloco-node run --publish.to {place} --publish.every_rounds {config.publish.every_rounds}"


def make_publisher(start: PublisherStart, tell: Callable[[PublishEvent], None]) -> Publisher:
    """Raises UsageError for a token that cannot be read."""
    config = start.config
    folder = config.node.data_dir / FOLDER
    quota = Quota(config.node.data_dir, quota_bytes(config.limits.disk_gb), config.node.text_folder)
    store = open_store(parse_publish_address(config.publish.to), token=read_token(config), part=start.peer_id[-16:])

    def write(waiting: WaitingRound, target: Path) -> None:
        from node.publication.model_card import read_curve
        from node.publication.model_folder import write_model_folder
        from node.training.checkpoint import read_outer
        from node.training.tokenizer import open_tokenizer

        manifest = manifest_of(config.node.data_dir)
        with quota.room(size_of(waiting.folder)):
            write_model_folder(
                manifest,
                read_outer(waiting.folder),
                target,
                tokenizer=open_tokenizer(manifest.run.data.tokenizer, config.node.text_folder, config.node.hub_cache),
                command=publish_command(config),
                curve=read_curve(folder / CURVE_FILE, until_round=waiting.round),
                with_state=True,
            )

    return Publisher(WaitingRounds(folder), store, write, folder / SCRATCH, turn_s=config.publish.turn_s, tell=tell)


def main() -> int:
    with serve_parent() as answers:
        try:
            start = PublisherStart.model_validate_json(sys.stdin.readline())
            make_publisher(start, lambda event: print(event.model_dump_json(), file=answers)).run()
        except NodeError as exc:
            sys.stderr.write(f"\n{exc}\n")
            return exc.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
