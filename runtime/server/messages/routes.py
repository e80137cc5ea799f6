"""The endpoints of /v1/messages."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse

from qcompile.runtime.server.asking import Asker
from qcompile.runtime.server.errors import MESSAGES
from qcompile.runtime.server.messages.answer import CountAnswer, MessageAnswer, MessagesFailure
from qcompile.runtime.server.messages.reply import MessageReply
from qcompile.runtime.server.messages.request import CountRequest, MessagesRequest
from qcompile.runtime.server.schema import answered
from qcompile.runtime.turn import Turn


class MessagesRoutes:
    """The handlers."""

    def __init__(self, asker: Asker) -> None:
        self._asker = asker

    def add_to(self, router: APIRouter) -> None:
        """Add the routes to a router."""
        router.post(MESSAGES, **answered(MessageAnswer, MessagesFailure, streams=True))(self.create)
        router.post(f"{MESSAGES}/count_tokens", **answered(CountAnswer, MessagesFailure))(self.count)

    async def create(self, asked: MessagesRequest, request: Request) -> Response:
        """Reply to a conversation, in the form of Anthropic's Messages API."""
        given = asked.params(self._asker.llm.sampling_defaults)
        turn = await self._turn(asked)
        params = turn.params(given)
        how: dict[str, Any] = {"structure_field": asked.structure_field, "model": asked.model}
        answer = await self._asker.submit([turn.prompt], params, asked.stream, **how)
        reply = MessageReply(self._asker.named(asked.model), turn)
        if asked.stream:
            events = reply.events(answer, self._asker.metrics.finished)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        outputs = await self._asker.outputs(request, answer)
        if outputs is None:
            return Response(status_code=499)  # nobody reads it; proxies log this status for it
        return JSONResponse(reply.whole(outputs[0]))

    async def count(self, asked: CountRequest) -> JSONResponse:
        """The number of tokens of the prompt that a message would have."""
        turn = await self._turn(asked)
        return JSONResponse({"input_tokens": await run_in_threadpool(self._asker.count, turn.prompt)})

    async def _turn(self, asked: CountRequest) -> Turn:
        self._asker.check_model(asked.model)
        templates = self._asker.templates
        return await run_in_threadpool(templates.turn, asked.dialogue(templates))
