"""Loads a GPU artifact: verifies its files, copies the weights to the GPU, and opens the executor and its drafts."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from qcompile.artifact.hashes import listed_file
from qcompile.artifact.layout import ADAPTER_TABLE, Manifest
from qcompile.errors import ArtifactError, ResourceError
from qcompile.runtime.cuda.adapters import DeviceAdapters, NamedFactors, Sites, plan_for
from qcompile.runtime.cuda.driver import Driver, driver
from qcompile.runtime.cuda.executor import CudaExecutor
from qcompile.runtime.cuda.features import feature_bytes
from qcompile.runtime.cuda.heads import CudaHeadSpeculator
from qcompile.runtime.cuda.memory import activation_bytes, pages_in, peer_bytes
from qcompile.runtime.cuda.ranks import CudaRanks, check_gpus
from qcompile.runtime.cuda.sleep import CudaMemory
from qcompile.runtime.cuda.speculate import CudaLookup, CudaSpeculator
from qcompile.runtime.cuda.weights import DeviceWeights, upload_rank, upload_weights
from qcompile.runtime.engine.blocks import BlockPool, requested_pages
from qcompile.runtime.loader import divided_stages
from qcompile.runtime.options import STEP_TOKENS
from qcompile.runtime.ranks.sleeping import DividedMemory
from qcompile.runtime.speculation.head_tokens import head_tokens
from qcompile.runtime.speculation.host import HostSpeculator
from qcompile.runtime.speculation.reencode import open_reencoder
from qcompile.runtime.speculation.stages import Drafter, DraftStage
from qcompile.runtime.step import Limits

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_FEWEST_ROWS = 512
"""Fewest rows of a step that loading chooses."""
_BUFFER_SHARE = 4
"""Loading chooses steps small enough that their buffers take at most 1 / 4 of the memory for buffers, cache and
states."""
_COPY_SHARE = 4
"""Copies of recurrent states take at most 1 / 4 of the memory for KV pages and copies, as on CPUs: a page is what a
request cannot do without, a copy saves it time."""
_COPIES_A_REQUEST = 4
"""Most copies for each request that runs at once, as on CPUs: a text has two, where its prompt ends and where it parts
from an earlier one, and the texts of twice as many users as run at once are kept."""
_NO_SLEEP = "this GPU's driver cannot give memory back and keep its addresses"


class OpenedCuda(NamedTuple):
    """A model on a GPU, its drafts if they are wanted, and what it can give back to sleep; if it cannot, the reason."""

    executor: CudaExecutor
    drafter: Drafter | None
    memory: CudaMemory | DividedMemory | str


def open_cuda(  # parameters: those of `load` that concern a GPU
    root: Path,
    manifest: Manifest,
    max_batch: int,
    kv_cache_bytes: int | None,
    memory_share: float,
    drafts: bool,
    tokenizer: Tokenizer | None = None,
    step_rows: int | None = None,
    adapters: NamedFactors | None = None,
    snapshots: bool = False,
) -> OpenedCuda:
    """Verify every file of the artifact, copy its weights to the GPU, and open its plan and, if wanted, its drafts.

    `memory_share` is the share of the GPU's memory that may be used, `tokenizer` the target's, `step_rows` the most
    rows of a step (by default STEP_TOKENS; fewer where memory is short or the kernels take fewer), `adapters` the
    factors of adapters by name, for an artifact that has places for them. With `snapshots`, there are slots for copies
    of recurrent states, as far as memory permits. Raises ArtifactError (damaged, or its kernels
    do not run on this GPU), ResourceError (no driver, GPU, or memory), UsageError (less cache than a page, or more rows
    than the kernels take).
    """
    if (ranks := len(manifest["runtime"].get("ranks") or [0])) > 1:
        given = max_batch, kv_cache_bytes, memory_share, drafts, step_rows, snapshots, adapters
        return open_divided(root, manifest, ranks, *given)
    gpu, named = driver(), adapters.named if adapters else {}
    runtime, model = manifest["runtime"], manifest["model"]
    kv = runtime["kv"]
    small = _read_other_files(root, manifest)
    stages = runtime.get("levels") or [] if drafts else []
    paths = [stage for stage in stages if "library" in stage]
    plans = [plan_for(json.loads(small[path["library"]]), named) for path in (runtime, *paths)]
    rows = step_rows or min(STEP_TOKENS["cuda"], runtime["max_tokens"], plans[0]["most_rows"])
    sizes = rows, runtime["vocab_size"], kv["page_tokens"], model["max_position"]
    limits = Limits(*sizes, kv.get("ring_tokens") or 0, max_batch, runtime.get("max_outputs") or 0)
    page_bytes = kv["page_bytes"] + sum(path["kv"]["page_bytes"] for path in paths if path.get("kv"))
    own = [plan for plan, path in zip(plans, (runtime, *paths), strict=True) if path.get("kv")]
    slot_bytes = sum(plan.get("slot_bytes", 0) for plan in own)
    most_pages = max_batch * limits.pages_for(limits.max_position)
    room = _Room(page_bytes, slot_bytes, most_pages, memory_share, step_rows is None, _most_copies(limits, snapshots))
    if kv_cache_bytes is not None and page_bytes:
        room = room.granted(requested_pages(kv_cache_bytes, page_bytes))
    with ExitStack() as undo:
        # On failure all memory is freed: a smaller model may fit then.
        held: list[int] = []
        modules: list[ctypes.c_void_p] = []
        undo.callback(_free, gpu, held, modules)
        functions = _load_kernels(gpu, plans, PurePosixPath(runtime["library"]).parent, small, modules)
        uploaded = upload_weights(gpu, root, manifest, held)
        weights = uploaded.by_name
        sent = DeviceAdapters(gpu, named, weights[ADAPTER_TABLE], held) if named else None
        target = _open_target(gpu, plans, functions, weights, limits, room)
        undo.pop_all()
        target.adopt(held, modules)
        target.inputs.adapters = sent
        undo.callback(target.close)
        opened = _open_stages(undo, target, stages, plans[1:], (functions, weights))
        drafter = _drafter(root, manifest["files"], target, stages, opened, tokenizer) if stages else None
        memory = CudaMemory(gpu, root, manifest, uploaded, target.memory.caches) if gpu.can_release else _NO_SLEEP
        undo.pop_all()
    return OpenedCuda(target, drafter, memory)


class LoadedRank(NamedTuple):
    """A rank of a divided model, with its kernels and weights on its GPU, but without the memory of its executors.

    plans: of the model, and of the draft `stages` that all ranks compute. adapters: those of requests, if there are
    any. uploaded: the same weights as places that the GPU can give back.
    """

    gpu: Driver
    plans: list[dict[str, Any]]
    stages: list[dict[str, Any]]
    functions: dict[str, int]
    uploaded: DeviceWeights
    limits: Limits
    held: list[int]
    modules: list[ctypes.c_void_p]
    adapters: DeviceAdapters | None = None

    def open(self, pages: int, rows: int, slots: int, copies: int) -> list[CudaExecutor]:
        """The executors of all paths, with `pages` pages of cache, for steps of `rows` rows and `slots` requests.

        There are slots for `copies` copies of recurrent states.
        """
        limits = self.limits._replace(max_tokens=rows, slots=slots, copies=copies)
        weights = self.uploaded.by_name
        target = CudaExecutor(self.gpu, self.plans[0], self.functions, weights, pages, limits)
        with ExitStack() as undo:
            undo.callback(target.close)
            drafts = _open_stages(undo, target, self.stages, self.plans[1:], (self.functions, weights))
            undo.pop_all()
        target.inputs.adapters = self.adapters
        target.adopt(self.held, self.modules)  # last, as `free` frees them if this fails
        return [target, *(draft.executor for draft in drafts if isinstance(draft.executor, CudaExecutor))]

    def memory(self, root: Path, manifest: Manifest, opened: CudaExecutor) -> CudaMemory | str:
        """What the rank can give back, where `opened` is the model's executor; if it cannot, the reason."""
        if not self.gpu.can_release:
            return _NO_SLEEP
        return CudaMemory(self.gpu, root, manifest, self.uploaded, opened.memory.caches)

    def free(self) -> None:
        """Free the GPU's memory, if no executor has taken it."""
        _free(self.gpu, self.held, self.modules)


