"""Requests of every argument of lm-evaluation-harness's models over HTTP, and of every option of its generation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypedDict

from tests.support.compatibility import Api, Probe, RefusedRequest
from tests.support.openai_probes import HELLO

_OWN = frozenset(
    {
        *("base_url", "pretrained", "max_retries", "trust_remote_code", "use_fast_tokenizer", "verify_certificate"),
        *("ca_cert_path", "timeout", "max_images", "self", "tokenizer", "revision"),
    }
)
"""Arguments that choose the server and the files of the tokenizer, or that the harness uses itself."""
CONTEXT, MORE = "import os\nimport ", "sys\n"


@dataclass(frozen=True)
class Scored:
    """What a model replies: log likelihoods, whether these texts are its most probable ones, and a text."""

    likelihoods: list[tuple[float, bool]]
    text: str


def _instance(kind: str, *arguments: Any) -> Any:
    from lm_eval.api.instance import Instance

    return Instance(kind, {}, arguments, 0)


def _scored(client: dict[str, Any], request: dict[str, Any]) -> Any:
    """Two log likelihoods and a text of `local-completions`."""
    import requests
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    try:
        model = LocalCompletionsAPI(**client | request)
        asked = [_instance("loglikelihood", CONTEXT, MORE), _instance("loglikelihood", "", CONTEXT)]
        if model.tokenizer_backend is None:
            asked = []
        options = {"until": ["\n\n"]}
        likelihoods = model.loglikelihood(asked, disable_tqdm=True) if asked else []
        [text] = model.generate_until([_instance("generate_until", CONTEXT, options)], disable_tqdm=True)
    except requests.HTTPError as error:
        return RefusedRequest(error.response.status_code, error.response.json()["error"]["message"])
    except (RuntimeError, ValueError) as error:
        root = client["base_url"].partition("/v1")[0]
        return RefusedRequest(None, str(error).splitlines()[0].replace(root, "URL"))
    return Scored(likelihoods, text)


def _generated(client: dict[str, Any], request: dict[str, Any]) -> Any:
    """A text of `local-chat-completions`."""
    import requests
    from lm_eval.models.api_models import JsonChatStr
    from lm_eval.models.openai_completions import LocalChatCompletion

    options = {name: value for name, value in request.items() if value is not None}
    try:
        model = LocalChatCompletion(**client, model=options.pop("model"))
        said = JsonChatStr(json.dumps([{"role": "user", "content": "x"}]))
        [text] = model.generate_until([_instance("generate_until", said, options)], disable_tqdm=True)
    except requests.HTTPError as error:
        return RefusedRequest(error.response.status_code, error.response.json()["error"]["message"])
    return text


def _same(reply: Any, plain: Any) -> bool:
    return bool(reply == plain)


def _generates(reply: Any, plain: Any) -> bool:
    return bool(reply.text == plain.text and not reply.likelihoods)


MODEL = {
    "model": [Probe("tiny", _same), Probe("other")],
    "tokenizer_backend": [
        Probe("huggingface", _same),
        Probe("none", _generates),
        Probe("remote", None, {"tokenizer": None}),
    ],
    "tokenized_requests": [Probe(True, _same), Probe(False, _same)],
    "truncate": [Probe(True, _same)],
    "num_concurrent": [Probe(3, _same)],
    "batch_size": [Probe(2, _same)],
    "seed": [Probe(7, _same)],
    "max_gen_toks": [Probe(1, lambda reply, plain: plain.text.startswith(reply.text) and reply.text != plain.text)],
    "max_length": [Probe(1024, _same)],
    "add_bos_token": [Probe(True)],
    "custom_prefix_token_id": [Probe(5, lambda reply, plain: reply.likelihoods[1] != plain.likelihoods[1])],
    "eos_string": [Probe("\n", lambda reply, plain: reply.text == plain.text.partition("\n")[0])],
    "auth_token": [Probe("none", _same)],
    "header": [Probe({"X-Request-Id": "a"}, _same)],
}


class Options(TypedDict):
    """The options of generation that the harness documents, and some that only servers have."""

    until: list[str]
    max_gen_toks: int
    max_tokens: int
    do_sample: bool
    temperature: float
    top_p: float
    top_k: int
    num_beams: int


def _changes(reply: str, plain: str) -> bool:
    return reply != plain


OPTIONS = {
    "until": [Probe([" there"], lambda reply, plain: reply == "Hello", says=HELLO)],
    "max_gen_toks": [Probe(3, lambda reply, plain: reply == "Hel", says=HELLO)],
    "max_tokens": [Probe(3, lambda reply, plain: reply == "Hel", {"max_gen_toks": None}, HELLO)],
    "do_sample": [Probe(False, _same)],
    "temperature": [Probe(1.0, _changes)],
    "top_p": [Probe(0.0, _same, {"temperature": 1.0})],
    "top_k": [Probe(1, _same, {"temperature": 1.0})],
    "num_beams": [Probe(4)],
}


def tables() -> list[Api]:
    """The tables of the harness's models."""
    from lm_eval.models.api_models import TemplateAPI

    base = {"model": "tiny", "max_gen_toks": 24}
    return [
        Api("lm_eval local-completions", TemplateAPI.__init__, base, _scored, MODEL, _OWN),
        Api("lm_eval local-chat-completions", Options, base, _generated, OPTIONS),
    ]
