"""The CUDA runtime over this machine's memory, each launch by Triton's interpreter (set TRITON_INTERPRET first)."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from qcompile import pipeline
from qcompile.artifact.adapted import Adapted
from qcompile.artifact.describe import KernelFiles
from qcompile.artifact.layout import ADAPTER_TABLE
from qcompile.checkpoints.adapters import read_adapter
from qcompile.codegen.gpu import compile as gpu_compile
from qcompile.codegen.gpu.build import with_rounds
from qcompile.codegen.gpu.kernel import Kernel
from qcompile.codegen.gpu.launches import Launch, LaunchPlan
from qcompile.codegen.gpu.operands import CountRef, NumberRef, grid_size
from qcompile.codegen.gpu.plan import make_plan
from qcompile.drafts import paths as draft_paths
from qcompile.drafts.paths import DraftPath
from qcompile.passes.lora import described
from qcompile.runtime.cuda import counts, inputs, launching, load
from qcompile.runtime.cuda.adapters import DeviceAdapters, plan_for
from qcompile.runtime.cuda.executor import CudaExecutor
from qcompile.runtime.cuda.sampling import DeviceSampling
from qcompile.runtime.engine.blocks import BlockPool
from qcompile.runtime.engine.engine import Engine
from qcompile.runtime.lora.factors import factors
from qcompile.runtime.preparations import Preparations
from qcompile.runtime.request import Request
from qcompile.runtime.sampling.inputs import SamplingInputs
from qcompile.runtime.speculation.controller import GammaController
from qcompile.runtime.speculation.costs import GAMMAS, RoundCosts, SpeculationPrior
from qcompile.runtime.step import Limits
from qcompile.targets import TARGETS
from tests.support.fake import listed

_TYPES = {"*fp32": torch.float32, "*bf16": torch.bfloat16, "*i32": torch.int32, "*i16": torch.int16, "*i8": torch.int8}
_TYPES |= {"*fp64": torch.float64, "*fp16": torch.float16, "*i64": torch.int64}
_ZEROED = ("scratch", "inputs", "rounds")
"""Memory that is zero when it is made; the rest is poisoned, so that what is read before it is written shows."""


class HostDriver:
    """What runtime.cuda asks of a driver; a graph is the list of launches put on the stream meanwhile."""

    stream = 0

    def __init__(self) -> None:
        self.preparations = Preparations()
        self.memory: dict[int, torch.Tensor] = {}
        self.recording: list[HostLaunch] | None = None
        self.replays = 0

    def use(self) -> None: ...

    def synchronize(self) -> None: ...

    def allocate(self, size: int, what: str) -> int:
        return self.keep(torch.full((size + 64,), 0 if what.startswith(_ZEROED) else 255, dtype=torch.uint8))

    allocate_releasable = allocate

    def keep(self, tensor: torch.Tensor) -> int:
        """The address of a tensor's memory, which lives from now on."""
        self.memory[tensor.data_ptr()] = tensor
        return tensor.data_ptr()

    def free(self, address: int) -> None:
        del self.memory[address]

    def pinned(self, size: int) -> int:
        return self.allocate(size, "pinned")

    free_pinned = free

    def event(self) -> int:
        return 0

    drop_event = record = wait_for = lambda self, event: None  # all is done when it is queued

    def upload(self, to: int, source: int, size: int, pinned: bool = True) -> None:
        ctypes.memmove(to, source, size)

    def download(self, to: int, source: int, size: int, pinned: bool = True) -> None:
        ctypes.memmove(to, source, size)

    def copy(self, to: int, source: int, size: int) -> None:
        ctypes.memmove(to, source, size)

    @contextmanager
    def captured(self) -> Iterator[list[Any]]:
        self.recording, result = [], []
        yield result
        result.append(self.recording)
        self.recording = None

    def replay(self, graph: list[HostLaunch]) -> None:
        self.replays += 1
        for launch in graph:
            launch.execute()

    def drop(self, graph: object) -> None: ...

    def at(self, address: int, type: str) -> torch.Tensor:
        """Memory from an address on, to the end of what was allocated together; of no address, none."""
        if not address:
            return torch.empty(0, dtype=_TYPES[type])
        start = max(base for base in self.memory if base <= address)
        rest = self.memory[start][address - start :]
        return rest[: len(rest) // 4 * 4].view(_TYPES[type])

    def launch_all(self, calls: Sequence[Any]) -> None:
        for call in calls:
            HostLaunch(self, call.function, call.shape.grid, [cell.value for cell in call.arguments]).run()


class HostLaunch:
    """Stands for LaunchCall; `function` is the kernel itself. `watch` is told the label of each that runs."""

    watch: Callable[[str], object] = staticmethod(lambda label: None)

    def __init__(self, driver: HostDriver, function: Kernel, grid: Sequence[int], *how: Any):
        self.driver, self.kernel, self.grid, self.arguments = driver, function, tuple(grid), how[-1]

    def run(self) -> None:
        if self.driver.recording is None:
            self.execute()
        else:
            self.driver.recording.append(self)

    def execute(self) -> None:
        HostLaunch.watch(self.kernel.label)
        pairs = zip(self.arguments, self.kernel.arguments, strict=True)
        values = [self.driver.at(v, a.type) if a.type.startswith("*") else v for v, a in pairs]
        gpu_compile.load(self.kernel)[self.grid](*values)


def _data(plan: LaunchPlan, program: Any) -> Any:
    """The plan as the runtime reads it."""
    launched = {label: {"threads": 1, "shared_bytes": 0, "prelaunch": False} for label in plan.kernels}
    return json.loads(plan.to_json(launched, program, {}))


def _written(folder: Path, drafts: Sequence[DraftPath]) -> dict[str, Any]:
    """Write the lists of tokens of draft heads. Returns them as a manifest lists files."""
    files = {}
    for draft in drafts:
        if draft.tokens:
            (folder / draft.name).mkdir()
            (folder / draft.name / "tokens.bin").write_bytes(draft.tokens)
            files |= {f"{draft.name}/{name}": facts for name, facts in listed(folder / draft.name).items()}
    return files


class Machine:
    """A decoder compiled by a recipe for a GPU, opened here with its drafts if it has some.

    Decode attention takes programs of whole splits, if not `fine`. Programs of leaves give the same bits, and take
    twice the time here. There are slots for `copies` copies of recurrent states. `how`: more arguments of
    `pipeline.plan`.
    """

    def __init__(
        self,
        graph: Any,
        recipe: str,
        pages: int,
        max_tokens: int = 64,
        split: int = 64,
        drafts: Sequence[Any] = (),
        fine: bool = False,
        copies: int = 0,
        **how: Any,
    ) -> None:
        launching.LaunchCall = HostLaunch  # type: ignore[assignment, misc]
        # One page behind the last shows that programs of nothing write nothing, in less time than seven.
        counts.MIN_PAGES = inputs.MIN_PAGES = 2
        self.driver = HostDriver()
        self.planned = planned = pipeline.plan(graph, target="h200", recipe=recipe, drafts=drafts, **how)
        kv = planned.program.kv
        sizes = max_tokens, planned.program.vocab_size, kv.page_tokens, planned.program.max_position
        self.limits = Limits(*sizes, kv.ring_tokens, slots=8, copies=copies)
        self.weights = {
            name: self.driver.keep(blob.clone())
            for weight in planned.weights
            for (name, _), blob in zip(weight.blobs, weight.produce(), strict=True)
        }
        self.bytes = sum(size for weight in planned.weights for _, size in weight.blobs)
        plans = {name: make_plan(p, TARGETS["h200"], split, inline_asm=False) for name, p in planned.programs.items()}
        plans = with_rounds(plans, planned.lookup)
        functions: Any = {label: kernel for plan in plans.values() for label, kernel in plan.kernels.items()}
        data = {name: _data(plan, planned.programs[name]) for name, plan in plans.items()}
        driver: Any = self.driver
        self.target = CudaExecutor(driver, data["model"], functions, self.weights, pages, self.limits)
        nowhere, listed = KernelFiles("", "", 0, ""), [{"name": name} for name in self.weights]
        stages = draft_paths.draft_stages(planned.drafts, planned.lookup, nowhere, listed)
        opened = [load._stage(self.target, e, data.get(e.get("path")), functions, self.weights) for e in stages]
        with TemporaryDirectory() as folder:
            files = _written(Path(folder), planned.drafts)
            drafter = load._drafter(Path(folder), files, self.target, stages, opened, None) if stages else None
        self.speculator: Any = drafter
        self.pages = pages
        if not fine:
            for executor in self.executors:
                executor.plan["fine_splits"] = 0

    @staticmethod
    def drafted(graph: Any, how: str, pages: int) -> Machine:
        """A decoder with drafts: `how` is "shared" (over the same weights), "own" (itself once more), "lookup", or
        anything else for none."""
        drafts: list[Any] = {"lookup": ["lookup"], "own": [graph]}.get(how, [])
        return Machine(graph, "nested" if how == "shared" else "bf16", pages, drafts=drafts)

    @property
    def executors(self) -> list[Any]:
        """Those of the target and of drafts."""
        drafts = [stage.executor for stage in self.speculator.stages] if self.speculator else []
        return [executor for executor in (self.target, *drafts) if executor is not None]

    def let_kernels_choose(self, chosen: bool) -> None:
        """Whether kernels choose tokens that are not greedy, those of drafts too, or the host does."""
        for executor in self.executors:
            executor.samples = chosen

    def adapt(self, rank: int, folders: Mapping[str, Path]) -> DeviceAdapters:
        """Load adapters for a decoder with places for those of a rank."""
        adapted = Adapted.from_bytes(described(self.planned.graphs[-1], rank).to_bytes())
        named = {name: factors(adapted, read_adapter(folder)) for name, folder in folders.items()}
        driver: Any = self.driver
        self.target.plan = self.target.launcher._plan = plan_for(self.target.plan, named)
        self.target.inputs.adapters = sent = DeviceAdapters(driver, named, self.weights[ADAPTER_TABLE], [])
        return sent

    def engine(self, gamma: int = 0) -> Engine:
        """A new engine that drafts `gamma` tokens a round. Like that of a loaded model, it has a controller."""
        remembered = self.pages if self.limits.copies else 0
        pool = BlockPool(self.pages, self.limits.page_tokens, self.limits.ring_tokens, remembered)
        engine = Engine(self.target, pool, None, (), 8, self.speculator if gamma else None)
        engine.scheduler.adapters = self.target.inputs.adapters
        prior = SpeculationPrior((RoundCosts(1, 64, 1e-3, dict.fromkeys(GAMMAS, 1e-3)),), 0.8)
        engine.speculation.gamma, engine.speculation.controller = gamma, GammaController(prior)
        return engine

    @staticmethod
    def run(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
        """Steps until all requests have ended; their tokens."""
        while engine.busy:
            engine.step()
            engine.check()
        assert engine.pool.used == 0
        return [request.output.token_ids for request in requests]


PROMPTS = [[5, 9, 11], [7], [1, 2], list(range(20, 37)), [3, 3, 3], [30, 31, 30]]


def send_sampling(
    sampling: Sequence[SamplingInputs], rows: int
) -> tuple[DeviceSampling, dict[str, int], dict[str, torch.Tensor]]:
    """Send the sampling inputs of a step of `rows` rows, all with logits. Returns its launches' counts, and arrays."""
    driver: Any = HostDriver()
    sender = DeviceSampling(driver, len(sampling))
    if sender.lacks_room(sampling):
        sender.grow(sampling)
    counts = sender.send(sampling, rows) | {"tokens": rows, "outputs": rows}
    types = {"sampling": "*fp64", "uniforms": "*fp64", "seen": "*i32", "reports": "*fp64"}
    return sender, counts, {name: driver.at(address, types[name]) for name, address in sender.addresses.items()}


def run_launches(launches: Iterable[Launch], counts: dict[str, int], arrays: dict[str, torch.Tensor]) -> None:
    """Interpret the launches that have work, with inputs and work arrays by name."""
    for launch in launches:
        if not counts[launch.by]:
            continue
        variant = next(v for v in launch.variants if not v.most or counts[launch.by] <= v.most)
        assert variant.code is not None
        values: list[Any] = []
        for argument in variant.code.arguments:
            operand: Any = variant.args[argument.name]
            if isinstance(operand, CountRef):
                values.append(counts[operand.name])
            elif isinstance(operand, NumberRef):
                values.append(operand.value)
            else:
                values.append(arrays[operand.name].view(_TYPES[argument.type]))
        gpu_compile.load(variant.code)[tuple(grid_size(size, counts) for size in variant.grid)](*values)


def logits_asked() -> list[bool]:
    """Whether each step from now on is asked for logits: a list that grows."""
    asked: list[bool] = []
    step = CudaExecutor.step

    def spied(self: Any, rows: Any, logits: bool, sampling: Any = ()) -> Any:
        asked.append(logits)
        return step(self, rows, logits, sampling)

    CudaExecutor.step = spied  # type: ignore[method-assign]
    return asked