def load_rank(
    root: str | Path, manifest: Manifest, rank: int, drafts: bool, adapters: Mapping[str, Sites] = MappingProxyType({})
) -> LoadedRank:
    """Load the kernels and weights of one rank to the GPU of that number, and verify its share of the files.

    With `drafts`, those of drafts that all ranks compute, too. `adapters` are the rank's factors of adapters by name.
    """
    gpu, root = driver(rank), Path(root)
    runtime, model = manifest["runtime"], manifest["model"]
    kv = runtime["kv"]
    small = _read_other_files(root, manifest)
    stages = divided_stages(runtime) if drafts else []
    plans = [plan_for(json.loads(small[path["library"]]), adapters) for path in (runtime, *stages)]
    rows = min(STEP_TOKENS["cuda"], runtime["max_tokens"], plans[0]["most_rows"])
    sizes = rows, runtime["vocab_size"], kv["page_tokens"], model["max_position"]
    limits = Limits(*sizes, kv.get("ring_tokens") or 0, 0, runtime.get("max_outputs") or 0)
    loaded = LoadedRank(gpu, plans, stages, {}, DeviceWeights({}, {}, {}), limits, [], [])
    try:
        folder = PurePosixPath(runtime["library"]).parent
        loaded.functions.update(_load_kernels(gpu, plans, folder, small, loaded.modules))
        loaded = loaded._replace(uploaded=upload_rank(gpu, root, manifest, rank, loaded.held))
        if adapters:
            sent = DeviceAdapters(gpu, adapters, loaded.uploaded.by_name[ADAPTER_TABLE], loaded.held)
            loaded = loaded._replace(adapters=sent)
    except BaseException:
        loaded.free()
        raise
    return loaded


