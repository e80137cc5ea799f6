"""The report: parts of layers are told by dataflow, and the page stands on its own."""

from __future__ import annotations

import functools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from qcompile import pipeline, recipes, sample_text
from qcompile.calibration import Calibration, CalibrationSource
from qcompile.errors import QCompileError, UnsupportedError
from qcompile.passes.base import run_passes
from qcompile.passes.calibration import perplexity
from qcompile.passes.schedule import configure
from qcompile.recipe_files.mixes import front
from qcompile.report import figures as report
from qcompile.report import page as report_page
from qcompile.report import plots
from qcompile.report.advice import advice
from qcompile.report.command import command
from qcompile.report.stored_weights import PLACE
from qcompile.roofline import CPU_CORE
from tests.support.cases import first
from tests.support.graphs import decoder
from tests.support.ranks import TWO, small


def call(kernel: str, **fields: Any) -> dict[str, Any]:
    return {"kernel": kernel, "name": fields.pop("name", kernel), **fields}


def gemm(name: str, x: str, out: str | None, epilogue: str = "store", **fields: Any) -> dict[str, Any]:
    weights = {"codes": f"{name}.codes", "scale": f"{name}.scale"}
    base = {"x": x, "out": out, "epilogue": epilogue, "weights": weights, "bias": None, "residual": None}
    return call("gemm", **({"name": name, "format": "w4_asym_g128", "n": 64, "k": 32} | base | fields))


def two_layers() -> dict[str, Any]:
    """A program with names of calls that say nothing."""
    calls, number = [call("embed", out="stream", table_dtype="f32")], 0

    def add(x: str, out: str | None, epilogue: str = "store", **fields: Any) -> None:
        nonlocal number
        calls.append(gemm(f"g{number}", x, out, epilogue, **fields))
        number += 1

    heads = {"heads": 2, "kv_heads": 1, "head_dim": 16}
    for layer in (0, 1):
        calls.append(call("norm", x="stream", out="normed"))
        add("normed", "joined")
        calls.append(call("rope_append", qkv="joined", layer=layer, v_offset=48, **heads))
        calls.append(call("attention", q="joined", out="mixed", layer=layer, value=None, **heads))
        calls.append(call("quantize", x="mixed", out="rounded"))
        add("rounded", "stream", "add")
        calls.append(call("norm", x="stream", out="normed"))
        add("normed", "gated", "silu_mul")
        calls.append(call("quantize", x="gated", out="rounded"))
        add("rounded", "stream", "add")
    add("stream", None, "logits", format="w8_sym_channel")
    names = ("stream", "normed", "joined", "mixed", "rounded", "gated")
    buffers = [{"name": name, "dtype": "q8" if name == "rounded" else "f32", "width": 64} for name in names]
    kv = {"page_bytes": 4096, "page_tokens": 64, "layers": 2, "layer_page_bytes": [2048, 2048]}
    return {"calls": calls, "buffers": buffers, "kv": kv}


SIZES = {f"g{number}.{role}": size for number in range(9) for role, size in (("codes", 1024), ("scale", 256))}


def facts(**changes: Any) -> dict[str, Any]:
    figures = {"g1": {"error": 0.01, "error_nearest": 0.03}}
    made = {
        "model": {"name": "<b>tiny</b>", "parameters": 1000},
        "recipe": "w4a8",
        "target": "cpu",
        "predicted_by": "the rates of one usual core",
        "calibrated": True,
        "bits_per_weight": 4.5,
        "weight_bytes": 1 << 20,
        "kv_bytes_per_token": 64,
        "passes": [{"name": "raise", "fired": 3, "notes": ["a & b"]}],
        "linears": report.linears(two_layers(), SIZES, figures, {}),
        "kernels": report.kernels(two_layers(), SIZES, CPU_CORE),
        "drafts": [],
        "context": 2048,
        "kv_format": "kv16",
        "perplexity": {"before": 5.1234, "after": 5.2, "tokens": 2046},
        "calibration": {"source": "text.jsonl", "samples": 2, "length": 1024},
        "command": "qcompile build tiny -o OUT",
        "versions": {"qcompile": "1", "torch": "2"},
    }
    return made | changes


@functools.cache
def plain_page() -> str:
    """The page of `facts()`."""
    return report_page.page(facts())


def test_parts_and_layers_come_from_the_dataflow() -> None:
    rows = report.linears(two_layers(), SIZES, {}, {})
    parts = [report.QKV, report.ATTENTION_OUT, report.GATE_UP, report.DOWN]
    assert [row["part"] for row in rows] == [*parts, *parts, report.HEAD]
    assert [row["layer"] for row in rows] == [0] * 4 + [1] * 4 + [None]
    assert rows[0]["bits"] == 8 * 1280 / (64 * 32)


def test_share_of_8_bit_features_is_that_of_the_marks_not_of_the_padded_bytes() -> None:
    program = two_layers()
    for name, format in (("g2", "mix_4_8"), ("g3", "nested_8_4"), ("g4", "mxfp4"), ("g5", "bf16")):
        next(c for c in program["calls"] if c["name"] == name)["format"] = format
    rows = report.linears(program, SIZES, {}, {"g2": 0.1})
    assert [row["wide_share"] for row in rows[:6]] == [0, 0, 0.1, 1, 0, 1] and rows[-1]["wide_share"] == 1


