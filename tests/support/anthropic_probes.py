"""Requests of every field of Anthropic's messages."""

from __future__ import annotations

from typing import Any

from anthropic.types.message_create_params import MessageCreateParamsNonStreaming

from tests.support.compatibility import Api, Probe, Shows
from tests.support.openai_probes import AGAIN, HELLO, REPLY, SCHEMA, SEED, USER, conforms


def _kinds(*kinds: str) -> Shows:
    """Whether the blocks of a reply are of these kinds."""
    return lambda reply, plain: [block.type for block in reply.content] == list(kinds)


ADD = [{"name": "add", "input_schema": SCHEMA}]
ADDING: dict[str, Any] = {"tools": ADD, "max_tokens": 200}

MESSAGES = Api(
    "/v1/messages",
    MessageCreateParamsNonStreaming,
    {"model": "tiny", "messages": [USER], "max_tokens": 24, **SEED},
    lambda client, request: client.messages.create(**request),
    {
        "messages": [
            Probe([{"role": "user", "content": [{"type": "text", "text": "x"}]}], _kinds("text")),
            Probe(
                [
                    USER,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "add", "input": {}}]},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "3"}]},
                ],
                _kinds("text"),
            ),
            Probe([USER, {**AGAIN, "role": "assistant"}]),
            Probe([{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "data:,"}}]}]),
        ],
        "max_tokens": [Probe(3, lambda reply, plain: reply.usage.output_tokens == 3)],
        "model": [Probe("tiny", lambda reply, plain: reply.model == "tiny"), Probe("other")],
        "system": [Probe("Be brief.", _kinds("text")), Probe([{"type": "text", "text": "Be brief."}], _kinds("text"))],
        "stop_sequences": [Probe([" there"], lambda reply, plain: reply.stop_sequence == " there", says=HELLO)],
        "stream": [Probe(True, lambda pieces, plain: pieces[-1].type == "message_stop")],
        "tools": [
            Probe(ADD, _kinds("thinking", "text", "tool_use", "tool_use"), {"max_tokens": 200}, REPLY),
            Probe([{"type": "web_search_20250305", "name": "web_search"}]),
        ],
        "tool_choice": [
            Probe({"type": "none"}, _kinds("thinking", "text"), ADDING, REPLY),
            Probe({"type": "any"}, lambda reply, plain: reply.content[0].type == "tool_use", ADDING),
            Probe({"type": "tool", "name": "add"}, _kinds("tool_use"), ADDING),
            Probe(
                {"type": "auto", "disable_parallel_tool_use": True},
                _kinds("thinking", "text", "tool_use"),
                ADDING,
                REPLY,
            ),
        ],
        "thinking": [
            Probe({"type": "enabled", "budget_tokens": 1024}, _kinds("thinking", "text"), {"max_tokens": 200}, REPLY),
            Probe({"type": "disabled"}, lambda reply, plain: True),
        ],
        "output_config": [
            Probe(
                {"format": {"type": "json_schema", "schema": SCHEMA}},
                lambda reply, plain: conforms(reply.content[0].text),
            ),
            Probe({"effort": "high"}, lambda reply, plain: True),
        ],
        "metadata": [Probe({"user_id": "u"})],
        "cache_control": [Probe({"type": "ephemeral"})],
        "service_tier": [Probe("auto")],
        "container": [Probe("c")],
        "diagnostics": [Probe({})],
        "inference_geo": [Probe("us")],
        "speed": [Probe("standard"), Probe("fast")],
        "user_profile_id": [Probe("u")],
        "workspace_id": [Probe("w")],
    },
)
