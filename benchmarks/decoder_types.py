"""Every decoder type in transformers' maps of causal and of image-and-text models: right, refused, or wrong.

    python benchmarks/decoder_types.py [--name NAME] [--shard I/N] [--only TYPE ...] [--again OUTCOME ...]
    python benchmarks/decoder_types.py [--name NAME] --table

The first form does the rows that are missing, each in a file of out/decoder_types; shards may run beside each other.
The second writes results/decoder_types.json and decoder_types.md of all rows. `--again` repeats rows of an outcome.
`--name` is another name of folder and results, for another version of transformers.

A row is the default configuration of the type, cut down by `tiny.py`, with random weights, compiled in float32 and
compared with transformers as families.py does. Types that are no decoders are listed as such: encoder-decoders,
models in which a token sees later ones, classifiers, drafters that read the states of another model, and those that
take no text without an image or another input. The exit code is 4 if a row is wrong.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import tiny
from benchmarks.common import RESULTS, machine
from benchmarks.families import Row, examine, quiet, random_model, tokens
from qcompile.cli import console
from qcompile.errors import QualityError

OUT = Path(__file__).parents[1] / "out"
OUTCOMES = ("right", "refused", "WRONG", "no reference", "no decoder")
UNSEEN = 1e-4
"""How far an earlier token's logits may move by rounding when a later token changes."""


