"""qcompile: a compiler from PyTorch decoder language models to quantized kernels.

    qcompile.build("samples/pycode-26m", "out", recipe="w4a8")
    llm = qcompile.load("out")
    print(llm.generate("def main(", max_tokens=64)[0].outputs[0].text)

Names are imported on first use: loading an artifact must not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qcompile.pipeline import build as build
    from qcompile.pipeline import rebuild as rebuild
    from qcompile.runtime.async_llm import AsyncLLM as AsyncLLM
    from qcompile.runtime.llm import LLM as LLM
    from qcompile.runtime.load import load as load
    from qcompile.runtime.sampling.params import SamplingParams as SamplingParams
    from qcompile.runtime.sampling.structured import StructuredOutputsParams as StructuredOutputsParams

__version__ = "0.2.0"
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "StructuredOutputsParams", "__version__", "build", "load", "rebuild"]

_HOMES = {
    "build": "qcompile.pipeline",
    "load": "qcompile.runtime.load",
    "rebuild": "qcompile.pipeline",
    "AsyncLLM": "qcompile.runtime.async_llm",
    "LLM": "qcompile.runtime.llm",
    "SamplingParams": "qcompile.runtime.sampling.params",
    "StructuredOutputsParams": "qcompile.runtime.sampling.structured",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'qcompile' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
