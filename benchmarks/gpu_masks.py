"""What masks of grammars cost a model of Llama-3-8B's shape on this GPU: tokens per second, plain and confined.

    python benchmarks/gpu_masks.py TOKENIZER [out.json] [--recipe=qserve] [--batches=1,16,64] [--cases=regex,...]
        [--rounds=3] [--tokens=128] [--target=cpu --model=FOLDER]

TOKENIZER is a tokenizer.json, or that compressed by gzip; random weights take any of up to 128,256 tokens. With
--target=cpu the model of a folder is built and takes the place of the GPU, with its own tokenizer ("-").

Each case of CASES runs in rounds that take turns with the same requests without a grammar, which the engine runs in
calls of several steps. Prompts differ by request and by round, except in the cases where all share one text. `lost` is
the median over rounds of the per cent of tokens per second that the grammar takes. `texts` are the different outputs of
the requests of a round, `ended` are outputs that ended before their last token. `phases` are milliseconds of the host a
step, of one more round with a grammar: each phase without those inside it, `wait` while the host waits for the GPU.
"""

from __future__ import annotations

import gzip
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.gpu_common import facts
from qcompile import LLM, SamplingParams
from qcompile.runtime.cuda.background import BackgroundCall
from qcompile.runtime.cuda.masks import DeviceMasks
from qcompile.runtime.cuda.memory import PinnedNumbers
from qcompile.runtime.engine.postprocess import Postprocessor
from qcompile.runtime.engine.scheduler import Scheduler
from qcompile.runtime.sampling.masks import GrammarState

REGEX = "([a-z]{2,9}=[0-9]{1,4} )*!!!!"
"""Goes on until a token of a mark alone is chosen, which is rarely the best of a vocabulary."""
MOST_ITEMS = 400
"""Fewest objects of a list: more than an output has room for, so that no output ends early."""
PROMPT = 24
Options = dict[str, Any]


def schema(name: str) -> Options:
    """A list of objects with free texts; `name` is the first key of each."""
    item = {
        "type": "object",
        "properties": {name: {"type": "string"}, "note": {"type": "string"}, "count": {"type": "integer"}},
        "required": [name, "note", "count"],
        "additionalProperties": False,
    }
    wanted = {"type": "array", "items": item, "minItems": MOST_ITEMS}
    return {"json": wanted, "disable_any_whitespace": True}


Case = tuple[Callable[[int], Options], float, bool]
"""The structured outputs of each request, the temperature, and whether all requests have one prompt and text."""
CASES: dict[str, Case] = {
    "regex": (lambda index: {"regex": REGEX}, 0.0, False),
    "regex sampled": (lambda index: {"regex": REGEX}, 1.0, False),
    "json": (lambda index: schema("name"), 0.0, False),
    "json sampled": (lambda index: schema("name"), 1.0, False),
    "json of each": (lambda index: schema(f"name{index}"), 0.0, False),
    "json shared": (lambda index: schema("name"), 0.0, True),
}


class Phases:
    """Seconds of functions, each without those of the others that it calls, while the object is entered."""

    def __init__(self, functions: Sequence[tuple[Any, str, str]]) -> None:
        """functions: owner, attribute, and the name of its phase."""
        self.seconds: dict[str, float] = {name: 0.0 for _, _, name in functions}
        self._functions, self._inside = functions, [0.0]

    def __enter__(self) -> Phases:
        self._former = [(owner, name, getattr(owner, name)) for owner, name, _ in self._functions]
        for (owner, name, function), (_, _, phase) in zip(self._former, self._functions, strict=True):
            setattr(owner, name, self._timed(function, phase))
        return self

    def __exit__(self, *error: object) -> None:
        for owner, name, function in self._former:
            if isinstance(owner, type):
                setattr(owner, name, function)
            else:
                delattr(owner, name)

    def _timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            self._inside.append(0.0)
            began = time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                seconds = time.perf_counter() - began
                self.seconds[phase] += seconds - self._inside.pop()
                self._inside[-1] += seconds

        return timed


def phases_of(llm: LLM) -> Phases:
    """The phases of an engine's step; those of an executor on CPUs are inside its call."""
    engine: Any = llm.engine
    functions: list[tuple[Any, str, str]] = [
        (engine, "step", "rest"),
        (Scheduler, "schedule", "schedule"),
        (Postprocessor, "append_all", "append"),
        (GrammarState, "note", "advance"),
        (Postprocessor, "publish", "publish"),
    ]
    if engine.overlaps:
        functions += [(engine.executor, "start", "queue"), (DeviceMasks, "want", "want")]
        functions += [(DeviceMasks, "begin", "begin masks"), (DeviceMasks, "send", "end masks")]
        functions += [(BackgroundCall, "wait", "wait for masks"), (PinnedNumbers, "begin", "wait")]
    else:
        functions += [(engine.executor, "step", "wait"), (engine.executor, "decode", "wait")]
        functions += [(GrammarState, "fill", "fill"), (GrammarState, "allows", "fill")]
    return Phases(functions)


