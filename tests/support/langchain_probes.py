"""Requests of every field of langchain-openai's models that reaches a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.compatibility import Api, Probe, Shows
from tests.support.openai_probes import HELLO, REPLY

_OWN = frozenset(
    {
        *("allowed_special", "async_client", "batch_size", "cache", "callbacks", "chunk_size", "client"),
        *("custom_get_token_ids", "default_headers", "default_query", "deployment", "disable_streaming"),
        *("disallowed_special", "embedding_ctx_length", "headers", "http_async_client", "http_client"),
        *("http_socket_options", "include_response_headers", "max_retries", "metadata", "name", "openai_api_base"),
        *("openai_api_key", "openai_api_type", "openai_api_version", "openai_organization", "openai_proxy"),
        *("output_version", "profile", "rate_limiter", "request_timeout", "retry_max_seconds", "retry_min_seconds"),
        *("root_async_client", "root_client", "show_progress_bar", "skip_empty", "stream_chunk_timeout", "tags"),
        *("tiktoken_enabled", "tiktoken_model_name", "verbose", "disabled_params"),
    }
)
"""Fields that choose the server, or that the library uses itself."""
LONG = {"max_tokens": 200}
RESPONSES = {"seed": None}
"""What requests to /v1/responses need: the library has no seed for these."""


def _message(reply: Any) -> Any:
    return reply.generations[0][0].message


def _text(reply: Any) -> str:
    return str(reply.generations[0][0].text)


def _changes(reply: Any, plain: Any) -> bool:
    return _text(reply) != _text(plain)


def _same(reply: Any, plain: Any) -> bool:
    return _text(reply) == _text(plain)


def _says(text: str) -> Shows:
    return lambda reply, plain: _text(reply) == text


def _responds(kind: str) -> Shows:
    """Whether a reply comes from /v1/responses, and has a part of this kind."""

    def shows(reply: Any, plain: Any) -> bool:
        message = _message(reply)
        return message.id.startswith("resp_") and kind in [part["type"] for part in message.content]

    return shows


def _told(reply: Any, plain: Any) -> bool:
    return len(_message(reply).response_metadata["logprobs"]["content"]) == 24


def _alternatives(reply: Any, plain: Any) -> bool:
    return len(_message(reply).response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2


def _generated(name: str) -> Callable[[Any, dict[str, Any]], Any]:
    """A model of a class asked for one prompt."""

    def call(client: dict[str, Any], request: dict[str, Any]) -> Any:
        import langchain_openai
        from langchain_core.messages import HumanMessage

        model = getattr(langchain_openai, name)(**client | request)
        return model.generate([[HumanMessage("x")] if "Chat" in name else "x"])

    return call


def _embedded(client: dict[str, Any], request: dict[str, Any]) -> Any:
    import langchain_openai

    return langchain_openai.OpenAIEmbeddings(**client | request).embed_documents(["x", "y"])


SAMPLING = {
    "frequency_penalty": [Probe(2.0, _changes)],
    "presence_penalty": [Probe(2.0, _changes)],
    "temperature": [Probe(0, _changes)],
    "top_p": [Probe(0.0, _changes)],
    "seed": [Probe(2, _changes)],
    "logit_bias": [Probe({"66": 100}, _changes)],
    "max_tokens": [Probe(3, lambda reply, plain: reply.llm_output["token_usage"]["completion_tokens"] == 3)],
    "n": [Probe(2, lambda reply, plain: len(reply.generations[0]) == 2)],
    "streaming": [Probe(True, _same)],
    "extra_body": [Probe({"top_k": 1}, _changes), Probe({"top_kk": 1})],
    "model_kwargs": [Probe({"user": "u"})],
    "model_name": [Probe("tiny", _same), Probe("other")],
}

CHAT = {
    **SAMPLING,
    "stream_usage": [
        Probe(True, lambda reply, plain: _message(reply).usage_metadata["output_tokens"] == 24, {"streaming": True})
    ],
    "stop": [Probe([" there"], _says("Hello"), says=HELLO)],
    "logprobs": [Probe(True, _told)],
    "top_logprobs": [Probe(2, _alternatives, {"logprobs": True})],
    "reasoning_effort": [Probe("none", _same), Probe("high", _says("Sure."), LONG, REPLY.partition("\n<tool")[0])],
    "reasoning": [Probe({"effort": "high"}, _responds("reasoning"), LONG | RESPONSES, REPLY.partition("\n<tool")[0])],
    "verbosity": [Probe("medium"), Probe("low")],
    "service_tier": [Probe("auto")],
    "store": [Probe(True)],
    "include": [Probe(["reasoning.encrypted_content"], _responds("text"), RESPONSES)],
    "truncation": [Probe("disabled", _responds("text"), RESPONSES), Probe("auto", None, RESPONSES)],
    "context_management": [Probe([{"type": "compaction"}], None, RESPONSES)],
    "prompt_cache_options": [Probe({"mode": "implicit"})],
    "use_responses_api": [Probe(True, _responds("text"), RESPONSES)],
    "use_previous_response_id": [Probe(True, _responds("text"), RESPONSES)],
}

COMPLETION = {
    **SAMPLING,
    "best_of": [Probe(2, lambda reply, plain: reply.llm_output["token_usage"]["completion_tokens"] > 24)],
    "logprobs": [
        Probe(2, lambda reply, plain: len(reply.generations[0][0].generation_info["logprobs"]["tokens"]) == 24)
    ],
}

EMBEDDING = {
    "dimensions": [Probe(7, lambda reply, plain: [len(each) for each in reply] == [7, 7]), Probe(1 << 20)],
    "check_embedding_ctx_length": [Probe(False, lambda reply, plain: reply == plain)],
    "model": [Probe("tiny", lambda reply, plain: reply == plain), Probe("other")],
    "model_kwargs": [Probe({"user": "u"})],
}


def tables() -> list[Api]:
    """The tables of langchain-openai's classes."""
    import langchain_openai

    base = {"model_name": "tiny", "seed": 1, "max_tokens": 24}
    whole = {"model": "tiny", "check_embedding_ctx_length": False}
    embeddings = langchain_openai.OpenAIEmbeddings
    return [
        Api("langchain_openai.ChatOpenAI", langchain_openai.ChatOpenAI, base, _generated("ChatOpenAI"), CHAT, _OWN),
        Api("langchain_openai.OpenAI", langchain_openai.OpenAI, base, _generated("OpenAI"), COMPLETION, _OWN),
        Api("langchain_openai.OpenAIEmbeddings", embeddings, whole, _embedded, EMBEDDING, _OWN),
    ]
