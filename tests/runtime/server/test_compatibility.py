"""docs/compatibility.md: every field of the APIs, asked for by their own clients, works or is refused by its name.

`pytest --update-golden` writes the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

import qcompile
from tests.runtime.server.test_server import serving
from tests.runtime.server.test_tools import TEMPLATE, Say, say, serving_with
from tests.support.anthropic_probes import MESSAGES
from tests.support.compatibility import Api, assert_page
from tests.support.openai_probes import CHATS, COMPLETIONS, EMBEDDINGS, RESPONSES
from tests.support.probing import rows_of

__all__ = ["say"]

APIS = (CHATS, COMPLETIONS, RESPONSES, MESSAGES, EMBEDDINGS)
IDS = [api.path for api in APIS]


@pytest.fixture(scope="module")
def clients(tiny_artifact: Callable[[str], Path]) -> Iterator[dict[str, Any]]:
    """A client for each endpoint. Embeddings are those of an artifact: the fake model has no hidden states."""
    with (
        qcompile.load(tiny_artifact("f32"), threads=1) as llm,
        serving_with(TEMPLATE) as server,
        serving(llm) as embedding,
    ):
        url, key = f"http://127.0.0.1:{server.port}", {"api_key": "none", "max_retries": 0}
        with (
            openai.OpenAI(base_url=f"{url}/v1", **key) as one,
            openai.OpenAI(base_url=f"http://127.0.0.1:{embedding.port}/v1", **key) as two,
            anthropic.Anthropic(base_url=url, **key) as three,
        ):
            yield {api.path: one for api in APIS} | {EMBEDDINGS.path: two, MESSAGES.path: three}


@pytest.mark.parametrize("api", APIS, ids=IDS)
def test_every_field_of_the_client_is_asked_for(api: Api) -> None:
    assert sorted(api.probes) == api.fields


@pytest.mark.parametrize("api", APIS, ids=IDS)
def test_every_field_works_or_is_refused(
    api: Api, clients: dict[str, Any], say: Say, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    rows = rows_of(api, clients[api.path], say, monkeypatch)
    assert_page(api.path, rows, bool(request.config.getoption("--update-golden")))
