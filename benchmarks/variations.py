"""Decoders that each differ from a plain one in one odd but legal way: compiled rightly, or refused by name.

    python benchmarks/variations.py [NAME ...] [--build] [--json FILE]

The variations are tables in tests/support/variations/, with what is right for each: `agrees` (the compiled model gives
torch's logits, within 1e-5 of the largest) or `refused` (with a message of one line). Each is imported and raised, and
the graph run. With --build, those that agree are also built in float32 for this CPU and run whole, token by token, and
in steps of 7; what lacks a kernel is then refused. NAMEs are beginnings of names, such as `turns` or `norms: mean`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import write_result
from benchmarks.fuzz import quickly_compiled
from tests.support.variations.verdicts import ALL, Verdict, examine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    quickly_compiled()
    started = time.perf_counter()
    counts: Counter[str] = Counter()
    result: dict[str, Verdict] = {}
    faults: dict[str, Verdict] = {}
    for name, variation in ALL.items():
        if arguments.names and not name.startswith(tuple(arguments.names)):
            continue
        result[name] = verdict = examine(variation)
        fault = verdict.name != variation.right
        if arguments.build and verdict.name == "agrees":
            with tempfile.TemporaryDirectory() as folder:
                result[name] = verdict = examine(variation, Path(folder))
            fault = fault or verdict.name not in ("agrees", "refused")
        counts[verdict.name] += 1
        if fault:
            faults[name] = verdict
        mark = "  <- not so" if fault else ""
        print(f"{name:60} {verdict.name:8} {verdict.error:8.1e} {verdict.reason}{mark}", flush=True)
    print(dict(counts), f"{len(faults)} faults, {time.perf_counter() - started:.0f} s")
    if arguments.json:
        document = {
            "built": arguments.build,
            "verdicts": counts,
            "variations": {name: [one.name, one.reason, one.error] for name, one in result.items()},
            "faults": list(faults),
            "seconds": round(time.perf_counter() - started),
            "met": not faults,
        }
        write_result(arguments.json, document)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
