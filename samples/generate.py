"""Build an artifact once, load it, and continue several prompts in one batch.

python samples/generate.py
"""

from pathlib import Path

import qcompile
from qcompile import SamplingParams

MODEL = Path(__file__).parent / "pycode-26m"
OUT = Path("out/generate")

if not OUT.exists():
    qcompile.build(str(MODEL), OUT, recipe="w4a8")

with qcompile.load(OUT) as llm:
    greedy = SamplingParams(temperature=0, max_tokens=48, stop="\n\n\n")
    for output in llm.generate(["def main(", "class Stack:\n", "import json\n"], greedy):
        print("-" * 40)
        print(output.prompt + output.outputs[0].text)
