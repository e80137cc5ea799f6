"""How much would trees of drafts gain over chains?

    python benchmarks/draft_trees.py PROMPTS.jsonl [MORE.jsonl] [--limit 64] [--variants nested] [--note TEXT]

At every position of the text that pycode-26m generates greedily, the draft proposes a tree of DEPTH levels: of each
level it expands the WIDTH nodes of the highest product of draft probabilities, and the chain of first choices. A tree
of N nodes and D levels has the N nodes of the highest product among those of at most D levels (EAGLE-2, arXiv
2406.16858). A comb is a chain of D drafts and the second choice at each of its places. Rounds are then counted through
the texts, with chains, combs and trees of each size. Target and draft are the steps of the artifact's executors; each
branch is a sequence of its own, with a copy of the page that it continues. `accepted with gamma 4` has the drafts that
the engine accepts in its rounds with gamma 4, which are those counted here.

Speed is combined from measured times (draft_tree_costs.py). Variants in the result file are not measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, write_result
from benchmarks.draft_tree_costs import DEPTH, NODES, WIDTH, combined, step_seconds
from benchmarks.draft_tree_proposals import Branches, Proposal
from benchmarks.speculation import HEAD, TOKENS, generate, read
from qcompile.cli import console

ROOT = Path(__file__).parents[1]
VARIANTS: dict[str, tuple[str, list[str]]] = {
    **{f"{recipe}+head": (recipe, [HEAD]) for recipe in ("w4a16", "qserve", "bf16")},
    "nested": ("nested", []),
    "ml-specqd": ("ml-specqd", []),
}
"""Recipe and further drafts by name."""


class Texts:
    """Rounds through texts: the tokens that a round yields, with each chain, comb and tree."""

    def __init__(self) -> None:
        self.tokens = 0
        self.branches, self.rows = np.zeros(len(NODES), int), np.zeros(len(NODES), int)
        self.rounds: dict[str, int] = {}

    def add(self, proposals: Sequence[Proposal]) -> None:
        """Count rounds through a text; proposal i is that after token i, and the text has one more token."""
        self.tokens += len(proposals)
        self.branches += sum(proposal.branches for proposal in proposals)
        self.rows += sum(proposal.rows for proposal in proposals)
        ranks = np.stack([proposal.ranks for proposal in proposals])
        chain = np.array([proposal.chain for proposal in proposals])
        second = np.array([proposal.second for proposal in proposals])
        for size in range(1, DEPTH + 1):
            self._go(f"chain {size}", np.minimum(chain, size))
            self._go(f"comb {size}", np.where(chain < size, chain + second, size))
            for nodes in NODES:
                self._go(f"tree {nodes}, {size} levels", (ranks[:, size - 1, :size] < nodes).sum(axis=1))

    def _go(self, name: str, kept: NDArray[np.int64]) -> None:
        place = rounds = 0
        while place < len(kept):
            place += 1 + int(kept[place])
            rounds += 1
        self.rounds[name] = self.rounds.get(name, 0) + rounds

    def yields(self) -> dict[str, float]:
        """Tokens that a round yields."""
        return {name: round(self.tokens / rounds, 4) for name, rounds in self.rounds.items()}

    def branching(self) -> dict[str, dict[str, float]]:
        """Leaves of trees of DEPTH levels, and rows of all paths to them, on average."""
        each = zip(NODES, self.branches / self.tokens, self.rows / self.tokens, strict=True)
        return {str(nodes): {"branches": round(many, 2), "rows": round(rows, 2)} for nodes, many, rows in each}


def measured(artifact: Path, prompts: list[str]) -> dict[str, Any]:
    """What rounds yield, and the seconds of steps, with the draft of an artifact."""
    texts = Texts()
    with qcompile.load(artifact, prefix_caching=False, threads=1) as llm:
        drafted = [output for prompt in prompts for output in generate(llm, [prompt], 4)]
        outputs = generate(llm, prompts, 0)
        started = time.monotonic()
        for number, output in enumerate(outputs):
            first, text = len(output.prompt_token_ids), [*output.prompt_token_ids, *output.outputs[0].token_ids]
            branches = Branches(llm, text)
            texts.add([branches.propose(place) for place in range(first, len(text) - 1)])
            if number % 8 == 7:
                console.log(f"{artifact.name}: {number + 1} of {len(outputs)}, {time.monotonic() - started:.0f} s")
        drafter: Any = llm.engine.speculation.drafter
        steps = step_seconds(drafter.target, drafter.stages[0].executor)
    accepted = {
        "engine": sum(sum(output.speculation.accepted) for output in drafted),
        "counted": texts.tokens - texts.rounds["chain 4"],
    }
    result = {"accepted with gamma 4": accepted, "tokens_a_round": texts.yields()}
    return {**result, "branching": texts.branching(), "cpu_step_seconds": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, nargs="+")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--limit", type=int, default=64, help="number of prompts to take, evenly spread")
    parser.add_argument("--note", default="", help="what else ran on the machine")
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "draft_trees", help="where artifacts go")
    parser.add_argument("--out", type=Path, default=RESULTS / "draft_trees.json")
    arguments = parser.parse_args()
    known = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
    variants: dict[str, Any] = known.get("variants", {})
    prompts = read(arguments.prompts, arguments.limit)
    facts = {"model": "pycode-26m", "prompts": len(prompts), "tokens": TOKENS, "width": WIDTH}
    facts["note"] = arguments.note or known.get("note", "")
    for name in arguments.variants.split(","):
        if name not in variants:
            recipe, drafts = VARIANTS[name]
            artifact = arguments.work / name
            if not (artifact / "qcompile.json").exists():
                qcompile.build(str(ROOT / "samples" / "pycode-26m"), artifact, recipe=recipe, drafts=drafts)
            variants[name] = measured(artifact, prompts)
        speeds = combined(variants)
        write_result(arguments.out, {**facts, "variants": variants, "speeds": speeds})


if __name__ == "__main__":
    main()
