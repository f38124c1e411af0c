"""The dashboard's files over HTTP: open to anyone, cached by name, packed where wanted; a plain word when not built."""

from __future__ import annotations

import asyncio
import gzip
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from node.api.page import make_page
from tests.api.conftest import ClientMaker

SCRIPT = b"console.log(1);"
INDEX = b'<!doctype html><script type="module" src="/assets/index-1a2b3c.js"></script>'


@pytest.fixture
def static(tmp_path: Path) -> Path:
    """What a build leaves, in small."""
    folder = tmp_path / "static"
    (folder / "assets").mkdir(parents=True)
    for name, content in (("index.html", INDEX), ("assets/index-1a2b3c.js", SCRIPT)):
        (folder / name).write_bytes(content)
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    (folder / "assets" / "icon-1a2b3c.svg").write_bytes(b"<svg/>")
    return folder


def asked(static: Path, path: str, accept: str = "identity") -> httpx.Response:
    async def main() -> httpx.Response:
        app = FastAPI()
        app.include_router(make_page(static))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://node") as http:
            return await http.get(path, headers={"Accept-Encoding": accept})

    return asyncio.run(main())


def test_index_is_asked_for_each_time_and_assets_never_again(static: Path) -> None:
    index = asked(static, "/")
    assert (index.status_code, index.content) == (200, INDEX)
    assert index.headers["content-type"] == "text/html; charset=utf-8"
    assert index.headers["cache-control"] == "no-cache"
    script = asked(static, "/assets/index-1a2b3c.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert script.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert asked(static, "/assets/icon-1a2b3c.svg").headers["content-type"] == "image/svg+xml"


@pytest.mark.parametrize(
    ("accept", "packed"), [("gzip, br", True), ("br;q=1, GZIP;q=0.5", True), ("gzip;q=0", False), ("identity", False)]
)
def test_packed_for_who_takes_it(static: Path, accept: str, packed: bool) -> None:
    answer = asked(static, "/assets/index-1a2b3c.js", accept)
    assert answer.content == SCRIPT
    assert answer.headers["vary"] == "Accept-Encoding"
    assert ("content-encoding" in answer.headers) == packed


@pytest.mark.parametrize(
    "name", ["index-1a2b3c.js.gz", "other.js", "..%2findex.html", "../index.html", "%2e%2e/app.py"]
)
def test_nothing_else_is_there(static: Path, name: str) -> None:
    assert asked(static, f"/assets/{name}").status_code == 404


def test_without_a_build_it_says_how(tmp_path: Path) -> None:
    page = asked(tmp_path / "nothing", "/")
    assert page.status_code == 200
    assert "npm run build" in page.text
    assert asked(tmp_path / "nothing", "/assets/index.js").status_code == 404


def test_page_needs_no_token_and_may_hold_nothing_inline(client: ClientMaker) -> None:
    """The one that this checkout has, built or not, behind the guard."""

    async def main() -> None:
        async with client(token=None) as http:
            page = await http.get("/")
            assert page.status_code == 200
            assert page.headers["content-security-policy"].startswith("default-src 'self'")
            assert "<style" not in page.text
            assert " style=" not in page.text
            assert page.text.count("<script") == page.text.count(' src="/assets/')
            assert (await http.get("/assets/../api/v1/status")).status_code in (401, 404)
            assert (await http.get("/assets/%2e%2e/app.py")).status_code in (401, 404)

    asyncio.run(main())
