"""`qcompile.load`: opens an artifact on the device that it was built for, and returns an `LLM`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from qcompile.artifact.layout import Manifest
from qcompile.artifact.reader import read_checked_manifest, state
from qcompile.artifact.rebuilt import RebuiltKernels
from qcompile.artifact.signature import check_signature
from qcompile.errors import ArtifactError, UsageError
from qcompile.runtime.chat import chat_template
from qcompile.runtime.devices import open_model
from qcompile.runtime.generation_config import NAME, sampling_defaults
from qcompile.runtime.llm import LLM
from qcompile.runtime.options import MAX_BATCH, LoadOptions
from qcompile.runtime.ranks.meeting import meet
from qcompile.runtime.special_tokens import end_tokens, json_object
from qcompile.runtime.speculation.controller import GammaController
from qcompile.runtime.speculation.costs import SpeculationPrior


def load(  # parameters: the options of loading, by name
    path: str | Path,
    threads: int | None = None,
    max_batch: int = MAX_BATCH,
    kv_cache_bytes: int | None = None,
    gamma: int | Literal["auto"] = "auto",
    acceptance: Literal["drawn", "rejection"] = "drawn",
    gpu_memory_utilization: float = 0.9,
    prefix_caching: bool = True,
    generation_config: Literal["auto", "none"] = "auto",
    max_num_batched_tokens: int | None = None,
    lora: Mapping[str, str | Path] | None = None,
    max_model_len: int | None = None,
    tensor_parallel_size: int | None = None,
    require_signature: str | Path | None = None,
    kernels: RebuiltKernels | None = None,
) -> LLM:
    """Verify the artifact at `path`, load it, and start its threads.

    threads: CPU threads that compute, of each process; default the cores that this process may use, divided over the
    processes; no effect on a GPU.
    max_batch: requests that run at once; others wait.
    max_num_batched_tokens: most tokens of a step, prompts and running requests together, up to 512 on a CPU and 8,192
    on a GPU; changes no bit of an output. Default 512 on a CPU, and 2,048 on a GPU, or fewer where its memory is short.
    max_model_len: the longest sequence in tokens, prompt and reply; default the artifact's context. Less takes less
    memory.
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
    generation_config: "auto" takes defaults of sampling parameters from the checkpoint's generation_config.json
    (`LLM.sampling_defaults`), "none" ignores that file.
    lora: folders of LoRA adapters in PEFT's format by the names that requests choose them by; the artifact must have
    been built with lora.rank set.
    tensor_parallel_size: processes that run the model together, as many as the artifact was built for (the default).
    require_signature: a public key, as text or as the path of a file of keys: the artifact must be signed by it, or by
    one of them. Otherwise it is refused before any of its code is loaded.
    kernels: what `qcompile.rebuild(path)` has returned: these are loaded in place of the artifact's own machine code.

    Raises ArtifactError (the artifact is damaged, not signed as required, or built for another CPU), ResourceError
    (memory, or a package is missing), UsageError.
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
    built = read_checked_manifest(path)
    if (trusted := options.trusted()) is not None:
        check_signature(Path(path), built, trusted)
    manifest = _shortened(built, options.max_model_len)
    options.check(path, manifest["runtime"])
    if options.kernels is not None:
        options.kernels.check(Path(path), built, options.gamma != 0)
    meet(len(manifest["runtime"].get("ranks") or [0]), path)
    opened = open_model(Path(path), manifest, options)
    most_cached = opened.most_cached if options.prefix_caching else 0
    llm = LLM(
        opened.executor, manifest, opened.tokenizer, options.max_batch, opened.drafter, opened.artifact, most_cached
    )
    llm.engine.scheduler.adapters = opened.adapters
    llm.engine.sleep.memory = opened.memory
    if options.generation_config == "auto":
        llm.sampling_defaults = sampling_defaults(Path(path), manifest["files"])
        llm.generation_config = json_object(Path(path), manifest["files"], NAME)
    llm.end_at(end_tokens(Path(path), manifest["files"], opened.tokenizer))
    llm.template = chat_template(Path(path), manifest["files"])
    return _speculating(llm, options) if llm.engine.speculation.drafter else llm


def _shortened(manifest: Manifest, tokens: Any) -> Manifest:
    """The manifest with a context of `tokens` tokens in place of the artifact's, if a number is given."""
    if tokens is None:
        return manifest
    context = manifest["model"]["max_position"]
    if type(tokens) is not int or not 1 <= tokens <= context:
        raise UsageError(f"max_model_len must be a whole number between 1 and the context, {context}, not {tokens!r}")
    return manifest | {"model": manifest["model"] | {"max_position": tokens}}


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
