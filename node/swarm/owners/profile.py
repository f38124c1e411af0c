"""Signed profiles: to which owner a key belongs, and how that owner is called. It does no networking.

Each key signs its own profile. An owner's profile has a name, a team and a *joining key*, whose secret is in the token
that the owner pastes on other machines. The profile of such a machine names the owner, and has the joining key's
signature. So a machine belongs to an owner only if both have agreed, and only the owner can change the name.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar

import base58
from pydantic import AfterValidator, Field, StringConstraints

from node.errors import UsageError
from node.host.printable import check_label
from node.swarm.identity import Identity, identity_of_seed, verify
from node.swarm.messages import Content, Document, PeerId, read, sign

LONGEST_NAME = 40
"""Most characters of a name or a team."""
TOKEN_PREFIX = "diloco-owner1-"  # noqa: S105 - not a secret
ID_BYTES, SEED_BYTES, CRC_BYTES = 38, 32, 4
PURPOSE = "diloco owner"
OWN_PROFILE_FILE = "profile.json"
"""Name of the file in the data folder with the node's `OwnProfile`. The command `owner` writes it."""


def check_name(text: str) -> str:
    return check_label(text, LONGEST_NAME)


Name = Annotated[str, AfterValidator(check_name)]


class Profile(Content):
    """What a key says about its owner. An owner's own profile has no `owner`."""

    kind_name = "profile"
    longest: ClassVar[int] = 768
    """The longest valid profile has 519 characters."""
    number: int = Field(ge=0, lt=2**53)
    """The profile with the highest number counts. Numbers are milliseconds since 1970 by the signer's clock."""
    name: Name = ""
    team: Name = ""
    joining_key: PeerId = ""
    """Peer id of the key that lets machines join this owner. A new one lets go of all machines that joined before."""
    owner: PeerId = ""
    """The key of the owner to which this machine belongs."""
    consent: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{128})?$")] = ""
    """The signature of the owner's joining key over both keys."""


class OwnProfile(Content):
    """The node's own profile, and the secret of its joining key in hex, if it is an owner."""

    kind_name = "own profile"
    document: Document
    joining_seed: str = ""


@dataclass(frozen=True, slots=True)
class Owner:
    """Who a machine belongs to. A machine without a profile is its own owner without a name."""

    key: str
    name: str = ""
    team: str = ""


def owner_profile(identity: Identity, number: int, name: str, team: str, joining: Identity) -> OwnProfile:
    """The profile of an owner."""
    profile = Profile(number=number, name=name, team=team, joining_key=joining.peer_id)
    return OwnProfile(document=sign(identity, profile), joining_seed=joining.seed.hex())


def machine_profile(identity: Identity, number: int, owner: str, joining: Identity) -> OwnProfile:
    """The profile of a machine that joins an owner."""
    consent = joining.sign(PURPOSE, _pair(owner, identity.peer_id)).hex()
    return OwnProfile(document=sign(identity, Profile(number=number, owner=owner, consent=consent)))


def read_profile(document: Document) -> Profile:
    """Check a profile and return it. Raises PeerError."""
    return read(document, Profile)


@lru_cache(maxsize=16_384)
def may_join(joining_key: str, owner: str, machine: str, consent: str) -> bool:
    """Whether the owner's joining key has agreed that this machine belongs to the owner."""
    return verify(joining_key, PURPOSE, _pair(owner, machine), bytes.fromhex(consent))


def _pair(owner: str, machine: str) -> bytes:
    return f"{owner} {machine}".encode()


def make_token(owner: str, joining: Identity) -> str:
    """The token that joins machines to an owner. It is a secret: whoever has it can add machines, but not rename."""
    body = base58.b58decode(owner) + joining.seed
    return TOKEN_PREFIX + base64.urlsafe_b64encode(body + zlib.crc32(body).to_bytes(CRC_BYTES, "big")).decode()


def read_token(text: str) -> tuple[str, Identity]:
    """The owner's key and the joining key. White space is ignored. Raises UsageError."""
    text = "".join(text.split())
    try:
        data = base64.b64decode(text.removeprefix(TOKEN_PREFIX), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        data = b""
    body, crc = data[:-CRC_BYTES], data[-CRC_BYTES:]
    is_whole = len(body) == ID_BYTES + SEED_BYTES and zlib.crc32(body).to_bytes(CRC_BYTES, "big") == crc
    if not text.startswith(TOKEN_PREFIX) or not is_whole:
        raise UsageError(
            f"The token is damaged or cut short: copy the whole text that `owner token` printed, it starts with "
            f"{TOKEN_PREFIX}."
        )
    return base58.b58encode(body[:ID_BYTES]).decode(), identity_of_seed(body[ID_BYTES:])
