"""Kernels of every family under compute-sanitizer, on this GPU: accesses outside memory, races, lost barriers.

    python benchmarks/gpu_sanitizer.py [out.json] [--tools=memcheck,racecheck,synccheck] [--only=REGEX] [--seconds=500]

Each case is an artifact that generates texts in a process of its own under each tool: prompts of 3 to LONGEST tokens at
once and alone, with penalties, log probabilities and temperatures, and with drafts where the recipe has some. `kernels`
counts the kernels that were launched. `dispatch` counts what racecheck reports of how Triton starts groups of warps
(see DISPATCH), which is no error. A case that --seconds do not suffice for is left out by name. The exit code is 4
if a tool reports anything.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import write_result
from benchmarks.families import quiet, save_random
from benchmarks.family_list import FAMILIES
from qcompile import SamplingParams
from qcompile.artifact.reader import read_manifest
from qcompile.errors import QualityError, UnsupportedError

SAMPLE = Path(__file__).parents[1] / "samples" / "pycode-1m"
SAMPLE_RECIPES = (
    *("bf16", "w8a8", "w4a16", "w4a8", "qserve", "qserve-channel", "mixllm", "mxfp4", "nvfp4", "w4a4"),
    *("w4a4-g128", "ml-specqd", "qspec", "qspec-w4a4", "qspec-atom", "quantspec", "quantspec-w8", "nested"),
)
RANDOM = {
    **dict.fromkeys(("mixtral, window", "gpt_oss", "qwen3_moe"), ("qserve", "mxfp4", "w4a16")),
    **dict.fromkeys(("deepseek_v3", "qwen3_next", "mamba", "lfm2", "minimax"), ("w8a8", "nested")),
    **dict.fromkeys(("zamba", "recurrent_gemma", "gemma2, soft caps", "falcon, alibi", "bloom, six heads"), ("w8a8",)),
    **dict.fromkeys(
        ("gemma3n_text, streams, shared keys, sparse gates", "deepseek_v32, within its top keys"), ("bf16",)
    ),
    **dict.fromkeys(("llama, odd vocabulary and widths", "llama4_text, experts of scaled inputs"), ("qserve", "bf16")),
    **dict.fromkeys(("mimo_v2_flash, layers of other heads", "gpt_neo, local layers"), ("w4a16",)),
}
"""Recipes of random models of `family_list.py`, by name."""
LONGEST, TOKENS, TOGETHER = 300, 12, 4
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
LINE = re.compile(r"^========= ?(.*)$", re.MULTILINE)
RACE = re.compile(r"Race reported between (\w+) access at (\S+)\+0x([0-9a-f]+)")
DISPATCH = 0x200
"""Bytes of code at the start of a kernel of several groups of warps, where groups wait until the first one tells them
what to do: they read a byte of shared memory that lies between two barriers of all warps. Triton emits both, and
racecheck does not see that these barriers order them."""


def cases() -> list[tuple[str, str]]:
    """(model, recipe) of each case; pycode-1m has no name."""
    random = [(name, recipe) for name, recipes in RANDOM.items() for recipe in recipes]
    return [("pycode-1m", recipe) for recipe in SAMPLE_RECIPES] + [("pycode-1m", "qserve+lookup")] + random


def build(model: str, recipe: str, target: str, folder: Path) -> str:
    """Build a case's artifact in `folder`. Returns why there is none, if a part of it is not supported."""
    os.environ["OMP_NUM_THREADS"] = "1"
    recipe, _, draft = recipe.partition("+")
    with quiet():
        try:
            checkpoint = SAMPLE
            if model != SAMPLE.name:
                kind, settings = next((kind, settings) for name, kind, settings in FAMILIES if name == model)
                checkpoint = folder / "model"
                save_random(kind, settings, checkpoint)
            qcompile.build(
                str(checkpoint), folder / "artifact", target=target, recipe=recipe, drafts=[draft] * bool(draft)
            )
        except UnsupportedError as error:
            return str(error)
    return ""


