"""The chat page as it is served: one document that nothing else is needed for, and what it may do."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator

import pytest

from qcompile import __version__
from qcompile.runtime.llm import LLM
from qcompile.runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput, SpeculationMetrics
from qcompile.runtime.server.answers import Usage
from qcompile.runtime.server.api import usage
from tests.runtime.server.test_server import serving
from tests.support.fake import CONTEXT, byte_tokenizer, fake_llm


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with fake_llm(tokenizer=byte_tokenizer()) as opened:
        opened.sampling_defaults = {"top_p": 0.8, "top_k": 20}
        yield opened


def test_the_page_is_one_document(llm: LLM) -> None:
    with serving(llm, page=True) as client:
        response = client.open("/")
        document = response.read().decode()
        assert response.status == 200 and response.getheader("content-type") == "text/html; charset=utf-8"
        assert client.open("/", method="HEAD").status == client.open("/docs").status == 200
    assert document.startswith("<!doctype html>")
    sources = re.findall(r'(?:src|href)="([^"]*)"', document)
    assert sources and not [each for each in sources if not each.startswith(("#", "data:")) and each != "docs"]
    assert re.findall(r"@import|url\(|innerHTML|eval\(|document\.write", document) == []


def test_the_browser_may_run_its_scripts_alone(llm: LLM) -> None:
    with serving(llm, page=True) as client:
        response = client.open("/")
        document = response.read().decode()
    assert response.getheader("x-content-type-options") == "nosniff"
    allowed = dict(part.split(" ", 1) for part in response.getheader("content-security-policy", "").split("; "))
    assert allowed["default-src"] == allowed["base-uri"] == allowed["frame-ancestors"] == "'none'"
    assert allowed["connect-src"] == "'self'" and allowed["require-trusted-types-for"] == "'script'"
    assert allowed["trusted-types"] == "'none'"
    for tag, name in (("script", "script-src"), ("style", "style-src")):
        inside = re.findall(rf"<{tag}>(.*?)</{tag}>", document, re.DOTALL)
        hashed = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in inside]
        assert inside and allowed[name] == " ".join(f"'sha256-{each}'" for each in hashed)
    assert not re.search(r'\son\w+="|\sstyle="', document)


def test_what_the_page_knows_of_the_server(llm: LLM) -> None:
    facts = {
        "model": "tiny",
        "context": CONTEXT,
        "version": __version__,
        "defaults": {"temperature": 1.0, "top_p": 0.8},
    }
    with serving(llm, page=True) as client:
        assert client.ask("/page.json") == (200, facts | {"chat": False, "locked": False})
    with serving(llm, page=True, template=lambda messages: "", api_key="geheim") as client:
        assert client.open("/").status == 200
        for wrong in ({}, {"Authorization": "Bearer other"}):
            assert client.ask("/page.json", **wrong) == (200, {"locked": True})
        assert client.ask("/page.json", Authorization="Bearer geheim") == (200, facts | {"chat": True, "locked": False})


def test_a_server_without_the_page_has_nothing_there(llm: LLM) -> None:
    with serving(llm) as client:
        assert client.ask("/")[0] == client.ask("/page.json")[0] == 404


def test_usage_tells_what_became_of_drafts() -> None:
    """Those of all prompts; a response without drafts has no such numbers."""

    def output(drafted: list[int], accepted: list[int]) -> RequestOutput:
        drafts = SpeculationMetrics(rounds=1, drafted=drafted, accepted=accepted) if drafted else None
        return RequestOutput(0, None, [1], [CompletionOutput(0)], True, RequestMetrics(), drafts)

    told = usage([output([3, 2], [2, 1]), output([], []), output([1], [1])])
    assert told["completion_tokens_details"] == {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 2}
    assert Usage.model_validate(told).model_dump() == told
    assert "completion_tokens_details" not in usage([output([], [])])