class Loads:
    """Requests of one loaded model. Prompts are random tokens, different in each call."""

    def __init__(self, llm: LLM, tokens: int) -> None:
        self.llm, self.tokens, self._calls = llm, tokens, 0

    def prompts(self, batch: int, shared: bool) -> list[list[int]]:
        """The prompts of the next call."""
        self._calls += 1
        made = random.Random(self._calls)
        vocab = self.llm.tokenizer.get_vocab_size() if self.llm.tokenizer else self.llm.vocab_size
        prompts = [[made.randrange(2, vocab) for _ in range(PROMPT)] for _ in range(1 if shared else batch)]
        return prompts * batch if shared else prompts

    def params(self, case: Case, batch: int, confined: bool) -> list[SamplingParams]:
        """What the requests ask for."""
        options, temperature, _ = case
        result = []
        for index in range(batch):
            drawn: Options = {"seed": 1000 * self._calls + index} if temperature else {}
            asked: Options = {"structured_outputs": options(index)} if confined else {"ignore_eos": True}
            result.append(SamplingParams(max_tokens=self.tokens, temperature=temperature, **drawn, **asked))
        return result

    def run(self, prompts: list[list[int]], wanted: list[SamplingParams]) -> tuple[float, list[list[int]]]:
        """Seconds of the call, and the tokens of each request."""
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, wanted)
        seconds = time.perf_counter() - began
        return seconds, [list(each.outputs[0].token_ids) for each in outputs]

    def measure(self, case: Case, batch: int, rounds: int) -> dict[str, Any]:
        """One case at one batch."""
        rates: dict[bool, list[float]] = {False: [], True: []}
        texts, ended = [], 0
        for turn in range(rounds + 1):
            prompts = self.prompts(batch, case[2])
            for confined in (False, True):
                seconds, tokens = self.run(prompts, self.params(case, batch, confined))
                if turn:  # the first compiles grammars and graphs
                    rates[confined].append(sum(map(len, tokens)) / seconds)
                if confined and turn:
                    texts.append(len(set(map(tuple, tokens))))
                    ended += sum(len(each) < self.tokens for each in tokens)
        lost = [100 * (1 - slow / fast) for fast, slow in zip(rates[False], rates[True], strict=True)]
        return {
            "plain_tokens_s": round(statistics.median(rates[False])),
            "confined_tokens_s": round(statistics.median(rates[True])),
            "lost": round(statistics.median(lost), 2),
            "lost_least_most": [round(min(lost), 2), round(max(lost), 2)],
            "texts": min(texts),
            "ended": ended,
            "phases": self.phases(case, batch),
        }

    def phases(self, case: Case, batch: int) -> dict[str, float]:
        """Milliseconds of each phase a step."""
        prompts = self.prompts(batch, case[2])
        with phases_of(self.llm) as phases:
            seconds, tokens = self.run(prompts, self.params(case, batch, True))
        steps = max(map(len, tokens))
        result = {name: round(1e3 * took / steps, 3) for name, took in phases.seconds.items()}
        return {"whole": round(1e3 * seconds / steps, 3), **result}


def read_tokenizer(path: Path) -> Any:
    """A tokenizer from a file, compressed or not."""
    from tokenizers import Tokenizer

    content = path.read_bytes()
    return Tokenizer.from_str((gzip.decompress(content) if path.suffix == ".gz" else content).decode())


def random_model(recipe: str, tokenizer: Any, sequences: int, tokens: int) -> LLM:
    """Llama-3-8B's shape with random weights on this GPU."""
    from benchmarks.gpu_e2e import CONFIG, empty_checkpoint, open_random

    room = PROMPT + tokens + 64
    with tempfile.TemporaryDirectory() as folder:
        opened = open_random(recipe, empty_checkpoint(Path(folder), CONFIG), sequences * room, room, slots=sequences)
    manifest: dict[str, Any] = {"model": {"eos_token_ids": [CONFIG["eos_token_id"]]}}
    return LLM(opened.target, manifest, tokenizer, sequences, keep=opened, remember=0)


def main() -> None:
    options = dict(a[2:].split("=", 1) for a in sys.argv[1:] if a.startswith("--"))
    file, *out = [a for a in sys.argv[1:] if not a.startswith("--")]
    batches = [int(each) for each in options.get("batches", "1,16,64").split(",")]
    recipe, tokens = options.get("recipe", "qserve"), int(options.get("tokens", "128"))
    names = options["cases"].split(",") if "cases" in options else list(CASES)
    if unknown := [name for name in names if name not in CASES]:
        raise SystemExit(f"--cases: {', '.join(unknown)} is unknown; there are {', '.join(CASES)}")
    opened: AbstractContextManager[LLM]
    with tempfile.TemporaryDirectory() as folder:
        if options.get("target") == "cpu":
            qcompile.build(options["model"], Path(folder) / "out", recipe=recipe, target="cpu")
            opened = qcompile.load(Path(folder) / "out", max_batch=max(batches))
            where: dict[str, Any] = {"target": "cpu", "date": time.strftime("%F")}
        else:
            opened = closing(random_model(recipe, read_tokenizer(Path(file)), max(batches), tokens))
            where = facts()
        results: dict[str, Any] = {}
        with opened as llm:
            loads = Loads(llm, tokens)
            for batch in batches:
                for name in names:
                    result = loads.measure(CASES[name], batch, int(options.get("rounds", "3")))
                    results[f"{name}, batch {batch}"] = result
                    print(f"{name}, batch {batch}:", json.dumps(result), flush=True)
                    if out:  # after each, as machines are lent by the minute
                        document = {**where, "recipe": recipe, "tokens": tokens, "cases": results}
                        Path(out[0]).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
