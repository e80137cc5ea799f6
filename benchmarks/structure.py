"""Print the structure of the code, and the bars that tests/test_structure.py sets for it.

python benchmarks/structure.py [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.structure import MOST_CLASS_LINES, MOST_LINES, MOST_PARAMETERS, Place, Structure, measure


def main() -> None:
    """Measure, and print a table or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    structure = measure()
    print(json.dumps(asdict(structure), indent=1) if parser.parse_args().json else as_text(structure))


def as_text(structure: Structure) -> str:
    """The structure for people: a count on each line, and below it what was counted."""
    modules = [name.removeprefix("qcompile.") for name in structure.top_modules]
    chain = [name.removeprefix("qcompile.") for name in structure.chain]
    blocks = [
        (f"modules directly in qcompile/: {len(modules)}", [", ".join(modules)]),
        (f"longest import chain: {len(chain)}", [" -> ".join(chain)]),
        (f"import cycles: {len(structure.cycles)}", [", ".join(cycle) for cycle in structure.cycles]),
        _block(f"functions over {MOST_LINES} lines", structure.long_functions),
        _block(f"functions over {MOST_PARAMETERS} parameters without a reason", structure.parameters),
        _block(f"classes over {MOST_CLASS_LINES} lines", structure.long_classes),
        (
            f"class names defined more than once: {len(structure.shared_names)}",
            [f"{name}: {', '.join(places)}" for name, places in structure.shared_names.items()],
        ),
    ]
    return "\n".join(line for title, lines in blocks for line in (title, *(f"  {line}" for line in lines)))


def _block(title: str, places: list[Place]) -> tuple[str, list[str]]:
    return f"{title}: {len(places)}", [f"{place.size} {place.module}.{place.name}" for place in places]


if __name__ == "__main__":
    main()
