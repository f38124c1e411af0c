"""The dashboard's files over HTTP: caching, compression, and a notice if the dashboard was not built."""

from __future__ import annotations

import gzip
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from node.api.page import make_page
from tests.api.conftest import ClientMaker, HttpClient

SCRIPT = b"console.log(1);"
INDEX = b'<!doctype html><script type="module" src="/assets/index-1a2b3c.js"></script>'


@pytest.fixture
def static(tmp_path: Path) -> Path:
    """A folder with a small stand-in for the built dashboard."""
    folder = tmp_path / "static"
    (folder / "assets").mkdir(parents=True)
    for name, content in (("index.html", INDEX), ("assets/index-1a2b3c.js", SCRIPT)):
        (folder / name).write_bytes(content)
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    (folder / "assets" / "icon-1a2b3c.svg").write_bytes(b"<svg/>")
    return folder


def get(static: Path, path: str, accept: str = "identity") -> httpx.Response:
    app = FastAPI()
    app.include_router(make_page(static))
    return HttpClient(app, None, "127.0.0.1").get(path, headers={"Accept-Encoding": accept})


def test_browsers_revalidate_the_index_page_and_cache_the_assets(static: Path) -> None:
    index = get(static, "/")
    assert (index.status_code, index.content) == (200, INDEX)
    assert index.headers["content-type"] == "text/html; charset=utf-8"
    assert index.headers["cache-control"] == "no-cache"
    script = get(static, "/assets/index-1a2b3c.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert script.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert get(static, "/assets/icon-1a2b3c.svg").headers["content-type"] == "image/svg+xml"


@pytest.mark.parametrize("path", ["/", "/assets/index-1a2b3c.js"])
def test_head_request_of_the_page_has_the_headers_of_the_get_request(static: Path, path: str) -> None:
    app = FastAPI()
    app.include_router(make_page(static))
    client = HttpClient(app, None, "127.0.0.1")
    head, get_ = client.request("HEAD", path), client.get(path)
    assert (head.status_code, head.headers, get_.status_code) == (200, get_.headers, 200)


@pytest.mark.parametrize(
    ("accept", "compressed"),
    [("gzip, br", True), ("br;q=1, GZIP;q=0.5", True), ("gzip;q=0", False), ("identity", False)],
)
def test_assets_are_compressed_for_clients_that_accept_gzip(static: Path, accept: str, compressed: bool) -> None:
    response = get(static, "/assets/index-1a2b3c.js", accept)
    assert response.content == SCRIPT
    assert response.headers["vary"] == "Accept-Encoding"
    assert ("content-encoding" in response.headers) == compressed


@pytest.mark.parametrize(
    "name", ["index-1a2b3c.js.gz", "other.js", "..%2findex.html", "../index.html", "%2e%2e/app.py"]
)
def test_assets_route_serves_only_existing_assets(static: Path, name: str) -> None:
    assert get(static, f"/assets/{name}").status_code == 404


def test_page_says_how_to_build_the_dashboard_if_it_was_not_built(tmp_path: Path) -> None:
    page = get(tmp_path / "nothing", "/")
    assert page.status_code == 200
    assert "npm run build" in page.text
    assert get(tmp_path / "nothing", "/assets/index.js").status_code == 404


def test_dashboard_page_needs_no_token_and_has_no_inline_scripts_or_styles(client: ClientMaker) -> None:
    """The page is the one of this checkout, whether built or not, behind the API's access checks."""
    http = client(token=None)
    page = http.get("/")
    assert page.status_code == 200
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    assert "<style" not in page.text
    assert " style=" not in page.text
    assert page.text.count("<script") == page.text.count(' src="/assets/')
    for path in ("/assets/../api/v1/status", "/assets/%2e%2e/app.py"):
        assert http.get(path).status_code in (401, 404)
