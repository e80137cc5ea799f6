"""Tokens that differ with modules for multi-token prediction, on small random models named as public checkpoints are.

    python benchmarks/mtp.py [out.json] [--gpu]

tests/support/mtp.py makes the models: GLM-4.5 (experts), DeepSeek-V3 (latents), Qwen3-Next (recurrent states; of two
sizes) and MiMo, with modules that know what the model mostly says. Each is built with each of RECIPES for this CPU, or
with --gpu for this GPU, and decodes PROMPTS greedily and drawn at each of GAMMAS. Counted are tokens that differ from
those without drafts; accepted_per_position is of greedy decoding with gamma 3.
"""

from __future__ import annotations

import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import machine, write_result
from benchmarks.speculation import acceptance
from qcompile import SamplingParams
from qcompile.errors import QCompileError
from qcompile.runtime.options import AUTO
from qcompile.runtime.outputs import RequestOutput
from tests.support.mtp import KINDS, save

RECIPES = ("w8a8", "qserve")
GAMMAS = (1, 2, 3, 4, AUTO)
PROMPTS = [[5, 6, 7, 8, 9], [11] * 40, [3], [9, 8, 7] * 20]
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "drawn": {"temperature": 0.9, "seed": 4}}
TOKENS = 64


def generated(artifact: Path, gamma: int | str) -> dict[str, list[RequestOutput]]:
    """The outputs of the prompts at once, by kind of sampling."""
    gpu = {} if "--gpu" in sys.argv else {"threads": 2}
    with qcompile.load(artifact, gamma=gamma, prefix_caching=False, **gpu) as llm:  # type: ignore[arg-type]
        return {
            kind: llm.generate(PROMPTS, SamplingParams(max_tokens=TOKENS, ignore_eos=True, **options))
            for kind, options in SAMPLING.items()
        }


def tokens(outputs: list[RequestOutput]) -> list[int]:
    """The tokens of all prompts behind each other."""
    return [token for output in outputs for token in output.outputs[0].token_ids]


def examine(kind: str, recipe: str, target: str, folder: Path) -> dict[str, Any]:
    """Counts for a kind of checkpoint with a recipe; the reason if it is refused."""
    result: dict[str, Any] = {"model": KINDS[kind].model_type, "recipe": recipe}
    try:
        qcompile.build(str(folder / kind), folder / "out", recipe=recipe, target=target, drafts="mtp")
    except QCompileError as error:
        return result | {"refused": str(error).replace(str(folder), "")}
    plain = generated(folder / "out", 0)
    result |= {"tokens": sum(len(tokens(outputs)) for outputs in plain.values()), "differing": {}}
    for gamma in GAMMAS:
        drafted = generated(folder / "out", gamma)
        pairs = [pair for name in plain for pair in zip(tokens(plain[name]), tokens(drafted[name]), strict=True)]
        result["differing"]["auto" if gamma == AUTO else str(gamma)] = sum(one != other for one, other in pairs)
        if gamma == 3:
            result |= acceptance(drafted["greedy"])
    return result


def main() -> None:
    """Examine all kinds and recipes; writes after each."""
    facts, target = machine(), "cpu"
    if "--gpu" in sys.argv:
        from benchmarks.gpu_common import facts as gpu_facts
        from benchmarks.gpu_common import this_target

        facts, target = gpu_facts(), this_target()
    paths = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("--")]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for kind, recipe in product(KINDS, RECIPES):
            folder = Path(temporary)
            if not (folder / kind).exists():
                (folder / kind).mkdir()
                save(kind, folder / kind)
            results.append(examine(kind, recipe, target, folder))
            print(results[-1], flush=True)
            for path in paths:
                write_result(path, facts | {"what": (__doc__ or "").partition("\n")[0], "models": results})


if __name__ == "__main__":
    main()
