"""`update` with good, old, expired and forged release files; pip is a fake command."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from node import __version__, cli
from node.commands import update
from node.commands.release_file import DOMAIN, SIZE_MAX_BYTES, Release, read_release, sign
from node.commands.update import ReleaseSource, check, install
from node.config.manifest import PROTOCOL_VERSION
from node.errors import MachineError, ReleaseError, UsageError

KEY, STRANGER = (Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2))
NOW = datetime(2026, 11, 26, tzinfo=UTC)
ROOT = Path(__file__).parents[2]


def wheel_that_needs(*packages: str) -> bytes:
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        lines = ["Metadata-Version: 2.4", "Name: diloco-node", *(f"Requires-Dist: {package}" for package in packages)]
        archive.writestr(zipfile.ZipInfo("diloco_node-9.0.0.dist-info/METADATA"), "\n".join(lines) + "\n\nText.\n")
    return file.getvalue()


WHEEL = wheel_that_needs("torch==2.13.0", "torch==9; extra == 'other'")


def public(key: Ed25519PrivateKey) -> str:
    return base64.b64encode(key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)).decode()


def release(**changes: Any) -> Release:
    values: dict[str, Any] = {
        "version": "9.0.0", "protocol": PROTOCOL_VERSION,
        "released_at": NOW - timedelta(days=1), "expires_at": NOW + timedelta(days=9),
        "wheel": "diloco_node-9.0.0-py3-none-any.whl", "size_bytes": len(WHEEL),
        "sha256": hashlib.sha256(WHEEL).hexdigest(), "notes": "Faster.\nSmaller.\x1b[31m",
    }  # fmt: skip
    return Release.model_validate(values | changes)


def source(tmp_path: Path, made: Release, key: Ed25519PrivateKey = KEY) -> ReleaseSource:
    file = tmp_path / "release.json"
    file.write_text(sign(made, key))
    (tmp_path / made.wheel).write_bytes(WHEEL)
    return ReleaseSource(str(file), (public(KEY),))


class Pip:
    def __init__(self, code: int = 0, check_code: int = 0) -> None:
        self.code, self.check_code = code, check_code
        self.commands: list[list[str]] = []
        self.installed = b""

    def __call__(self, command: Sequence[str]) -> int:
        if command[-1] == "check":
            return self.check_code
        self.commands.append(list(command))
        self.installed = Path(command[-1]).read_bytes()
        return self.code


def test_good_release_is_announced_and_installed_only_on_demand(tmp_path: Path) -> None:
    where, pip = source(tmp_path, release()), Pip()
    found = check(where, "0.1.0", NOW)
    assert found.is_newer and found.release == release() and pip.commands == []
    assert str(found).splitlines() == ["Version 9.0.0 is available, of 25 November 2026.", "Faster.", "Smaller. [31m"]
    install(where, found.release, pip)
    ((python, *words, wheel),) = pip.commands
    assert python == sys.executable and words[:3] == ["-P", "-m", "pip"] and "install" in words
    assert Path(wheel).name == "diloco_node-9.0.0-py3-none-any.whl" and pip.installed == WHEEL
    assert not Path(wheel).exists(), "the download is temporary"


def test_same_version_is_the_newest(tmp_path: Path) -> None:
    found = check(source(tmp_path, release(version="0.1.0")), "0.1", NOW)
    assert not found.is_newer and str(found) == "This is the newest version, 0.1.0."


def test_release_of_another_protocol_says_what_that_means(tmp_path: Path) -> None:
    found = str(check(source(tmp_path, release(protocol=PROTOCOL_VERSION + 1)), "0.1.0", NOW))
    assert f"It speaks protocol {PROTOCOL_VERSION + 1}, and this program speaks protocol {PROTOCOL_VERSION}" in found


def test_old_release_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match=r"0\.0\.9, which is older than this program \(0\.1\.0\)") as caught:
        check(source(tmp_path, release(version="0.0.9")), "0.1.0", NOW)
    assert (caught.value.exit_code, caught.value.code) == (2, "old_release")


def test_expired_release_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match=r"expired at 2026-12-05T00:00:00Z"):
        check(source(tmp_path, release()), "0.1.0", NOW + timedelta(days=9))


def forgeries() -> dict[str, str]:
    good = json.loads(sign(release(), KEY))
    altered = good["release"].replace("9.0.0", "9.0.1")
    flipped = bytearray(base64.b64decode(good["signature"]))
    flipped[7] ^= 1
    bare = base64.b64encode(KEY.sign(good["release"].encode())).decode()
    return {
        "by a stranger": sign(release(), STRANGER),
        "altered": json.dumps({**good, "release": altered}),
        "signature altered": json.dumps({**good, "signature": base64.b64encode(flipped).decode()}),
        "no signature": json.dumps({**good, "signature": ""}),
        "signed for another purpose": json.dumps({**good, "signature": bare}),
    }


@pytest.mark.parametrize("text", forgeries().values(), ids=forgeries())
def test_forged_release_is_refused(text: str) -> None:
    with pytest.raises(ReleaseError, match="no valid signature") as caught:
        read_release(text.encode(), [public(KEY)], NOW)
    assert caught.value.code == "forged_release"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"<html>",
        b'{"release": "x", "signature": "%"}',
        b'{"release": 1, "signature": ""}',
        b"\xff\x00",
        b'{"release": "x", "signature": "\xc3\xa9"}',
    ],
)
def test_what_is_no_release_file_is_refused(data: bytes) -> None:
    with pytest.raises(ReleaseError, match="not a release file"):
        read_release(data, [public(KEY)], NOW)
    with pytest.raises(ReleaseError, match="too large"):
        read_release(bytes(SIZE_MAX_BYTES + 1), [public(KEY)], NOW)


def test_signed_release_of_a_newer_form_is_refused() -> None:
    text = json.dumps({**json.loads(release().model_dump_json()), "more": 1})
    signature = base64.b64encode(KEY.sign(DOMAIN + text.encode())).decode()
    with pytest.raises(ReleaseError, match="of a newer form"):
        read_release(json.dumps({"release": text, "signature": signature}).encode(), [public(KEY)], NOW)


def test_each_of_several_keys_is_accepted(tmp_path: Path) -> None:
    assert read_release(sign(release(), STRANGER).encode(), [public(KEY), public(STRANGER)], NOW) == release()


@pytest.mark.parametrize("name", ["../evil.whl", "a/b.whl", "x.tar.gz", ".whl"])
def test_name_of_the_wheel_cannot_leave_its_folder(name: str) -> None:
    with pytest.raises(ValueError, match="wheel"):
        release(wheel=name)


@pytest.mark.parametrize("content", [b"b" + WHEEL[1:], WHEEL[:-1], WHEEL + b"b"])
def test_other_wheel_than_the_signed_one_is_not_installed(tmp_path: Path, content: bytes) -> None:
    where, pip = source(tmp_path, release()), Pip()
    (tmp_path / release().wheel).write_bytes(content)
    with pytest.raises(ReleaseError, match="not the file that the release file names") as caught:
        install(where, release(), pip)
    assert pip.commands == [] and caught.value.code == "wrong_wheel"


@pytest.mark.parametrize(
    ("pip", "text"),
    [
        (Pip(code=1), r"could not install .* Version 0\.1\.0 is installed now, and `pip check` finds no conflict"),
        (Pip(code=1, check_code=1), r"could not install .* Version 0\.1\.0 .* finds conflicts"),
        (Pip(check_code=1), r"do not fit together.* Version 0\.1\.0 .* finds conflicts"),
    ],
)
def test_failed_pip_is_an_error_that_says_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pip: Pip, text: str
) -> None:
    monkeypatch.setattr("node.commands.update.installed_version", {"diloco-node": "0.1.0", "torch": "2.13.0"}.get)
    with pytest.raises(MachineError, match=text):
        install(source(tmp_path, release()), release(), pip)


@pytest.mark.parametrize(
    ("installed", "needed", "index"),
    [
        ("2.13.0+cpu", "2.13.0", None),
        ("2.13.0", "2.14.0", None),
        ("2.13.0+cpu", "2.14.0", "https://download.pytorch.org/whl/cpu"),
        ("2.13.0+rocm7.0", "2.14.0", "https://download.pytorch.org/whl/rocm7.0"),
    ],
)
def test_build_of_torch_is_not_replaced_by_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str, needed: str, index: str | None
) -> None:
    monkeypatch.setattr("node.commands.update.installed_version", {"torch": installed}.get)
    wheel = wheel_that_needs("numpy>=2", f"torch=={needed}")
    made = release(size_bytes=len(wheel), sha256=hashlib.sha256(wheel).hexdigest())
    where, pip = source(tmp_path, made), Pip()
    (tmp_path / made.wheel).write_bytes(wheel)
    if index is None:
        install(where, made, pip)
        assert len(pip.commands) == 1
        return
    with pytest.raises(MachineError, match=f"`{sys.executable} -m pip install torch=={needed} --index-url {index}`"):
        install(where, made, pip)
    assert pip.commands == []


def test_signed_file_that_is_no_wheel_is_refused(tmp_path: Path) -> None:
    made = release(size_bytes=1, sha256=hashlib.sha256(b"x").hexdigest())
    where, pip = source(tmp_path, made), Pip()
    (tmp_path / made.wheel).write_bytes(b"x")
    with pytest.raises(ReleaseError, match="not a wheel"):
        install(where, made, pip)
    assert pip.commands == []


def test_environment_without_pip_is_told_how_to_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "has_pip", lambda: False)
    pip = Pip()
    with pytest.raises(UsageError, match="pull the new image"):
        install(source(tmp_path, release()), release(), pip)
    assert pip.commands == []


@pytest.mark.parametrize("url", ["http://example.org/release.json", "ftp://example.org/r", "file:///etc/passwd"])
def test_only_https_and_files_are_read(url: str) -> None:
    with pytest.raises(ReleaseError, match="neither a file nor an https URL"):
        check(ReleaseSource(url, (public(KEY),)), "0.1.0", NOW)


def test_missing_release_file_is_an_error_with_its_address(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match=r"gone\.json cannot be read"):
        check(ReleaseSource(str(tmp_path / "gone.json"), (public(KEY),)), "0.1.0", NOW)
    with pytest.raises(ReleaseError, match=r"https://\[x cannot be read"):
        check(ReleaseSource("https://[x", (public(KEY),)), "0.1.0", NOW)


def test_address_that_does_not_answer_leaves_no_empty_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(urllib.request, "urlopen", fail)
    with pytest.raises(ReleaseError, match=r"release\.json cannot be read \(TimeoutError\):"):
        check(ReleaseSource("https://example.org/release.json", (public(KEY),)), "0.1.0", NOW)


# The command


def test_command_installs_only_with_its_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    far = datetime.now(UTC) + timedelta(days=300)
    where, pip = source(tmp_path, release(expires_at=far)), Pip()
    monkeypatch.setattr(ReleaseSource, "of_this_program", lambda url: ReleaseSource(url or where.url, where.keys))
    monkeypatch.setattr(update, "pip", pip)
    assert cli.main(["update"], environ={}) == 0
    assert "Nothing is installed" in capsys.readouterr().out and pip.commands == []
    assert cli.main(["update", "--install"], environ={}) == 0
    assert "Restart the node" in capsys.readouterr().out and len(pip.commands) == 1
    (tmp_path / "release.json").write_text(sign(release(version=__version__, expires_at=far), KEY))
    assert cli.main(["update", "--install"], environ={}) == 0
    assert "newest version" in capsys.readouterr().out and len(pip.commands) == 1
    (tmp_path / "release.json").write_text(sign(release(expires_at=far), STRANGER))
    assert cli.main(["update", "--install", "--from", where.url], environ={}) == 2
    assert "no valid signature" in capsys.readouterr().err and len(pip.commands) == 1


def test_build_without_a_release_key_checks_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if update.tomllib.loads(update.SOURCE.read_text())["keys"]:  # type: ignore[attr-defined]
        pytest.skip("this build has a release key")
    source(tmp_path, release())
    assert cli.main(["update", "--from", str(tmp_path / "release.json"), "--install"], environ={}) == 2
    assert "contains no release key" in capsys.readouterr().err


def test_release_script_makes_a_key_and_signs_with_it(tmp_path: Path) -> None:
    """The script runs on a copy of the package whose release.toml names the new key."""
    private = tmp_path / "key.pem"
    run = [sys.executable, str(ROOT / ".ci" / "release.py")]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    made = subprocess.run(
        [*run, "key", str(private)], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    key = made.stdout.strip()
    assert private.stat().st_mode & 0o777 == 0o600 and len(base64.b64decode(key)) == 32
    wheel = tmp_path / "diloco_node-0.1.0-py3-none-any.whl"
    wheel.write_bytes(WHEEL)
    signing = [*run, "sign", str(wheel)]
    environment["RELEASE_KEY"] = private.read_text()
    done = subprocess.run(signing, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode and "no release key" in done.stderr, "the package does not know the key yet"
    code = (
        "import sys, runpy, pathlib; from node.commands import update; "
        f"update.SOURCE = pathlib.Path({str(tmp_path / 'release.toml')!r}); sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    (tmp_path / "release.toml").write_text(f'url = ""\nkeys = ["{key}"]\n')
    subprocess.run(
        [sys.executable, "-c", code, *signing[1:]], env=environment, timeout=60, check=True, capture_output=True
    )
    now = datetime.now(UTC)
    signed = read_release((tmp_path / "release.json").read_bytes(), [key], now)
    assert (signed.version, signed.wheel, signed.size_bytes) == (__version__, wheel.name, len(WHEEL))
    assert signed.sha256 == hashlib.sha256(WHEEL).hexdigest() and signed.expires_at > now + timedelta(days=300)
