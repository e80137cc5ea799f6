"""A server that is asked for twice of what it can do: who is answered, how soon, and how soon others are refused.

    python benchmarks/overload.py [--model samples/pycode-26m] [--seconds 30] [--max-waiting 8] [--out FILE]

Clients that wait for their answers give the capacity. Then requests arrive as a Poisson process: at 0.7 of the
capacity, at twice the capacity, and after 10 seconds of rest at 0.7 again. Each answer is compared with the one to its
prompt alone. Exit code 4 if an answer is wrong, a request has neither answer nor refusal (429 or 503), a refusal takes
a second or longer, or answers take too long: the 99th percentile may be 3 times that at 0.7 in the overload, and 1.5
times after it. The clients take processor time of the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, write_result
from qcompile.cli.load_test.client import Endpoint
from qcompile.cli.load_test.server import started
from qcompile.errors import QualityError
from qcompile.runtime.options import MAX_BATCH
from tests.support.overload import EXTRAS, Phase, campaign

SAMPLE = Path(__file__).parents[1] / "samples" / "pycode-26m"
REST_SECONDS = 10.0
MOST_REFUSAL_SECONDS, MOST_SLOWER, MOST_SLOWER_AFTER = 1.0, 3.0, 1.5


def misses(phases: dict[str, Phase]) -> list[str]:
    """The bars that were missed."""
    moderate, overload, after = (phases[name] for name in ("moderate", "overload", "after"))
    result = [f"{name}: {one.wrong} wrong, lost {one.lost}" for name, one in phases.items() if one.wrong or one.lost]
    if not overload.refused:
        result.append("nothing was refused in the overload")
    elif overload.refused[-1] >= MOST_REFUSAL_SECONDS:
        result.append(f"a refusal took {overload.refused[-1]:.2f} s")
    for name, one, most in (("overload", overload, MOST_SLOWER), ("after", after, MOST_SLOWER_AFTER)):
        if one.p99 > most * moderate.p99:
            result.append(f"{name}: p99 {one.p99:.3f} s is {one.p99 / moderate.p99:.1f} times {moderate.p99:.3f} s")
    if after.refused:
        result.append(f"after: {len(after.refused)} refused")
    return result


def main() -> int:
    """Serve, and measure all phases; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SAMPLE)
    parser.add_argument("--recipe", default="w4a8")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each phase of arrivals; 2/3 of it for capacity")
    parser.add_argument("--threads", type=int, default=1, help="of the model")
    parser.add_argument("--max-waiting", type=int, default=MAX_BATCH // 2, help="of the server")
    parser.add_argument("--out", type=Path, default=RESULTS / "overload.json")
    options = parser.parse_args()
    limits = ["--threads", str(options.threads), "--max-waiting", str(options.max_waiting)]
    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(folder) / options.model.name
        qcompile.build(str(options.model), artifact, recipe=options.recipe)
        with started(str(artifact), limits) as server:
            endpoint = Endpoint(server["url"], server["model"], extras=EXTRAS)
            clients, seconds = MAX_BATCH + options.max_waiting, (options.seconds * 2 / 3, options.seconds)
            phases = asyncio.run(campaign(endpoint, options.tokens, clients, seconds, REST_SECONDS))
    for name, one in phases.items():
        counts = f"{len(one.answered)} answered, {len(one.refused)} refused"
        print(f"{name}: {counts} in {one.seconds:.1f} s, p99 {one.p99:.3f} s")
    missed = misses(phases)
    document = {
        "model": options.model.name,
        "recipe": options.recipe,
        "answer_tokens": options.tokens,
        "threads": options.threads,
        "max_batch": MAX_BATCH,
        "max_waiting": options.max_waiting,
        "note": "the machine was shared with other work, and with the clients",
        "phases": {name: one.told() for name, one in phases.items()},
        "missed": missed,
    }
    write_result(options.out, document)
    for line in missed:
        print(line, file=sys.stderr)
    return QualityError.exit_code if missed else 0


if __name__ == "__main__":
    sys.exit(main())
