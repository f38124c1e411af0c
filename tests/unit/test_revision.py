"""The program knows its commit: from git in a checkout, else from what the build has left."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from node import revision


@pytest.fixture(autouse=True)
def _fresh() -> None:
    revision.revision.cache_clear()


def test_of_a_checkout_and_of_what_is_none(tmp_path: Path) -> None:
    assert revision._of_checkout(tmp_path) == ""
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    git = ("git", "-C", str(tmp_path), *identity)
    for words in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "first")):
        subprocess.run([*git, *words], check=True, timeout=20)
    done = subprocess.run([*git, "rev-parse", "HEAD"], check=True, timeout=20, capture_output=True, text=True)
    assert revision._of_checkout(tmp_path) == done.stdout[:12]
    (tmp_path / "node").mkdir()
    assert revision._of_checkout(tmp_path / "node") == ""


def test_what_the_build_has_left_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "revision.txt").write_text("0123456789ab\n")
    monkeypatch.setattr(revision, "FILE", tmp_path / "revision.txt")
    assert revision.revision() == "0123456789ab"
