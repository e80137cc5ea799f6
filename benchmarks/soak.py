"""A server at 70 % of its capacity for an hour, asked for everything that it can do: what grows, what slows down.

    python benchmarks/soak.py [--minutes 60] [--model samples/pycode-26m] [--recipe w4a8] [--out FILE]

The artifact drafts by lookup and takes adapters. tests/support/mixture.py says which requests come: whole and streamed
answers, clients that leave, drawn tokens, JSON schemas, patterns, an adapter, long prompts, conversations. Each answer
is compared with the one that its request got alone before. Clients that wait for their answers give the capacity; then
requests come evenly. The server runs on the first core, with one thread, and the clients on the last one. Exit code 4
if an answer is wrong or lost, the memory of all processes of the server grows by more than 2 % after the first ten
minutes, descriptors or threads grow, or the throughput of 5 minutes is more than 5 % from the mean. The result file
is written again at each look at the processes, so that a soak that is broken off tells what it saw.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.attacked import listener
from benchmarks.common import RESULTS, machine, write_result
from qcompile.cli import console
from qcompile.cli.load_test.server import started
from qcompile.errors import QualityError
from qcompile.runtime.options import MAX_BATCH
from tests.support import adapters
from tests.support.mixture import TEMPLATE, cases, references, session
from tests.support.soak import Plan, Soak, capacity, misses, soak

SAMPLE = Path(__file__).parents[1] / "samples" / "pycode-26m"
SHARE, WINDOW_SECONDS, FEWEST_WINDOWS, WARM_WINDOWS = 0.7, 300.0, 12, 2
"""Of the capacity; seconds of a part of the time, of which a short soak has as many as the third number; and parts
before memory must be flat."""
CACHE_BYTES = 128 << 20
"""Of the KV cache. Its memory is touched when it is first used: one of the default size would grow with each new peak
of requests at once, while all of this one is used during the warm-up."""
TOKENS, LONG_TOKENS, RANK = 32, 1400, 8
"""Of answers; of long prompts, of which more pages are asked for than the cache keeps; of the adapter."""
MOST_SAMPLE_SECONDS = 30.0


def made(model: Path, recipe: str, folder: Path) -> tuple[Path, Path]:
    """An artifact that drafts by lookup and takes adapters and conversations, and an adapter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint, artifact, adapter = folder / "model", folder / "artifact", folder / "adapter"
    shutil.copytree(model, checkpoint)
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    options = {"lora.rank": RANK}
    qcompile.build(str(checkpoint), artifact, recipe=recipe, drafts=["lookup"], options=options)
    shape = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
    adapters.save(adapter, adapters.adapter_of(shape, "q_proj v_proj down_proj", RANK), r=RANK, lora_alpha=RANK)
    return artifact, adapter


async def measure(server: dict[str, Any], plan: Plan, seconds: float, partial: Path) -> dict[str, Any]:
    """References, capacity and soak. seconds: of measuring the capacity. partial: is written while it runs."""
    about, process, root = machine(), listener(int(server["url"].rpartition(":")[2])), server["url"]
    asked = cases(TOKENS, LONG_TOKENS, "style")
    async with session() as clients:
        console.log(f"references of {len(asked)} requests")
        wanted = await references(clients, root, asked)
        most = await capacity(clients, root, asked, seconds, MAX_BATCH)
        rate = SHARE * most
        facts = {"capacity_requests_per_second": round(most, 3), "requests_per_second": round(rate, 3)}
        console.log(f"capacity {most:.1f} requests per second; soak at {rate:.1f}")

        def noted(done: Soak, at: float) -> None:
            partial.write_text(json.dumps({**about, "ended": False, "seconds": at, **facts, **done.told()}, indent=1))
            left = (plan.seconds - at) / 60
            console.log(
                f"{left:.1f} minutes left, {done.sent} sent, {done.wrong.total()} wrong, {done.lost.total()} lost"
            )

        done = await soak(clients, root, process, (asked, wanted), rate, plan, noted)
    return {**facts, **done.told(), "missed": misses(done)}


def main() -> int:
    """Serve, and soak; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--capacity-seconds", type=float, default=60.0)
    parser.add_argument("--model", type=Path, default=SAMPLE)
    parser.add_argument("--recipe", default="w4a8")
    parser.add_argument("--note", help="what else the machine did")
    parser.add_argument("--out", type=Path, default=RESULTS / "soak.json")
    given = parser.parse_args()
    seconds = given.minutes * 60
    window = min(WINDOW_SECONDS, seconds / FEWEST_WINDOWS)
    plan = Plan(seconds, window, min(MOST_SAMPLE_SECONDS, window / 5), WARM_WINDOWS * window)
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        artifact, adapter = made(given.model, given.recipe, Path(folder))
        os.sched_setaffinity(0, cores[:1])  # which the server inherits
        options = ["--threads", "1", "--kv-cache-bytes", str(CACHE_BYTES), "--lora", f"style={adapter}"]
        with started(str(artifact), options) as server:
            os.sched_setaffinity(0, cores[-1:])
            measured = asyncio.run(measure(server, plan, given.capacity_seconds, given.out))
            os.sched_setaffinity(0, cores)
    model: dict[str, Any] = {
        "model": given.model.name,
        "recipe": given.recipe,
        "drafts": ["lookup"],
        "lora_rank": RANK,
        "threads": 1,
    }
    model["kv_cache_bytes"] = CACHE_BYTES
    write_result(given.out, {**model, "note": given.note, "ended": True, **measured})
    for line in measured["missed"]:
        print(line, file=sys.stderr)
    return QualityError.exit_code if measured["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
