"""The signed release file: what it says, how it is signed, and how it is checked.

It is JSON with the text `release` and a `signature` of exactly this text by Ed25519, in base64. The text is JSON, so
the signed bytes need no canonical form. A release file expires, so nobody can replay an old one for ever.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Annotated

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from node.errors import ReleaseError
from node.status import Moment, rfc3339

DOMAIN = b"diloco-node release\n"
"""Comes before the text in what is signed, so that no other signature of the key can be taken for this one."""
SIZE_MAX_BYTES = 1 << 18
WHEEL_MAX_BYTES = 1 << 28
LIFETIME = timedelta(days=400)


def _check_version(text: str) -> str:
    try:
        return str(Version(text))
    except InvalidVersion as exc:
        raise ValueError(f"{text!r} is not a version") from exc


class Release(BaseModel):
    """One release."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Annotated[str, AfterValidator(_check_version)]
    protocol: int = Field(ge=1)
    """The protocol version of the swarm that it speaks."""
    released_at: Moment
    expires_at: Moment
    wheel: str = Field(pattern=r"^[A-Za-z0-9_.+-]{1,200}\.whl$")
    """File name of the wheel, which lies beside the release file."""
    size_bytes: int = Field(gt=0, le=WHEEL_MAX_BYTES)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    notes: str = Field(default="", max_length=10_000)
    """What is new, as plain text."""


class _SignedRelease(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    release: str
    signature: str


def sign(release: Release, key: Ed25519PrivateKey) -> str:
    """Return the text of a release file."""
    text = release.model_dump_json()
    signature = base64.b64encode(key.sign(DOMAIN + text.encode())).decode()
    return json.dumps({"release": text, "signature": signature}, indent=1) + "\n"


def read_release(data: bytes, keys: Iterable[str], now: datetime) -> Release:
    """Check a release file and return what it says. `keys` are public keys in base64. Raises ReleaseError."""
    if len(data) > SIZE_MAX_BYTES:
        raise ReleaseError("The release file is too large: nothing is installed. Check its address.")
    try:
        signed = _SignedRelease.model_validate_json(data)
        signature = base64.b64decode(signed.signature, validate=True)
    except ValueError as exc:  # Also a signature that is not ASCII.
        raise ReleaseError("This is not a release file: nothing is installed. Check its address.") from exc
    if not any(_is_signed_by(key, signature, DOMAIN + signed.release.encode()) for key in keys):
        raise ReleaseError(
            "The release file has no valid signature of a release key of this program, so somebody else may have "
            "written it: nothing is installed. Ask the project about it.",
            code="forged_release",
        )
    try:
        release = Release.model_validate_json(signed.release)
    except ValidationError as exc:
        raise ReleaseError(
            "The release file is signed, but of a newer form: nothing is installed. Install the new version by hand."
        ) from exc
    if release.expires_at <= now:
        raise ReleaseError(
            f"The release file expired at {rfc3339(release.expires_at)}, so there may be a newer one that is kept from "
            "you: nothing is installed. Check its address and this machine's clock.",
            code="expired_release",
        )
    return release


def _is_signed_by(key: str, signature: bytes, message: bytes) -> bool:
    public = Ed25519PublicKey.from_public_bytes(base64.b64decode(key, validate=True))
    try:
        public.verify(signature, message)
    except InvalidSignature:
        return False
    return True
