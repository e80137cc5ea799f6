"""Perplexity and bits per weight of each recipe, on the Python files of a folder.

python samples/recipes.py FOLDER
"""

import sys
from pathlib import Path

import qcompile
from qcompile.recipes import RECIPES

if len(sys.argv) != 2:
    sys.exit(__doc__)
MODEL = Path(__file__).parent / "pycode-1m"
texts = [path.read_text(encoding="utf-8") for path in sorted(Path(sys.argv[1]).rglob("*.py"))]

for recipe in RECIPES:
    report = qcompile.build(str(MODEL), f"out/recipes/{recipe}", recipe=recipe)
    with qcompile.load(report.path) as llm:
        result = llm.perplexity(texts, window=1024, max_windows=8)
    print(f"{recipe:15} {report.bits_per_weight:6.2f} bits per weight, perplexity {result.perplexity:.3f}")
