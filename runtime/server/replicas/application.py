"""The application that clients see in front of replicas: paths that concern all, and the rest passed on to one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from fastapi import FastAPI, Request, Response

from qcompile.runtime.server.bodies import Bounded
from qcompile.runtime.server.errors import add_error_handlers

_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


class Passing(Protocol):
    """What answers for replicas."""

    async def health(self) -> Response:
        """Whether replicas answer."""

    async def show_metrics(self) -> Response:
        """The metrics of all."""

    async def forward(self, request: Request) -> Response:
        """The response of one replica to a request."""


def _ignored(path: str, status: int) -> None:
    """Nothing counts the responses."""


def application(
    passing: Passing,
    most: int,
    responded: Callable[[str, int], None] = _ignored,
    posts: Mapping[str, Callable[[Request], object]] = MappingProxyType({}),
) -> FastAPI:
    """The application. Bodies of more than `most` bytes are refused; `responded` is told each path and status.

    posts: handlers of POST requests that concern all replicas, by path.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_middleware(Bounded, responded=responded, most=most)
    for path, handler in (("/health", passing.health), ("/metrics", passing.show_metrics)):
        app.api_route(path, methods=["GET", "HEAD"])(handler)
    for path, handle in posts.items():
        app.post(path, response_model=None)(handle)
    app.api_route("/{path:path}", methods=_METHODS)(passing.forward)
    add_error_handlers(app)
    return app
