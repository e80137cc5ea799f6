"""Lets all replicas of a model sleep, or none: requests to sleep and to wake go to each, whichever process is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from fastapi import Request, Response

from qcompile.errors import ResourceError
from qcompile.runtime.server.replicas.forwarding import Forwarding, LostError, UnreachableError, Watch
from qcompile.runtime.server.replicas.replica import Replica

SLEEP, WAKE = "/sleep", "/wake_up"
_ALONE = Watch(lambda: None, lambda: None, lambda id: None)


class SleepingReplicas:
    """How the replicas sleep. forwarding: the connections to each. key: an API key that they take.

    A replica that starts again while the others sleep falls asleep before it takes requests.
    """

    def __init__(self, replicas: Sequence[Replica], forwarding: Sequence[Forwarding], key: bytes) -> None:
        self._replicas, self._forwarding = replicas, forwarding
        self._headers = {"Authorization": f"Bearer {key.decode()}"}
        self._level = ""
        """The level at which they sleep, as clients give it; empty while they are awake."""
        self._deciding = asyncio.Lock()
        for replica in replicas:
            replica.prepare = partial(self._join, replica)

    @property
    def routes(self) -> Mapping[str, Callable[[Request], object]]:
        """The handlers of POST requests, by path."""
        return {SLEEP: self.sleep, WAKE: self.wake}

    async def sleep(self, request: Request) -> Response:
        """Let all replicas sleep; if one cannot, those that could are woken. Raises ResourceError if none answers."""
        async with self._deciding:
            level = self._level or request.query_params.get("level", "1")
            answer = await self._ask_all(request, undo=WAKE)
            if answer.status_code == 200:
                self._level = level
            return answer

    async def wake(self, request: Request) -> Response:
        """Wake all replicas; if one cannot, the others sleep on. Raises ResourceError if none answers."""
        async with self._deciding:
            answer = await self._ask_all(request, undo=f"{SLEEP}?level={self._level}" if self._level else "")
            if answer.status_code == 200:
                self._level = ""
            return answer

    async def _ask_all(self, request: Request, undo: str) -> Response:
        """The answer of all replicas to a request: that of the first that refuses it, if one does.

        Then the replicas that did not are asked for `undo`. One that ends meanwhile starts again, and joins the others.
        """
        ready = [replica for replica in self._replicas if replica.ready]
        asked = [self._forwarding[replica.number].send(request, b"", _ALONE) for replica in ready]
        answers: dict[int, Response] = {}
        for replica, answer in zip(ready, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(answer, Response):
                answers[replica.number] = answer
            elif not isinstance(answer, UnreachableError | LostError):
                raise answer
        if not answers:
            raise ResourceError("no process of the model answers now: try again later")
        refused = [answer for answer in answers.values() if answer.status_code != 200]
        if refused and undo:
            done = [number for number, answer in answers.items() if answer.status_code == 200]
            posted = [self._forwarding[number].post(undo, self._headers) for number in done]
            await asyncio.gather(*posted, return_exceptions=True)  # one that has ended joins the others
        return refused[0] if refused else next(iter(answers.values()))

    async def _join(self, replica: Replica) -> None:
        """Let a replica that has started sleep, if the others do. Raises ResourceError if it cannot."""
        async with self._deciding:
            if self._level:
                await self._forwarding[replica.number].post(f"{SLEEP}?level={self._level}", self._headers)
