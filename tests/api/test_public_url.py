"""`api.public_url`: the link that is printed, the host names that are answered, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from node.api.auth import host_name
from node.config.schema import ApiConfig
from node.daemon.data_directory import DataDirectory
from node.daemon.http_server import no_tls_notice


def test_host_of_the_public_url_is_allowed() -> None:
    api = ApiConfig(public_url="http://Nas.local:8081/", allowed_hosts=("other",))
    assert api.public_url == "http://Nas.local:8081"
    assert api.host_names == ("other", "nas.local") and host_name("nas.local:8081") in api.host_names
    assert ApiConfig().host_names == ()


@pytest.mark.parametrize(
    "url", ["nas.local:8081", "ftp://nas", "http://nas/page", "http://nas/?x=1", "http://a:b@nas", "http://"]
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        ApiConfig(public_url=url)


def test_public_url_without_tls_is_noticed_unless_a_proxy_encrypts() -> None:
    notice = no_tls_notice(ApiConfig(host="0.0.0.0", public_url="http://nas.local:8081"))
    assert notice is not None and "nas.local" in notice.text
    assert no_tls_notice(ApiConfig(host="0.0.0.0", public_url="https://nas.local")) is None


def test_other_commands_learn_the_public_url_from_the_data_folder(tmp_path: Path) -> None:
    with DataDirectory.open(tmp_path / "data") as directory:
        directory.write_address("http://127.0.0.1:8080", public_url="http://nas.local:8081")
        stored = json.loads((directory.path / "api.json").read_text())
    assert (stored["url"], stored["public_url"]) == ("http://127.0.0.1:8080", "http://nas.local:8081")
