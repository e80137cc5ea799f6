"""Sampling parameters that a checkpoint recommends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qcompile
from qcompile import SamplingParams
from qcompile.errors import ArtifactError, UsageError
from qcompile.runtime.generation_config import sampling_defaults
from tests.runtime.server.test_server import serving
from tests.support.fake import byte_tokenizer, fake_llm, listed

RECOMMENDED = {"temperature": 3.0, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.3}


def stored(folder: Path, config: Any) -> dict[str, Any]:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return sampling_defaults(folder, listed(folder))


def test_what_is_taken_from_the_file(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path, {}) == {}
    others = {"eos_token_id": 2, "do_sample": True, "max_new_tokens": 5, "min_p": None, "typical_p": 0.5}
    assert stored(tmp_path, RECOMMENDED | others) == RECOMMENDED
    assert stored(tmp_path, others | {"min_p": 0.1}) == {"min_p": 0.1}
    with pytest.raises(ArtifactError, match=r"generation_config\.json holds a JSON list"):
        stored(tmp_path, [])
    said = (
        "generation_config.json: temperature must be a finite number, at least 0, not 'hot'; generation_config \"none\""
    )
    with pytest.raises(UsageError, match=said):
        stored(tmp_path, {"temperature": "hot"})


def test_they_hold_where_nothing_else_is_said() -> None:
    """In Python if SamplingParams are not given, and over HTTP for each field that a request does not give."""
    with fake_llm(tokenizer=byte_tokenizer()) as plain, fake_llm(tokenizer=byte_tokenizer()) as llm:
        llm.sampling_defaults = RECOMMENDED

        def said(**options: Any) -> str:
            return plain.generate("ab", SamplingParams(seed=1, **options))[0].outputs[0].text

        recommended, mixed, own = said(**RECOMMENDED), said(**RECOMMENDED | {"top_k": 0}), said()
        assert len({recommended, mixed, own}) == 3
        assert llm.generate("ab", seed=1)[0].outputs[0].text == recommended
        assert llm.generate("ab", seed=1, top_k=0)[0].outputs[0].text == mixed
        assert llm.generate("ab", SamplingParams(seed=1))[0].outputs[0].text == own
        assert [output.outputs[0].text for output in llm.stream("ab", seed=1)][-1] == recommended
        with serving(llm, template=lambda messages: messages[0]["content"]) as client:
            asked = {"prompt": "ab"}, {"messages": [{"role": "user", "content": "ab"}]}
            for path, body in zip(("/v1/completions", "/v1/chat/completions"), asked, strict=True):
                for more, text in (({}, recommended), ({"top_k": 0}, mixed), ({"top_k": None}, recommended)):
                    (choice,) = client.ask(path, body | {"max_tokens": 16, "seed": 1} | more)[1]["choices"]
                    assert (choice["text"] if "text" in choice else choice["message"]["content"]) == text


def test_an_artifact_without_recommendations(tiny_artifact: Callable[[str], Path]) -> None:
    with qcompile.load(tiny_artifact("w4a8"), threads=1, max_batch=1, generation_config="none") as llm:
        assert llm.sampling_defaults == {}
    with pytest.raises(UsageError, match="generation_config must be auto or none, not 'vllm'"):
        qcompile.load(tiny_artifact("w4a8"), generation_config="vllm")  # type: ignore[arg-type]
