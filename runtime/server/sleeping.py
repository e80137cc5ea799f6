"""The endpoints by which a model that is served gives its memory back and takes it again, as vLLM has them."""

from __future__ import annotations

from typing import Protocol

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from qcompile.errors import UsageError, shown
from qcompile.runtime.server.answers import SleepAnswer
from qcompile.runtime.server.schema import answered


class Sleeping(Protocol):
    """What can sleep (service.py)."""

    @property
    def asleep(self) -> bool: ...
    async def sleep(self, level: int) -> None: ...
    async def wake_up(self) -> None: ...


class SleepRoutes:
    """The handlers of `/sleep`, `/wake_up` and `/is_sleeping`."""

    def __init__(self, service: Sleeping) -> None:
        self._service = service

    def add_to(self, router: APIRouter) -> None:
        """Add the routes."""
        router.post("/sleep", **answered(SleepAnswer))(self.sleep)
        router.post("/wake_up", **answered(SleepAnswer))(self.wake_up)
        router.get("/is_sleeping", **answered(SleepAnswer))(self.is_sleeping)

    async def sleep(self, request: Request) -> JSONResponse:
        """Refuse new requests, let those that run end, then give the memory of weights and cache back. Query: level."""
        level = _parameters(request, "level").get("level", "1")
        if level not in ("1", "2"):
            raise UsageError(f"level must be 1 or 2, not {shown(level)}")
        await self._service.sleep(int(level))
        return self._answer()

    async def wake_up(self, request: Request) -> JSONResponse:
        """Take the memory again, and read and verify the weights."""
        _parameters(request)
        await self._service.wake_up()
        return self._answer()

    async def is_sleeping(self) -> JSONResponse:
        """Whether the model sleeps."""
        return self._answer()

    def _answer(self) -> JSONResponse:
        return JSONResponse({"is_sleeping": self._service.asleep})


def _parameters(request: Request, *known: str) -> dict[str, str]:
    """The parameters of the request's URL. Raises UsageError for others than those known."""
    given = dict(request.query_params)
    if unknown := sorted(given.keys() - set(known)):
        raise UsageError(f"{shown(unknown[0])} is not supported: the whole model sleeps and wakes")
    return given
