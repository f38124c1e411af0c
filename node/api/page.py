"""The dashboard's built files over HTTP. Knows where the build leaves them; knows not what is in them, nor any node."""

from __future__ import annotations

import mimetypes
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request, Response

STATIC = Path(__file__).parent / "static"
FOR_EVER = "public, max-age=31536000, immutable"
"""The build writes a hash of its content into the name of every asset."""
NOT_BUILT = b"""<!doctype html>
<html lang="en">
  <head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>diloco-node</title></head>
  <body>
    <h1>diloco-node</h1>
    <p>The node runs, and its dashboard is not built yet: run <code>npm ci &amp;&amp; npm run build</code> in the
    folder <code>dashboard</code> (Node.js 20 or newer), then start the node again.</p>
    <p>The API goes on working: <a href="/api/v1/status">/api/v1/status</a>.</p>
  </body>
</html>
"""


@dataclass(frozen=True, slots=True)
class File:
    content: bytes
    packed: bytes | None
    """The same through gzip, where the build made it."""
    media_type: str

    def response(self, request: Request, cache: str) -> Response:
        headers = {"Cache-Control": cache, "Vary": "Accept-Encoding"}
        if self.packed is not None and _takes_gzip(request.headers.get("accept-encoding", "")):
            return Response(self.packed, media_type=self.media_type, headers=headers | {"Content-Encoding": "gzip"})
        return Response(self.content, media_type=self.media_type, headers=headers)


def make_page(static: Path = STATIC) -> APIRouter:
    """`/` and `/assets/*`, as they are in `static` at this moment: a build beside a running node changes nothing."""
    router = APIRouter(include_in_schema=False)
    index = static / "index.html"
    page = _read(index) if index.is_file() else File(NOT_BUILT, None, "text/html")
    files = sorted((static / "assets").glob("*"))
    assets = {path.name: _read(path) for path in files if path.is_file() and path.suffix != ".gz"}

    @router.get("/")
    async def show_page(request: Request) -> Response:
        return page.response(request, "no-cache")

    @router.get("/assets/{name}")
    async def show_asset(request: Request, name: str) -> Response:
        # Looked up, never a path: what was not there at the start does not exist.
        if name not in assets:
            raise HTTPException(404)
        return assets[name].response(request, FOR_EVER)

    return router


def _read(path: Path) -> File:
    packed = path.with_name(path.name + ".gz")
    media_type = {".js": "text/javascript"}.get(path.suffix) or mimetypes.guess_type(path.name)[0]
    return File(path.read_bytes(), packed.read_bytes() if packed.is_file() else None, media_type or "text/plain")


def _takes_gzip(accepted: str) -> bool:
    offers = [offer.strip().lower().partition(";") for offer in accepted.split(",")]
    return any(name == "gzip" and how.replace(" ", "") not in ("q=0", "q=0.0") for name, _, how in offers)
