"""docs/compatibility.md: every field of the libraries' own functions and classes works, or is refused with a line.

`pytest --update-golden` writes the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import qcompile
from tests.runtime.server.test_server import serving
from tests.runtime.server.test_tools import TEMPLATE, Say, say, serving_with
from tests.support.compatibility import Api, assert_page
from tests.support.probing import rows_of

__all__ = ["say"]

MODEL = Path(__file__).parents[2] / "samples" / "pycode-1m"
LIBRARIES = {"litellm": "litellm", "langchain_openai": "langchain", "lm_eval": "lm_eval"}


@pytest.fixture(scope="module")
def ports(tiny_artifact: Callable[[str], Path], made_once: Callable[..., Path]) -> Iterator[dict[str, int]]:
    """Of servers with a scripted model, with one that has embeddings, and with one that has a tokenizer on disk."""
    sample = made_once("pycode-1m-f32", lambda out: qcompile.build(str(MODEL), out, recipe="f32"))
    with (
        qcompile.load(tiny_artifact("f32"), threads=1) as tiny,
        qcompile.load(sample, threads=1) as scored,
        serving_with(TEMPLATE) as said,
        serving(tiny) as embedded,
        serving(scored) as evaluated,
    ):
        yield {"said": said.port, "embedded": embedded.port, "evaluated": evaluated.port}


def connection(api: Api, ports: dict[str, int]) -> dict[str, Any]:
    """The arguments with which a library asks a server."""
    path = api.path
    used = "embedded" if "mbedding" in path else "evaluated" if "local-completions" in path else "said"
    root = f"http://127.0.0.1:{ports[used]}"
    if path.startswith("langchain"):
        return {"openai_api_base": f"{root}/v1", "openai_api_key": "none", "max_retries": 0}
    if path.startswith("lm_eval"):
        place = "chat/completions" if "chat" in path else "completions"
        more = {} if "chat" in path else {"tokenizer": str(MODEL), "tokenizer_backend": "huggingface"}
        return {"base_url": f"{root}/v1/{place}", "max_retries": 1} | more
    if "anthropic" in path:
        return {"api_base": root, "api_key": "none"}
    return {"api_base": f"{root}/v1", "api_key": "none", "max_retries": 0}


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_field_works_or_is_refused(
    library: str,
    ports: dict[str, int],
    say: Say,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    pytest.importorskip(library)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    for api in import_module(f"tests.support.{LIBRARIES[library]}_probes").tables():
        assert sorted(api.probes) == api.fields, api.path
        rows = rows_of(api, connection(api, ports), say, monkeypatch)
        rows += [f"| {', '.join(f'`{name}`' for name in used)} | | of the library |"] if (used := api.used) else []
        assert_page(api.path, rows, bool(request.config.getoption("--update-golden")))