def generate(artifact: Path) -> None:
    """What runs under a tool: texts of an artifact. Prints the number of kernels that were launched."""
    drafts = bool(read_manifest(artifact)["runtime"].get("levels"))
    with qcompile.load(artifact, kv_cache_bytes=1 << 26, max_batch=4, gamma=3 if drafts else 0) as llm:
        limits = llm.executor.limits
        longest = min(LONGEST, limits.max_position - TOKENS - 8)
        prompts = [[5 + (7 * i + j) % (limits.vocab - 8) for i in range(n)] for j, n in enumerate((3, 40, longest))]
        drawn = SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=1, max_tokens=TOKENS, ignore_eos=True)
        greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        judged = SamplingParams(
            temperature=0, max_tokens=TOKENS, ignore_eos=True, frequency_penalty=0.5, logit_bias={7: 2.0}, logprobs=3
        )
        launched = set[str]()
        llm.executor.profile(True)
        llm.generate(prompts, greedy)
        llm.generate(prompts, [drawn, judged, drawn])
        launched |= set(llm.executor.profile_read())
        llm.executor.profile(False)
        llm.generate(prompts, greedy)  # as graphs
        llm.generate(prompts[1:2], greedy)
    print("kernels", len(launched), flush=True)


def check(tool: str, artifact: Path, seconds: float) -> dict[str, Any]:
    """Run `generate` under a tool."""
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "1000", sys.executable, __file__]
    started = time.perf_counter()
    try:
        done = subprocess.run([*command, f"--inside={artifact}"], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"outcome": "left out", "reason": f"took more than {seconds:.0f} seconds"}
    text = done.stdout + done.stderr
    summary, kernels = SUMMARY.search(text), re.search(r"^kernels (\d+)$", text, re.MULTILINE)
    row: dict[str, Any] = {"seconds": round(time.perf_counter() - started, 1)}
    row["kernels"] = int(kernels.group(1)) if kernels else 0
    row["errors"] = int(next(filter(None, summary.groups()), 0)) if summary else -1
    if tool == "racecheck" and summary:
        races = RACE.findall(text)
        row["dispatch"] = sum(access == "Read" and int(at, 16) < DISPATCH for access, _, at in races)
        row["errors"] = len(races) - row["dispatch"]
    wrong = row["errors"] != 0 or not kernels
    if wrong:
        row["report"] = LINE.findall(text)[:40] or text[-600:].splitlines()
    return row | {"outcome": "WRONG" if wrong else "right"}


def main() -> int:
    """Check all cases; the exit code."""
    given = dict(a[2:].partition("=")[::2] for a in sys.argv[1:] if a.startswith("--"))
    if "inside" in given:
        generate(Path(given["inside"]))
        return 0
    from benchmarks.gpu_common import facts, this_target

    if shutil.which("compute-sanitizer") is None:
        sys.exit("compute-sanitizer is not on the path; it is part of the CUDA toolkit")
    path = next((Path(a) for a in sys.argv[1:] if not a.startswith("--")), None)
    tools = given.get("tools", "memcheck,racecheck,synccheck").split(",")
    end = time.perf_counter() + float(given.get("seconds", "500"))
    wanted = [case for case in cases() if re.search(given.get("only", ""), "; ".join(case))]
    rows: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as temporary,
        ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as builders,
        ThreadPoolExecutor(TOGETHER) as checkers,
    ):
        folders = [Path(temporary) / str(index) for index in range(len(wanted))]
        target = this_target()
        builds = [builders.submit(build, *case, target, folder) for case, folder in zip(wanted, folders, strict=True)]

        def row(tool: str, folder: Path, built: Future[str]) -> dict[str, Any]:
            if reason := built.result():
                return {"outcome": "refused", "reason": reason}
            left = end - time.perf_counter()
            return check(tool, folder / "artifact", left) if left > 5 else {"outcome": "left out", "reason": "no time"}

        each = [
            (tool, *case, folder, built)
            for tool in tools
            for case, folder, built in zip(wanted, folders, builds, strict=True)
        ]
        checks = {
            checkers.submit(row, tool, folder, built): f"{tool}; {model}; {recipe}"
            for tool, model, recipe, folder, built in each
        }
        for done in as_completed(checks):  # those that are built first are checked and told first
            name = checks[done]
            rows[name] = done.result()
            print(f"{name:60} {rows[name]}", flush=True)
            if path:
                outcomes = [each["outcome"] for each in rows.values()]
                counts = {outcome: outcomes.count(outcome) for outcome in ("right", "refused", "left out", "WRONG")}
                write_result(path, {**facts(), **counts, "rows": rows})
    return QualityError.exit_code if any(each["outcome"] == "WRONG" for each in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
