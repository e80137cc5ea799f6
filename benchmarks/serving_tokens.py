"""Serves a model that is no artifact as `qcompile serve` does, for benchmarks of the server."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qcompile.cli.options import Logging, Serving
from qcompile.cli.serve_model import ModelToServe, serve_model


def serve_tokens(
    llm: Any, folder: Path, max_waiting: int, listening: socket.socket, ready: Callable[[], None], http_process: bool
) -> None:
    """Serve `llm` until a signal. folder: where its tokenizer is written, from which the process that answers clients
    reads it. http_process: whether there is such a process."""
    content = llm.tokenizer.to_str().encode()
    (folder / "tokenizer.json").write_bytes(content)
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    llm.manifest["files"] = {"tokenizer.json": entry}
    serving = Serving(max_waiting=max_waiting, http_process=http_process)
    limits = serving.limits
    serve_model(ModelToServe(llm, folder, "model", serving, Logging(), [], limits, listening), ready)
