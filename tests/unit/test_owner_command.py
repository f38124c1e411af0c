"""The command `owner` on data folders, without a node."""

from __future__ import annotations

import errno
import io
import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from node import cli
from node.commands import owner
from node.errors import RestartError
from node.swarm.messages import Document
from node.swarm.owners.profile import OWN_PROFILE_FILE, OwnProfile, read_profile
from node.swarm.owners.profile_table import ProfileTable


@pytest.fixture
def laptop(tmp_path: Path) -> Path:
    return tmp_path / "laptop"


@pytest.fixture
def box(tmp_path: Path) -> Path:
    return tmp_path / "box"


def run(folder: Path, *words: str) -> int:
    return cli.main(["owner", *words, "--data-dir", str(folder)], {"HOME": "/nowhere"})


def own(folder: Path) -> Document:
    return OwnProfile.model_validate_json((folder / OWN_PROFILE_FILE).read_bytes()).document


def exchange(*folders: Path) -> ProfileTable:
    """Write what running nodes would have exchanged."""
    table = ProfileTable("", lambda: ())
    assert table.merge([own(folder) for folder in folders]) == []
    content = {
        "documents": [document.model_dump() for document in table.documents],
        "owners": {key: asdict(one) for key, one in table.owners()},
    }
    for folder in folders:
        (folder / "profiles.json").write_text(json.dumps(content))
    return table


def test_a_full_disk_is_named_as_the_cause(
    laptop: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path, _text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert run(laptop, "set", "Ada") == 0
    monkeypatch.setattr(owner, "write_whole", refuse)
    assert run(laptop, "set", "Ben") == RestartError.exit_code
    assert "free some space" in capfd.readouterr().err
    assert "Ada" in own(laptop).text


def test_two_machines_of_one_owner_are_joined_with_one_token(
    laptop: Path, box: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(laptop, "set", "Ada", "--team", "Blue") == 0
    assert capsys.readouterr().out == "This machine belongs to Ada of team Blue.\n"
    assert run(laptop, "token") == 0
    token = capsys.readouterr().out.strip()
    assert run(box, "join", token) == 0
    capsys.readouterr()
    assert run(box) == 0
    assert "not known to agree yet" in capsys.readouterr().out
    table = exchange(laptop, box)
    keys = [own(folder).signer for folder in (laptop, box)]
    assert {table.owner_of(key).key for key in keys} == {keys[0]}
    entries = [{"member": key, "tokens": tokens} for key, tokens in zip((*keys, "other"), (200, 100, 700), strict=True)]
    (box / "credit.json").write_text(json.dumps({"evidence": {"round": 7}, "table": entries}))
    assert run(box) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Owner     Ada, team Blue\nMachines  2\n")
    assert f"{keys[1]} (this machine)" in shown and "Gave      300 tokens, 30.0% of the run up to round 7" in shown
    assert run(laptop, "token", "--new") == 0
    assert capsys.readouterr().out.strip() != token
    assert exchange(laptop, box).owner_of(keys[1]).key == keys[1], "the old token is worth nothing"


def test_name_and_team_change_alone_and_leaving_forgets_both(laptop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(laptop, "set", "Ada") == 0
    secret = OwnProfile.model_validate_json((laptop / OWN_PROFILE_FILE).read_bytes()).joining_seed
    assert run(laptop, "set", "--team", "Blue") == 0
    assert run(laptop, "set", "Ada L.") == 0
    kept = OwnProfile.model_validate_json((laptop / OWN_PROFILE_FILE).read_bytes())
    profile = read_profile(kept.document)
    assert (profile.name, profile.team, kept.joining_seed) == ("Ada L.", "Blue", secret)
    assert run(laptop, "leave") == 0
    assert (read_profile(own(laptop)).name, read_profile(own(laptop)).number > profile.number) == ("", True)
    capsys.readouterr()
    assert run(laptop) == 0
    assert "belongs to nobody" in capsys.readouterr().out
    assert (laptop / OWN_PROFILE_FILE).stat().st_mode & 0o777 == 0o600


def test_profile_gets_a_higher_number_even_if_the_clock_was_set_back(
    laptop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(laptop, "set", "Ada") == 0
    number = read_profile(own(laptop)).number
    exchange(laptop)
    (laptop / OWN_PROFILE_FILE).unlink()
    monkeypatch.setattr(time, "time_ns", lambda: 1)
    assert run(laptop, "set", "Bob") == 0
    assert read_profile(own(laptop)).number == number + 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("set",), "An owner needs a name"),
        (("set", "a\u202eb"), "The name cannot be used, because it has an invisible or control character"),
        (("set", "Ada", "--team", "x" * 41), "The team cannot be used, because it has 41 characters"),
        (("token",), "Only the owner's first machine has the token"),
        (("join",), "Paste the token"),
        (("join", "diloco-owner1-x"), "damaged or cut short"),
        (("leave", "now"), "takes no more arguments"),
        (("show", "--team", "x"), "--team belongs to"),
        (("rename",), "invalid choice"),
    ],
)
def test_bad_use_is_refused_in_one_sentence(
    laptop: Path,
    words: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert run(laptop, *words) == 2
    assert message in capsys.readouterr().err
    assert not (laptop / OWN_PROFILE_FILE).exists()


def test_looking_at_a_folder_makes_no_node_of_it(laptop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(laptop) == 0
    assert "belongs to nobody" in capsys.readouterr().out
    assert not laptop.exists()


def test_machine_that_has_joined_cannot_rename_its_owner(
    laptop: Path, box: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(laptop, "set", "Ada") == 0
    token = owner.token(laptop, is_new=False)
    assert run(laptop, "join", token) == 2
    assert "token of this machine" in capsys.readouterr().err
    assert run(box, "join", token) == 0
    for words in (("set", "Eve"), ("token",)):
        assert run(box, *words) == 2
    (box / OWN_PROFILE_FILE).write_text("{")
    assert run(box) == 2
    assert "is damaged" in capsys.readouterr().err


def test_end_of_input_at_the_hidden_prompt_is_a_usage_error(
    laptop: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(_prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("getpass.getpass", end)
    assert run(laptop, "join") == 2
    assert "Paste the token" in capsys.readouterr().err
