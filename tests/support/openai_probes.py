"""Requests of every field of OpenAI's completions, chat completions, responses and embeddings."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as CompletionParams
from openai.types.embedding_create_params import EmbeddingCreateParams as EmbeddingParams
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming as ResponseParams

from tests.support.compatibility import Api, Probe, Shows

HELLO = "Hello there."
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
REPLY = f"<think>\nLet me see.\n</think>\n\nSure.\n{CALL}\n{CALL}"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
FUNCTION = {"name": "add", "parameters": SCHEMA}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
USER = {"role": "user", "content": "x"}
ADDING: dict[str, Any] = {**TOOLS, "max_completion_tokens": 200}
SEED = {"extra_body": {"seed": 1}}
AGAIN = {"role": "user", "content": "y"}
CALLED = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def conforms(text: str) -> bool:
    """Whether a text is JSON of SCHEMA."""
    return json.loads(text) in ({"a": 1}, {"a": 2})


def _message(reply: Any) -> Any:
    return reply.choices[0].message


def _content(reply: Any) -> str:
    """The content of a chat, or of a piece of its stream."""
    choice = reply.choices[0]
    return (choice.message if hasattr(choice, "message") else choice.delta).content or ""


def _first(reply: Any) -> Any:
    """The log probabilities of the first token of a chat."""
    return reply.choices[0].logprobs.content[0]


def _called(count: int) -> Shows:
    """Whether a reply has `count` calls."""
    return lambda reply, plain: len(_message(reply).tool_calls or ()) == count


def _common(text: Callable[[Any], str]) -> dict[str, Sequence[Probe]]:
    """Requests of the fields that completions and chats share. text: of a reply, or of a piece of a stream."""

    def changes(reply: Any, plain: Any) -> bool:
        return text(reply) != text(plain)

    def stopped(reply: Any, plain: Any) -> bool:
        return text(reply) == "Hello" and reply.choices[0].finish_reason == "stop"

    def pieces_of(pieces: Any, plain: Any) -> bool:
        return "".join(map(text, pieces)) == text(plain)

    streamed = {"stream": True}
    return {
        "frequency_penalty": [Probe(2.0, changes)],
        "presence_penalty": [Probe(2.0, changes)],
        "temperature": [Probe(0, changes)],
        "top_p": [Probe(0.0, changes)],
        "seed": [Probe(2, changes)],
        "logit_bias": [Probe({"66": 100}, changes)],
        "n": [Probe(2, lambda reply, plain: len(reply.choices) == 2)],
        "stop": [Probe(" there", stopped, says=HELLO), Probe(["z", " th"], stopped, says=HELLO)],
        "stream": [Probe(True, pieces_of)],
        "stream_options": [
            Probe({"include_usage": True}, lambda pieces, plain: pieces[-1].usage.completion_tokens == 24, streamed),
            Probe({"include_obfuscation": False}, None, streamed),
        ],
        "user": [Probe("u")],
        "model": [Probe("tiny", lambda reply, plain: reply.model == "tiny"), Probe("other")],
    }


COMPLETIONS = Api(
    "/v1/completions",
    CompletionParams,
    {"model": "tiny", "prompt": "x", "seed": 1, "max_tokens": 24},
    lambda client, request: client.completions.create(**request),
    _common(lambda reply: reply.choices[0].text)
    | {
        "prompt": [
            Probe("x", lambda reply, plain: reply.usage == plain.usage),
            Probe([89], lambda reply, plain: reply.usage == plain.usage),
            Probe(["x", "y"], lambda reply, plain: len(reply.choices) == 2),
            Probe([[89], [90, 91]], lambda reply, plain: reply.usage.prompt_tokens == 3),
        ],
        "best_of": [Probe(2, lambda reply, plain: reply.usage.completion_tokens > 24)],
        "echo": [Probe(True, lambda reply, plain: reply.choices[0].text == "x" + plain.choices[0].text)],
        "logprobs": [Probe(2, lambda reply, plain: len(reply.choices[0].logprobs.top_logprobs[0]) >= 2)],
        "max_tokens": [Probe(3, lambda reply, plain: reply.usage.completion_tokens == 3)],
        "suffix": [Probe(""), Probe("y")],
    },
)

CHATS = Api(
    "/v1/chat/completions",
    ChatParams,
    {"model": "tiny", "messages": [USER], "seed": 1, "max_completion_tokens": 24},
    lambda client, request: client.chat.completions.create(**request),
    _common(_content)
    | {
        "messages": [
            Probe([{"role": "system", "content": "s"}, USER], lambda reply, plain: reply.usage == plain.usage),
            Probe([{"role": "user", "content": [{"type": "text", "text": "x"}]}], lambda reply, plain: True),
            Probe(
                [USER, {"role": "assistant", "content": None, "tool_calls": [CALLED]}, {**AGAIN, "role": "tool"}],
                lambda reply, plain: True,
            ),
            Probe([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]),
        ],
        "max_completion_tokens": [Probe(3, lambda reply, plain: reply.usage.completion_tokens == 3)],
        "max_tokens": [
            Probe(3, lambda reply, plain: reply.usage.completion_tokens == 3, {"max_completion_tokens": None})
        ],
        "logprobs": [Probe(True, lambda reply, plain: len(reply.choices[0].logprobs.content) == 24)],
        "top_logprobs": [
            Probe(
                2, lambda reply, plain: len(reply.choices[0].logprobs.content[0].top_logprobs) == 2, {"logprobs": True}
            )
        ],
        "response_format": [
            Probe({"type": "text"}),
            Probe(
                {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
                lambda reply, plain: conforms(_message(reply).content),
            ),
            Probe({"type": "json_object"}, lambda reply, plain: _message(reply).content.lstrip().startswith("{")),
        ],
        "tools": [
            Probe(TOOLS["tools"], _called(2), {"max_completion_tokens": 200}, REPLY),
            Probe([{"type": "custom", "custom": {"name": "f"}}]),
        ],
        "tool_choice": [
            Probe("auto", _called(2), ADDING, REPLY),
            Probe("none", _called(0), ADDING, REPLY),
            Probe("required", lambda reply, plain: len(_message(reply).tool_calls) >= 1, ADDING),
            Probe({"type": "function", "function": {"name": "add"}}, _called(1), ADDING),
            Probe({"type": "allowed_tools", "allowed_tools": {"mode": "auto", **TOOLS}}, _called(2), ADDING, REPLY),
        ],
        "parallel_tool_calls": [Probe(False, _called(1), ADDING, REPLY)],
        "reasoning_effort": [
            Probe("none", lambda reply, plain: True),
            Probe(
                "high",
                lambda reply, plain: _message(reply).reasoning_content == "Let me see.",
                {"max_completion_tokens": 200},
                REPLY,
            ),
        ],
        "functions": [Probe([]), Probe([FUNCTION])],
        "function_call": [Probe("auto"), Probe({"name": "add"})],
        "modalities": [Probe(["text"]), Probe(["text", "audio"])],
        "audio": [Probe({"format": "mp3", "voice": "alloy"})],
        "metadata": [Probe({"a": "b"})],
        "moderation": [Probe({"model": "m"})],
        "prediction": [Probe({"type": "content", "content": "x"})],
        "prompt_cache_key": [Probe("k")],
        "prompt_cache_options": [Probe({"mode": "implicit"})],
        "prompt_cache_retention": [Probe("24h")],
        "safety_identifier": [Probe("s")],
        "service_tier": [Probe("auto")],
        "store": [Probe(True)],
        "verbosity": [Probe("medium"), Probe("low")],
        "web_search_options": [Probe({})],
    },
)


def _kinds(*kinds: str) -> Shows:
    """Whether the items of a response are of these kinds."""
    return lambda reply, plain: [item.type for item in reply.output] == list(kinds)


def _told(top: int) -> Shows:
    """Whether a response tells log probabilities, and `top` alternatives."""

    def shown(reply: Any, plain: Any) -> bool:
        told = reply.output[0].content[0].logprobs
        return len(told) > 1 and all(len(one.top_logprobs) == top for one in told)

    return shown


LOGPROBS = {"include": ["message.output_text.logprobs"]}
ADD = [{"type": "function", **FUNCTION, "strict": False}]
ADDED: dict[str, Any] = {"tools": ADD, "max_output_tokens": 200}
TWICE = _kinds("reasoning", "message", "function_call", "function_call")

RESPONSES = Api(
    "/v1/responses",
    ResponseParams,
    {"model": "tiny", "input": "x", "max_output_tokens": 24, **SEED},
    lambda client, request: client.responses.create(**request),
    {
        "input": [
            Probe("x", lambda reply, plain: reply.usage.output_tokens == 24),
            Probe([USER], lambda reply, plain: reply.usage.output_tokens == 24),
            Probe(
                [
                    USER,
                    {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": "3"},
                ],
                lambda reply, plain: reply.usage.output_tokens == 24,
            ),
            Probe([{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]),
        ],
        "instructions": [Probe("Be brief.", lambda reply, plain: reply.instructions == "Be brief.")],
        "max_output_tokens": [Probe(3, lambda reply, plain: reply.usage.output_tokens == 3)],
        "temperature": [Probe(0, lambda reply, plain: reply.output_text != plain.output_text)],
        "top_p": [Probe(0.0, lambda reply, plain: reply.output_text != plain.output_text)],
        "stream": [Probe(True, lambda pieces, plain: pieces[-1].type == "response.incomplete")],
        "stream_options": [Probe({"include_obfuscation": False}, None, {"stream": True})],
        "text": [
            Probe({"format": {"type": "text"}}),
            Probe(
                {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}},
                lambda reply, plain: conforms(reply.output_text),
            ),
            Probe({"format": {"type": "json_object"}}, lambda reply, plain: reply.output_text.lstrip().startswith("{")),
            Probe({"verbosity": "low"}),
        ],
        "tools": [
            Probe(ADD, TWICE, {"max_output_tokens": 200}, REPLY),
            Probe([{"type": "web_search"}]),
        ],
        "tool_choice": [
            Probe("none", _kinds("reasoning", "message"), ADDED, REPLY),
            Probe("required", lambda reply, plain: reply.output[0].type == "function_call", ADDED),
            Probe({"type": "function", "name": "add"}, _kinds("function_call"), ADDED),
            Probe({"type": "allowed_tools", "mode": "auto", "tools": ADD}, TWICE, ADDED, REPLY),
        ],
        "parallel_tool_calls": [Probe(False, _kinds("reasoning", "message", "function_call"), ADDED, REPLY)],
        "reasoning": [
            Probe({"effort": "high"}, _kinds("reasoning", "message"), {"max_output_tokens": 200}, REPLY),
            Probe({"effort": "none", "summary": "auto"}, lambda reply, plain: True),
            Probe({"summary": "detailed"}),
        ],
        "store": [Probe(False, lambda reply, plain: True)],
        "metadata": [Probe({"a": "b"}, lambda reply, plain: reply.metadata == {"a": "b"})],
        "previous_response_id": [Probe("resp_0")],
        "model": [Probe("tiny", lambda reply, plain: reply.model == "tiny"), Probe("other")],
        "access_programs": [Probe([])],
        "background": [Probe(False), Probe(True)],
        "background_options": [Probe({})],
        "context_management": [Probe([{"type": "compaction"}])],
        "conversation": [Probe("conv_0")],
        "image": [Probe({})],
        "include": [Probe(["reasoning.encrypted_content"]), Probe(LOGPROBS["include"], _told(0)), Probe(["x"])],
        "max_tool_calls": [Probe(1)],
        "moderation": [Probe({"model": "m"})],
        "prompt": [Probe({"id": "p"})],
        "prompt_cache_key": [Probe("k")],
        "prompt_cache_options": [Probe({"mode": "implicit"})],
        "prompt_cache_retention": [Probe("24h")],
        "safety_identifier": [Probe("s")],
        "service_tier": [Probe("auto")],
        "top_logprobs": [Probe(0), Probe(2, _told(2), LOGPROBS), Probe(2)],
        "truncation": [Probe("disabled"), Probe("auto")],
        "user": [Probe("u")],
    },
)


def _embeddings(count: int) -> Shows:
    """Whether a reply has `count` embeddings."""
    return lambda reply, plain: len(reply.data) == count


EMBEDDINGS = Api(
    "/v1/embeddings",
    EmbeddingParams,
    {"model": "tiny", "input": "x"},
    lambda client, request: client.embeddings.create(**request),
    {
        "input": [
            Probe("x", _embeddings(1)),
            Probe(["x", "y"], _embeddings(2)),
            Probe([89, 90], _embeddings(1)),
            Probe([[89], [90, 91]], _embeddings(2)),
        ],
        "dimensions": [Probe(7, lambda reply, plain: len(reply.data[0].embedding) == 7), Probe(1 << 20)],
        "encoding_format": [
            Probe("float", lambda reply, plain: reply.data[0].embedding == plain.data[0].embedding),
            Probe("base64", lambda reply, plain: isinstance(reply.data[0].embedding, str)),
        ],
        "model": [Probe("tiny", lambda reply, plain: reply.model == "tiny"), Probe("other")],
        "user": [Probe("u")],
    },
)