def open_divided(  # parameters: those of `open_cuda` that a divided model has
    root: Path,
    manifest: Manifest,
    ranks: int,
    max_batch: int,
    kv_cache_bytes: int | None,
    memory_share: float,
    drafts: bool,
    step_rows: int | None,
    snapshots: bool,
    adapters: NamedFactors | None,
) -> OpenedCuda:
    """Open a model that is divided over `ranks` GPUs, as rank 0; the other ranks have processes of their own.

    `kv_cache_bytes` are those of all GPUs together. With `drafts`, all ranks open the drafts, too. The host starts each
    step of rounds: the others repeat what it starts.
    """
    gpu = driver()
    check_gpus(gpu, ranks, root)
    with ExitStack() as undo:
        named, folders = (adapters.named, adapters.folders) if adapters else ({}, ())
        processes = CudaRanks(root, manifest["sha256"], ranks, gpu, drafts, folders)
        undo.callback(processes.close)
        own = load_rank(root, manifest, 0, drafts, named)
        undo.callback(own.free)
        limits = own.limits._replace(slots=max_batch, max_tokens=step_rows or own.limits.max_tokens)
        page_bytes, slot_bytes = manifest["runtime"]["kv"]["page_bytes"], own.plans[0].get("slot_bytes", 0)
        most_pages = max_batch * limits.pages_for(limits.max_position)
        copies = _most_copies(limits, snapshots)
        room = _Room(page_bytes, slot_bytes, most_pages, memory_share, step_rows is None, copies)
        if kv_cache_bytes is not None and page_bytes:
            room = room.granted(requested_pages(kv_cache_bytes, ranks * page_bytes))
        free, total = gpu.memory()
        limits, pages = _fitting(own.plans, limits, room, min(free, processes.loaded()), total)
        sizes = {"pages": pages, "rows": limits.max_tokens, "slots": limits.slots, "copies": limits.copies}
        executors = own.open(**sizes)
        undo.pop_all()
        for executor in executors:
            undo.callback(executor.close)
        undo.callback(processes.close)
        peers = processes.join(sizes, gpu, [executor.memory.peer_memory for executor in executors])
        for path, (executor, addresses) in enumerate(zip(executors, peers, strict=True)):
            executor.join(0, addresses, processes.failed.address, processes.of_path(path))
        undo.pop_all()
    stages = manifest["runtime"].get("levels") or [] if drafts else []
    memory = own.memory(root, manifest, executors[0])
    divided = memory if isinstance(memory, str) else DividedMemory(memory, processes)
    return OpenedCuda(executors[0], _host_drafter(executors, stages), divided)


def _host_drafter(executors: Sequence[CudaExecutor], stages: Sequence[dict[str, Any]]) -> Drafter | None:
    """The drafts of a divided model, of which the first of `executors` is the target."""
    rest = iter(executors[1:])
    opened = [
        DraftStage(next(rest), stage["gamma"], True, threshold=stage["threshold"])
        if "library" in stage
        else DraftStage(None, stage["gamma"], match=stage["lookup"])
        for stage in stages
    ]
    return HostSpeculator(executors[0], opened) if opened else None


