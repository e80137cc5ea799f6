"""Structured outputs on this CPU: whether they validate, whether drafts change them, and what masks cost.

    pip install jsonschema lark
    python benchmarks/structured.py [--schemas 1000] [--model samples/pycode-1m] [--timed samples/pycode-26m]

Random JSON schemas and the grammars of structured_grammars.lark, each for one request, greedy or sampled in turns, in
batches of 16, without drafts and with rounds of 4 drafts. Finished outputs are checked by the packages jsonschema and
lark. The cost is CPU time at batch 1 with one thread, which other programs of the machine change less than the time:
medians of rounds in which plain and confined decoding take turns, and of their ratios in a round. Each round has
grammars of its own, so that no mask is known from the rounds before.
"""

from __future__ import annotations

import argparse
import calendar
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, write_result
from qcompile import SamplingParams
from qcompile.cli import console

ROOT = Path(__file__).parents[1]
BATCH, TOKENS, TIMED_TOKENS = 16, 200, 192
RECIPE, GAMMA = "qspec", 4
Asked = tuple[dict[str, Any], Callable[[str], bool]]
"""Structured outputs, and whether a text fits them."""

# ---- random schemas ---------------------------------------------------------------------------------


def leaf(draw: random.Random) -> dict[str, Any]:
    """A schema of a value without parts."""
    low = draw.randrange(-50, 50)
    return draw.choice(
        [
            {"type": "string", "minLength": draw.randrange(3), "maxLength": draw.randrange(3, 12)},
            {"type": "string", "pattern": f"^[a-{draw.choice('cfz')}]{{1,{draw.randrange(1, 9)}}}$"},
            {"type": "string", "format": draw.choice(["date", "time", "date-time", "uuid", "ipv4", "email"])},
            {"type": "integer", "minimum": low, "maximum": low + draw.randrange(1, 200)},
            {"type": "number", "minimum": low, "exclusiveMaximum": low + draw.randrange(1, 200)},
            {"type": "boolean"},
            {"type": "null"},
            {"enum": draw.sample(["red", "green", 1, 2.5, None, True, "é", "a b"], draw.randrange(1, 5))},
            {"const": draw.choice(["x", 7, [1, "b"], {"k": None}])},
            {"type": ["string", "null"], "maxLength": 6},
        ]
    )


