"""Gives the page's files."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

from starlette.responses import Response

if TYPE_CHECKING:
    from fastapi import FastAPI

FILES = {"index.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


def add_page(app: FastAPI) -> None:
    """Add ``/`` and the files it needs; they are read once."""
    folder = resources.files("specdec_server.page") / "static"
    contents = {name: (folder / name).read_bytes() for name in FILES}

    def add(path: str, name: str) -> None:
        async def give() -> Response:
            return Response(contents[name], media_type=FILES[name], headers=_HEADERS)

        app.add_api_route(path, give, methods=["GET", "HEAD"], include_in_schema=False)

    add("/", "index.html")
    for name in FILES:
        add(f"/page/{name}", name)