class _Room(NamedTuple):
    """The memory that caches and states may take.

    It has the bytes of a page and of a slot, summed over all paths, the most pages, the share of the GPU's memory that
    may be used, whether steps may have fewer rows than the limits say, the most copies of recurrent states, and how
    many pages come before those.
    """

    page_bytes: int
    slot_bytes: int
    most_pages: int
    memory_share: float
    fewer_rows: bool = False
    most_copies: int = 0
    first_pages: int = 1

    def granted(self, pages: int) -> _Room:
        """The room if the caller has asked for this number of pages, whatever share of the memory they take."""
        return self._replace(most_pages=pages, memory_share=1.0, first_pages=pages)


def _open_stages(
    undo: ExitStack,
    target: CudaExecutor,
    stages: list[dict[str, Any]],
    plans: list[dict[str, Any]],
    addresses: tuple[dict[str, int], dict[str, int]],
) -> list[DraftStage]:
    """Open the draft stages, those with a library over the next of `plans`; `undo` closes them.

    `addresses` are those of kernels and of weights, by name.
    """
    opened: list[DraftStage] = []
    rest = iter(plans)
    for stage in stages:
        plan = next(rest) if "library" in stage else None
        opened.append(_stage(target, stage, plan, *addresses))
        if executor := opened[-1].executor:
            undo.callback(executor.close)
    return opened


def _stage(
    target: CudaExecutor,
    stage: dict[str, Any],
    plan: dict[str, Any] | None,
    functions: dict[str, int],
    weights: dict[str, int],
) -> DraftStage:
    """Open a draft stage, in the target's cache or in one of its own with as many pages."""
    if plan is None:
        return DraftStage(None, stage["gamma"], match=stage["lookup"])
    own, limits = stage.get("kv"), _of_drafts(target.limits)
    limits = limits._replace(max_position=stage["max_position"], vocab=stage["vocab_size"])
    if own:
        limits = limits._replace(page_tokens=own["page_tokens"], ring_tokens=own.get("ring_tokens") or 0)
    executor = CudaExecutor(target.driver, plan, functions, weights, target.kv_pages, limits, target, bool(own))
    target.memory.caches += executor.memory.caches
    return DraftStage(executor, stage["gamma"], not own, threshold=stage["threshold"])


def _drafter(
    root: Path,
    files: dict[str, Any],
    target: CudaExecutor,
    stages: list[dict[str, Any]],
    opened: list[DraftStage],
    tokenizer: Tokenizer | None,
) -> Drafter:
    """The drafter for these stages. A single stage without a threshold runs its rounds as graphs."""
    first = opened[0]
    if stages[0].get("features"):
        return _head_drafter(root, files, target, stages[0], first)
    if stages[0].get("tokenizer") and first.executor:
        pool = BlockPool(target.kv_pages, first.executor.limits.page_tokens)
        return open_reencoder(root, files, stages[0], tokenizer, target.limits.vocab, first.executor, pool)
    if len(opened) == 1 and not first.threshold:
        return CudaSpeculator(target, first) if first.executor else CudaLookup(target, first)
    return HostSpeculator(target, opened)


def _head_drafter(
    root: Path, files: dict[str, Any], target: CudaExecutor, stage: dict[str, Any], opened: DraftStage
) -> CudaHeadSpeculator:
    """The drafter for a draft head. Raises ArtifactError if it does not fit the target."""
    head: Any = opened.executor
    if opened.shares_cache:
        raise ArtifactError(f"{root}: a draft head is no path of its own; build it again")
    for executor in (target, head):
        executor.connect()
    if head.plan["features"] != target.plan["features"] or not head.given:
        raise ArtifactError(f"{root}: the model and its draft head have different features; build it again")
    tokens = head_tokens(root, files, stage, target.limits.vocab)
    return CudaHeadSpeculator(target, head, stage["gamma"], tokens)


def _free(gpu: Driver, addresses: list[int], modules: list[ctypes.c_void_p]) -> None:
    for address in addresses:
        gpu.free(address)
    for module in modules:
        gpu.unload(module)


