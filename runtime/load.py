"""`qcompile.load`: opens an artifact on the device that it was built for, and returns an `LLM`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from qcompile.artifact.reader import read_checked_manifest, state
from qcompile.errors import ArtifactError
from qcompile.runtime.cpu.load import open_cpu
from qcompile.runtime.llm import LLM
from qcompile.runtime.loader import load_artifact
from qcompile.runtime.options import MAX_BATCH, LoadOptions
from qcompile.runtime.speculation.controller import GammaController
from qcompile.runtime.speculation.costs import SpeculationPrior
from qcompile.runtime.tokenizer import load_tokenizer


def load(
    path: str | Path,
    threads: int | None = None,
    max_batch: int = MAX_BATCH,
    kv_cache_bytes: int | None = None,
    gamma: int | Literal["auto"] = "auto",
    acceptance: Literal["drawn", "rejection"] = "drawn",
    gpu_memory_utilization: float = 0.9,
    prefix_caching: bool = True,
) -> LLM:
    """Verify the artifact at `path`, load it, and start its threads.

    threads: CPU threads that compute; default the cores that this process may use; no effect on a GPU.
    max_batch: requests that run at once; others wait.
    kv_cache_bytes: default what `max_batch` requests of full context need, but on a CPU at most a quarter of the free
    memory, and on a GPU what `gpu_memory_utilization` leaves. A cache smaller than the context shortens the context.
    gamma: tokens that the artifact's drafts propose per round; "auto" chooses from measurements, 0 turns drafts off.
    acceptance: how draft tokens are accepted at a temperature above 0. "drawn" accepts a token if the target draws the
    same one; with a seed, the output is the same as without drafts. "rejection" sampling accepts more tokens; the
    distribution is the same, the tokens are not.
    gpu_memory_utilization: share of a GPU's memory that may be used.
    prefix_caching: whether a prompt that begins like an earlier one reuses its keys and values, which changes no bit of
    an output. A hierarchical cache is reused only where a request continues a whole earlier text. On a CPU, unless
    kv_cache_bytes is given, at most a quarter of the cache is kept for reuse.

    Raises ArtifactError (the artifact is damaged, or built for another CPU), ResourceError (memory), UsageError.
    """
    options = LoadOptions.of(locals())
    while True:
        before = state(path)
        try:
            return _load(path, options)
        except ArtifactError:
            if state(path) == before:
                raise
            # A build has replaced the artifact since `before`: its files and the manifest read here may differ. Retry.


def _load(path: str | Path, options: LoadOptions) -> LLM:
    """`load` without retry: an artifact that is replaced in the meantime may appear damaged."""
    manifest = read_checked_manifest(path)
    options.check(path, manifest["runtime"])
    if manifest["target"].get("kind") == "cuda":
        from qcompile.runtime.cuda.load import open_cuda

        memory = options.kv_cache_bytes, options.gpu_memory_utilization
        tokenizer = load_tokenizer(Path(path), manifest["files"])
        cuda, drafter = open_cuda(Path(path), manifest, options.max_batch, *memory, options.gamma != 0, tokenizer)
        llm = LLM(cuda, manifest, tokenizer, options.max_batch, drafter, None, None if options.prefix_caching else 0)
    else:
        threads = len(os.sched_getaffinity(0)) if options.threads is None else options.threads
        artifact = load_artifact(path, manifest)
        tokenizer = load_tokenizer(Path(path), manifest["files"])
        memory_bytes = options.kv_cache_bytes
        cpu, drafter = open_cpu(artifact, options.max_batch, memory_bytes, threads, options.gamma != 0, tokenizer)
        # Pages that were never used take no memory yet. Unless the caller has granted an amount, most stay unused.
        few = max(cpu.kv_pages // 4, cpu.limits.pages_for(cpu.limits.max_position))
        most = None if memory_bytes is not None else few
        llm = LLM(cpu, manifest, tokenizer, options.max_batch, drafter, artifact, most if options.prefix_caching else 0)
    return _speculating(llm, options) if llm.engine.speculation.drafter else llm


def _speculating(llm: LLM, options: LoadOptions) -> LLM:
    """Turn drafting on in the model's engine."""
    executor: Any = llm.executor
    speculation = llm.engine.speculation
    speculation.gamma = options.gamma
    speculation.controller = GammaController(_prior(llm.manifest, executor.description["weights"]))
    speculation.rejects = options.acceptance == "rejection"
    return llm


def _prior(manifest: dict[str, Any], count: int) -> SpeculationPrior:
    """Costs as `qcompile tune` measured them, else predicted from bytes. The target reads the first `count` weights."""
    if manifest.get("tuned"):
        return SpeculationPrior.load(manifest["tuned"])
    sizes = [entry["bytes"] for entry in manifest["runtime"]["weights"]]
    # The manifest calls draft stages "levels": the format of artifacts is stable.
    drafts = manifest["runtime"]["levels"][0].get("weights", [])
    return SpeculationPrior.predicted(sum(sizes[:count]), sum(sizes[index] for index in drafts))
