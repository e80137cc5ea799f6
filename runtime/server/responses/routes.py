"""The endpoints of /v1/responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse

from qcompile.errors import UsageError, shown
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.server.asking import Asker
from qcompile.runtime.server.logprobs import TokenBytes
from qcompile.runtime.server.responses.answer import DeletedAnswer, InputTokensAnswer, ItemsAnswer, ResponseAnswer
from qcompile.runtime.server.responses.items import Message, input_items, messages_of
from qcompile.runtime.server.responses.reply import ResponseReply
from qcompile.runtime.server.responses.request import ResponsesRequest
from qcompile.runtime.server.responses.store import ResponseStore, StoredResponse, UnknownResponseError
from qcompile.runtime.server.schema import answered
from qcompile.runtime.turn import Turn

_PATH = "/v1/responses"


class ResponsesRoutes:
    """The handlers. Responses are kept in memory."""

    def __init__(self, asker: Asker) -> None:
        self._asker, self._store = asker, ResponseStore()

    def add_to(self, router: APIRouter) -> None:
        """Add the routes to a router."""
        router.post(_PATH, **answered(ResponseAnswer, streams=True))(self.create)
        router.post(f"{_PATH}/input_tokens", **answered(InputTokensAnswer))(self.count)
        router.get(f"{_PATH}/{{id}}", **answered(ResponseAnswer))(self.retrieve)
        router.get(f"{_PATH}/{{id}}/input_items", **answered(ItemsAnswer))(self.input_items)
        router.delete(f"{_PATH}/{{id}}", **answered(DeletedAnswer))(self.delete)
        router.post(f"{_PATH}/{{id}}/cancel", **answered(ResponseAnswer))(self.cancel)

    @property
    def _tokens(self) -> tuple[Callable[[str], int], TokenBytes]:
        return self._asker.count, self._asker.llm.token_bytes

    async def create(self, asked: ResponsesRequest, request: Request) -> Response:
        """Reply to a conversation, in the form of OpenAI's Responses API."""
        before = self._before(asked)
        turn, params = await self._turn(asked, before)
        reply = ResponseReply(self._asker.named(asked.model), asked, params, turn, *self._tokens)
        how: dict[str, Any] = {"structure_field": asked.structure_field, "model": asked.model}
        answer = await self._asker.submit([turn.prompt], params, asked.stream, **how)

        def complete(response: dict[str, Any]) -> None:
            if asked.store:
                messages = [*before, *asked.messages(), *_said(response)]
                self._store.add(StoredResponse(response, messages, input_items(asked.input)))

        if asked.stream:
            events = reply.events(answer, self._asker.metrics.finished, complete)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        outputs = await self._asker.outputs(request, answer)
        if outputs is None:
            return Response(status_code=499)  # nobody reads it; proxies log this status for it
        response = reply.whole(outputs[0])
        complete(response)
        return JSONResponse(response)

    async def count(self, asked: ResponsesRequest) -> JSONResponse:
        """The number of tokens of the prompt that a response would have."""
        turn, _ = await self._turn(asked, self._before(asked))
        tokens = await run_in_threadpool(self._asker.count, turn.prompt)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})

    async def retrieve(self, id: str, stream: bool = False) -> JSONResponse:
        """A response that was kept."""
        if stream:
            raise UsageError("stream: a response that was kept cannot be streamed")
        return JSONResponse(self._store.get(id).response)

    async def input_items(
        self,
        id: str,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> JSONResponse:
        """The input of a response that was kept: its items in pages, the last one first. after: where a page begins."""
        items = self._store.get(id).input[:: 1 if order == "asc" else -1]
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise UsageError(f"after: there is no item {shown(after)}")
            items = items[ids.index(after) + 1 :]
        page = items[:limit]
        ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return JSONResponse({"object": "list", "data": page, **ends, "has_more": len(items) > limit})

    async def delete(self, id: str) -> JSONResponse:
        """Forget a response."""
        self._store.remove(id)
        return JSONResponse({"id": id, "object": "response", "deleted": True})

    async def cancel(self, id: str) -> JSONResponse:
        """Refused: responses do not run in the background."""
        self._store.get(id)
        raise UsageError(
            "only responses in the background can be cancelled, and `background` is not supported: close the connection"
        )

    def _before(self, asked: ResponsesRequest) -> list[Message]:
        """The messages of the response that a request goes on from."""
        self._asker.check_model(asked.model)
        if asked.previous_response_id is None:
            return []
        try:
            return list(self._store.get(asked.previous_response_id).messages)
        except UnknownResponseError as error:
            raise UsageError(f"previous_response_id: {error}") from None

    async def _turn(self, asked: ResponsesRequest, before: list[Message]) -> tuple[Turn, SamplingParams]:
        given = asked.params(self._asker.llm.sampling_defaults)
        turn = await run_in_threadpool(self._asker.templates.turn, asked.dialogue(before))
        return turn, turn.params(given)


def _said(response: dict[str, Any]) -> list[Message]:
    """The messages of a response's output."""
    return messages_of(ResponsesRequest.model_validate({"input": response["output"]}).input)
