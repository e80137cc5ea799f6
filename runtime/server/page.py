"""The chat page: one document for browsers that needs nothing but this server, and what it shows of the server."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException

from qcompile import __version__
from qcompile.runtime.sampling.params import SamplingParams

_READ = ["GET", "HEAD"]
_STYLE = re.compile(r'<link rel="stylesheet" href="([\w.]+)">')
_SCRIPT = re.compile(r'<script src="([\w.]+)"></script>')


def page_facts(model: str, context: int, chat: bool, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of the server. chat: whether conversations have a template. defaults: those of requests."""
    usual = SamplingParams()
    known = {"temperature": usual.temperature, "top_p": usual.top_p}
    settings = {name: defaults.get(name, value) for name, value in known.items()}
    return {"model": model, "context": context, "chat": chat, "defaults": settings, "version": __version__}


def add_page(app: FastAPI, facts: dict[str, Any], authorize: Callable[[Request], None]) -> None:
    """Serve the page at `/`, and at `/page.json` what it shows.

    The page needs no key. Who has none learns from `/page.json` no more than that: browsers report refused requests as
    errors of a page. authorize: raises HTTPException for a request without the key.
    """

    async def page() -> HTMLResponse:
        document, headers = _page()
        return HTMLResponse(document, headers=headers)

    async def about(request: Request) -> JSONResponse:
        try:
            authorize(request)
        except HTTPException:
            return JSONResponse({"locked": True})
        return JSONResponse({"locked": False} | facts)

    app.api_route("/", methods=_READ, include_in_schema=False)(page)
    app.api_route("/page.json", methods=_READ, include_in_schema=False)(about)


@cache
def _page() -> tuple[str, dict[str, str]]:
    """The document with its style and its scripts inside, and its headers.

    The browser runs only scripts with these hashes, asks no other server for anything, and refuses to parse text as
    HTML (Trusted Types): what a model writes stays text whatever it contains.
    """
    styles: list[str] = []
    scripts: list[str] = []

    def inside(tag: str, kept: list[str], match: re.Match[str]) -> str:
        kept.append(_source(match[1]))
        return f"<{tag}>{kept[-1]}</{tag}>"

    document = _STYLE.sub(lambda match: inside("style", styles, match), _source("index.html"))
    document = _SCRIPT.sub(lambda match: inside("script", scripts, match), document)
    allowed = {
        "default-src": "'none'",
        "script-src": " ".join(map(_hash, scripts)),
        "style-src": " ".join(map(_hash, styles)),
        "img-src": "data:",  # its icon
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return document, {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in allowed.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }


def _source(name: str) -> str:
    return (files("qcompile.runtime.server") / "web" / name).read_text(encoding="utf-8")


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
