"""Whether a client ever gets a token, or a cached page, of another one.

    python benchmarks/client_leaks.py [--requests 10000] [--model samples/pycode-1m] [--recipe w4a8] [--out FILE]

tests/support/leaks.py says what the requests are. Each answer is compared with the one that its prompt gets
alone, of an engine that remembers nothing. Exit code 4 if an answer is wrong, or a page was of another owner.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, build, write_result
from qcompile.errors import QualityError
from tests.support import leaks

SAMPLE = Path(__file__).parents[1] / "samples" / "pycode-1m"
DISTINCT = 5
"""How often each prompt is asked on average."""
BATCH, PAGES = 16, 72
"""Samples that run at once, and pages of the cache: about as many as they take."""


def main() -> int:
    """Ask all; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--model", type=Path, default=SAMPLE)
    parser.add_argument("--recipe", default="w4a8")
    parser.add_argument("--out", type=Path, default=RESULTS / "client_leaks.json")
    options = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        artifact = build(options.model, [options.recipe], Path(folder))[options.recipe]
        with qcompile.load(artifact, max_batch=1, prefix_caching=False) as alone:
            kv, vocabulary = alone.manifest["runtime"]["kv"], alone.vocab_size
            draw = random.Random(1)
            count = max(1, options.requests // DISTINCT)
            prompts = [leaks.marked(draw, vocabulary, kv["page_tokens"]) for _ in range(count)]
            wanted = leaks.references(alone, [prompt for _, prompt in prompts])
        cache = PAGES * kv["page_bytes"]
        with qcompile.load(artifact, max_batch=BATCH, kv_cache_bytes=cache) as llm, leaks.poisoned(llm, kv):
            result = leaks.ask(llm, prompts, wanted, options.requests)
    told = {"model": options.model.name, "recipe": options.recipe, "prompts": count, "owners": len(leaks.OWNERS)}
    told |= {"requests": options.requests, "pages": PAGES, **asdict(result)}
    print(told)
    write_result(options.out, told | {"seconds": round(time.perf_counter() - started, 1)})
    return QualityError.exit_code if result.wrong or result.foreign else 0


if __name__ == "__main__":
    sys.exit(main())
