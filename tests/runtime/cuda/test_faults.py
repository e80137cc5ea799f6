"""A GPU that falls away, or has no memory left: one line and exit code 5, at loading, at a capture and in a step."""

from __future__ import annotations

import ctypes
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qcompile
from qcompile.errors import ResourceError
from qcompile.runtime.cuda import driver as cuda_driver
from qcompile.runtime.engine.engine import Engine
from qcompile.runtime.server import app
from tests.runtime.cuda.test_driver import FakeLibrary, library  # noqa: F401  # a fixture

Build = Callable[[str], Path]
MEMORY, LOST = 2, 999
FAULTS = {MEMORY: "the GPU has no memory left for", LOST: "the GPU does not answer"}
CALLS: dict[str, tuple[str, Callable[[cuda_driver.Driver], Any]]] = {
    "loading": ("cuMemAlloc_v2", lambda driver: driver.allocate(1 << 20, "weights")),
    "capture": ("cuStreamBeginCapture_v2", lambda driver: driver.captured().__enter__()),
    "graph": ("cuGraphInstantiateWithFlags", lambda driver: _captured(driver)),
    "step": ("cuStreamSynchronize", lambda driver: driver.synchronize()),
    "copy": ("cuMemcpyDtoHAsync_v2", lambda driver: driver.download(0, 0, 8)),
}


def _captured(driver: cuda_driver.Driver) -> None:
    with driver.captured():
        pass


@pytest.mark.parametrize("code", FAULTS)
@pytest.mark.parametrize("where", CALLS)
def test_faults_of_the_driver_are_lacking_resources(where: str, code: int, library: FakeLibrary) -> None:  # noqa: F811
    name, call = CALLS[where]
    driver = cuda_driver.Driver()
    library.codes[name] = code
    with pytest.raises(ResourceError, match=FAULTS[code]) as raised:
        call(driver)
    assert raised.value.exit_code == 5 and "\n" not in str(raised.value)


def test_codes_of_wrong_calls_are_faults_of_the_program(library: FakeLibrary) -> None:  # noqa: F811
    driver = cuda_driver.Driver()
    library.codes["cuStreamSynchronize"] = 700  # an illegal address
    with pytest.raises(RuntimeError, match="CUDA step"):
        driver.synchronize()


@pytest.fixture
def falling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third step of an engine finds no GPU."""
    fake, step, steps = FakeLibrary(), Engine.step, [0]
    with monkeypatch.context() as while_made:
        for kind in ("CDLL", "PyDLL"):
            while_made.setattr(ctypes, kind, lambda name: fake)
        driver = cuda_driver.Driver()
    fake.codes["cuStreamSynchronize"] = LOST

    def stepped(engine: Engine) -> Any:
        steps[0] += 1
        if steps[0] == 3:
            driver.synchronize()
        return step(engine)

    monkeypatch.setattr(Engine, "step", stepped)


@pytest.mark.usefixtures("falling")
def test_a_server_ends_with_the_reason_and_tells_its_clients(tiny_artifact: Build) -> None:
    listening, raised = app.bind("127.0.0.1", 0), list[BaseException]()
    asked = {"prompt": "x", "max_tokens": 50, "ignore_eos": True}
    with qcompile.load(tiny_artifact("w4a8"), threads=1) as llm:

        def serve() -> None:
            try:
                app.serve(app.Served(llm, "tiny"), listening)
            except ResourceError as error:
                raised.append(error)

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1/completions"
        request = urllib.request.Request(url, json.dumps(asked).encode(), {"Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        thread.join(30)
    assert refused.value.code == 503 and "the GPU does not answer" in refused.value.read().decode()
    assert not thread.is_alive() and [error.exit_code for error in raised if isinstance(error, ResourceError)] == [5]
