"""1 to 1,000 clients of one server: whether each gets its own answer, once.

    python benchmarks/load.py [--target cpu] [--ranks 1] [--clients 1,4,16,64,256,1000] [--seconds 100] [--out FILE]

Each client has prompts of its own, and asks for one greedy completion after the other, every second one in a stream.
Each answer is compared with the one that its prompt gets alone, of an engine that remembers nothing. The server's own
count of answers tells if it gave one twice. On a GPU, `--target h200 --seconds 20 --max-batch 256` takes minutes. Exit
code 4 if an answer is wrong, lost or doubled. The clients take processor time of the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, write_result
from qcompile import SamplingParams
from qcompile.cli import console
from qcompile.cli.load_test.server import started
from qcompile.errors import QualityError
from qcompile.runtime.options import MAX_BATCH
from tests.support.crowd import crowd, prompts
from tests.support.mixture import session

SAMPLE = Path(__file__).parents[1] / "samples" / "pycode-26m"


def alone(artifact: Path, asked: list[str], tokens: int) -> dict[str, str]:
    """The answer to each prompt alone."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    with qcompile.load(artifact, max_batch=1, prefix_caching=False) as llm:
        return {prompt: llm.generate([prompt], params)[0].outputs[0].text for prompt in asked}


async def measure(root: str, wanted: dict[str, str], tokens: int, given: argparse.Namespace) -> list[dict[str, Any]]:
    """What the clients of each level saw."""
    result = []
    async with session() as clients:
        for count in given.clients:
            level = await crowd(clients, root, wanted, tokens, count, given.seconds)
            result.append(level.told())
            console.log(json.dumps(result[-1]))
    return result


def main() -> int:
    """Serve, and load; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SAMPLE)
    parser.add_argument("--recipe", default="w4a8")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--ranks", type=int, default=1, help="processes or GPUs that share the model")
    parser.add_argument("--clients", type=lambda text: [int(count) for count in text.split(",")])
    parser.add_argument("--seconds", type=float, default=100.0, help="of each number of clients")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--max-batch", type=int, default=MAX_BATCH)
    parser.add_argument("--note", help="what else the machine did")
    parser.add_argument("--out", type=Path, default=RESULTS / "load.json")
    parser.set_defaults(clients=[1, 4, 16, 64, 256, 1000])
    given = parser.parse_args()
    most = max(given.clients)
    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(folder) / given.model.name
        console.log(f"building for {given.target}")
        options = {"shard.ranks": str(given.ranks)}
        qcompile.build(str(given.model), artifact, recipe=given.recipe, target=given.target, options=options)
        console.log(f"answers of {most} prompts alone")
        wanted = alone(artifact, prompts(most), given.tokens)
        served = ["--max-batch", str(given.max_batch), "--max-waiting", str(most)]
        with started(str(artifact), served) as server:
            levels = asyncio.run(measure(server["url"], wanted, given.tokens, given))
    where = {"target": given.target} | ({} if given.target.startswith("cpu") else _gpu())
    facts = {"model": given.model.name, "recipe": given.recipe, "ranks": given.ranks, "answer_tokens": given.tokens}
    facts |= {"max_batch": given.max_batch, "different_answers": len(set(wanted.values())), "note": given.note}
    write_result(given.out, {**where, **facts, "levels": levels})
    print(json.dumps(levels))
    return QualityError.exit_code if any(level["wrong"] or level["lost"] or level["doubled"] for level in levels) else 0


def _gpu() -> dict[str, Any]:
    """Device and versions; imported here, since a CPU needs no Triton."""
    from benchmarks.gpu_common import facts

    return facts()


if __name__ == "__main__":
    sys.exit(main())