@pytest.mark.parametrize(
    ("target", "recipe"),
    first(
        [
            ("cpu-avx2", "mixllm"),
            *(("h200", name) for name in ("auto", "f32", "w4a16", "qserve", "nested", "quantspec")),
        ],
        [("cpu-avx2", "mixllm"), *(("h200", name) for name in recipes.RECIPES)],
    ),
)
def test_every_recipe_is_reported_for_every_kind_of_target(target: str, recipe: str) -> None:
    wide = decoder(vocab=96, hidden=256, heads=4, head_dim=64, ffn=256, layers=1)
    try:
        plan = pipeline.plan(wide, target=target, recipe=recipe)
    except UnsupportedError as error:
        assert target != "cpu-avx2" and re.search("have no (GPU kernels|kv32 cache)", str(error)), (target, recipe)
        return
    rows = json.loads(plan.report)["linears"]
    mixed = [row for row in rows if row["format"] == "mix_4_8"]
    assert len(mixed) == (4 if recipe in ("mixllm", "auto") else 0)
    features = sum(row["outputs"] for row in mixed)
    assert sum(row["wide_share"] * row["outputs"] for row in mixed) == pytest.approx(features / 10, abs=2)


def test_predicted_time_is_that_of_the_roofline() -> None:
    rows = {row["kernel"]: row for row in report.kernels(two_layers(), SIZES, CPU_CORE)}
    moved = rows["gemm"]["bytes"] / CPU_CORE.bytes_per_second * 1e6
    assert rows["gemm"]["calls"] == 9
    assert abs(rows["gemm"]["predicted_us"] - moved) < 1e-3 * moved  # one token: all of it is moving weights


