"""Stream sampled text as it is generated; the seed makes the output reproducible.

python samples/stream.py 'def read_file('
"""

import sys
from pathlib import Path

import qcompile

MODEL = Path(__file__).parent / "pycode-26m"
OUT = Path("out/stream")
prompt = sys.argv[1] if len(sys.argv) > 1 else "def read_file("

if not OUT.exists():
    qcompile.build(str(MODEL), OUT, recipe="w4a8")

with qcompile.load(OUT) as llm:
    print(prompt, end="")
    for output in llm.stream(prompt, max_tokens=128, temperature=0.7, top_p=0.95, seed=1):
        print(output.outputs[0].new_text, end="", flush=True)
    print()