def _open_target(
    gpu: Driver,
    plans: list[dict[str, Any]],
    functions: dict[str, int],
    weights: dict[str, int],
    limits: Limits,
    room: _Room,
) -> CudaExecutor:
    """Open the target's executor, with as many cache pages as fit beside the recurrent states."""
    limits, pages = _fitting(plans, limits, room, *gpu.memory())
    return CudaExecutor(gpu, plans[0], functions, weights, pages, limits)


def _fitting(plans: list[dict[str, Any]], limits: Limits, room: _Room, free: int, total: int) -> tuple[Limits, int]:
    """The limits, with fewer rows a step if they may have that, and the number of pages that fit into `free` bytes.

    Raises ResourceError if too little is free.
    """
    rest = free - int(total * (1 - room.memory_share))
    while room.fewer_rows and limits.max_tokens > _FEWEST_ROWS and _buffers(plans, limits) > rest // _BUFFER_SHARE:
        limits = limits._replace(max_tokens=limits.max_tokens // 2)
    buffers = _buffers(plans, limits)
    if buffers > max(rest, 0):
        raise ResourceError(
            f"steps of {limits.max_tokens} rows take {buffers:,} bytes of GPU memory, which has {max(rest, 0):,} left:"
            f" lower max_num_batched_tokens"
        )
    rest -= buffers
    states = limits.slots * room.slot_bytes
    if states > rest:
        fits = rest // room.slot_bytes
        raise ResourceError(
            f"the recurrent states of {limits.slots} requests take {states:,} bytes of GPU memory, which has room for"
            f" those of {fits}: lower max_batch"
        )
    rest -= states
    copied = plans[0].get("slot_bytes", 0)  # drafts with states of their own compute a text's again
    if copied:
        left = max(0, rest - room.first_pages * room.page_bytes) // _COPY_SHARE
        limits = limits._replace(copies=min(room.most_copies, left // copied))
    return limits, pages_in(rest - limits.copies * copied, room.page_bytes, room.most_pages, 1.0)


def _most_copies(limits: Limits, snapshots: bool) -> int:
    """Most copies of recurrent states that are kept; none over a hierarchical cache, which keeps texts as a whole."""
    return _COPIES_A_REQUEST * limits.slots if snapshots and not limits.ring_tokens else 0


def _of_drafts(limits: Limits) -> Limits:
    """The limits of a draft path's steps: one row or two for each sequence, or a part of a prompt."""
    return limits._replace(max_tokens=limits.max_outputs, copies=0)


def _buffers(plans: list[dict[str, Any]], limits: Limits) -> int:
    """Estimated bytes of all paths apart from weights and cache; the first plan is the target's."""
    by_plan = [(plan, _of_drafts(limits) if i else limits) for i, plan in enumerate(plans)]
    peers = sum(peer_bytes(plan["sums"], most.max_tokens) for plan, most in by_plan if "sums" in plan)
    size = sum(activation_bytes(plan, most) for plan, most in by_plan)
    if len(plans) > 1:
        size += sum(feature_bytes(plan, most.max_tokens) for plan, most in by_plan)
    return peers + size + len(plans) * (512 << 20)


def _read_other_files(root: Path, manifest: Manifest) -> dict[str, bytes]:
    """Read and verify every file except the weights."""
    files: dict[str, dict[str, Any]] = manifest["files"]
    weights = {entry["file"] for entry in manifest["runtime"]["weights"]}
    return {name: listed_file(root, files, name) or b"" for name in sorted(set(files) - weights)}


def _load_kernels(
    gpu: Driver,
    plans: list[dict[str, Any]],
    folder: PurePosixPath,
    files: dict[str, bytes],
    modules: list[ctypes.c_void_p],
) -> dict[str, int]:
    """Load the plans' kernels; returns their handles by label. The loaded modules are added to `modules`."""
    shown: list[str] = []

    def notice(text: str) -> None:
        if not shown:
            print(f"qcompile: {text}", file=sys.stderr)
        shown.append(text)

    def ptx(label: str) -> Callable[[], bytes]:
        return lambda: files[str(folder / f"{label}.ptx")]

    kernels = {}
    for label, kernel in {label: kernel for plan in plans for label, kernel in plan["kernels"].items()}.items():
        module = gpu.module(files[str(folder / f"{label}.cubin")], ptx(label), notice)
        modules.append(module)
        kernels[label] = gpu.function(module, kernel["function"], kernel["shared_bytes"])
    return kernels
