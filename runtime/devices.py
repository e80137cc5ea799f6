"""The kinds of devices on which artifacts run, and how a model is opened on each.

A kind of device is a row of `_OPEN`: the kind in the manifest of an artifact, and a function that verifies the artifact
and opens its executor. Nothing else in the runtime depends on the kind.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qcompile.artifact.layout import Manifest
from qcompile.errors import ArtifactError
from qcompile.runtime.engine.sleep import ReleasableMemory
from qcompile.runtime.loader import LoadedArtifact, load_artifact
from qcompile.runtime.lora.table import Adapters, open_table, read_adapters
from qcompile.runtime.options import LoadOptions
from qcompile.runtime.ranks.crew import threads_of_each
from qcompile.runtime.speculation.stages import Drafter
from qcompile.runtime.step import StepExecutor
from qcompile.runtime.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class OpenedModel:
    """A model that is ready to run: its executor, its drafts if they are wanted, and its tokenizer if it has one.

    `artifact` must live as long as the executor; None if the executor needs nothing of it. `most_cached` is the largest
    number of pages that may be kept for prefix reuse without being in use; None is no limit. `adapters` are those that
    requests may have, if any. `memory` is what it can give back to sleep; if it cannot, the reason.
    """

    executor: StepExecutor
    drafter: Drafter | None
    tokenizer: Tokenizer | None
    artifact: LoadedArtifact | None = None
    most_cached: int | None = None
    adapters: Adapters | None = None
    memory: ReleasableMemory | str = "its memory is kept until it is closed"


def open_model(root: Path, manifest: Manifest, options: LoadOptions) -> OpenedModel:
    """Verify the artifact at `root` and open it on the device that it was built for; `manifest` was checked before.

    Raises ArtifactError (damaged, or built for another machine or an unknown kind of device), ResourceError (memory, a
    device or its driver), UsageError.
    """
    kind = manifest["target"].get("kind", "cpu")
    if kind not in _OPEN:
        raise ArtifactError(f"{root} was built for a device of kind {kind}; this qcompile runs {', '.join(_OPEN)}")
    return _OPEN[kind](root, manifest, options)


def _open_on_cpu(root: Path, manifest: Manifest, options: LoadOptions) -> OpenedModel:
    from qcompile.runtime.cpu.load import open_cpu
    from qcompile.runtime.cpu.sleep import CpuMemory
    from qcompile.runtime.ranks.sleeping import DividedMemory

    ranks = len(manifest["runtime"].get("ranks") or [0])
    threads = threads_of_each(ranks) if options.threads is None else options.threads
    read = read_adapters(root, manifest, options.lora or {})
    artifact = load_artifact(root, manifest, kernels=options.kernels)
    tokenizer = load_tokenizer(root, manifest["files"])
    granted = options.kv_cache_bytes
    wanted = options.gamma != 0, tokenizer, options.prefix_caching
    rows = options.max_num_batched_tokens
    executor, drafter = open_cpu(artifact, options.max_batch, granted, threads, *wanted, rows, read.folders)
    # Pages that were never used take no memory yet. Unless the caller has granted an amount, most stay unused.
    few = max(executor.kv_pages // 4, executor.limits.pages_for(executor.limits.max_position))
    if executor.ranks:
        adapters = open_table(artifact, read.named, executor.ranks.memory.numbers, executor.ranks.settle)
    else:
        adapters = open_table(artifact, read.named, (ctypes.c_int32 * executor.kv_pages)())
    most_cached = None if granted is not None else few
    own = CpuMemory(artifact, executor.caches)
    memory = DividedMemory(own, executor.ranks) if executor.ranks else own
    return OpenedModel(executor, drafter, tokenizer, artifact, most_cached, adapters, memory)


def _open_on_gpu(root: Path, manifest: Manifest, options: LoadOptions) -> OpenedModel:
    from qcompile.runtime.cuda.load import open_cuda

    memory = options.kv_cache_bytes, options.gpu_memory_utilization
    tokenizer = load_tokenizer(root, manifest["files"])
    rows = options.max_num_batched_tokens
    read = read_adapters(root, manifest, options.lora or {})
    drafts = options.gamma != 0
    copies = options.prefix_caching
    opened = open_cuda(root, manifest, options.max_batch, *memory, drafts, tokenizer, rows, read, copies)
    executor, drafter, released = opened
    return OpenedModel(executor, drafter, tokenizer, adapters=executor.inputs.adapters, memory=released)


_OPEN: dict[str, Callable[[Path, Manifest, LoadOptions], OpenedModel]] = {"cpu": _open_on_cpu, "cuda": _open_on_gpu}
