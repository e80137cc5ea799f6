"""Every decoder family of `family_list.py`, compiled in float32 for this CPU and compared with transformers.

    python benchmarks/families.py [--only TEXT ...] [--resume]

Each row is right, refused (with the reason), or WRONG. Right means: logits within 2e-4 of transformers at 9, 48 and
57 tokens and batches of 1 and 2; tokens fed one at a time after 1, 8, 17 and 47 give the logits of one pass within
2e-4; and greedy choices are transformers' own wherever its best two logits lie more than 1e-3 apart. Weights are
random, norms and biases too. Results are written after every row, to results/families.json and families.md; `--only`
repeats rows with TEXT in their name, `--resume` makes those that are missing. The exit code is 4 if a row is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, machine
from benchmarks.family_list import FAMILIES, Settings
from qcompile.cli import console
from qcompile.errors import QualityError, UnsupportedError

TOLERANCE = 2e-4
TORN = 1e-3
"""Where the reference's best two logits are closer than this, either may win."""

LENGTHS, CUTS = (9, 48, 57), (1, 8, 17, 47)
GREEDY_TOKENS = 12
TABLE, PAGE = RESULTS / "families.json", RESULTS / "families.md"
Row = dict[str, Any]


def auto_class(kind: str) -> Any:
    """transformers' class that makes models of the type `kind`, and reads them back.

    Some causal models take only the configuration of the text part. Its own type is in no map, so that nothing reads
    their checkpoints: the class is then that of the image-and-text model.
    """
    import transformers
    from transformers.models.auto import modeling_auto as auto

    causal, seeing = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    unread = kind in causal and getattr(transformers, causal[kind]).config_class.model_type not in causal
    if kind not in causal or (unread and kind in seeing):
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def random_model(kind: str, settings: Settings, seed: int = 0) -> Any:
    """A model of transformers' type `kind`, every parameter random."""
    from transformers import AutoConfig

    torch.manual_seed(seed)
    module = auto_class(kind).from_config(AutoConfig.for_model(kind, **settings), dtype=torch.float32)
    with torch.no_grad():
        for parameter in filter(torch.numel, module.parameters()):
            flat, size = parameter.dim() < 2, _own_size(parameter)
            parameter.normal_(0.5 * size if flat else 0.0, 0.3 * size if flat else parameter.shape[-1] ** -0.5)
        for part in module.modules():  # transformers sets these rows to zero when it loads some types
            if isinstance(part, torch.nn.Embedding) and part.padding_idx is not None:
                part.weight[part.padding_idx] = 0.0
    return module


def _own_size(parameter: Tensor) -> float:
    """The number below 1 that a type gives to all of a parameter and divides by later (as nGPT does), or 1."""
    first = parameter.flatten()[0].abs().item()
    return first if 0 < first < 1 and bool((parameter.abs() == first).all()) else 1.0


def save_random(kind: str, settings: Settings, path: Path, seed: int = 0) -> Any:
    """A random model of the type `kind`, saved at `path` and read back from there."""
    random_model(kind, settings, seed).save_pretrained(path)
    # Written out, since some versions of transformers leave soft caps out otherwise. Falcon's alone is wrong then:
    # its biases by position are added twice.
    attention = "sdpa" if kind == "falcon" else "eager"
    return auto_class(kind).from_pretrained(path, dtype=torch.float32, attn_implementation=attention).eval()


def tokens(batch: int, length: int, vocabulary: int) -> Tensor:
    """Random token ids [batch, length], the same each time."""
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(length))


def examine(kind: str, settings: Settings, folder: Path) -> Row:
    """One row: the family saved, compiled and compared."""
    start = time.perf_counter()
    reference = save_random(kind, settings, folder / "model")
    try:
        built = qcompile.build(folder / "model", folder / "artifact", recipe="f32")
    except UnsupportedError as error:
        return {"outcome": "refused", "reason": str(error), "seconds": round(time.perf_counter() - start, 1)}
    with qcompile.load(folder / "artifact") as llm, torch.no_grad():
        result = compare(llm, reference)
    fired = {record.name: record.fired for record in built.passes}
    return {**result, "passes": fired, "seconds": round(time.perf_counter() - start, 1)}


def compare(llm: Any, reference: Any) -> Row:
    """The errors of a loaded artifact against the module `reference`, and whether all are small enough."""
    lengths = [length for length in LENGTHS if length <= llm.context]
    error, torn, greedy = 0.0, 0, True
    for batch in (1, 2):
        for length in lengths:
            ids = tokens(batch, length, llm.vocab_size)
            wanted, result = reference(ids, use_cache=False).logits, llm.logits(ids)
            error = max(error, (result - wanted).abs().max().item())
            best = wanted.topk(2).values
            sure = best[..., 0] - best[..., 1] > TORN
            torn += int((~sure).sum())
            greedy &= bool((result.argmax(-1) == wanted.argmax(-1))[sure].all())
    ids = tokens(2, lengths[-1], llm.vocab_size)
    whole = llm.logits(ids)
    cuts = [cut for cut in CUTS if cut < lengths[-1]]
    decode = max((after_cut(llm, ids, cut) - whole).abs().max().item() for cut in cuts)
    greedy &= same_text(llm, reference, ids[0, : lengths[0]].tolist())
    right = error <= TOLERANCE and decode <= TOLERANCE and greedy
    return {
        "outcome": "right" if right else "WRONG",
        "error": error,
        "decode_error": decode,
        "greedy": greedy,
        "torn": torn,
        "largest_logit": whole.abs().max().item(),
    }


