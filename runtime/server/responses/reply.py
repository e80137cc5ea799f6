"""Responses of /v1/responses, whole or as a stream of events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from qcompile.errors import QCompileError, UsageError
from qcompile.runtime.outputs import RequestOutput
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.server.api import named_event
from qcompile.runtime.server.blocks import BlockReader, Change, ReplyBlock
from qcompile.runtime.server.logprobs import TokenBytes, TokenSpeller, no_bytes
from qcompile.runtime.server.replies import Finished, OutputStream
from qcompile.runtime.server.responses.items import new_id
from qcompile.runtime.server.responses.request import ResponsesRequest
from qcompile.runtime.server.responses.token_places import TokenPlaces
from qcompile.runtime.turn import Turn

Json = dict[str, Any]
_PREFIX = {"text": "msg", "reasoning": "rs", "call": "fc"}
_PART = {"text": "output_text", "reasoning": "reasoning_text"}


class ResponseReply:
    """The response to a request, of which it repeats fields. count: counts the tokens of a text. token_bytes: the
    model's tokens, for log probabilities.

    Raises UsageError where a field is no JSON.
    """

    def __init__(
        self,
        model: str,
        asked: ResponsesRequest,
        params: SamplingParams,
        turn: Turn,
        count: Callable[[str], int],
        token_bytes: TokenBytes = no_bytes,
    ) -> None:
        self._asked, self._count = asked, count
        self._reader = BlockReader(turn, "call_")
        self._ids: list[str] = []  # of the items, which the blocks are
        self._places = TokenPlaces(TokenSpeller(token_bytes), asked.top_logprobs) if asked.tells_logprobs else None
        self._logprobs: dict[int, list[Json]] = {}  # of the items that are texts
        self._number = 0  # of the next event
        self._header = _echoed(model, asked, params)
        _check_json(self._header)
        self._ended: Json = {"status": "in_progress", "incomplete_details": None, "error": None, "usage": None}

    @property
    def response(self) -> Json:
        """The response so far."""
        items = [self._item(index) for index in range(len(self._reader.blocks))]
        return self._header | self._ended | {"output": items}

    def whole(self, output: RequestOutput) -> Json:
        """The response that has this output."""
        for _ in self._changes(output):
            pass
        self._end(output)
        return self.response

    async def events(
        self, answer: OutputStream, finished: Finished, complete: Callable[[Json], None]
    ) -> AsyncIterator[str]:
        """Server-sent events as `answer` grows. Ending the iteration early cancels the answer.

        complete: called with the complete response before the last event.
        """
        try:
            yield self._event("response.created", response=self.response)
            yield self._event("response.in_progress", response=self.response)
            async for output in answer:
                for change, logprobs in self._changes(output):
                    for event in self._events_of(change, logprobs):
                        yield event
                if output.finished:
                    finished(output)
                    self._end(output)
            complete(self.response)
            yield self._event(f"response.{self._ended['status']}", response=self.response)
        except QCompileError as error:  # the status line was sent already
            self._ended |= {"status": "failed", "error": {"code": "server_error", "message": str(error)}}
            yield self._event("response.failed", response=self.response)
        finally:
            answer.cancel()

    def _changes(self, output: RequestOutput) -> Iterator[tuple[Change, list[Json]]]:
        """What is new, and the log probabilities of what has grown."""
        ends = self._places.read(output.outputs[0]) if self._places else ()
        for change in self._reader.read(output, ends):
            if change.what == "begin":
                self._ids.append(new_id(_PREFIX[change.block.kind]))
            yield change, self._new_logprobs(change)

    def _new_logprobs(self, change: Change) -> list[Json]:
        """The log probabilities of what a block has grown by."""
        if self._places is None or change.what != "grow" or change.block.kind == "call":
            return []
        added = self._places.logprobs(change.added, change.read)
        self._logprobs.setdefault(change.index, []).extend(added)
        return added

    def _end(self, output: RequestOutput) -> None:
        details = {"reason": "max_output_tokens"} if self._reader.cut else None
        reasoning = self._reader.text_of("reasoning")
        tokens, prompt = output.generated_tokens, len(output.prompt_token_ids)
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": output.metrics.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": min(self._count(reasoning), tokens) if reasoning else 0},
            "total_tokens": prompt + tokens,
        }
        status = "incomplete" if self._reader.cut else "completed"
        self._ended |= {"status": status, "incomplete_details": details, "usage": usage, "completed_at": time.time()}

    def _item(self, index: int, status: str | None = None) -> Json:
        """A block as an item. status: None for that which follows from the response's."""
        block, last = self._reader.blocks[index], index + 1 == len(self._reader.blocks)
        status = status or ("incomplete" if last and self._reader.cut else "completed")
        item: Json = {"id": self._ids[index], "status": status}
        if block.kind == "call":
            return item | {
                "type": "function_call",
                "call_id": block.call_id,
                "name": block.name,
                "arguments": block.text,
            }
        content = [_part(block, self._logprobs.get(index))] if status != "in_progress" else []
        if block.kind == "reasoning":
            return item | {"type": "reasoning", "summary": [], "content": content}
        return item | {"type": "message", "role": "assistant", "content": content}

    def _events_of(self, change: Change, logprobs: list[Json]) -> Iterator[str]:
        """The events that tell of a change. logprobs: of what has grown."""
        block, index = change.block, change.index
        place = {"item_id": self._ids[index], "output_index": index}
        part = place | {"content_index": 0}
        told: Json = {"logprobs": logprobs} if block.kind == "text" else {}
        name = "response.function_call_arguments" if block.kind == "call" else f"response.{_PART[block.kind]}"
        if change.what == "begin":
            yield self._event("response.output_item.added", output_index=index, item=self._item(index, "in_progress"))
            if block.kind != "call":
                yield self._event("response.content_part.added", **part, part=_part(ReplyBlock(block.kind)))
        elif change.what == "grow" and block.kind == "call":
            yield self._event(f"{name}.delta", **place, delta=change.added)
        elif change.what == "grow":
            yield self._event(f"{name}.delta", **part, delta=change.added, **told)
        else:
            if block.kind == "call":
                yield self._event(f"{name}.done", **place, name=block.name, arguments=block.text)
            else:
                all_told = {"logprobs": self._logprobs.get(index, [])} if told else {}
                yield self._event(f"{name}.done", **part, text=block.text, **all_told)
                yield self._event("response.content_part.done", **part, part=_part(block, all_told.get("logprobs")))
            yield self._event("response.output_item.done", output_index=index, item=self._item(index))

    def _event(self, kind: str, **data: Any) -> str:
        self._number += 1
        return named_event({"type": kind, "sequence_number": self._number - 1} | data)


