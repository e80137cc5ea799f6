"""What users of `generate` and of the HTTP server get of a GPU's decoding: a Llama-3-8B configuration, random weights.

    python benchmarks/gpu_serving.py [out.json] [--recipes=qserve,...] [--batches=1,8,64,256]

A batch is a number of places: in each place, two requests run one after the other. Requests have prompts of 16 tokens
and 512 tokens of output, and the output's text is decoded. "executor" is the same decoding without any of the host's
work, at the mean context; "waiting" is
`generate` where the host waits for each step before it does anything else; "http" streams to clients of another
process, each with its own connection. "varied" are two requests for each place of 16 to 300 tokens and 64 to 512
tokens of output, so that one ends and another begins every few steps; tokens of output count.
"queued_ms" and "captured_ms" are the host's time to queue a step launch by launch, and to capture it as a graph.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

PROMPT, OUTPUT, ROUNDS = 16, 512, 2
BATCHES = (1, 8, 64, 256)
Work = list[tuple[list[int], int]]
"""Requests: tokens of a prompt, and how many of output."""


def workload(batch: int, varied: bool) -> Work:
    """The requests for `batch` places."""
    if not varied:
        return [([1 + i % batch, 2 + i // batch, *range(3, 1 + PROMPT)], OUTPUT) for i in range(ROUNDS * batch)]
    draw = random.Random(batch)
    counts = [(draw.randint(16, 300), draw.randint(64, OUTPUT)) for _ in range(ROUNDS * batch)]
    return [([draw.randint(1, 999) for _ in range(prompt)], output) for prompt, output in counts]


async def ask(port: int, work: Work, result: list[float]) -> None:
    """Stream the answers to requests until there are no more; notes the times to their first pieces."""
    while work:
        prompt, output = work.pop()
        body = {"prompt": prompt, "max_tokens": output, "stream": True, "temperature": 0, "ignore_eos": True}
        content = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        asked, first = time.monotonic(), 0.0
        writer.write(f"{head}{len(content)}\r\n\r\n".encode() + content)
        while not (line := await reader.readline()).startswith(b"data: [DONE]"):
            if not line:
                raise SystemExit("the server hung up")
            if line.startswith(b"data: ") and not first:
                first = time.monotonic()
        writer.close()
        result.append(first - asked)


async def client(port: int, batch: int) -> dict[str, float]:
    """Tokens per second of `batch` clients, and their median time to the first token."""
    results = {}
    for name, varied in (("", False), ("http", False), ("http_varied", True)):  # the first time is a rehearsal
        work, result = workload(batch, varied), list[float]()
        tokens, started = sum(output for _, output in work), time.monotonic()
        await asyncio.gather(*(ask(port, work, result) for _ in range(batch)))
        if name:
            results[name] = tokens / (time.monotonic() - started)
            results[f"{name}_first_token_seconds"] = statistics.median(result)
    return results


def over_http(llm: Any, batch: int, folder: Path, http_process: bool) -> dict[str, float]:
    """`client` in another process, of a server in this one, or in this one and one that answers clients."""
    from benchmarks.serving_tokens import serve_tokens
    from qcompile.runtime.server import app

    listening, out = app.bind("127.0.0.1", 0), folder / "client.json"
    arguments = [f"--client={listening.getsockname()[1]},{batch}", str(out)]
    out.unlink(missing_ok=True)

    def start_client() -> None:
        subprocess.Popen([sys.executable, __file__, *arguments])

    with contextlib.suppress(KeyboardInterrupt):  # the client's, when it is done
        serve_tokens(llm, folder, 1024, listening, start_client, http_process)
    result: dict[str, float] = json.loads(out.read_text())
    return result


def generated(llm: Any, batch: int, varied: bool = False) -> float:
    """Tokens per second of `generate`."""
    from qcompile import SamplingParams

    work = workload(batch, varied)
    params = [SamplingParams(temperature=0, max_tokens=output, ignore_eos=True) for _, output in work]
    best = 0.0
    for _ in range(2):
        started = time.perf_counter()
        outputs = llm.generate([prompt for prompt, _ in work], params)
        best = max(best, sum(output for _, output in work) / (time.perf_counter() - started))
        assert [len(output.outputs[0].token_ids) for output in outputs] == [output for _, output in work]
    return best


def queueing(executor: Any, batch: int) -> dict[str, float]:
    """Milliseconds of the host for a step of `batch` rows, the least of five: queued launch by launch, and captured."""
    from benchmarks.gpu_e2e import sequences

    counts, launcher = executor.fill(sequences(executor, batch, PROMPT, 1)), executor.launcher
    launches = executor.plan["launches"]
    queueing_ms, capture_ms = list[float](), list[float]()
    for _ in range(6):
        began = time.perf_counter()
        launcher.launch(launches, counts)
        queued = time.perf_counter()
        executor.driver.synchronize()
        captured = time.perf_counter()
        with executor.driver.captured() as graph:
            for _, call in launcher.prepare(launches, counts):
                call.run()
        ended = time.perf_counter()
        executor.driver.drop(graph[0])
        queueing_ms.append(1e3 * (queued - began))
        capture_ms.append(1e3 * (ended - captured))
    return {"queued_ms": min(queueing_ms), "captured_ms": min(capture_ms)}


def measure(recipe: str, folder: Path, batches: tuple[int, ...]) -> list[dict[str, Any]]:
    """The rates of each batch."""
    from tokenizers import Tokenizer, models

    from benchmarks.gpu_e2e import decode_rate, open_random
    from qcompile.runtime.llm import LLM

    context = PROMPT + 2 * OUTPUT
    opened = open_random(recipe, folder, max(batches) * context, context)
    words = {f"word{index}": index for index in range(opened.target.limits.vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="word0"))
    result = []
    for batch in batches:
        row: dict[str, Any] = {"recipe": recipe, "batch": batch}
        row["executor"] = decode_rate(opened.target, batch, PROMPT + OUTPUT // 2)
        row |= queueing(opened.target, batch)
        llm = LLM(opened.target, {"model": {"eos_token_ids": []}}, tokenizer, batch, remember=0)
        row |= {"generate": generated(llm, batch), "varied": generated(llm, batch, varied=True)}
        llm.engine.overlaps = False
        row |= {"waiting": generated(llm, batch), "varied_waiting": generated(llm, batch, varied=True)}
        llm.engine.overlaps = True
        try:
            row |= over_http(llm, batch, folder, http_process=True)
            one = over_http(llm, batch, folder, http_process=False)
            row |= {f"one_process_{name}": value for name, value in one.items()}
        except ModuleNotFoundError as error:
            row["http"] = f"no {error.name}"
        llm._close.detach()  # the executor serves the next batch
        result.append(row)
        print(row, flush=True)
    opened.close()
    return result


def main() -> None:
    options = dict(a.removeprefix("--").split("=", 1) for a in sys.argv[1:] if a.startswith("--"))
    paths = [Path(a) for a in sys.argv[1:] if not a.startswith("--")]
    if "client" in options:
        port, batch = map(int, options["client"].split(","))
        try:
            paths[0].write_text(json.dumps(asyncio.run(client(port, batch))))
        finally:
            os.kill(os.getppid(), signal.SIGINT)
        return
    from benchmarks.gpu_common import facts
    from benchmarks.gpu_e2e import empty_checkpoint, write

    batches = tuple(map(int, options["batches"].split(","))) if "batches" in options else BATCHES
    results: dict[str, Any] = {**facts(), "prompt": PROMPT, "output": OUTPUT, "tokens_per_second": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = empty_checkpoint(Path(temporary))
        for recipe in options.get("recipes", "qserve").split(","):
            results["tokens_per_second"] += measure(recipe, folder, batches)
            write(results, paths)


if __name__ == "__main__":
    main()
