"""Opens the executor of a verified CPU artifact, and its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from qcompile.artifact.layout import Manifest
from qcompile.errors import ArtifactError, ResourceError
from qcompile.runtime.cpu.executor import Executor, StateMemory, bind
from qcompile.runtime.cpu.heads import LibraryHeadSpeculator
from qcompile.runtime.cpu.ranks import RankProcesses, RankSettings, SharedMemory, join
from qcompile.runtime.cpu.speculate import LibrarySpeculator
from qcompile.runtime.engine.blocks import BlockPool, requested_pages
from qcompile.runtime.loader import Arena, LoadedArtifact, divided_stages
from qcompile.runtime.speculation.head_tokens import head_tokens
from qcompile.runtime.speculation.reencode import Reencoder, open_reencoder
from qcompile.runtime.speculation.stages import Drafter, DraftStage, Speculator
from qcompile.runtime.step import Limits
from qcompile.system.free_memory import available_memory

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_KV_SHARE = 4  # by default the cache takes at most 1 / 4 of the free memory


def open_cpu(  # parameters: those of `load` that concern a CPU
    artifact: LoadedArtifact,
    max_batch: int,
    kv_cache_bytes: int | None,
    threads: int,
    drafts: bool,
    tokenizer: Tokenizer | None,
    snapshots: bool = False,
    step_rows: int | None = None,
    adapters: Sequence[Sequence[str]] = (),
) -> tuple[Executor, Drafter | None]:
    """Open the artifact's model, and its drafts if `drafts` is true. On failure, nothing stays open.

    With `snapshots`, there are slots for copies of recurrent states, as far as memory permits. `step_rows` are the most
    rows of a step, by default as many as the artifact permits. `adapters` are the names, folders and hashes of
    adapters, which other ranks read too.

    `tokenizer` is the target's. Raises ArtifactError (manifest and libraries differ), ResourceError (memory, threads),
    UsageError.
    """
    runtime = artifact.manifest["runtime"]
    kv, ranks = runtime["kv"], len(runtime.get("ranks") or [0])
    limits = _limits(artifact.manifest, step_rows or runtime["max_tokens"])
    # The manifest calls draft stages "levels": the format of artifacts is stable.
    stages = runtime.get("levels") or [] if drafts else []
    page_bytes = kv["page_bytes"] + sum(
        stage["kv"]["page_bytes"] for stage in stages if stage.get("kv") and not stage.get("tokenizer")
    )
    slot_bytes = _slot_bytes(kv) + sum(_slot_bytes(stage["kv"]) for stage in stages if stage.get("kv"))
    _check_states(slot_bytes, max_batch)
    pages = _kv_pages(page_bytes, limits, max_batch, kv_cache_bytes, ranks)
    bind(artifact.library)
    copies = _snapshots(kv, max_batch, ranks) if snapshots else 0
    arena, states = Arena(pages * kv["page_bytes"]), _states(kv, max_batch, copies)
    with ExitStack() as undo:
        executor = Executor(artifact.library, artifact.pointers, arena, pages, threads, limits, states=states)
        undo.callback(executor.close)
        drafter: Drafter | None = None
        if stages and stages[0].get("tokenizer"):
            drafter = _open_reencoder(artifact, stages[0], executor, tokenizer, max_batch, undo)
        elif stages and stages[0].get("features"):
            drafter = _open_head(artifact, stages, executor, undo)
        elif stages:
            drafter = _open_stages(artifact, stages, executor, _Caches(arena, states, max_batch), undo)
        if ranks > 1:
            divided = [executor, *_divided(stages, drafter)]
            processes = _start_ranks(artifact, divided, ranks, max_batch, adapters)
            for path in divided:
                path.ranks = processes
            if not executor.description.get("plans_embeds"):
                executor.embed_width = 0  # its library plans steps of tokens only: an earlier version has built it
        undo.pop_all()
    return executor, drafter


def _divided(stages: Sequence[dict[str, Any]], drafter: Drafter | None) -> list[Executor]:
    """The executors of the draft `stages` that all ranks compute: those that share the model's weights."""
    if not isinstance(drafter, LibrarySpeculator):
        return []
    opened = [stage.executor for stage, entry in zip(drafter.stages, stages, strict=True) if "ranks" in entry]
    return [executor for executor in opened if isinstance(executor, Executor)]


