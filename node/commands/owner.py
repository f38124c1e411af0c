"""The owner of this machine: sets name and team, and joins other machines. A running node sees it within seconds."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from node.errors import DataFolderError, UsageError
from node.host.files import check_space, write_whole
from node.swarm.identity import Identity, identity_of_seed, load_identity, new_identity
from node.swarm.messages import Document, sign
from node.swarm.owners.profile import (
    OWN_PROFILE_FILE,
    OwnProfile,
    Profile,
    check_name,
    machine_profile,
    make_token,
    owner_profile,
    read_profile,
    read_token,
)


def set_name(data_dir: Path, name: str | None, team: str | None) -> str:
    """Make this machine's key an owner with this name and team; None leaves one as it is. Returns a sentence."""
    identity, own = _load(data_dir)
    profile = _profile(own)
    if profile.owner:
        raise UsageError(
            "This machine has joined an owner: set the name on that owner's first machine, or run "
            "`diloco-node owner leave` here first."
        )
    name, team = profile.name if name is None else name, profile.team if team is None else team
    for what, text in (("name", name), ("team", team)):
        try:
            check_name(text)
        except ValueError as exc:
            raise UsageError(f"The {what} cannot be used, because {exc}.") from exc
    if not name:
        raise UsageError("An owner needs a name: run `diloco-node owner set NAME`.")
    _write(data_dir, owner_profile(identity, _next_number(data_dir, identity, own), name, team, _joining_key(own)))
    return f"This machine belongs to {name}{f' of team {team}' if team else ''}."


def token(data_dir: Path, *, is_new: bool) -> str:
    """The token that joins other machines to this machine's owner. With `is_new`, machines that have joined are let go.

    Raises UsageError if this machine is not the owner's first one.
    """
    identity, own = _load(data_dir)
    profile = _profile(own)
    if not profile.name:
        raise UsageError(
            "Only the owner's first machine has the token: run this there, or `diloco-node owner set NAME` here."
        )
    joining = new_identity() if is_new else _joining_key(own)
    if is_new:
        number = _next_number(data_dir, identity, own)
        _write(data_dir, owner_profile(identity, number, profile.name, profile.team, joining))
    return make_token(identity.peer_id, joining)


def join(data_dir: Path, text: str) -> str:
    """Make this machine belong to the owner who made the token. Returns a sentence."""
    owner, joining = read_token(text)
    identity, own = _load(data_dir)
    if owner == identity.peer_id:
        raise UsageError("This is the token of this machine: paste it on your other machines.")
    _write(data_dir, machine_profile(identity, _next_number(data_dir, identity, own), owner, joining))
    return f"This machine belongs to the owner with the key {owner}."


def leave(data_dir: Path) -> str:
    """Make this machine belong to nobody. Returns a sentence."""
    identity, own = _load(data_dir)
    profile = Profile(number=_next_number(data_dir, identity, own))
    _write(data_dir, OwnProfile(document=sign(identity, profile)))
    return "This machine belongs to nobody now."


NOBODY = "This machine belongs to nobody: run `diloco-node owner set NAME`, or `diloco-node owner join TOKEN`."


def describe(data_dir: Path) -> str:
    """The owner of this machine, its machines, and what they gave, as this data folder knows it."""
    if not (data_dir / "identity.key").exists():  # Looking at a folder makes no node of it.
        return NOBODY
    identity, own = _load(data_dir)
    profile, key = _profile(own), identity.peer_id
    known = _read(data_dir / "profiles.json").get("owners", {})
    owner, name, team = profile.owner or key, profile.name, profile.team
    if profile.owner:
        granted = known.get(key, {})
        if granted.get("key") != owner:
            return (
                f"This machine asks to belong to the owner {owner}, who is not known to agree yet: let both machines "
                "run for a minute. If it stays so, the token is an old one: ask for a new one."
            )
        name, team = granted["name"], granted["team"]
    elif not name:
        return NOBODY
    machines = {key} | {machine for machine, one in known.items() if one["key"] == owner}
    keys = sorted(machines, key=lambda one: (one != owner, one))
    lines = [
        f"Owner     {name}{f', team {team}' if team else ''}",
        f"Machines  {len(keys)}",
        *(f"          {one}{' (this machine)' if one == key else ''}" for one in keys),
    ]
    if credit := _read(data_dir / "credit.json"):
        tokens = {entry["member"]: entry["tokens"] for entry in credit["table"]}
        given = sum(tokens.get(one, 0) for one in keys)
        share, number = given / max(1, sum(tokens.values())), credit["evidence"]["round"]
        lines.append(f"Gave      {given:,} tokens, {share:.1%} of the run up to round {number}")
    return "\n".join(lines)


# the data folder


def _load(data_dir: Path) -> tuple[Identity, OwnProfile | None]:
    """This machine's key, which is made if there is none, and its profile."""
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        identity = load_identity(data_dir / "identity.key")
        own = OwnProfile.model_validate_json((data_dir / OWN_PROFILE_FILE).read_bytes())
    except FileNotFoundError:
        return identity, None
    except ValidationError as exc:
        raise DataFolderError(
            f"{data_dir / OWN_PROFILE_FILE} is damaged: remove it, and run the command again."
        ) from exc
    except OSError as exc:
        raise DataFolderError(
            f"{data_dir} cannot be used ({exc.strerror}): run the command as the node's user."
        ) from exc
    return identity, own if own.document.signer == identity.peer_id else None


def _profile(own: OwnProfile | None) -> Profile:
    return read_profile(own.document) if own is not None else Profile(number=0)


def _joining_key(own: OwnProfile | None) -> Identity:
    return identity_of_seed(bytes.fromhex(own.joining_seed)) if own is not None and own.joining_seed else new_identity()


def _next_number(data_dir: Path, identity: Identity, own: OwnProfile | None) -> int:
    """A number above those of all known profiles of this key, also if the clock was set back."""
    documents = [Document.model_validate(one) for one in _read(data_dir / "profiles.json").get("documents", ())]
    documents += [own.document] if own is not None else []
    known = [read_profile(document).number for document in documents if document.signer == identity.peer_id]
    return max([time.time_ns() // 1_000_000, *(number + 1 for number in known)])


def _read(path: Path) -> dict[str, Any]:
    """A JSON file that the node has written; empty if there is none."""
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return {}


def _write(data_dir: Path, own: OwnProfile) -> None:
    path = data_dir / OWN_PROFILE_FILE
    try:
        write_whole(path, own.model_dump_json())
    except OSError as exc:
        check_space(exc)
        raise DataFolderError(
            f"{path} cannot be written ({exc.strerror}): run the command as the node's user."
        ) from exc
