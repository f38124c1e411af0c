"""A node that takes any port takes the same one again."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.swarm.ports import remember, same_as_before


def test_the_port_of_last_time_is_asked_for_again(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "port"
    assert same_as_before(["/ip4/0.0.0.0/tcp/0"], file) == ("/ip4/0.0.0.0/tcp/0",)
    remember(40123, file)
    assert same_as_before(["/ip4/0.0.0.0/tcp/0"], file) == ("/ip4/0.0.0.0/tcp/40123",)
    assert same_as_before(["/ip4/0.0.0.0/tcp/31000"], file) == ("/ip4/0.0.0.0/tcp/31000",)
    assert same_as_before([], file) == ()


@pytest.mark.parametrize("content", ["", "0", "-3", "70000", "x", "\ufffd"])
def test_a_file_that_makes_no_sense_is_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "port").write_text(content)
    assert same_as_before(["/ip4/0.0.0.0/tcp/0"], tmp_path / "port") == ("/ip4/0.0.0.0/tcp/0",)


def test_of_two_open_ports_nobody_knows_which(tmp_path: Path) -> None:
    remember(40123, tmp_path / "port")
    listen = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")
    assert same_as_before(listen, tmp_path / "port") == listen
