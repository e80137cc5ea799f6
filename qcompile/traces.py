"""Traces kept between builds: the raised graph of a checkpoint, found again by its configuration and headers.

Tracing a model takes longer than all else that a build does with its kernels compiled before. A trace is kept where no
value of the checkpoint had a part in it, and all it reads are stored tensors as they are and constants. Its file is
safetensors: the constants, and the graph as JSON.
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

from qcompile import stored_formats, user_cache
from qcompile.checkpoint import Checkpoint, name_of
from qcompile.errors import QCompileError, UsageError
from qcompile.graph import Graph, WeightStore

SOFTWARE = ("torch", "transformers")
CONFIGURATION = ("config.json", "generation_config.json")


@dataclass(frozen=True)
class Trace:
    """A raised graph, and what raising it did: how often it fired, what it left alone."""

    graph: Graph
    fired: int
    notes: tuple[str, ...]


class Place:
    """Where the trace of one checkpoint is kept, known by all that decides it but the values of weights."""

    def __init__(self, directory: Path, name: str, options: str) -> None:
        self._checkpoint = stored_formats.open_checkpoint(directory)
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
        """The trace that was kept here, if there is one that can be read."""
        kept = user_cache.recall(self.path)
        if kept is None:
            return None
        try:
            facts = json.loads(_metadata(kept)["trace"])
            constants = load(kept)
            store = WeightStore()
            for name, shape, dtype, stored in facts["weights"]:
                read = functools.partial(self._checkpoint.load, stored) if stored else _constant(constants[name])
                store.add(name, shape, getattr(torch, dtype), read)
            graph = Graph.from_json(facts["graph"], store)
            graph.infer(torch.empty(shape, dtype=torch.int64, device="meta") for shape in facts["inputs"])
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, UsageError):
            return None  # an older qcompile's, which the next build writes again
        return Trace(graph, facts["fired"], tuple(facts["notes"]))

    def keep(self, trace: Trace) -> None:
        """Keep `trace` where values of weights had no part in it."""
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
    """Where the trace of `model` is kept; None for what is no plain local checkpoint, or a damaged one."""
    if not isinstance(model, (str, Path)) or not Path(model).is_dir():
        return None
    # A checkpoint's own code is not among what is known here; without weights, or cut, it is another model.
    plain = {"name": source.get("name"), "allow_remote": False, "weights": True}
    if any(key not in plain or value != plain[key] for key, value in source.items()):
        return None
    directory = Path(model)
    try:
        return Place(directory, source.get("name") or name_of(directory), options)
    except QCompileError:
        return None  # loading it says what is wrong


def _stored(load: Callable[[], Tensor]) -> tuple[Checkpoint | None, str | None]:
    """(checkpoint, tensor) that `load` gives as it is; None twice where it does something else."""
    if isinstance(load, functools.partial) and getattr(load.func, "__func__", None) is Checkpoint.load:
        return load.func.__self__, str(load.args[0])  # type: ignore[attr-defined]
    return None, None


def _metadata(content: bytes) -> dict[str, str]:
    """What a safetensors file says of itself, which the library tells of files alone."""
    length = int.from_bytes(content[:8], "little")
    found: dict[str, str] = json.loads(content[8 : 8 + length])["__metadata__"]
    return found


def _constant(value: Tensor) -> Callable[[], Tensor]:
    return lambda: value


@functools.cache
def _source_digest() -> bytes:
    """Of this qcompile's own code, which makes the traces."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted([*root.glob("*.py"), *root.glob("ops/*.py"), *root.glob("passes/*.py")]):
        digest.update(path.read_bytes())
    return digest.digest()
