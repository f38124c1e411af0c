"""The program's commit comes from the file of a build, or else from git in a checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from node.host import revision


@pytest.fixture(autouse=True)
def _fresh() -> None:
    revision.revision.cache_clear()


def test_revision_of_a_git_checkout_is_its_commit(tmp_path: Path) -> None:
    assert revision._checkout_revision(tmp_path) == ""
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    git = ("git", "-C", str(tmp_path), *identity)
    for words in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "first")):
        subprocess.run([*git, *words], check=True, timeout=20)
    done = subprocess.run([*git, "rev-parse", "HEAD"], check=True, timeout=20, capture_output=True, text=True)
    assert revision._checkout_revision(tmp_path) == done.stdout[:12]
    (tmp_path / "node").mkdir()
    assert revision._checkout_revision(tmp_path / "node") == ""


def test_revision_file_of_a_build_takes_precedence_over_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "revision.txt").write_text("0123456789ab\n")
    monkeypatch.setattr(revision, "FILE", tmp_path / "revision.txt")
    assert revision.revision() == "0123456789ab"
