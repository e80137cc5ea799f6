"""docs/compatibility.md: every field of the APIs, asked for by their own clients, works or is refused by its name.

`pytest --update-golden` writes the page.
"""

from __future__ import annotations

import re
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
from tests.support.compatibility import Api, RefusedRequest, row
from tests.support.fake import FakeLibrary
from tests.support.openai_probes import CHATS, COMPLETIONS, EMBEDDINGS, RESPONSES

__all__ = ["say"]

PAGE = Path(__file__).parents[3] / "docs" / "compatibility.md"
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
    client, computes = clients[api.path], FakeLibrary._run
    plain = api.asked(client, dict(api.base))
    assert not isinstance(plain, RefusedRequest), plain
    rows = []
    for name in api.fields:
        for probe in api.probes[name]:
            if probe.says is not None:
                say(probe.says)
            reply = api.asked(client, api.request(name, probe))
            monkeypatch.setattr(FakeLibrary, "_run", computes)
            if isinstance(reply, RefusedRequest):
                assert reply.status in (400, 404) and "\n" not in reply.message
            elif probe.shows:
                assert probe.shows(reply, plain), (name, probe.value, reply)
            rows.append(row(name, probe, reply))
    assert_page(api.path, rows, bool(request.config.getoption("--update-golden")))


def assert_page(path: str, rows: list[str], update: bool) -> None:
    """Compare the table of an endpoint with the page, or write it there."""
    text = PAGE.read_text(encoding="utf-8")
    start = text.index(f"## {path}\n")
    head = text.index("|---|---|---|\n", start) + len("|---|---|---|\n")
    result = re.match(r"(\|.*\n)*", text[head:])
    assert result
    if update:
        written = "".join(f"{line}\n" for line in rows)
        PAGE.write_text(text[:head] + written + text[head + result.end() :], encoding="utf-8")
        return
    assert result[0].splitlines() == rows, "docs/compatibility.md: run pytest --update-golden and read what it wrote"
