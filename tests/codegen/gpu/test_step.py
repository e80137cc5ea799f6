"""A whole step as GPU kernels, without a GPU: interpreted against the graph's reference, and compiled ahead of time."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qcompile import ops, recipes
from qcompile.calibration import Calibration
from qcompile.cli.bench import seconds_of
from qcompile.codegen.buffers import PAD
from qcompile.codegen.calls import Embed, Gemm, QuantizeRows
from qcompile.codegen.gpu.attention import AttentionSpec
from qcompile.codegen.gpu.attention_splits import SplitLimits
from qcompile.codegen.gpu.attention_variants import for_queries
from qcompile.codegen.gpu.compile import triton_version
from qcompile.codegen.gpu.gemm import tiles
from qcompile.codegen.gpu.gemm.pack import GPU_PACKING, pack_gpu
from qcompile.codegen.gpu.kv_pages import GpuKV
from qcompile.codegen.gpu.plan import make_plan
from qcompile.codegen.gpu.rows import MAX_WIDTH, RowSpec, in_blocks
from qcompile.codegen.lower import lower
from qcompile.codegen.packing import WeightTable
from qcompile.codegen.program import Program
from qcompile.errors import UnsupportedError
from qcompile.formats.activations import activation_format
from qcompile.formats.symmetric import W8_SYM_CHANNEL
from qcompile.passes.base import run_passes
from qcompile.passes.schedule import configure
from qcompile.targets import TARGETS
from tests.support.cases import first
from tests.support.compiled import Record, sizes_of_sums
from tests.support.graphs import decoder, latent, step_inputs, tied
from tests.support.interpreted import interpreted, needs_triton
from tests.support.lowering import gpu_program
from tests.support.tiny import Chunk

RECIPES = {
    # A small difference (bf16 queries, weights of values, gates) may put a code on the other side of a rounding edge:
    # worth 1/255 of int8's range, 1/15 of a 4-bit key's.
    "qserve": 0.04,
    "qserve-channel": 0.04,
    "w4a8": 0.03,
    "w8a8": 0.03,  # with 8-bit keys and values, and biases
    "nested": 0.03,
    "mxfp4": 0.03,  # activations in groups of 128
    "mixllm": 0.03,
    "w4a4-g128": 0.2,  # an online Hadamard; a code of 4 bits that falls the other way is worth a seventh, as on a CPU
    "w4a4-g128 int8": 0.03,  # the same kernels with 8-bit activations
    "w4a4-g128 late norms": 0.03,  # and the Hadamard in front of all linears
    "w4a16": 0.02,  # scales and products rounded to bf16
    "bf16": 0.02,
    "bf16 capped": 0.02,  # logits that come of more than a linear, and an activation that takes a weight
}
SHAPE: dict[str, Any] = {"vocab": 70, "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 256}


def lowered(recipe: str, **options: Any) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """The last graph of a small decoder, its program, and its packed weights; `text` [samples, tokens] calibrates."""
    passes, text = options.pop("passes", {}), options.pop("text", None)
    made = decoder(**{**SHAPE, "layers": 1, **options})
    made.calibration = None if text is None else Calibration(text)
    return gpu_program(made, recipe, passes)


def interpret_recipes(*names: str, most: int = 2) -> None:
    """Prefill and decode of a text, and for the first recipe of `most`, against the graph's own reference; in a process
    that has TRITON_INTERPRET set."""
    from tests.support.gpu_interpreter import Interpreter

    for texts, name in zip((most, *[1] * len(names)), names, strict=False):
        options: dict[str, dict[str, Any]] = {
            "w8a8": {"bias": True, "act": "mish", "passes": {"cache.format": "kv8"}},
            "w4a4-g128 int8": {"passes": {"assign_precision.activation": "int8_g128"}, "act": "elu"},
            "w4a4-g128 late norms": {
                "passes": {"assign_precision.activation": "int8_g128"},
                "late_norms": True,
                "act": "gelu_tanh",
            },
            "w4a8": {"act": "gelu_quick"},
            "mixllm": {"act": "gelu"},
            "w4a16": {"act": "gelu_tanh"},
            "bf16 capped": {"capped": True, "vocab": 96, "act": "xielu"},
        }
        more = options.get(name, {})
        graph, program, blobs = lowered(name.split()[0], **more)
        machine = Interpreter(program, make_plan(program, TARGETS["h200"], split=64, inline_asm=False), blobs)
        ids = torch.randint(0, SHAPE["vocab"], (texts, 20), generator=torch.Generator().manual_seed(1))
        inputs = step_inputs(ids, None, graph)
        want = graph.run(*inputs)[0]
        pages = inputs[3].tolist()
        got, best = machine.step([Chunk(ids[s].tolist(), 0, pages[s]) for s in range(texts)])
        error = ((got.double() - want).norm() / want.norm()).item()
        assert error < RECIPES[name], (name, error)
        assert torch.equal(best.long(), got.argmax(-1))
        again = Interpreter(program, machine.plan, blobs)
        for start, end in ((0, 17), (17, 18), (18, 20)):  # chunks of both attention classes
            chunks = [Chunk(ids[s, start:end].tolist(), start, pages[s]) for s in range(texts)]
            part, _ = again.step(chunks)
        error = ((part[-1] - got[-1]).norm() / got[-1].norm()).item()
        assert error < 1e-3, (name, error)


def interpret_narrow_values(*names: str) -> None:
    """Queries and keys out of normalized columns of one value, heads of 96 features, values of 64."""
    from tests.support.gpu_interpreter import Interpreter

    for name in names:
        made = latent(vocab=64, hidden=128, heads=2, plain=64, turned=32, narrow=64, rank=96)
        graph, program, blobs = gpu_program(made, name, {})
        machine = Interpreter(program, make_plan(program, TARGETS["h200"], split=64, inline_asm=False), blobs)
        ids = torch.randint(0, 64, (1, 9), generator=torch.Generator().manual_seed(1))
        inputs = step_inputs(ids, None, graph)
        want = graph.run(*inputs)[0]
        got, _ = machine.step([Chunk(ids[0].tolist(), 0, inputs[3].tolist()[0])])
        error = ((got.double() - want).norm() / want.norm()).item()
        assert error < RECIPES[name], (name, error)


@pytest.mark.parametrize("recipe", first(("qserve",), ("qserve", "bf16")))
def test_narrow_values_interpreted(recipe: str) -> None:
    interpreted(__name__, f"interpret_narrow_values({recipe!r})")


def interpret_odd_inputs(*recipes: str) -> None:
    """Inputs that are no whole blocks of a packing, nor whole groups: rows of activations are filled up with zeros."""
    SHAPE.update(hidden=224, heads=3, kv_heads=1, ffn=352)
    interpret_recipes(*recipes, most=1)


def test_filled_rows_meet_nothing_that_is_written() -> None:
    """Those of one place are alike and live one after the other; the model's plan has none where inputs are whole."""
    assert all(b.pad == PAD for b in lowered("qserve")[1].buffers)
    program = lowered("qserve", hidden=224, ffn=352, layers=3)[1]
    filled = [b for b in program.buffers if b.pad != PAD]
    assert {(b.width, b.stride) for b in filled} == {(224, 256), (352, 512)}
    others = [b.offset + b.row_bytes for b in program.buffers if b.pad == PAD and b.rows == "tokens"]
    assert min(b.offset for b in filled if b.rows == "tokens") >= max(others)
    places = {(b.offset, b.width) for b in filled if b.rows == "tokens"}
    assert len(places) == 2 and len({offset for offset, _ in places}) == 2
    uses = [{b.name for b in filled if b.name in (*call.reads, *call.writes)} for call in program.calls]
    read = [name for names in uses for name in names]
    assert all(read[i] == read[i + 1] for i in range(0, len(read), 2))  # written, then read, before the next is written