def all_types() -> list[str]:
    """The types of both maps in their order."""
    from transformers.models.auto import modeling_auto as auto

    return sorted({*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


def row_of(kind: str) -> Row:
    """The row of one type."""
    started = time.perf_counter()
    try:
        reason = takes_more(kind)
        settings = {} if reason else tiny.settings(kind)
        reason = reason or not_a_decoder(kind, settings)
    except Exception as error:  # whatever transformers raises for a configuration or without an image
        needs = re.search("pixel_values|image_encoder_embeddings", str(error))
        return {"outcome": "no decoder" if needs else "no reference", "reason": _line(error)}
    if reason:
        return {"outcome": "no decoder", "reason": reason}
    with tempfile.TemporaryDirectory() as folder:
        try:
            row = examine(kind, settings, Path(folder))
            row["cache"] = cache_kind(Path(folder) / "artifact") if row["outcome"] == "right" else ""
        except Exception as error:  # whatever is not a refusal is a bug, and the other rows are wanted all the same
            row = {"outcome": "WRONG", "reason": _line(error)}
    return row | {"seconds": round(time.perf_counter() - started, 1)}


def takes_more(kind: str) -> str:
    """What a model of the type takes besides text, as a reason why it is no decoder, or an empty text."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    named = {**auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}[kind]
    taken = inspect.signature(getattr(transformers, named).forward).parameters
    if "decoder_input_ids" in taken:
        return "encoder and decoder"
    if "shared_kv_states" in taken:
        return "a drafter, which reads the keys and values of another model"
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [name for name, one in taken.items() if one.default is inspect.Parameter.empty and one.kind not in kinds]
    more = [name for name in needed if name not in ("self", "input_ids")]
    return f"needs {', '.join(more)} besides text" if more else ""


def not_a_decoder(kind: str, settings: tiny.Settings) -> str:
    """Why the type is no decoder, or an empty text."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

    if kind in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:  # the map lists the decoder inside under this type
        return "classifier of images"
    config = AutoConfig.for_model(kind, **settings)
    if config.is_encoder_decoder or config.get_text_config().is_encoder_decoder:
        return "encoder and decoder"
    model = random_model(kind, settings)
    ids = tokens(2, 9, tiny.VOCABULARY)
    other = ids.clone()
    other[:, -1] = (ids[:, -1] + 1) % tiny.VOCABULARY
    with torch.no_grad():
        before, after = (model.eval()(input_ids=given, use_cache=False).logits[:, :-1] for given in (ids, other))
    return "" if (before - after).abs().max() <= UNSEEN else "a token sees later ones"


def cache_kind(artifact: Path) -> str:
    """What the artifact caches for each sequence: kinds of the calls that write to the cache."""
    program = json.loads((artifact / "graphs" / "program.json").read_text(encoding="utf-8"))
    kinds: Counter[str] = Counter()
    for call in program["calls"]:
        if call["kernel"] in ("kv_append", "rope_append"):
            kinds["keys and values"] += 1
        elif "state" in call["kernel"] or "conv" in call["kernel"] or "latent" in call["kernel"]:
            kinds[call["kernel"]] += 1
    return ", ".join(sorted(kinds))


def _line(error: Exception) -> str:
    return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:300]


# ---- the rows and the table ----------------------------------------------------------------------------


def read_rows(folder: Path) -> dict[str, Row]:
    """The rows done so far by type."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def do(kinds: list[str], folder: Path) -> None:
    """Do the rows of `kinds`, each written at once to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in kinds:
        with quiet():
            row = row_of(kind) | {"made": made()}
        part = folder / f"{kind}.part"
        part.write_text(json.dumps(row), encoding="utf-8")
        part.rename(folder / f"{kind}.json")
        console.log(f"{kind:30} {row['outcome']:12} {row.get('reason', '') or format(row['error'], '.1e')}")


def made() -> str:
    """With what a row is made now: the commit and the version of torch."""
    facts = machine()
    return f"{facts['commit']} with torch {facts['torch']}"


def write_table(rows: dict[str, Row], name: str) -> None:
    """The table as JSON and Markdown, in results `name`."""
    import transformers

    counts = {outcome: sum(row["outcome"] == outcome for row in rows.values()) for outcome in OUTCOMES}
    decoders = len(rows) - counts["no decoder"]
    facts = {**machine(), "transformers": transformers.__version__, "decoders": decoders, **counts}
    document = json.dumps({**facts, "rows": rows}, indent=1)
    (RESULTS / f"{name}.json").write_text(document + "\n", encoding="utf-8")
    tried, every = len(rows), len(all_types())
    types = f"{tried} types" if tried == every else f"{tried} of {every} types"
    lines = [
        "# Decoder types",
        "",
        f"{types} in the maps of transformers {facts['transformers']}, of which {decoders} are decoders: "
        f"{counts['right']} right ({counts['right'] / max(decoders, 1):.0%}), {counts['refused']} refused, "
        f"{counts['WRONG']} wrong, {counts['no reference']} without a reference.",
        "Rows by commit: "
        + ", ".join(f"{count} of {by}" for by, count in Counter(row["made"] for row in rows.values()).items())
        + ".",
        "Written by `python benchmarks/decoder_types.py`; its first lines say what the rows are.",
        "",
        "| type | outcome | error | decode | cache | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for kind, row in rows.items():
        errors = [f"{row[key]:.1e}" if key in row else "" for key in ("error", "decode_error")]
        reason = ": " + row["reason"].replace("|", "\\|") if row.get("reason") else ""
        cells = (kind, row["outcome"] + reason, *errors, row.get("cache", ""), row.get("seconds", ""))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """Do rows, or write the table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--name", default="decoder_types", help="the name of folder and results")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="do every Nth row from the Ith on")
    parser.add_argument("--only", nargs="+", default=[], metavar="TYPE", help="do these types, done or not")
    parser.add_argument("--again", nargs="+", default=[], choices=OUTCOMES, help="do rows of this outcome again")
    parser.add_argument("--table", action="store_true", help="write the table")
    options = parser.parse_args()
    folder = OUT / options.name
    rows = read_rows(folder)
    if not options.table:
        place, shards = map(int, options.shard.split("/"))
        mine = all_types()[place - 1 :: shards]  # whatever other shards have done meanwhile
        do(options.only or [k for k in mine if k not in rows or rows[k]["outcome"] in options.again], folder)
        rows = read_rows(folder)
    else:
        write_table(rows, options.name)
    wrong = [kind for kind, row in rows.items() if row["outcome"] == "WRONG"]
    if wrong:
        console.log(f"wrong: {', '.join(wrong)}")
    return QualityError.exit_code if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