def _limits(manifest: Manifest, rows: int) -> Limits:
    """The limits of an executor of the artifact with steps of at most `rows` rows."""
    runtime, kv = manifest["runtime"], manifest["runtime"]["kv"]
    position = manifest["model"]["max_position"]
    return Limits(rows, runtime["vocab_size"], kv["page_tokens"], position, kv.get("ring_tokens") or 0)


def _start_ranks(
    artifact: LoadedArtifact,
    paths: Sequence[Executor],
    ranks: int,
    max_batch: int,
    adapters: Sequence[Sequence[str]],
) -> RankProcesses:
    """Start the processes of the other ranks, and join them. `paths`: those that all ranks compute, the model's first.

    Raises ResourceError if one cannot open the model.
    """
    executor, root = paths[0], str(artifact.root.absolute())
    numbers = executor.kv_pages if adapters else 0
    memory = SharedMemory([path.library.qc_rank_bytes(path.handle) for path in paths], numbers=numbers)
    join(paths, memory, ranks, 0)
    limits = executor.limits
    sizes = executor.kv_pages, executor.threads, max_batch, limits.max_tokens, limits.max_position
    shared = memory.sizes, len(paths) > 1, artifact.manifest["sha256"]
    copies = executor.copies.many if executor.copies else 0
    settings = [
        RankSettings(root, rank, *sizes, *shared, copies, adapters, artifact.rebuilt) for rank in range(1, ranks)
    ]
    return RankProcesses(memory, settings)


def open_rank(artifact: LoadedArtifact, settings: RankSettings) -> list[Executor]:
    """Open the artifact's part of one rank as rank 0 has opened its own, but for joining it: the model, and drafts."""
    kv = artifact.manifest["runtime"]["kv"]
    limits = _limits(artifact.manifest, settings.max_tokens)._replace(max_position=settings.max_position)
    bind(artifact.library)
    arena, states = Arena(settings.pages * kv["page_bytes"]), _states(kv, settings.max_batch, settings.copies)
    given = arena, settings.pages, settings.threads, limits
    paths = [Executor(artifact.library, artifact.pointers, *given, states=states)]
    stages = divided_stages(artifact.manifest["runtime"]) if settings.drafts else []
    for stage, draft in zip(stages, artifact.drafts, strict=bool(stages)):
        if draft is None:
            raise ArtifactError(f"{artifact.root}: a draft that shares the model's weights has no library")
        bind(draft.library)
        of_draft = limits._replace(max_position=stage["max_position"])
        paths.append(Executor(draft.library, draft.pointers, *given[:3], of_draft, paths[0], states))
    return paths


class _Caches(NamedTuple):
    """The target's KV cache and states, and the requests that run at once."""

    kv: Arena
    states: StateMemory | None
    max_batch: int


def _slot_bytes(kv: dict[str, Any]) -> int:
    """Bytes of a sequence's recurrent states in a path; `kv` is the manifest's description of the path's cache."""
    return int(kv.get("slot_bytes") or 0)


def _states(kv: dict[str, Any], max_batch: int, copies: int = 0) -> StateMemory | None:
    """Memory of the recurrent states of `max_batch` requests, and of `copies`; None if the path has none."""
    size = _slot_bytes(kv)
    return StateMemory(Arena((max_batch + copies) * size), copies) if size else None