def after_cut(llm: Any, ids: Tensor, cut: int) -> Tensor:
    """Logits [batch, tokens, vocabulary] of a prefill of `cut` tokens followed by one token at a time."""
    from qcompile.runtime.engine.slots import NO_SLOT
    from qcompile.runtime.step import Rows

    length = ids.shape[1]
    rows = ids.tolist()
    pool = llm.engine.pool
    pages = [pool.take(pool.pages_for(length)) for _ in rows]
    slots = llm.engine.scheduler.slots
    places = [slots.take() if llm.engine.executor.state_slots else NO_SLOT for _ in rows]
    result = torch.empty(*ids.shape, llm.vocab_size)
    for start, end in [(0, cut), *((t, t + 1) for t in range(cut, length))]:
        batch = [
            Rows(row[start:end], start, held, end - start, slot=place)
            for row, held, place in zip(rows, pages, places, strict=True)
        ]
        _, logits = llm.engine.executor.step(batch, logits=True)
        result[:, start:end] = torch.from_numpy(logits.copy()).view(len(rows), end - start, -1)
    for held, place in zip(pages, places, strict=True):
        pool.give_back(held)
        slots.give_back(place)
    return result


def same_text(llm: Any, reference: Any, prompt: list[int]) -> bool:
    """Whether each greedy token is the reference's choice after those before it, or one of two as good."""
    made = llm.generate([prompt], max_tokens=GREEDY_TOKENS, temperature=0, ignore_eos=True)[0].outputs[0].token_ids
    ids = prompt + list(made)
    logits = reference(torch.tensor([ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(made)[:, None])[:, 0]
    return bool((logits.max(-1).values - chosen <= TORN).all())


# ---- the table -----------------------------------------------------------------------------------------


def write(rows: dict[str, Row]) -> None:
    """The rows so far, as JSON and as a Markdown table."""
    counts = {
        outcome: sum(row["outcome"] == outcome for row in rows.values()) for outcome in ("right", "refused", "WRONG")
    }
    import transformers

    facts = {**machine(), "transformers": transformers.__version__, "tolerance": TOLERANCE, **counts}
    TABLE.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    kinds = {row["type"] for row in rows.values()}
    right = {row["type"] for row in rows.values() if row["outcome"] == "right"}
    lines = [
        "# Decoder families",
        "",
        f"{len(rows)} configurations of {len(kinds)} model types of transformers {facts['transformers']}: "
        f"{counts['right']} right ({len(right)} types), {counts['refused']} refused, {counts['WRONG']} wrong.",
        "Written by `python benchmarks/families.py`; its first lines say what right means.",
        "Errors are the largest absolute differences of logits: from transformers, and of decoding from one pass.",
        "",
        "| family | type | outcome | error | decode | passes fired | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_line(name, row) for name, row in rows.items()]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _line(name: str, row: Row) -> str:
    if row["outcome"] == "refused":
        reason = re.sub(r"\s+", " ", row["reason"]).replace("|", "\\|")
        return f"| {name} | {row['type']} | refused: {reason} | | | | {row['seconds']} |"
    fired = ", ".join(f"{key} {count}" for key, count in row.get("passes", {}).items() if count)
    errors = [f"{row[key]:.1e}" if key in row else "" for key in ("error", "decode_error")]
    outcome = row["outcome"] if "reason" not in row else f"{row['outcome']}: {row['reason']}"
    return f"| {name} | {row['type']} | {outcome} | {errors[0]} | {errors[1]} | {fired} | {row['seconds']} |"


@contextlib.contextmanager
def quiet() -> Any:
    """Without transformers' progress bars and torch's logs of failed exports."""
    import logging

    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    with Path(os.devnull).open("w") as sink, contextlib.redirect_stderr(sink):
        yield


def examine_all(names: Sequence[str], rows: dict[str, Row]) -> None:
    """Do the families `names` and write the table after each."""
    for name, kind, settings in FAMILIES:
        if name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder, quiet():
            try:
                row = examine(kind, settings, Path(folder))
            except Exception as error:  # whatever is not a refusal is a bug, and the other rows are wanted all the same
                row = {"outcome": "WRONG", "reason": f"{type(error).__name__}: {error}"[:300], "seconds": 0}
        rows[name] = {"type": kind, **row}
        order = [n for n, _, _ in FAMILIES if n in rows]
        write({n: rows[n] for n in order})
        console.log(f"{name:45} {row['outcome']:8} {row.get('reason', '') or format(row['error'], '.1e')}")


def read() -> dict[str, Row]:
    """The rows of the committed table by family."""
    rows: dict[str, Row] = json.loads(TABLE.read_text(encoding="utf-8"))["rows"]
    return rows


def main() -> int:
    """Regenerate the table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="do rows with one of these in their name")
    parser.add_argument("--resume", action="store_true", help="do the rows that the table lacks")
    options = parser.parse_args()
    kept = options.resume or options.only
    rows: dict[str, Row] = read() if kept and TABLE.is_file() else {}
    names = [name for name, _, _ in FAMILIES]
    if options.only:
        names = [name for name in names if any(text in name for text in options.only)]
    elif options.resume:
        names = [name for name in names if name not in rows]
    examine_all(names, rows)
    wrong = [name for name, row in rows.items() if row["outcome"] == "WRONG"]
    if wrong:
        console.log(f"wrong: {', '.join(wrong)}")
    return QualityError.exit_code if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
