"""Raised graphs of checkpoints, cached between builds; a cached graph with its constants is called a trace.

Tracing a model takes most of the time of a build if its kernels are cached. The key covers the configuration and the
headers of the weight files, not the values of weights. So a trace is stored only if it does not depend on these values,
and if its graph reads only stored tensors, unmodified, and constants. The file is safetensors with the constants, and
the graph as JSON in its metadata.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from qcompile import user_cache
from qcompile.checkpoints.checkpoint import Checkpoint
from qcompile.checkpoints.loaders import StoredLoader
from qcompile.checkpoints.model_names import name_of
from qcompile.checkpoints.stored import formats
from qcompile.errors import QCompileError, UsageError
from qcompile.graph import Graph, WeightStore

SOFTWARE = ("torch", "transformers")
SOURCES = ("*.py", "checkpoints/**/*.py", "formats/**/*.py", "ops/**/*.py", "passes/**/*.py")
"""Source files on which a trace may depend, below the package."""
CONFIGURATION = ("config.json", "generation_config.json")


@dataclass(frozen=True)
class Trace:
    """A raised graph, how often raising fired, and notes on what it did not rewrite."""

    graph: Graph
    fired: int
    notes: tuple[str, ...]


class Place:
    """The cache entry for the trace of a checkpoint. Its key covers all that a trace depends on."""

    def __init__(self, directory: Path, name: str, options: str) -> None:
        self._checkpoint = formats.open_checkpoint(directory)
        known = hashlib.sha256(_source_digest())
        for part in (name, options, *(f"{package} {importlib.metadata.version(package)}" for package in SOFTWARE)):
            known.update(f"{part}\n".encode())
        for file in CONFIGURATION:
            content = (directory / file).read_bytes() if (directory / file).is_file() else b""
            known.update(hashlib.sha256(content).digest())
        for stored in sorted(self._checkpoint):
            entry = self._checkpoint.entries[stored]
            known.update(f"{stored} {entry.dtype} {entry.shape}\n".encode())
        self.path = user_cache.cache_dir() / "traces" / f"{known.hexdigest()}.safetensors"

    def recall(self) -> Trace | None:
        """The kept trace, or None if there is none that can be read."""
        kept = user_cache.recall(self.path)
        if kept is None:
            return None
        try:
            facts = json.loads(_metadata(kept)["trace"])
            constants = load(kept)
            store = WeightStore()
            for name, shape, dtype, stored in facts["weights"]:
                if stored:
                    self._checkpoint.require(stored, tuple(shape))
                    read = StoredLoader(self._checkpoint, stored)
                    store.add(name, shape, getattr(torch, dtype), read, few_bits=read.few_bits, stored=read.stored)
                else:
                    store.add(name, shape, getattr(torch, dtype), _constant(constants[name]))
            graph = Graph.from_json(facts["graph"], store)
            graph.infer(torch.empty(shape, dtype=torch.int64, device="meta") for shape in facts["inputs"])
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, UsageError):
            return None  # written by an older qcompile; the next build replaces it
        return Trace(graph, facts["fired"], tuple(facts["notes"]))

    def keep(self, trace: Trace) -> None:
        """Keep `trace` unless it depends on the values of weights."""
        entries = trace.graph.weights.entries
        read = {str(node.target) for node in trace.graph.nodes if node.op == "get_attr"}
        stored = {name: _stored(entries[name].load) for name in read}
        checkpoints = {checkpoint for checkpoint, _ in stored.values() if checkpoint}
        constants = {}
        for name in (*(name for name, (checkpoint, _) in stored.items() if checkpoint is None), ""):
            if any(checkpoint.values_read for checkpoint in checkpoints):  # by raising, or for a constant
                return
            if name:
                constants[name] = entries[name].load().contiguous()
        weights = [
            (name, entries[name].shape, str(entries[name].dtype).removeprefix("torch."), stored[name][1])
            for name in entries
            if name in read
        ]
        inputs = [tuple(node.meta["val"].shape) for node in trace.graph.inputs]
        facts: dict[str, Any] = {"graph": trace.graph.to_json(), "weights": weights, "inputs": inputs}
        facts |= {"fired": trace.fired, "notes": trace.notes}
        user_cache.remember(self.path, save(constants, {"trace": json.dumps(facts)}))


def place(model: Any, source: Mapping[str, Any], options: str) -> Place | None:
    """The cache entry for `model`; None if it is not a local checkpoint that is read whole, without code of its own."""
    if not isinstance(model, (str, Path)) or not Path(model).is_dir():
        return None
    # The key does not cover a checkpoint's own code; without weights, or truncated, it is a different model.
    plain = {"name": source.get("name"), "allow_remote": False, "weights": True}
    if any(key not in plain or value != plain[key] for key, value in source.items()):
        return None
    directory = Path(model)
    try:
        return Place(directory, source.get("name") or name_of(directory), options)
    except QCompileError:
        return None  # loading the model reports the error


def _stored(load: Callable[[], Tensor]) -> tuple[Checkpoint | None, str | None]:
    """(checkpoint, tensor) if `load` loads it unmodified, else (None, None)."""
    return (load.checkpoint, load.name) if isinstance(load, StoredLoader) else (None, None)


def _metadata(content: bytes) -> dict[str, str]:
    """The metadata of a safetensors file in memory; the library reads it from files only."""
    length = int.from_bytes(content[:8], "little")
    metadata: dict[str, str] = json.loads(content[8 : 8 + length])["__metadata__"]
    return metadata


def _constant(value: Tensor) -> Callable[[], Tensor]:
    return lambda: value


@functools.cache
def _source_digest() -> bytes:
    """Digest of qcompile's own source code, which determines the traces."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(path for pattern in SOURCES for path in root.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.digest()
