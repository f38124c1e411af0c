"""`update`: checks a signed release file, and installs its wheel only if told to.

Nothing calls it automatically. It checks the wheel before pip installs it, but not the packages that pip downloads in
addition.
"""

from __future__ import annotations

import email
import hashlib
import io
import shlex
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from http.client import HTTPException
from importlib.machinery import PathFinder
from pathlib import Path
from urllib.parse import urljoin, urlsplit

from packaging.requirements import Requirement
from packaging.version import Version

from node.commands.release_file import SIZE_MAX_BYTES, Release, read_release
from node.config.manifest import PROTOCOL_VERSION
from node.errors import MachineError, ReleaseError, UsageError, cause_of
from node.host.printable import printable
from node.host.revision import installed_version

SOURCE = Path(__file__).with_name("release.toml")
TIMEOUT_S = 30.0
LINE_LENGTH_MAX = 300
TORCH_INDEX = "https://download.pytorch.org/whl"
"""PyTorch's indexes of its builds. Each has the name of its builds' local version label, such as `cpu`."""


@dataclass(frozen=True, slots=True)
class ReleaseSource:
    """Where releases are announced, and by whom they are signed."""

    url: str
    """URL with https, or the path of a file; empty if unknown."""
    keys: tuple[str, ...]

    @classmethod
    def of_this_program(cls, url: str | None = None) -> ReleaseSource:
        """Read the source that the package contains. `url` replaces its address. Raises UsageError without a key."""
        known = tomllib.loads(SOURCE.read_text(encoding="utf-8"))
        source = cls(url or known["url"], tuple(known["keys"]))
        if not source.keys:
            raise UsageError(
                "This build contains no release key, so it cannot check a release file: install a new version by hand."
            )
        if not source.url:
            raise UsageError("This build does not know where releases are: name a release file with --from.")
        return source


@dataclass(frozen=True, slots=True)
class Update:
    release: Release
    is_newer: bool
    """Whether the release is newer than this program."""

    def __str__(self) -> str:
        release = self.release
        if not self.is_newer:
            return f"This is the newest version, {release.version}."
        lines = [f"Version {release.version} is available, of {release.released_at:%d %B %Y}."]
        if release.protocol != PROTOCOL_VERSION:
            lines.append(
                f"It speaks protocol {release.protocol}, and this program speaks protocol {PROTOCOL_VERSION}, so the "
                "new version cannot continue your run. Finish the run first, or update all members together."
            )
        return "\n".join([*lines, *(printable(line, LINE_LENGTH_MAX) for line in release.notes.splitlines())])


def check(source: ReleaseSource, version: str, now: datetime) -> Update:
    """Read the release file. `version` is this program's. Raises ReleaseError, and for an older release as well."""
    release = read_release(_read(source.url, SIZE_MAX_BYTES), source.keys, now)
    if Version(release.version) < Version(version):
        raise ReleaseError(
            f"The release file announces version {release.version}, which is older than this program ({version}): "
            "nothing is installed. Install an older version by hand if you want it.",
            code="old_release",
        )
    return Update(release, Version(release.version) > Version(version))


def has_pip() -> bool:
    """Whether this environment has pip."""
    # `find_spec` would ask setuptools as well, which warns if distutils is imported already.
    return PathFinder.find_spec("pip") is not None


def install(source: ReleaseSource, release: Release, run: Callable[[Sequence[str]], int]) -> None:
    """Download the wheel, compare it with the signed hash, and let pip install it into this environment.

    `run` runs a command and returns its exit code. Raises ReleaseError for another file, and MachineError if pip would
    install another build of torch, or if pip fails.
    """
    if not has_pip():
        raise UsageError(
            "This environment has no pip. If it is the container image, pull the new image and start it on the volume; "
            "else install the wheel in the way in which you installed this version."
        )
    data = _read(_beside(source.url, release.wheel), release.size_bytes)
    if len(data) != release.size_bytes or hashlib.sha256(data).hexdigest() != release.sha256:
        raise ReleaseError(
            f"{release.wheel} is not the file that the release file names: nothing is installed. Try again later.",
            code="wrong_wheel",
        )
    _check_torch(data)
    pip_command = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
        wheel = Path(folder, release.wheel)
        wheel.write_bytes(data)
        is_failed = run([*pip_command, "install", "--upgrade", str(wheel)])
    is_unfit = run([*pip_command, "check"])
    if is_failed or is_unfit:
        fault = "pip could not install the new version" if is_failed else "The packages do not fit together"
        version = installed_version("diloco-node") or "none"
        raise MachineError(
            f"{fault}: see the message above. Version {version} is installed now, and "
            f"`pip check` finds {'conflicts' if is_unfit else 'no conflict'}."
        )


def _check_torch(wheel: bytes) -> None:
    """Raise MachineError if pip would replace torch by the build of its default index, which may lack this GPU."""
    try:
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            lines = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
    except (zipfile.BadZipFile, StopIteration) as exc:
        raise ReleaseError("The release is not a wheel: nothing is installed. Report it.", code="wrong_wheel") from exc
    installed = installed_version("torch")
    build = Version(installed).local if installed else None
    needed = next((one for one in map(Requirement, lines) if one.name == "torch" and one.marker is None), None)
    if installed is None or build is None or needed is None or needed.specifier.contains(installed):
        return
    index = f"{TORCH_INDEX}/{build}"
    command = [sys.executable, "-m", "pip", "install", f"torch{needed.specifier}", "--index-url", index]
    raise MachineError(
        f"The new version needs torch{needed.specifier}, and pip would replace torch {installed} by a build for other "
        f"machines: run `{shlex.join(command)}`, and then this command again. Nothing is installed yet.",
        code="torch_build",
    )


def pip(command: Sequence[str]) -> int:
    return subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode


def _beside(url: str, name: str) -> str:
    return urljoin(url, name) if urlsplit(url).scheme else str(Path(url).with_name(name))


def _read(url: str, limit_bytes: int) -> bytes:
    """Read a file or an https URL. Stops after `limit_bytes` + 1. Raises ReleaseError."""
    try:
        scheme = urlsplit(url).scheme
        if scheme not in ("", "https"):
            raise ReleaseError(f"{url} is neither a file nor an https URL: name one.")
        if not scheme:
            with Path(url).open("rb") as file:
                return file.read(limit_bytes + 1)
        request = urllib.request.Request(url, headers={"User-Agent": "diloco-node"})  # noqa: S310 - the scheme is checked
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
            return bytes(answer.read(limit_bytes + 1))
    except (OSError, HTTPException, ValueError) as exc:
        raise ReleaseError(
            f"{url} cannot be read ({cause_of(exc)}): check the address and try again.", code="no_release"
        ) from exc