def interpret_scales_of_filled_rows() -> None:
    """Scales of three groups in rows that have room for four, by one program a row and by one a group."""
    from qcompile.codegen.gpu.compile import load

    x = torch.randn(2, 384, generator=torch.Generator().manual_seed(2))
    codes, scales, *_ = activation_format("int8_g128").quantize(x, 384)
    for blocks in (1, 3):
        spec = RowSpec(384 // blocks, 384, 512, out="q8", group=128, row_scales=4, blocks=blocks)
        result, own = torch.zeros(2, 512, dtype=torch.int8), torch.zeros(2, 4)
        load(spec.kernel(80))[2, blocks, 1](x, result, own)
        assert torch.equal(result[:, :384], codes) and not result[:, 384:].any()
        assert torch.equal(own[:, :3], scales) and not own[:, 3:].any()


def test_scales_of_filled_rows_interpreted() -> None:
    interpreted(__name__, "interpret_scales_of_filled_rows()")


def test_only_positions_may_lie_behind_their_table() -> None:
    """Tokens are checked before they come here."""
    program = lowered("bf16")[1]
    for index, bounded in (("tokens", False), ("positions", True)):
        calls = [replace(call, index=index) if isinstance(call, Embed) else call for call in program.calls]
        sources = [
            kernel.source for kernel in make_plan(replace(program, calls=calls), TARGETS["h200"]).kernels.values()
        ]
        assert any(f"tl.minimum(source, {SHAPE['vocab'] - 1})" in source for source in sources) == bounded


def interpret_xielu() -> None:
    """A few roundings of numbers of x's size, however small it is; the same in blocks of a row."""
    from qcompile.codegen.gpu.compile import load

    sizes = torch.logspace(-8, 1.5, 88)
    x = torch.stack((-sizes, torch.randn(88, generator=torch.Generator().manual_seed(2))))
    x[1, :6] = torch.tensor([0, -0.0, -1e-6, -0.2499, -0.25, -90])
    curve, result = torch.tensor([0.8, 1.3, 0.5, -1e-6]), torch.zeros(2, 2, 88)
    wanted = ops.xielu(x.double(), curve)
    for blocks in (1, 2):
        load(RowSpec(88 // blocks, 88, 88, unary="xielu", blocks=blocks).kernel(80))[2, blocks, 1](
            x, result[blocks - 1], curve
        )
    assert ((result[0] - wanted).abs() <= 3e-7 * (x.abs() + wanted.abs())).all() and torch.equal(result[0], result[1])


def test_xielu_interpreted() -> None:
    interpreted(__name__, "interpret_xielu()")


def interpret_softplus() -> None:
    """A few roundings of the result, however small it is."""
    from qcompile.codegen.gpu.compile import load

    sizes = torch.logspace(-6, 1.6, 88)
    x, result = torch.stack((-sizes, sizes)), torch.zeros(2, 88)
    wanted = ops.UNARY["softplus"](x.double(), threshold=100)
    load(RowSpec(88, 88, 88, unary="softplus").kernel(80))[2, 1, 1](x, result)
    assert ((result - wanted).abs() <= 1e-6 * wanted).all()  # e^x itself is good to about 5e-7 at -40


def test_softplus_interpreted() -> None:
    interpreted(__name__, "interpret_softplus()")


@pytest.mark.parametrize("target", ["a100", "l40s", "h200", "b200"])
def test_softplus_compiles(target: str, compiled: Record) -> None:
    capability = TARGETS[target].capability
    compiled(RowSpec(88, 88, 88, unary="softplus").kernel(capability), capability)


@pytest.mark.parametrize("target", ["a100", "l40s", "h200", "b200"])
def test_xielu_compiles(target: str, compiled: Record) -> None:
    machine = TARGETS[target]
    plan = make_plan(lowered("w4a16", act="xielu")[1], machine)
    own = {label: kernel for label, kernel in plan.kernels.items() if "xielu" in label}
    assert len(own) == 1 and all("curve" in [a.name for a in kernel.arguments] for kernel in own.values())
    assert all(compiled(kernel, machine.capability).spill_bytes == 0 for kernel in own.values())


ODD = ("qserve", "w8a8", "mixllm", "mxfp4", "w4a16")
OTHERS = ("qserve-channel", "nested", "bf16")


@pytest.mark.parametrize(
    "recipes",
    [ODD, pytest.param(OTHERS, marks=pytest.mark.exhaustive)],
    ids=["some", "others"],
)
def test_odd_inputs_interpreted(recipes: tuple[str, ...]) -> None:
    interpreted(__name__, f"interpret_odd_inputs(*{recipes})")


STEPS = ("qserve", "w4a8", "w8a8", "nested", "mxfp4", "mixllm", "w4a4-g128", "w4a16", "bf16 capped")


@pytest.mark.parametrize(
    "names", [STEPS, pytest.param(tuple(RECIPES.keys() - STEPS), marks=pytest.mark.exhaustive)], ids=["some", "others"]
)
def test_a_step_interpreted(names: tuple[str, ...]) -> None:
    interpreted(__name__, f"interpret_recipes(*{names})")


def interpret_wide_logits() -> None:
    """Logits that are more than a row kernel takes at once are capped in blocks."""
    from qcompile.codegen.gpu import row_launches

    row_launches.MAX_WIDTH = 64
    interpret_recipes("bf16 capped")


def test_wide_logits_interpreted() -> None:
    assert in_blocks(256000, MAX_WIDTH) == {"width": 2048, "blocks": 125}
    assert in_blocks(MAX_WIDTH, MAX_WIDTH) == {"width": MAX_WIDTH} and in_blocks(50257) == {"width": 50257}
    interpreted(__name__, "interpret_wide_logits()")


def interpret_nested_draft() -> None:
    """The draft of nested weights reads the upper plane of the verifying path's, and is the 4-bit model."""
    from tests.support.gpu_interpreter import Interpreter

    settings = recipes.get_recipe("nested").settings()
    draft = recipes.get_recipe("nested").drafts[0]
    graphs, _ = run_passes(decoder(**{**SHAPE, "layers": 1}), configure(settings, {})[1:])
    quantized = [graph for graph in graphs if graph.stage == "quantize"][-1]
    passes = configure(settings | draft.settings("nested"), {})
    own = passes[[p.name for p in passes].index("speculate") :]
    drafted, _ = run_passes(quantized, own)
    table = WeightTable(GPU_PACKING)
    verify, program = lower(graphs[-1], table), lower(drafted[-1], table)
    read = {name for c in program.calls if c.kernel == "gemm" for name in c.weights.values()}
    assert read == {n for c in verify.calls if c.kernel == "gemm" for n in c.weights.values() if not n.endswith(".low")}
    blobs = {name: blob for w in table.weights for (name, _), blob in zip(w.blobs, w.produce(), strict=True)}
    machine = Interpreter(program, make_plan(program, TARGETS["h200"], split=64, inline_asm=False), blobs)
    ids = torch.randint(0, SHAPE["vocab"], (1, 20), generator=torch.Generator().manual_seed(1))
    inputs = step_inputs(ids, None, drafted[-1])
    want = drafted[-1].run(*inputs)[0]
    got, _ = machine.step([Chunk(ids[0].tolist(), 0, inputs[3].tolist()[0])])
    error = ((got.double() - want).norm() / want.norm()).item()
    assert error < RECIPES["nested"], error


def test_the_draft_of_nested_weights_interpreted() -> None:
    interpreted(__name__, "interpret_nested_draft()")


def interpret_pick() -> None:
    """The largest of each row: the lowest index of several, -1 where it is not finite or any is no number."""
    from qcompile.codegen.gpu.compile import load
    from qcompile.codegen.gpu.rows import ARGMAX_PART, argmax_kernel

    vocab = ARGMAX_PART + 40
    logits = torch.randn(6, vocab)
    logits[1, [5, ARGMAX_PART + 3]] = 9.0
    logits[2, ARGMAX_PART + 7] = math.nan
    logits[3, 8] = math.inf
    logits[4] = -math.inf
    logits[5, :-1] = -math.inf
    given = {"logits": logits, "part_value": torch.zeros(6, 2), "part_index": torch.zeros(6, 2, dtype=torch.int32)}
    given["argmax"] = torch.full((6,), -9, dtype=torch.int32)
    for final, grid in ((False, (6, 2)), (True, (6, 1))):
        kernel = argmax_kernel(vocab, 2, final, 80)
        load(kernel)[*grid, 1](*(given[a.name] for a in kernel.arguments))
    assert given["argmax"].tolist() == [logits[0].argmax().item(), 5, -1, -1, -1, vocab - 1]


def test_the_largest_logit_interpreted() -> None:
    interpreted(__name__, "interpret_pick()")


def interpret_feedback() -> None:
    """Two greedy steps: what was largest becomes the next token, one position on."""
    from tests.support.gpu_interpreter import Interpreter

    _, program, blobs = lowered("qserve")
    machine = Interpreter(program, make_plan(program, TARGETS["h200"], split=64, inline_asm=False), blobs)
    _, first = machine.step([Chunk([5], 0, [0]), Chunk([7], 0, [1])])
    machine.feed_back(2)
    inputs = machine.inputs
    assert inputs["token_ids"].tolist() == first.tolist() == inputs["decoded"].tolist()[:2]
    assert inputs["positions"].tolist() == [1, 1] and inputs["counter"].tolist() == [1]
    # Behind logits that are not finite there is no token; nothing outside of the embeddings is read.
    assert torch.equal(machine.step([Chunk([-1], 0, [0])])[0], machine.step([Chunk([0], 0, [0])])[0])


def test_feedback_interpreted() -> None:
    interpreted(__name__, "interpret_feedback()")


def test_a_script_without_a_guard_compiles_in_several_processes(tmp_path: Path) -> None:
    needs_triton()
    script = tmp_path / "script.py"
    script.write_text(
        "from qcompile.codegen.gpu.attention_merge import MergeSpec\n"
        "from qcompile.codegen.gpu.kv_pages import GpuKV\n"
        "from qcompile.codegen.gpu.compile import compile_all\n"
        "kernels = [MergeSpec(GpuKV('kv4', 1, 32), 2, level).kernel(80) for level in (1, 2)]\n"
        "print(*sorted(label in compile_all(kernels, 80, 2) for label in (kernel.label for kernel in kernels)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert done.stdout == "True True\n", done.stderr


@pytest.mark.parametrize(
    ("target", "recipe"),
    [(target, "qserve") for target in ("a100", "h200", "b200")]
    + [("h200", "mixllm"), ("h200", "mxfp4"), ("a100", "w4a4-g128"), ("h200", "w4a4-g128")],
)
def test_decode_kernels_compile_without_spills(target: str, recipe: str, compiled: Record) -> None:
    machine = TARGETS[target]
    plan = make_plan(lowered(recipe)[1], machine)
    # Where rows are taken alone: the kernels for one, for most of those, and for a few more.
    first = []
    for launch in plan.launches:
        alone = [variant.kernel for variant in launch.variants if "gemv" in variant.kernel]
        first += [*alone[:1], *alone[-1:], launch.variants[len(alone)].kernel]
    labels = dict.fromkeys(first)
    matrix = set()
    for label in labels:
        built = compiled(plan.kernels[label], machine.capability)
        assert built.spill_bytes == 0 and built.shared_bytes <= machine.shared_bytes, label
        if "attention" in label or "gemm" in label:
            matrix.add(label.split("_")[0])
            assert any("bf16" in name or "s8" in name or "kind::" in name for name in built.matrix), built.matrix
    assert matrix == {"attention", "gemm"}


@pytest.mark.parametrize("format", ["kv4", "kv8", "kv16", "kv_hier", "kv_hier4"])
def test_attention_of_several_positions_compiles_without_spills(format: str, compiled: Record) -> None:
    kv = GpuKV(format, 8, 128)
    base = AttentionSpec(kv, 32, 4096, 0.1, split=tiles.split_positions(kv))
    base = tiles.decode_attention(base, SplitLimits(kv, TARGETS["h200"].multiprocessors))["coarse"]
    assert for_queries(base, 1).rows == 8 and for_queries(base, 7).rows == 16  # two programs
    most = for_queries(base, 5)
    assert (most.rows, most.warps) == (24, 2)
    # By the Triton that it was measured with all fits; others hand out registers in their own way.
    assert compiled(most.kernel(90), 90).spill_bytes <= (0 if triton_version().startswith("3.6.") else 256)


def test_rows_are_quantized_in_parts_where_the_kernel_before_stored_their_amax() -> None:
    of_heads = (1, "decode_tokens")
    cases: list[tuple[str, int, str, set[tuple[int, str]]]] = [
        ("qserve", 256, "l40s", {(3, "tokens"), of_heads}),
        # Up to 8 and 16 rows warp-specialized kernels store it too; with this number of weights there is no split-K.
        ("qserve", 256, "h200", {(5, "tokens"), of_heads}),
        ("qserve", 10240, "h200", {(5, "tokens"), of_heads}),
        ("qserve-channel", 256, "h200", set()),
        ("nested", 256, "h200", set()),
    ]
    for recipe, ffn, target, known in cases:
        plan = make_plan(lowered(recipe, ffn=ffn)[1], TARGETS[target])
        stored: list[tuple[int, int, str]] = []  # most rows, amax values of a row, and the launch's count
        seen = set()
        for launch in plan.launches:
            of_amax = [variant for variant in launch.variants if "amax" in variant.args]
            writers = [variant for variant in of_amax if not variant.kernel.startswith("rows")]
            if writers and "gemv" in writers[0].kernel:
                sources = [plan.kernels[variant.kernel].source for variant in writers]
                stored = [
                    (v.most, _amax_parts_of(source), launch.by) for v, source in zip(writers, sources, strict=True)
                ]
            elif writers:
                assert all("merge" in variant.kernel for variant in writers)
                stored = [(16, 2 * SHAPE["heads"], "decode_tokens")]
            elif of_amax:
                assert [variant.most for variant in launch.variants] == [*(most for most, _, _ in stored), 0]
                for variant, (_, count, by) in zip(of_amax, stored, strict=True):
                    assert f"row * {count} + part_index" in plan.kernels[variant.kernel].source and launch.by == by
                seen |= {(len(stored), by) for _, _, by in stored}
        # A prefill's attention stores no amax: another launch quantizes its result.
        assert seen == known, recipe


def _amax_parts_of(source: str) -> int:
    """How many amax values of a row a GEMM kernel stores."""
    result = re.search(r"amax \+ (?:\(token \+ 0\)|rm) \* (\d+) \+ pn", source)
    assert result
    return int(result[1])


def test_programs_for_many_rows_have_all_rows_of_mixed_weights() -> None:
    plan = make_plan(lowered("mixllm", ffn=512)[1], TARGETS["h200"])
    odd = 0
    for launch in plan.launches:
        for variant in launch.variants:
            source = plan.kernels[variant.kernel].source
            if cut := re.search(r"^N = tl\.constexpr\((\d+)\)\n.*\n.*\nROWS = tl\.constexpr\((\d+)\)", source, re.M):
                n, rows = int(cut[1]), int(cut[2])
                odd += n % rows > 0
                # Persistent programs loop over all tiles.
                stored = re.search(r"^N_TILES = tl\.constexpr\((\d+)\)", source, re.M)
                choose = (
                    int(stored[1]) if stored and variant.grid[0] == plan.target.multiprocessors else variant.grid[1]
                )
                assert choose == -(-n // rows), launch.name
    assert odd  # some programs lack the rows of some of their warps


def test_few_rows_are_quantized_in_parts_of_whole_groups() -> None:
    plan = make_plan(lowered("nested", ffn=1280)[1], TARGETS["h200"])
    grids = {
        tuple((variant.grid[1], variant.most) for variant in launch.variants)
        for launch in plan.launches
        if launch.variants[0].kernel.startswith("rows_q8")
    }
    assert grids == {((1, 0),), ((5, 16), (1, 0))}  # 256 columns are one part, 1280 are five of 256


@pytest.mark.parametrize("recipe", ["qserve", "w4a4", "quantspec"])
def test_what_a_call_takes_is_what_its_launches_take(recipe: str) -> None:
    program = lowered(recipe)[1]
    timed = {launch.name: (1.0, 1) for launch in make_plan(program, TARGETS["h200"]).launches}
    seconds = [seconds_of(call.name, timed) for call in program.calls if not _only_rounds(program, call)]
    assert min(seconds) >= 1 and sum(seconds) == len(timed)


def _only_rounds(program: Program, call: Any) -> bool:
    """Whether the launches of the call before write its result."""
    return isinstance(call, QuantizeRows) and program.buffer(call.out).dtype == "bf16"


@pytest.mark.parametrize("format", ["kv4", "kv_hier4"])
def test_attention_sums_features_alike_in_all_programs(format: str, compiled: Record) -> None:
    """Which threads sum what of queries of 128 features decides a row's last bits."""
    shape: dict[str, Any] = {"hidden": 128, "heads": 4, "kv_heads": 1, "head_dim": 128}
    passes = {"cache.format": format}
    if format == "kv4":  # with sums of the features of queries and the keys' mean
        shape |= {"softcap": 1.0, "text": torch.tensor([[3, 1, 4, 1, 5]])}
        passes |= {"center_keys.enabled": "true"}
    plan = make_plan(lowered("bf16", passes=passes, **shape)[1], TARGETS["h200"])
    kernels = {label: kernel for label, kernel in plan.kernels.items() if label.startswith("attention")}
    result = {label: set(compiled.find(sizes_of_sums, kernel, 90)) for label, kernel in kernels.items()}
    # Neighbours are added, and of two there is one order.
    assert len(result) >= 3 and all(sums <= {2} for sums in result.values()), result
    rows = "the B operands", "warp_specialize("  # there sums are of axes of 2 by themselves
    few = [sums for label, sums in result.items() if not any(part in kernels[label].source for part in rows)]
    assert len(few) < len(result) or format == "kv_hier4"
    assert all(2 in sums for sums in few) == (format == "kv4")


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("f32", {}, "GPU kernels have no kv32 cache"),
        ("f32", {"cache.format": "kv16"}, r"node gemm\w*: a linear in f32 that ends in"),
        ("qserve", {"assign_precision.activation": "int8_g128"}, r"node gemm\w*: .* int8_g128 have no GPU kernels"),
    ],
)
def test_what_has_no_gpu_kernel_is_refused_by_name(recipe: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        make_plan(lowered(recipe, passes=options)[1], TARGETS["h200"])


def interpret_rounded_rows() -> None:
    """Rows of a table packed as a GEMM's weight; neither rows nor columns are whole blocks."""
    from qcompile.codegen.gpu.compile import load

    parts = W8_SYM_CHANNEL.quantize(torch.randn(70, 200, generator=torch.Generator().manual_seed(2)))
    packed, ids = pack_gpu(parts, "w8_sym_channel"), torch.tensor([0, 69, 33, 32, -1], dtype=torch.int32)
    spec = RowSpec(200, 256, 200, "i8", indexed=True, factor=1.5)
    result = torch.zeros(5, 200)
    load(spec.kernel(80))[5, 1, 1](packed["w"], result, ids, packed["w_scale"])
    assert torch.equal(result, (W8_SYM_CHANNEL.dequantize(parts, 200) * 1.5)[ids.clamp(min=0).long()])


def test_rounded_rows_interpreted() -> None:
    interpreted(__name__, "interpret_rounded_rows()")


def test_rounded_rows_compile(compiled: Record) -> None:
    """A step reads them from the weight that the head multiplies by."""
    graph = tied(decoder(**SHAPE, layers=1))
    program = gpu_program(graph, "w8a8", {"assign_precision.embedding": "int8"})[1]
    embed = next(call for call in program.calls if isinstance(call, Embed))
    assert embed.table in {name for call in program.calls if isinstance(call, Gemm) for name in call.weights.values()}
    plan = make_plan(program, TARGETS["h200"])
    (kernel,) = (kernel for kernel in plan.kernels.values() if any(a.name == "row_scale" for a in kernel.arguments))
    assert compiled(kernel, 90).spill_bytes == 0
