"""What the host's work for each step costs in CPU time, over a GPU that is only a clock: no GPU is needed.

    python benchmarks/host_cost.py [out.json] [--batches=256,512] [--modes=generate,http,apart,masks]
                                   [--workloads=same,varied]

The engine, the executor of GPUs and the server are the real ones; the driver computes nothing. A step takes as long as
one of Llama-3-8B by `qserve` takes on an H200
(benchmarks/results/gpu_serving_h200.json). Tokens are those of Python source files. The requests are those of
benchmarks/gpu_serving.py: "same" is 16 tokens in and 512 out, "varied" 16 to 300 in and 64 to 512 out, all at once, two
after each other in each place. "http" streams to clients of another process, "apart" does so from a process of its own.

`engine_ms`, `loop_ms` and `other_ms` are CPU milliseconds a step of the thread that steps the engine, of the event loop
of its process (which serves clients with "http", and takes requests from a channel with "apart"), and of all other
threads. `pieces` are those of streams; slower steps give more of them a step. `busy` is the share of the time in which
the GPU would have computed: below 1, the host was late, or other programs of the machine were in its way, which CPU
times tell apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import machine
from benchmarks.gpu_serving import Work, ask, workload
from benchmarks.serving_tokens import serve_tokens
from qcompile.runtime.cuda import launching
from qcompile.runtime.cuda.executor import CudaExecutor
from qcompile.runtime.cuda.masks import DeviceMasks
from qcompile.runtime.engine.samples import PromptSamples
from qcompile.runtime.llm import LLM
from qcompile.runtime.sampling.inputs import GREEDY
from qcompile.runtime.sampling.masks import Masks
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.server import app
from qcompile.runtime.server.apart import host
from qcompile.runtime.server.service import Job, Service
from qcompile.runtime.step import Limits, Rows
from tests.support.fake_driver import PLAN, FakeDriver, FakeLaunch

SAMPLES = Path(__file__).parents[1] / "samples"
LAUNCHES, ARGUMENTS, MASK_STEPS = 300, 16, 60
_DEFAULTS = ("batches", "256,512"), ("modes", "generate,http,apart"), ("workloads", "same,varied")
STEP_SECONDS, ROW_SECONDS = 1.5e-3, 20e-6
"""Of a step of Llama-3-8B on an H200: 1.5 ms with one row, 3.0 with 64, 6.6 with 256."""
CONTEXT, PAGE_TOKENS = 1024, 64


class Clock(FakeDriver):
    """A driver of a simulated GPU that only takes time. What is copied from it are tokens of a text."""

    def __init__(self, text: np.ndarray) -> None:
        super().__init__()
        self._text, self._at = text, 0
        self._ends = 0.0  # when all that was queued has run
        self._after: dict[int, float] = {}  # by event: when it occurs
        self.seconds, self.steps = 0.0, 0

    def take(self, seconds: float) -> None:
        """Queue work of `seconds` seconds."""
        self._ends = max(self._ends, time.monotonic()) + seconds
        self.seconds += seconds
        self.log.clear()

    def record(self, event: int, in_graph: bool = False) -> None:
        self._after[event] = self._ends

    def wait_for(self, event: int) -> None:
        if (left := self._after.get(event, 0.0) - time.monotonic()) > 0:
            time.sleep(left)

    def upload(self, to: int, source: int, size: int, pinned: bool = True) -> None: ...

    def download(self, to: int, source: int, size: int, pinned: bool = True) -> None:
        self._at = (self._at + 997) % (len(self._text) - size // 4)
        ctypes.memmove(to, self._text[self._at :].ctypes.data, size)


class ClockedExecutor(CudaExecutor):
    """The executor of GPUs over `Clock`."""

    def _run(self, counts: dict[str, int], feed_back: bool, times: int) -> None:
        driver: Any = self.driver
        driver.take(times * (STEP_SECONDS + ROW_SECONDS * counts["tokens"]))
        driver.steps += times
        super()._run(counts, feed_back, times)


def plan() -> dict[str, Any]:
    """A launch plan with as many launches and arguments as that of a model of 32 layers has."""
    names = [f"a{place}" for place in range(ARGUMENTS)]
    given = {name: {"kind": "weight", "name": "w"} for name in names}
    counts = {"a0": {"kind": "count", "name": "tokens"}, "a1": {"kind": "count", "name": "sequences"}}
    sizes = {"x": {"count": "tokens", "divisor": 16}, "y": 3, "z": 1}
    variants = [{"kernel": "few", "grid": sizes, "args": given | counts, "most": most} for most in (64, 0)]
    kernels = {name: kernel | {"arguments": names} for name, kernel in PLAN["kernels"].items()}
    launches = [{"name": "any", "by": "tokens", "variants": variants} for _ in range(LAUNCHES)]
    return PLAN | {"most_rows": 2048, "launches": launches, "kernels": kernels, "feedback": [], "follow": []}


def opened(batch: int) -> tuple[LLM, Clock]:
    """A model for `batch` requests at once, and its clock."""
    tokenizer = Tokenizer.from_file(str(SAMPLES / "pycode-1m" / "tokenizer.json"))
    lines = (SAMPLES / "heldout.jsonl").read_text().splitlines()
    text = " ".join(json.loads(line)["text"] for line in lines[:40])
    driver: Clock = Clock(np.array(tokenizer.encode(text).ids, np.int32))
    launching.LaunchCall = FakeLaunch  # type: ignore[assignment, misc]
    limits = Limits(2048, tokenizer.get_vocab_size(), PAGE_TOKENS, CONTEXT, most_outputs=512)
    functions: Any = dict.fromkeys(plan()["kernels"], 1)
    pages = batch * CONTEXT // PAGE_TOKENS
    executor = ClockedExecutor(driver, plan(), functions, {"w": 1}, pages, limits)  # type: ignore[arg-type]
    return LLM(executor, {"model": {"eos_token_ids": []}}, tokenizer, batch), driver


def generate(llm: LLM, work: Work) -> None:
    """All requests by one call."""
    params = [SamplingParams(temperature=0, max_tokens=output, ignore_eos=True) for _, output in work]
    llm.generate([prompt for prompt, _ in work], params)


def serve(llm: LLM, batch: int, name: str, http_process: bool) -> None:
    """All requests by clients of another process."""
    listening = app.bind("127.0.0.1", 0)
    command = [sys.executable, __file__, f"--client={listening.getsockname()[1]},{batch},{name}"]

    def started() -> None:
        subprocess.Popen(command)

    with (  # the interrupt is the client's, when it is done
        contextlib.suppress(KeyboardInterrupt),
        tempfile.TemporaryDirectory() as folder,
    ):
        serve_tokens(llm, Path(folder), 2 * batch, listening, started, http_process)


def client(port: str, batch: str, name: str) -> None:
    """Ask all requests of a workload, then end the server."""

    async def ask_all() -> None:
        work, result = workload(int(batch), name == "varied"), list[float]()
        await asyncio.gather(*(ask(int(port), work, result) for _ in range(int(batch))))

    try:
        asyncio.run(ask_all())
    finally:
        os.kill(os.getppid(), signal.SIGINT)


def masks(batch: int, name: str) -> dict[str, Any]:
    """Cost of the masks of requests confined to one regular expression, over a vocabulary of 8,192 tokens.

    "same": all have the same text; "varied": no two have, after the first token.
    """
    llm, clock = opened(batch)
    vocab, draw = llm.vocab_size, random.Random(0)
    llm.end_at([0])
    wanted = SamplingParams(structured_outputs={"regex": "[a-z ]{600,}"}, max_tokens=None)
    grammar = llm.engine.grammars.compile(wanted.structure)
    assert grammar is not None
    device = DeviceMasks(clock, batch, vocab)  # type: ignore[arg-type]
    states = [grammar.start() for _ in range(batch)]
    sampling = [GREEDY._replace(masks=Masks(state, 1)) for state in states]
    waited: list[float] = []
    for _ in range(MASK_STEPS):
        began = time.process_time()
        device.want([Rows([1], 0, (), 1)] * batch, sampling)
        device.grow()
        device.send()
        waited.append(time.process_time() - began)
        allowed = [np.flatnonzero(np.isfinite(states[0].masked(np.zeros(vocab, np.float32))))]
        tokens = [int(draw.choice(allowed[0])) for _ in states]
        for state, token in zip(states, tokens, strict=True):
            state.note(tokens[0] if name == "same" else token)
    device.free()
    llm.close()
    costs = {"masks_ms": round(1e3 * statistics.median(waited), 3), "lexers": len(grammar.lexers.all)}
    return {"batch": batch, "mode": "masks", "workload": name} | costs


def measure(batch: int, mode: str, name: str) -> dict[str, Any]:
    """Costs of one workload."""
    llm, clock = opened(batch)
    work = workload(batch, name == "varied")
    tokens = sum(output for _, output in work)
    ended: list[float] = []
    pieces: list[int] = []

    class Watched(Service):
        def _run(self) -> None:
            super()._run()
            ended.append(time.thread_time())

        def _publish(self, job: Job, samples: PromptSamples) -> None:
            super()._publish(job, samples)
            pieces.append(1)

    app.Service = host.Service = Watched  # type: ignore[misc]
    main, whole, wall = time.thread_time(), time.process_time(), time.monotonic()
    if mode == "generate":
        generate(llm, work)
    else:
        serve(llm, batch, name, mode == "apart")
    main, whole, wall = time.thread_time() - main, time.process_time() - whole, time.monotonic() - wall
    engine, loop = (ended[0], main) if ended else (main, 0.0)
    each = 1e3 / clock.steps
    row: dict[str, Any] = {"batch": batch, "mode": mode, "workload": name, "steps": clock.steps}
    row |= {"tokens_per_step": tokens / clock.steps, "gpu_ms": clock.seconds * each, "engine_ms": engine * each}
    row |= {"loop_ms": loop * each, "other_ms": (whole - engine - loop) * each, "pieces": len(pieces)}
    row |= {"loop_us_per_piece": 1e6 * loop / max(1, len(pieces))}
    row |= {"busy": clock.seconds / wall, "tokens_per_second": tokens / wall}
    llm.close()
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}


def main() -> None:
    options = dict(a.removeprefix("--").split("=", 1) for a in sys.argv[1:] if a.startswith("--"))
    if "client" in options:
        client(*options["client"].split(","))
        return
    rows = []
    asked = [options.get(*each).split(",") for each in _DEFAULTS]
    for number, mode, name in product(*asked):
        rows.append(masks(int(number), name) if mode == "masks" else measure(int(number), mode, name))
        print(rows[-1], flush=True)
    for path in (a for a in sys.argv[1:] if not a.startswith("--")):
        Path(path).write_text(json.dumps(machine() | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
