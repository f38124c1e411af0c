"""Serves the built dashboard. The files are read once, when the application is made."""

from __future__ import annotations

import mimetypes
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request, Response

STATIC = Path(__file__).parent / "static"
FOREVER = "public, max-age=31536000, immutable"
"""Caching of assets, whose names contain a hash of their content."""
NOT_BUILT = b"""<!doctype html>
<html lang="en">
  <head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>diloco-node</title></head>
  <body>
    <h1>diloco-node</h1>
    <p>The node runs, but its dashboard is not built: run <code>npm ci &amp;&amp; npm run build</code> in the
    folder <code>dashboard</code> (Node.js 20 or newer), then start the node again.</p>
    <p>The API works without it: <a href="/api/v1/status">/api/v1/status</a>.</p>
  </body>
</html>
"""


@dataclass(frozen=True, slots=True)
class File:
    content: bytes
    gzipped: bytes | None
    """The same content compressed; None if the build did not make it."""
    media_type: str

    def response(self, request: Request, cache: str) -> Response:
        headers = {"Cache-Control": cache, "Vary": "Accept-Encoding"}
        if self.gzipped is not None and _accepts_gzip(request.headers.get("accept-encoding", "")):
            return Response(self.gzipped, media_type=self.media_type, headers=headers | {"Content-Encoding": "gzip"})
        return Response(self.content, media_type=self.media_type, headers=headers)


def make_page(static: Path = STATIC) -> APIRouter:
    """Make the routes for `/` and `/assets/*`. A later build does not change what a running node serves."""
    router = APIRouter(include_in_schema=False)
    index = static / "index.html"
    page = _read(index) if index.is_file() else File(NOT_BUILT, None, "text/html")
    files = sorted((static / "assets").glob("*"))
    assets = {path.name: _read(path) for path in files if path.is_file() and path.suffix != ".gz"}

    @router.head("/")
    @router.get("/")
    async def show_page(request: Request) -> Response:
        return page.response(request, "no-cache")

    @router.head("/assets/{name}")
    @router.get("/assets/{name}")
    async def show_asset(request: Request, name: str) -> Response:
        # A lookup by name: no request can reach a path outside the folder.
        if name not in assets:
            raise HTTPException(404)
        return assets[name].response(request, FOREVER)

    return router


def _read(path: Path) -> File:
    gzipped = path.with_name(path.name + ".gz")
    media_type = {".js": "text/javascript"}.get(path.suffix) or mimetypes.guess_type(path.name)[0]
    return File(path.read_bytes(), gzipped.read_bytes() if gzipped.is_file() else None, media_type or "text/plain")


def _accepts_gzip(accepted: str) -> bool:
    encodings = [part.strip().lower().partition(";") for part in accepted.split(",")]
    return any(name == "gzip" and quality.replace(" ", "") not in ("q=0", "q=0.0") for name, _, quality in encodings)