def _snapshots(kv: dict[str, Any], max_batch: int, ranks: int) -> int:
    """Number of copies of recurrent states to keep for prefix reuse: four for each request, in a quarter of memory.

    Each of `ranks` processes keeps them all, as it computes all of the states.
    """
    size = ranks * _slot_bytes(kv)
    return min(4 * max_batch, available_memory() // _KV_SHARE // size) if size else 0


def _check_states(slot_bytes: int, max_batch: int) -> None:
    """Raise ResourceError unless the states of `max_batch` requests fit into memory, with `slot_bytes` over all paths.

    Slots take memory when they are first used.
    """
    free = available_memory()
    if slot_bytes * max_batch > free:
        raise ResourceError(
            f"the recurrent states of {max_batch} requests take {slot_bytes * max_batch:,} bytes, {free:,} are "
            f"available; load with a max_batch of {max(free // slot_bytes, 1)} or less"
        )


def _open_stages(
    artifact: LoadedArtifact, stages: list[dict[str, Any]], target: Executor, caches: _Caches, undo: ExitStack
) -> Speculator:
    """Open the draft paths with the target's threads, page and slot numbers and, where they share them, its `caches`.

    `undo` closes them.
    """
    opened = []
    for stage, draft in zip(stages, artifact.drafts, strict=True):
        if draft is None:
            opened.append(DraftStage(None, stage["gamma"], match=stage["lookup"]))
            continue
        bind(draft.library)
        own, pages = stage.get("kv"), target.kv_pages
        arena = Arena(pages * own["page_bytes"]) if own else caches.kv
        states = _states(own, caches.max_batch) if own else caches.states
        limits = target.limits._replace(max_position=stage["max_position"])
        executor = Executor(draft.library, draft.pointers, arena, pages, target.threads, limits, target, states)
        undo.callback(executor.close)
        opened.append(DraftStage(executor, stage["gamma"], own is None, threshold=stage["threshold"]))
    return LibrarySpeculator(target, opened)


def _open_head(artifact: LoadedArtifact, stages: list[dict[str, Any]], target: Executor, undo: ExitStack) -> Drafter:
    """Open a draft head with the target's threads and page numbers, and a cache of its own. `undo` closes it.

    A lookup may follow it.
    Raises ArtifactError if it does not fit the target.
    """
    (stage, *more), (draft, *_) = stages, artifact.drafts
    if draft is None or stage.get("kv") is None or any("lookup" not in other for other in more):
        raise ArtifactError(f"{artifact.root}: a draft head is no path of its own; build it again")
    bind(draft.library)
    limits = target.limits._replace(max_position=stage["max_position"], vocab=stage["vocab_size"])
    arena = Arena(target.kv_pages * stage["kv"]["page_bytes"])
    head = Executor(draft.library, draft.pointers, arena, target.kv_pages, target.threads, limits, target)
    undo.callback(head.close)
    for executor in (target, head):
        executor.connect()
    if head.features.shape != target.features.shape:
        raise ArtifactError(f"{artifact.root}: the model and its draft head have different features; build it again")
    drafting = [DraftStage(head, stage["gamma"]), *(DraftStage(None, m["gamma"], match=m["lookup"]) for m in more)]
    tokens = head_tokens(artifact.root, artifact.manifest["files"], stage, target.limits.vocab)
    return LibraryHeadSpeculator(target, head, drafting, tokens)


def _open_reencoder(
    artifact: LoadedArtifact,
    stage: dict[str, Any],
    target: Executor,
    tokenizer: Tokenizer | None,
    max_batch: int,
    undo: ExitStack,
) -> Reencoder:
    """Open a draft model with another tokenizer, with pages for `max_batch` requests of its full context.

    `undo` closes it.
    """
    draft, kv = artifact.drafts[0], stage["kv"]
    if draft is None:
        raise ArtifactError(f"{artifact.root}: a draft that encodes text is no path; build it again")
    bind(draft.library)
    limits = Limits(target.limits.max_tokens, stage["vocab_size"], kv["page_tokens"], stage["max_position"])
    pool = BlockPool(max_batch * -(-limits.max_position // limits.page_tokens), limits.page_tokens)
    arena = Arena(pool.total * kv["page_bytes"])
    executor = Executor(draft.library, draft.pointers, arena, pool.total, target.threads, limits, target)
    undo.callback(executor.close)
    files, vocab = artifact.manifest["files"], target.limits.vocab
    return open_reencoder(artifact.root, files, stage, tokenizer, vocab, executor, pool)


def _kv_pages(page_bytes: int, limits: Limits, max_batch: int, wanted_bytes: int | None, ranks: int) -> int:
    """Number of pages of the KV cache, each of `page_bytes` over all paths in each of `ranks` processes."""
    page_bytes *= ranks
    full = max_batch * limits.pages_for(limits.max_position)
    if not page_bytes:  # no attention: pages only count positions
        return full
    if wanted_bytes is not None:
        return requested_pages(wanted_bytes, page_bytes)
    pages = min(full, available_memory() // _KV_SHARE // page_bytes)
    if pages < 1:
        raise ResourceError(f"no memory for one KV page of {page_bytes:,} bytes")
    return pages
