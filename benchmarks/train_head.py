"""Train the draft head of the sample model, on the standard library and on what the model writes after it.

    python benchmarks/train_head.py [--out DIR] [--cuts 3] [--steps 3600] [--layers 2,4,5] [--device gpu]

The text is that of the running interpreter's standard library without its tests, without files that begin like one of
`--heldout`. Each file is taken `--cuts` times, each time from another line on, so that pieces begin at other places. Of
each piece of 512 tokens the first `--continue-after` are kept, and the model writes the rest.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.train_hybrid import texts

SAMPLE = Path(__file__).parents[1] / "samples" / "pycode-26m"


def cut(documents: list[str], cuts: int) -> list[str]:
    """The documents, `cuts` times: each time but the first from a line in their first quarter on."""
    draw = random.Random(0)
    result = list(documents)
    for _ in range(cuts - 1):
        for document in documents:
            lines = document.splitlines(keepends=True)
            result.append("".join(lines[draw.randrange(len(lines) // 4 + 1) :]))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SAMPLE)
    parser.add_argument("--out", type=Path, default=Path("out/pycode-26m-head"))
    parser.add_argument("--cuts", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--layers", default="2,4,5")
    parser.add_argument("--draft-vocab-size", type=int, default=4096)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--continue-after", type=int, default=128, help="0: the text as it is")
    parser.add_argument("--heldout", type=Path, help='JSON lines with a "text" field')
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    args = parser.parse_args()
    lines = args.heldout.read_text(encoding="utf-8").splitlines() if args.heldout else []
    library = Path(sysconfig.get_paths()["stdlib"])
    documents = cut(texts([json.loads(line)["text"] for line in lines], [library], ("test", "tests")), args.cuts)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "text.jsonl"
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
        options = {
            "--data": data,
            "-o": args.out,
            "--steps": args.steps,
            "--batch-size": args.batch,
            "--depth": args.depth,
            "--layers": args.layers,
            "--draft-vocab-size": args.draft_vocab_size,
            "--learning-rate": args.learning_rate,
            "--device": args.device,
        }
        if args.continue_after:
            options["--continue-after"] = args.continue_after
        words = [str(word) for pair in options.items() for word in pair]
        command = [sys.executable, "-m", "qcompile", "train-draft", str(args.model), *words, "--json"]
        sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
