"""Steers a running run: signs amendments with the founder's key, or with one of several keys, and submits them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from node.commands.client import Client
from node.config.amendments import (
    CHANGEABLE,
    MOST_BYTES,
    Action,
    Amendment,
    AmendmentError,
    SignedAmendment,
    changed,
)
from node.config.loader import check_value, nearest
from node.config.schema import Config
from node.errors import DataFolderError, UsageError
from node.host.files import check_space, expand_user, write_new, write_whole
from node.status import AmendmentInfo, GovernanceInfo
from node.swarm.governance.charter import add_signature, sign_amendment
from node.swarm.identity import Identity, load_identity

LEAST_AHEAD = 2
"""The round that is being agreed on can accept an amendment of the next one."""
USUAL_AHEAD = 4
"""By default, an amendment applies from this many rounds after the last one, so that all members know it by then."""
WAIT_S = 10.0
LOOK_S = 0.2


def read_key(data_dir: Path, file: Path | None) -> Identity:
    """The key of the node of this data folder, or of another key file. Raises UsageError if there is none."""
    path = data_dir / "identity.key" if file is None else expand_user(file)
    try:
        if not path.is_file():
            raise UsageError(f"There is no key in {path}: name the key file with --key.")
        return load_identity(path)
    except OSError as exc:
        raise DataFolderError(f"{path} cannot be read ({exc.strerror}): run the command as its user.") from exc


def parse_changes(words: Sequence[str]) -> dict[str, Any]:
    """Parse `KEY=VALUE` words. The keys may begin with `run.`. Raises UsageError."""
    changes: dict[str, Any] = {}
    for word in words:
        key, has_value, text = word.partition("=")
        key = key.removeprefix("run.")
        if not has_value:
            raise UsageError(f"{word!r} is not a change: write KEY=VALUE, such as inner.lr=2e-4.")
        if key not in CHANGEABLE:
            raise UsageError(
                f"run.{key} cannot be changed while the run runs: did you mean {nearest(key, CHANGEABLE)}? "
                f"These can be changed: {', '.join(sorted(CHANGEABLE))}."
            )
        try:
            value = check_value(f"run.{key}", text)
        except ValueError as exc:
            raise UsageError(f"run.{key} = {text!r} is not allowed: {exc}.") from exc
        changes[key] = json.loads(json.dumps(value, default=lambda table: table.model_dump(mode="json")))
    if not changes:
        raise UsageError("Name what to change: `diloco-node steer amend KEY=VALUE ...`.")
    return changes


def read_sources(config: Config, changes: dict[str, Any]) -> dict[str, Any]:
    """Read the text of new sources on this machine, and return the changes with names on the hub pinned to commits.

    All members end if none of them can read the text. Raises MachineError or ConfigError if it cannot be read here.
    """
    if not changes.keys() & {"data.sources", "data.held_out_source"}:
        return changes
    from node.config.amendments import schedule_of
    from node.config.manifest import manifest_of
    from node.training.checkpoint import CheckpointStore
    from node.training.hub import pinned
    from node.training.text import open_text

    data_dir = config.node.data_dir
    accepted, _ = CheckpointStore(data_dir / "checkpoints", keep=1).newest_amendments()
    try:
        last = schedule_of(manifest_of(data_dir).run, accepted.encode()).terms[-1].run
        run = pinned(changed(last, changes))
    except AmendmentError as exc:
        raise UsageError(f"These sources do not fit the other settings of the run: {exc}.") from exc
    open_text(run, config.node.text_folder, config.node.hub_cache).held_out()
    now = {"data.sources": list(run.data.sources), "data.held_out_source": run.data.held_out_source}
    return changes | {key: now[key] for key in now if key in changes}


def read_target(data_dir: Path, word: str) -> dict[str, Any]:
    """The content of a rollback to this round, of which this node has a checkpoint. Raises UsageError."""
    from node.training.checkpoint import CheckpointStore

    store = CheckpointStore(data_dir / "checkpoints", keep=1)
    try:
        kept = [str(round_) for round_ in store.rounds()]
        digest = store.digest_at(int(word)) if word in kept else ""
    except PermissionError as exc:
        raise DataFolderError.of_another_user(data_dir) from exc
    if not digest:
        raise UsageError(
            f"This node has no checkpoint of round {word}: choose one of {', '.join(kept) or 'none'}. "
            "checkpoint.keep says how many are kept."
        )
    return {"to_round": int(word), "state": digest}


def draft(
    client: Client, action: str, content: dict[str, Any], from_round: int | None, replaces: int | None = None
) -> Amendment:
    """The next amendment of the run of this node. Raises UsageError if the run cannot be amended so.

    `content` has the fields of `Amendment` that belong to the action. `replaces` is the number of a pending amendment
    that is replaceable.
    """
    info, status = governance(client), client.status()
    if info.mode == "fixed":
        raise UsageError("Nobody may amend this run: its founder chose run.governance = fixed.")
    check_effects(content.get("changes", {}), info.schedule_tokens, int(status["peers"]["training"]))
    if replaces is None:
        check_pause(info, action)
    # `swarm_round` is only what most members claim, so it sets the default and not the limit.
    last = max(info.round, int(status["run"]["swarm_round"]))
    # No round of a paused run follows by itself, so a change applies from the next one on.
    usual = last + (LEAST_AHEAD if info.is_paused else USUAL_AHEAD)
    from_round = usual if from_round is None else from_round
    if from_round < (first := info.round + LEAST_AHEAD):
        raise UsageError(f"--from-round {from_round} is too early: the first round to change is {first}.")
    known = {one.number: one for one in info.amendments}
    if replaces is not None:
        old = known.get(replaces)
        if old is None or old.accepted_round is not None or not old.is_replaceable:
            raise UsageError(
                "--replace takes the number of a pending rollback or of a pending change of round.min_peers."
            )
    try:
        amendment = Amendment(
            run=info.run,
            # An amendment that was dropped, or was left behind with its chain, has left its number free.
            number=replaces or next(number for number in count(1) if number not in known),
            from_round=from_round,
            action=cast(Action, action),
            **content,
        )
    except ValidationError as exc:
        raise UsageError(f"The amendment is not valid: {exc.errors()[0]['msg']}.") from exc
    if replaces is not None and amendment.is_replaceable:
        raise UsageError("--replace works only with an action that needs no more members, such as pause or resume.")
    return amendment


def check_effects(changes: Mapping[str, Any], schedule_tokens: int, members: int) -> None:
    """Raise UsageError for new values that would end the run, or that no round could accept with these members."""
    total, least = changes.get("total_tokens"), changes.get("round.min_peers")
    if total is not None and total <= schedule_tokens:
        raise UsageError(
            f"run.total_tokens = {total} would end the run, which has trained on {schedule_tokens} tokens: to end it, "
            "run `diloco-node steer stop`."
        )
    if least is not None and least > members:
        raise UsageError(
            f"run.round.min_peers = {least} is more than the {members} members that are here, so no round could accept "
            "it: choose a lower number."
        )


def check_pause(info: GovernanceInfo, action: str) -> None:
    """Raise UsageError for a pause of a run that stays paused, or a resume of one that stays running."""
    orders = [one for one in info.amendments if one.change in ("pause", "resume")]
    last = max(orders, key=lambda one: (one.from_round, one.number), default=None)
    will_pause = last.change == "pause" if last is not None else info.is_paused
    if action == "pause" and will_pause:
        raise UsageError("The run is paused already, or will be: see `diloco-node steer`.")
    if action == "resume" and not will_pause:
        raise UsageError("The run is not paused, or will be resumed: see `diloco-node steer`.")


def governance(client: Client) -> GovernanceInfo:
    info = client.governance()
    if not info.run:
        raise UsageError("The node is not in its run yet: try again later.")
    return info


def sign(client: Client, identity: Identity, amendment: Amendment) -> tuple[SignedAmendment, int]:
    """Sign an amendment. Returns it with the number of signatures that it still needs. Raises UsageError."""
    info = governance(client)
    check_key(info, identity)
    if len(text := amendment.canonical()) > MOST_BYTES:
        raise UsageError(
            f"The change has {len(text):,} characters of at most {MOST_BYTES:,}: give fewer or shorter values."
        )
    signed = sign_amendment(identity, amendment)
    return signed, info.threshold - len(signed.signatures)


def check_key(info: GovernanceInfo, identity: Identity) -> None:
    """Raise UsageError if this key may not amend the run."""
    if identity.peer_id not in info.keys:
        raise UsageError(
            f"The key {identity.peer_id} may not amend this run: use --key FILE with the key of one of "
            f"{', '.join(info.keys)}."
        )


def write_for_others(path: Path, signed: SignedAmendment, missing: int) -> str:
    """Write a file to which others add `missing` signatures. Returns a sentence. Raises UsageError if it exists."""
    write_new(expand_user(path), _text(signed))
    needs, amendment = max(0, missing), signed.amendment
    return (
        f"Wrote amendment {amendment.number} to {path}. It needs {_signatures(needs)}, "
        f"and must be accepted before its round {amendment.from_round}."
    )


def _text(signed: SignedAmendment) -> str:
    return signed.model_dump_json() + "\n"


def read(path: Path) -> tuple[SignedAmendment, Amendment]:
    """Read a file of `write_for_others`. Raises UsageError."""
    try:
        signed = SignedAmendment.model_validate_json(expand_user(path).read_bytes())
        return signed, signed.amendment
    except OSError as exc:
        raise UsageError(f"{path} cannot be read: {exc.strerror}.") from exc
    except (ValidationError, AmendmentError) as exc:
        raise UsageError(f"{path} holds no amendment: use a file that `diloco-node steer` has written.") from exc


def sign_file(path: Path, identity: Identity, info: GovernanceInfo | None) -> str:
    """Add a signature to a file. Returns what was signed, and what is missing if the run of `info` is that of the file.

    Raises UsageError if the key may not amend that run.
    """
    signed, amendment = read(path)
    if info is not None and info.run != amendment.run:
        info = None
    if info is not None:
        check_key(info, identity)
    signed = add_signature(identity, signed)
    try:
        file = expand_user(path).resolve(strict=True)
        mode = file.stat().st_mode
        write_whole(file, _text(signed))
        file.chmod(mode)  # Others can still read it, and sign it.
    except OSError as exc:
        check_space(exc)
        raise UsageError(f"{path} cannot be written ({exc.strerror}): copy it to a folder that you own.") from exc
    what = f"{amendment.number}: {amendment.describe()}, from round {amendment.from_round}"
    if info is None:
        return (
            f"Signed amendment {what}, with the key {identity.peer_id}. No node of its run runs here to check the key."
        )
    missing = info.threshold - len(signed.signatures.keys() & set(info.keys))
    then = f"It needs {_signatures(missing)}." if missing > 0 else f"It is complete: `diloco-node steer submit {path}`."
    return f"Signed amendment {what}. {then}"


def _signatures(missing: int) -> str:
    return f"{missing} more signature{'' if missing == 1 else 's'}"


def submit(client: Client, signed: SignedAmendment, sleep: Callable[[float], None] = time.sleep) -> str:
    """Submit an amendment, and wait until the node has checked it. Returns a sentence. Raises UsageError if refused."""
    digest, info = hashlib.sha256(signed.text.encode()).hexdigest(), governance(client)
    before = len([one for one in info.refused if one.digest == digest])
    # A signature of another key would spoil those of the run's keys.
    of_keys = {key: signature for key, signature in signed.signatures.items() if key in info.keys}
    client.submit_amendment(signed.model_copy(update={"signatures": of_keys}).model_dump())
    for _ in range(round(WAIT_S / LOOK_S)):
        info = governance(client)
        for one in info.amendments:
            if one.digest == digest:
                return f"Amendment {_line(one)}."
        refused = [one.reason for one in info.refused if one.digest == digest]
        if len(refused) > before:
            raise UsageError(f"The node refuses the amendment, because {refused[-1]}.")
        sleep(LOOK_S)
    return "The amendment is submitted, but the node has not answered yet: see `diloco-node steer`."


def describe(info: GovernanceInfo) -> str:
    """Who may amend a run, and its amendments."""
    who = {
        "fixed": "nobody",
        "founder": f"the founder's key {', '.join(info.keys)}",
        "keys": f"{info.threshold} of these {len(info.keys)} keys: {', '.join(info.keys)}",
    }[info.mode]
    lines = [
        f"Run        {info.run}",
        f"May amend  {who}",
        f"State      {'paused' if info.is_paused else 'running'} after round {info.round}",
        *(f"Amendment  {_line(one)}" for one in info.amendments),
        *(f"Refused    {one.number}: {one.change}, because {one.reason}" for one in info.refused if one.number),
    ]
    return "\n".join(lines)


def _line(one: AmendmentInfo) -> str:
    state = "pending" if one.accepted_round is None else f"accepted by round {one.accepted_round}"
    if one.was_skipped:
        state += ", and did not take place, because too few members had the state"
    return f"{one.number} is {state}: {one.change}, from round {one.from_round}, signed by {', '.join(one.signers)}"