def schema(draw: random.Random, depth: int) -> dict[str, Any]:
    """A schema with up to `depth` levels of parts."""
    kind = draw.choice(["leaf", "leaf", "object", "object", "array", "any", "tuple"]) if depth else "leaf"
    if kind == "object":
        names = draw.sample(["name", "size", "tags", "next", "a b", "é", "kind", "value"], draw.randrange(1, 5))
        required = [name for name in names if draw.random() < 0.6]
        parts = {name: schema(draw, depth - 1) for name in names}
        return {"type": "object", "properties": parts, "required": required, "additionalProperties": False}
    if kind == "array":
        most = draw.randrange(1, 5)
        return {"type": "array", "items": schema(draw, depth - 1), "minItems": draw.randrange(most), "maxItems": most}
    if kind == "any":
        return {"anyOf": [schema(draw, depth - 1) for _ in range(draw.randrange(2, 4))]}
    if kind == "tuple":
        items = [schema(draw, depth - 1) for _ in range(draw.randrange(1, 4))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    return leaf(draw)


def root_schema(draw: random.Random) -> dict[str, Any]:
    """A schema; some refer to a definition, which may contain itself."""
    made = schema(draw, 3)
    if draw.random() < 0.2:
        node: dict[str, Any] = {
            "type": "object",
            "properties": {"v": leaf(draw), "next": {"$ref": "#/$defs/node"}},
            "required": ["v"],
        }
        node |= {"additionalProperties": False}
        return {"anyOf": [made, {"$ref": "#/$defs/node"}], "$defs": {"node": node}}
    return made


def is_date(text: str) -> bool:
    """Whether a text is a date by RFC 3339, which has a year 0; Python has none."""
    if not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
        return False
    year, month, day = map(int, text.split("-"))
    return 1 <= month <= 12 and 1 <= day <= calendar.monthrange(2000 + year % 400, month)[1]


def is_time(text: str) -> bool:
    """Whether a text is a time by RFC 3339; jsonschema knows none with an offset."""
    hour, minute = "([01][0-9]|2[0-3])", "[0-5][0-9]"
    second, offset = r"([0-5][0-9]|60)(\.[0-9]+)?", f"([zZ]|[+-]{hour}:{minute})"
    return re.fullmatch(f"{hour}:{minute}:{second}{offset}", text) is not None


def is_date_time(text: str) -> bool:
    """Whether a text is a date and a time by RFC 3339."""
    return is_date(text[:10]) and text[10:11] in ("T", "t", " ") and is_time(text[11:])


def asked_schemas(count: int) -> list[Asked]:
    """`count` requests for random schemas."""
    validators, draw = import_module("jsonschema"), random.Random(0)
    checker = validators.FormatChecker()
    for name, check in (("date", is_date), ("time", is_time), ("date-time", is_date_time)):
        checker.checks(name)(lambda value, check=check: not isinstance(value, str) or check(value))

    def fits(wanted: dict[str, Any]) -> Callable[[str], bool]:
        validator = validators.Draft202012Validator(wanted, format_checker=checker)
        return lambda text: validator.is_valid(json.loads(text))

    made = [root_schema(draw) for _ in range(count)]
    return [({"json": one, "disable_any_whitespace": draw.random() < 0.5}, fits(one)) for one in made]


def asked_grammars() -> list[Asked]:
    """Requests for the grammars."""
    lark = import_module("lark")

    def fits(grammar: str) -> Callable[[str], bool]:
        parser = lark.Lark(grammar, parser="earley", lexer="dynamic_complete")

        def parses(text: str) -> bool:
            try:
                parser.parse(text)
            except lark.exceptions.LarkError:
                return False
            return True

        return parses

    grammars = Path(__file__).with_name("structured_grammars.lark").read_text("utf-8").split("\n\n")
    return [({"grammar": text}, fits(text)) for text in grammars]


# ---- outputs and cost -------------------------------------------------------------------------------


def outputs(llm: qcompile.LLM, asked: Sequence[Asked], gamma: int) -> list[tuple[list[int], str, str | None]]:
    """Tokens, text and finish reason of each request."""
    llm.engine.speculation.gamma = gamma
    result = []
    for start in range(0, len(asked), BATCH):
        params = [
            SamplingParams(
                max_tokens=TOKENS, temperature=(0.0, 1.0)[index % 2], seed=start + index, structured_outputs=one
            )
            for index, (one, _) in enumerate(asked[start : start + BATCH])
        ]
        for output in llm.generate(["result = "] * len(params), params):
            sample = output.outputs[0]
            result.append((sample.token_ids, sample.text, sample.finish_reason))
    return result


def measured(llm: qcompile.LLM, asked: Sequence[Asked]) -> dict[str, int]:
    """How many outputs end, of these validate, and differ with drafts."""
    plain, drafted = outputs(llm, asked, 0), outputs(llm, asked, GAMMA)
    ended = [(fits, text) for (_, fits), (_, text, reason) in zip(asked, plain, strict=True) if reason == "stop"]
    return {
        "requests": len(asked),
        "finished": len(ended),
        "valid": sum(fits(text) for fits, text in ended),
        "differing_with_drafts": sum(a != b for a, b in zip(plain, drafted, strict=True)),
    }


PAIR = {"type": "object", "properties": {"a": {"type": "string"}}}


def confined(number: int) -> dict[str, dict[str, Any] | None]:
    """What outputs of a round are confined to, in languages of its own."""
    return {
        "plain": None,
        "any text": {"regex": f"(?s:.){{{2000 + number}}}"},
        "json": {"json": {"type": "array", "items": PAIR, "minItems": 99 + number}},
    }


def costs(llm: qcompile.LLM, rounds: int, temperature: float) -> dict[str, dict[str, float]]:
    """CPU milliseconds for a token at batch 1 without drafts, and by how many percent that is above plain decoding."""
    llm.engine.speculation.gamma = 0
    times: dict[str, list[float]] = {name: [] for name in confined(0)}
    for seed in range(rounds):
        for name, asked in confined(seed).items():
            options: dict[str, Any] = {"structured_outputs": asked} if asked else {"ignore_eos": True}
            params = SamplingParams(max_tokens=TIMED_TOKENS, temperature=temperature, seed=seed, **options)
            if asked:
                llm.engine.grammars.compile(params.structure)
            llm.generate(["def main("], SamplingParams(max_tokens=1))  # the prompt is in the cache from now on
            started = time.process_time()
            [output] = llm.generate(["def main("], params)
            times[name].append(1e3 * (time.process_time() - started) / len(output.outputs[0].token_ids))

    def above(name: str) -> float:
        ratios = [one / plain for one, plain in zip(times[name], times["plain"], strict=True)]
        return 100 * (statistics.median(ratios) - 1)

    return {name: {"ms": statistics.median(result), "percent": above(name)} for name, result in times.items()}


def compile_times(llm: qcompile.LLM, asked: Sequence[Asked]) -> dict[str, float]:
    """Milliseconds to compile a grammar."""
    seconds = []
    for one, _ in asked:
        params = SamplingParams(structured_outputs=one)
        started = time.perf_counter()
        llm.engine.grammars.compile(params.structure)
        seconds.append(1e3 * (time.perf_counter() - started))
    return {"median": statistics.median(seconds), "largest": max(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "samples" / "pycode-1m")
    parser.add_argument("--timed", type=Path, default=ROOT / "samples" / "pycode-26m", help="model of the cost")
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "bench", help="where artifacts go")
    parser.add_argument("--out", type=Path, default=RESULTS / "structured.json")
    arguments = parser.parse_args()
    work = arguments.work / "structured"
    qcompile.build(str(arguments.model), work / "model", recipe=RECIPE)
    qcompile.build(str(arguments.timed), work / "timed", recipe=RECIPE)
    schemas, grammars = asked_schemas(arguments.schemas), asked_grammars()
    document: dict[str, Any] = {"model": arguments.model.name, "timed": arguments.timed.name, "recipe": RECIPE}
    with qcompile.load(work / "model", threads=1, max_batch=BATCH) as llm:
        document["compile_ms"] = compile_times(llm, schemas[:200])
        document["schemas"] = measured(llm, schemas)
        document["grammars"] = measured(llm, grammars)
    with qcompile.load(work / "timed", threads=1) as llm:
        document["cpu_a_token"] = {
            "greedy": costs(llm, arguments.rounds, 0.0),
            "sampled": costs(llm, arguments.rounds, 1.0),
        }
    print(
        console.table(
            ["", "requests", "finished", "valid", "differing with drafts"],
            [[name, *map(str, document[name].values())] for name in ("schemas", "grammars")],
        )
    )
    print(document["cpu_a_token"], document["compile_ms"])
    write_result(arguments.out, document)


if __name__ == "__main__":
    main()