class Page(HTMLParser):
    """Counts tags, and collects what a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [
            v or "" for k, v in attrs if k in ("src", "href", "xlink:href") and not (v or "").startswith(("#", "data:"))
        ]


def test_page_stands_on_its_own_and_draws_what_there_is() -> None:
    text = plain_page()
    assert text.count(PLACE.decode()) == 1  # for what is known when the weights are written
    page = Page(text)
    assert page.fetched == [] and "script" not in page.tags and "@import" not in text
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    assert titles[-2:] == ["What to try next", "How it was built"] and "Error of each layer&#39;s output" in titles
    assert page.tags.count("svg") == len(titles) - 2 == 4
    assert "&lt;b&gt;tiny&lt;/b&gt;" in text and "a &amp; b" in text
    assert "5.12 → 5.20" in text and "<pre>qcompile build tiny -o OUT</pre>" in text and "torch 2 ·" in text
    outliers = {"keys": {"before": [8.0, 9.0], "after": [2.0, 2.5]}}
    assert Page(report_page.page(facts(outliers=outliers))).tags.count("svg") == 5
    assert "perplexity before" not in report_page.page(facts(perplexity=None, calibration=None))


def test_mixes_of_a_study_are_drawn() -> None:
    """By bits and by predicted time, with the names of uniform formats alone."""
    study = {"names": ["small:int8", "mix 1", "large:bf16"], "bits": [4.0, 5.0, 16.0], "tokens": 64, "exact": 8.9}
    text = report_page.page(facts(study=study | {"predicted_us": [1.0, 2.0, 4.0], "perplexity": [9.9, 9.2, 9.0]}))
    assert Page(text).tags.count("svg") == 6 and text.count(">small</text>") == 2 and "mix 1" not in text
    assert "<h2>Perplexity by bits per weight</h2>" in text and "on 64 tokens" in text
    assert front([5.0, 4.0, 4.0, 6.0], [2.0, 3.0, 2.5, 2.0]) == [2, 0]


def test_axes_of_layers_have_whole_numbers_and_legends_stand_above() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    plots._outliers(axes, {"before": [8.0, 9.0], "after": [2.0, 2.5]}, moved=True)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0", "1"]
    plots._layers(axes, range(80))
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    moved = next(plots._outlier_plots({"keys": {"before": [1.0], "after": [1.0]}}))
    assert "which no pass of this recipe moves" in moved.caption and "before</text>" not in moved.svg
    svg = next(plot.svg for plot in plots.plots(facts()) if plot.title == "Weight bytes by layer")
    heights = {name: float(y) for y, name in re.findall(r' y="([\d.]+)"[^>]*>([^<]+)</text>', svg)}
    ticks = [y for text, y in heights.items() if re.fullmatch(r"[\d.]+", text)]
    assert max(heights[part] for part in report.PARTS[:2]) < min(ticks)


def test_the_headline_says_what_the_bits_consist_of() -> None:
    rows = report.linears(two_layers(), SIZES, {}, {})
    text = report_page.headline(facts(linears=rows, bits_per_weight=5.0, weight_bytes=1 << 20))
    assert text.startswith("Weights take 1.0 MiB; in 16 bits they would take 0.0 MiB.")
    assert "5.00 bits per weight on average" in text and "5.00 in the layers" in text and "11 % of the weights" in text
    assert "on average" not in report_page.headline(facts(linears=rows[:-1]))
    parts = report.bytes_by_part(facts())
    assert [name for name, _, _ in parts][-2:] == [report.HEAD, report.OTHER_WEIGHTS]
    assert sum(size for _, size, _ in parts) == 1 << 20


def test_advice_follows_the_figures() -> None:
    def commands(**changes: Any) -> str:
        return " ".join(each.command for each in advice(facts(**changes)))

    usual = commands()
    assert "--calib" not in usual and "--target-bits" not in usual and "kv8" not in usual and "lookup" in usual
    assert "--calib" in commands(calibrated=False)
    assert "--target-bits" in commands(perplexity={"before": 5.0, "after": 5.2, "tokens": 9})
    assert "--target-bits" not in commands(perplexity=None)
    assert "kv8" in commands(kv_bytes_per_token=128) and "kv8" not in commands(kv_bytes_per_token=128, kv_format="kv8")
    drafted = {"name": "draft1", "shares_cache": True, "predicted_us": 1.0, "passes": []}
    assert "tune" in commands(drafts=[drafted]) and "lookup" not in commands(drafts=[drafted])


def test_the_command_builds_it_again() -> None:
    settings = {"recipe": "qserve", "target": "cpu", "head_dtype": None}
    calib = CalibrationSource(Path("a/my text.jsonl"), samples=16)
    made = command("x/llama", settings, {"cache.format": "kv8"}, [Path("y/small"), "lookup"], ["style=0.5"], calib)
    assert made == (
        "qcompile build llama -o OUT --recipe qserve --target cpu --draft small --draft lookup --lora style=0.5 "
        "--set cache.format=kv8 --calib 'my text.jsonl' --num-calibration-samples 16"
    )
    sample = CalibrationSource(sample_text.FOLDER)
    assert command("x", {}, {}, [], [], sample) == "qcompile build x -o OUT --calib sample"
    tokens = CalibrationSource(torch.zeros(1, 2, dtype=torch.int64))
    assert command(object(), settings, {}, [], [], tokens) == (
        "qcompile.build(<object>, 'OUT', recipe='qserve', target='cpu', calib='<Tensor>')"
    )
    assert "calib" not in command("x", {}, {}, [], [], None)


@pytest.mark.parametrize(("head", "options"), [("int8", {}), ("nested", {}), ("int8", TWO)])
def test_perplexity_is_that_of_the_graphs_and_their_whole_weights(head: str, options: dict[str, str]) -> None:
    """Also where the last graph is a rank's part of the model."""
    passes = configure(recipes.get_recipe("w4a8").settings(head), options)[1:]
    model = small() if options else decoder(layers=1)
    model.calibration = Calibration(torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(0)))
    graphs = [model, *run_passes(model, passes)[0]]
    result = perplexity.compare(graphs)
    assert result is not None and result["tokens"] == 3 * 11 and result["before"] != result["after"]
    rounded = [graph for graph in graphs if graph.stage == "quantize"]
    whole = [graph for graph in rounded if not graph.calls("all_reduce")]
    assert (whole[-1] is not rounded[-1]) is bool(options)
    for name, graph in (("before", model), ("after", whole[-1])):
        positions = torch.arange(12)[None]
        losses = [
            torch.nn.functional.cross_entropy(graph.run(row[None], positions)[0, :-1].float(), row[1:])
            for row in model.calibration.tokens
        ]
        # Of float32 sums in another order, and rounded to 4 digits.
        assert result[name] == pytest.approx(float(torch.stack(losses).mean().exp()), rel=1e-4)
    assert perplexity.compare([]) is None and json.loads(pipeline.plan(decoder(layers=1)).report)["perplexity"] is None


def test_page_tells_of_drafts() -> None:
    passes = [{"name": "fuse", "fired": 7, "notes": []}]
    draft = {"name": "draft1", "shares_cache": False, "predicted_us": 12.0, "passes": passes}
    text = report_page.page(facts(drafts=[draft]))
    assert "draft1: fuse" in text and "12 µs" in text and "a cache of its own" in text
    assert "draft1" not in report_page.page(facts())


def test_page_is_the_same_each_time_and_the_process_gives_it() -> None:
    with report_page.PageWriter() as writer:
        text = writer.ask(json.dumps(facts()).encode())()
    assert text.decode() == plain_page()


def test_page_is_utf8_whatever_this_process_is_told_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its title has a dot that ASCII lacks."""
    for name, value in {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}.items():
        monkeypatch.setenv(name, value)
    with report_page.PageWriter() as writer:
        assert "\N{MIDDLE DOT}" in writer.ask(json.dumps(facts()).encode())().decode()


def test_report_that_cannot_be_drawn_is_an_error_in_one_line() -> None:
    with report_page.PageWriter() as writer, pytest.raises(QCompileError, match=r"report\.html could not be drawn"):
        writer.ask(b"{}")()