def _part(block: ReplyBlock, logprobs: list[Json] | None = None) -> Json:
    """The content of an item that is a text or reasoning."""
    part = {"type": _PART[block.kind], "text": block.text}
    return part | {"annotations": [], "logprobs": logprobs or []} if block.kind == "text" else part


def _check_json(header: Json) -> None:
    """Raise UsageError for a field that cannot be repeated: Python takes NaN and halves of characters for JSON."""
    for name, value in header.items():
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except ValueError:
            raise UsageError(f"{name} must be JSON: with finite numbers, and texts of whole characters") from None


def _echoed(model: str, asked: ResponsesRequest, params: SamplingParams) -> Json:
    """What a response repeats of its request."""
    form = asked.text.format if asked.text else None
    written = form.model_dump(exclude_none=True, by_alias=True) if form else {"type": "text"}
    tools = [{"strict": False} | tool.model_dump(exclude_none=True) for tool in asked.tools or ()]
    effort = asked.reasoning.effort if asked.reasoning else None
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "model": model,
        **{"instructions": asked.instructions, "max_output_tokens": asked.max_output_tokens},
        **{"temperature": params.temperature, "top_p": params.top_p, "truncation": "disabled"},
        "top_logprobs": asked.top_logprobs,
        **{"tools": tools, "tool_choice": asked.tool_choice, "parallel_tool_calls": asked.parallel_tool_calls},
        **{"text": {"format": written, "verbosity": "medium"}, "reasoning": {"effort": effort, "summary": None}},
        **{"previous_response_id": asked.previous_response_id, "store": asked.store, "background": False},
        **{"metadata": asked.metadata or {}, "user": asked.user, "service_tier": "default"},
    }
