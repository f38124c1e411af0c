"""Makes and uses the key that signs releases.

Run it from the top of the checkout: with PYTHONPATH=. and .ci/signing.lock installed, or in the environment of `make`.

    python .ci/release.py key FILE                    write a new private key, and print its public key
    python .ci/release.py sign WHEEL [--notes FILE]   write release.json beside the wheel

`sign` reads the private key from the variable RELEASE_KEY. The public key goes
into node/commands/release.toml; keep the private key away from the machines that build.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from node import __version__
from node.commands.release_file import LIFETIME, Release, read_release, sign
from node.commands.update import ReleaseSource
from node.config.manifest import PROTOCOL_VERSION


def public_key(key: Ed25519PrivateKey) -> str:
    return base64.b64encode(key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)).decode()


def make_key(file: Path) -> None:
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(pem)
    sys.stdout.write(f"{public_key(key)}\n")


def sign_wheel(wheel: Path, notes: Path | None) -> None:
    key = load_pem_private_key(os.environ["RELEASE_KEY"].encode(), password=None)
    assert isinstance(key, Ed25519PrivateKey), "the release key is of Ed25519"
    data, now = wheel.read_bytes(), datetime.now(UTC)
    release = Release(
        version=__version__,
        protocol=PROTOCOL_VERSION,
        released_at=now,
        expires_at=now + LIFETIME,
        wheel=wheel.name,
        size_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        notes=notes.read_text(encoding="utf-8") if notes is not None else "",
    )
    text = sign(release, key)
    # Nobody could update to a release whose key the program does not know.
    read_release(text.encode(), ReleaseSource.of_this_program("release.json").keys, now)
    target = wheel.with_name("release.json")
    target.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{target}: version {release.version}, {release.sha256}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("key").add_argument("file", type=Path)
    signing = actions.add_parser("sign")
    signing.add_argument("wheel", type=Path)
    signing.add_argument("--notes", type=Path)
    arguments = parser.parse_args()
    if arguments.action == "key":
        make_key(arguments.file)
    else:
        sign_wheel(arguments.wheel, arguments.notes)


if __name__ == "__main__":
    main()
