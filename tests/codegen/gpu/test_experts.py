"""Mixtures of experts as GPU kernels, without a GPU: interpreted against their references, and compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from qcompile import ops
from qcompile.codegen.calls import Combine, Elementwise, ExpertGemm, Route
from qcompile.codegen.gpu import compile as gpu_compile
from qcompile.codegen.gpu.gemm import spec as gemm
from qcompile.codegen.gpu.gemm import tiles
from qcompile.codegen.gpu.gemm.tile import Tile
from qcompile.codegen.gpu.kernel import Kernel
from qcompile.codegen.gpu.operands import grid_size
from qcompile.codegen.gpu.plan import make_plan
from qcompile.codegen.gpu.router import CombineSpec, RouteSpec, RouteStep, ScoresSpec
from qcompile.codegen.gpu.sorted_slots import BlocksSpec
from qcompile.codegen.program import Program
from qcompile.errors import UnsupportedError
from qcompile.passes.base import apply
from qcompile.passes.merge import Merge
from qcompile.targets import TARGETS
from tests.codegen.cpu.test_experts import decoder
from tests.support.cases import first
from tests.support.compiled import Record
from tests.support.graphs import step_inputs
from tests.support.interpreted import interpreted
from tests.support.lowering import gpu_program
from tests.support.tiny import Chunk

RECIPES = {
    # The median row's error: where scores are nearly equal, a token may get another expert. Values are rounded to
    # 8 bits, or to bf16 where weights meet those.
    "qserve": 0.03,
    "nested gated": 0.03,
    "w4a16 gated": 0.02,
    "qserve limited": 0.03,
    "mixllm": 0.03,
    "qserve top1": 0.03,
    "w4a16 top1": 0.02,
}


def lowered(recipe: str, **shape: int) -> tuple[Any, Program, dict[str, torch.Tensor]]:
    """The last graph of a decoder with experts, its program, and its packed weights."""
    name, *gates = recipe.split()
    options: dict[str, Any] = {"experts": 4, "hidden": 256, "inner": 64, "vocab": 96} | shape
    options |= {"slots": 1} if gates == ["top1"] else {}
    made = decoder(**options, biased=False, clamped=not gates, limit=0.5 if gates == ["limited"] else None)
    return gpu_program(made, name)


def interpret_steps(*names: str) -> None:
    """A step against the graph's own reference, and the same bits whatever shares it."""
    from tests.support.gpu_interpreter import Interpreter

    for name in names:
        graph, program, blobs = lowered(name)
        plan = make_plan(program, TARGETS["h200"], split=64, inline_asm=False)
        machine = Interpreter(program, plan, blobs)
        ids = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(1))
        inputs = step_inputs(ids, None, graph)
        want, pages = graph.run(*inputs)[0], inputs[3].tolist()
        got, _ = machine.step([Chunk(ids[s].tolist(), 0, pages[s]) for s in range(2)])  # 18 rows
        errors = (got.double() - want).norm(dim=-1) / want.norm(dim=-1)
        assert errors.median() < RECIPES[name], (name, errors)
        again = Interpreter(program, plan, blobs)
        for start, end in ((0, 6), (6, 7), (7, 9)):  # blocks of slots, and single ones
            part, _ = again.step([Chunk(ids[0, start:end].tolist(), start, pages[0])])
            # Here sums of products of floats depend on how many there are; on a GPU none differs (gpu_quality.py).
            near = 1e-5 if name in ("w4a16 gated", "w4a16 top1") else 0.0
            assert torch.allclose(part, got[start:end], rtol=0, atol=near), name


@pytest.mark.parametrize("recipe", first(("qserve limited", "nested gated", "w4a16 top1"), RECIPES))
def test_a_step_with_experts_interpreted(recipe: str) -> None:
    interpreted(__name__, f"interpret_steps({recipe!r})")


def run(kernel: Kernel, grid: tuple[int, int, int], *arguments: Any) -> None:
    gpu_compile.load(kernel)[grid](*arguments)


def interpret_blocks() -> None:
    """Slots in order by expert, in blocks; those behind the last say so; twice, so that nothing is left over."""
    torch.manual_seed(0)
    every = ((5, 3, 16, 16), (128, 8, 16, 64), (4, 2, 64, 512), (8, 1, 16, 16), (3, 2, 64, 8192), (11, 10, 64, 1024))
    for experts, slots, tokens, most in every:
        spec = BlocksSpec(experts, slots, 32, tokens, most)
        order = torch.full((most * slots,), -7, dtype=torch.int32)
        blocks = torch.full((spec.list, 3), -7, dtype=torch.int32)
        for rows in (1, 3, 17, min(most, 4100)):
            if rows > most:
                continue
            index = torch.full((rows, 32), 99, dtype=torch.int32)
            few = min(experts, 3) if rows == 17 else experts  # many slots of some experts, none of others
            index[:, :slots] = torch.rand(rows, max(few, slots)).argsort(1)[:, :slots]
            made = {"index": index.flatten(), "order": order, "blocks": blocks.flatten(), "M": rows}
            sizes = {"counts": 16 * spec.chunks, "before": 16 * spec.chunks, "totals": 16}
            made |= {name: torch.full((size,), -7, dtype=torch.int32) for name, size in sizes.items()}
            kernels = spec.chunk_kernels(80) if spec.in_chunks else ((spec.kernel(80), (experts, 1, 1)),)
            for kernel, grid_sizes in kernels:
                grid = [grid_size(size, {"tokens": rows}) for size in grid_sizes]
                run(kernel, (grid[0], 1, 1), *(made[argument.name] for argument in kernel.arguments))
            chosen = index[:, :slots].flatten()
            want = torch.sort(chosen, stable=True).indices
            assert torch.equal(order[: rows * slots].long(), want)
            grid = grid_size(spec.grid, {"tokens": rows})
            listed = blocks[:grid].tolist()
            result = [block for block in listed if block[0] >= 0]
            assert all(block[0] == -1 for block in listed[len(result) :]) and grid <= spec.list
            assert [i for _, begin, end in result for i in range(begin, end)] == list(range(rows * slots))
            for expert, begin, end in result:
                assert 0 < end - begin <= tokens and set(chosen[want[begin:end]].tolist()) == {expert}


def test_slots_in_order_interpreted() -> None:
    interpreted(__name__, "interpret_blocks()")


def interpret_routes() -> None:
    """A router's steps, all in one kernel and one by one, with ties, against the operators; experts 24 of 3 groups."""
    torch.manual_seed(0)
    rows, experts, k = 17, 24, 3
    x = torch.randn(rows, 32)
    x[0, :experts] = 1.0  # all alike: the first ones
    x[1, 3] = x[1, 9] = 7.0
    x[2, :experts] = float("nan")  # some expert is chosen still
    scores = torch.softmax(x[:, :experts], -1)
    limited = ops.op("limit_groups")(scores, 3, 2, 2)
    index = ops.op("top_k")(limited, k)
    picked = ops.op("pick")(scores, index)
    want = ops.op("normalize")(picked, 1e-3, 0.2)
    steps = (
        RouteStep("softmax", experts, experts, x_stride=32),
        RouteStep("limit_groups", experts, experts, groups=3, keep=2, count=2, x=0),
        RouteStep("top_k", experts, k, x=1, out_stride=8),
        RouteStep("pick", experts, k, x=0, index=2),
        RouteStep("normalize", k, k, eps=1e-3, floor=0.2, x=3, out_stride=4),
    )
    out2, out4 = torch.full((rows, 8), -7, dtype=torch.int32), torch.full((rows, 4), -7.0)
    run(RouteSpec(steps).kernel(80), (rows, 1, 1), x, out2, out4)
    numbers = [row for row in range(rows) if row != 2]
    assert torch.equal(out2[numbers, :k].long(), index[numbers]) and (out2[:, k:] == -7).all()
    assert len(set(out2[2, :k].tolist())) == k and out2[2, :k].max() < experts
    assert (out4[numbers, :k] - want[numbers]).abs().max() < 1e-6 and (out4[:, k:] == -7).all()
    table, plain = torch.randn(experts), torch.randn(rows, experts)
    plain[0] = -plain[0].abs()
    plain[1] = plain[2, 5:] = 0.0
    chosen = ops.op("top_k")(plain, k)
    mixed = (
        RouteStep("top_k", experts, k, x_stride=experts),
        RouteStep("near_share", experts, k, tolerance=0.7, x_stride=experts, index=0, out_stride=4),
        RouteStep("pick", experts, k, index=0, out_stride=4),  # of one table for all rows
        RouteStep("bound_choice", 9, k, index=0, out_stride=4),
    )
    out, other = torch.full((rows, 4), -7.0), torch.full((rows, 4), -7.0)
    bounded = torch.full((rows, 4), -7, dtype=torch.int32)
    run(RouteSpec(mixed).kernel(80), (rows, 1, 1), plain, plain, out, table, other, bounded)
    assert torch.equal(bounded[:, :k].long(), chosen.clamp(max=8)) and (bounded[:, k:] == -7).all()
    share = ops.op("near_share")(plain, chosen, 0.7)
    assert (out[:, :k] - share).abs().max() < 1e-6 and (out[:, k:] == -7).all() and len(set(share[:, 0].tolist())) > 9
    assert torch.equal(other[:, :k], table[chosen])
    x[3, :experts] = -x[3, :experts].abs()
    x[4, :3] = torch.tensor([-0.0, 0.0, -0.0])
    x[4, 3:experts] = -1.0
    x[5, :experts] = float("-inf")
    best = RouteSpec((RouteStep("top_k", experts, k, x_stride=32, out_stride=8),))
    given = x.clone()
    given[6, 5] = float("nan")
    run(best.kernel(80), (rows, 1, 1), given, out2)
    known = given.nan_to_num(-1e30, neginf=float("-inf"))[:, :experts]  # what is no number comes last
    assert torch.equal(out2[numbers, :k].long(), ops.top_k(known[numbers], k))
    run(RouteSpec(steps).kernel(80), (rows, 1, 1), x, out2, out4)
    index = out2[:, :k].long()
    alone = RouteSpec((RouteStep("pick", experts, k, x_stride=32, index_stride=8, out_stride=4),))
    out = torch.zeros(rows, 4)
    run(alone.kernel(80), (rows, 1, 1), x, out2, out)
    assert torch.equal(out[numbers, :k], x.gather(1, index)[numbers])


def test_routers_interpreted() -> None:
    interpreted(__name__, "interpret_routes()")


def interpret_scores_and_sums() -> None:
    """Odd sizes, and a row's bits whatever program has it."""
    torch.manual_seed(0)
    n, k = 13, 600
    w, bias = torch.randn(n, k), torch.randn(n)
    for rows in (1, 3, 17):
        x = torch.randn(rows, 640)
        outs = []
        for tokens, rows_first in ((1, False), (4, False), (4, True)):
            spec = ScoresSpec(n, k, 640, 32, True, tokens, rows_first)
            out = torch.full((rows, 32), float("nan"))
            run(spec.kernel(80), spec.grid(-(-rows // tokens)), x, w, out, bias, rows)
            assert (out[:, :n] - (x[:, :k] @ w.T + bias)).abs().max() < 1e-4 and out[:, n:].isnan().all()
            outs.append(out[:, :n])
        assert all(torch.equal(outs[0], out) for out in outs)
        y, factor = torch.randn(rows, 2112), torch.randn(rows, 32)
        sums = CombineSpec(3, 700, 2112, 704, 32)
        out = torch.full((rows, 704), float("nan"))
        run(sums.kernel(80), (rows, sums.programs, 1), y, out, factor)
        slots = y[:, :2100].view(rows, 3, 700)
        assert (out[:, :700] - (slots * factor[:, :3, None]).sum(1)).abs().max() < 1e-5
        run(replace(sums, score_stride=0).kernel(80), (rows, sums.programs, 1), y, out)
        assert (out[:, :700] - slots.sum(1)).abs().max() < 1e-5 and out[:, 700:].isnan().all()


def test_scores_and_sums_interpreted() -> None:
    interpreted(__name__, "interpret_scores_and_sums()")


@pytest.mark.parametrize("target", ["a100", "l40s", "h200", "b200"])
@pytest.mark.parametrize("recipe", ["qserve", "w4a16"])
def test_kernels_of_experts_compile_without_spills(target: str, recipe: str, compiled: Record) -> None:
    machine = TARGETS[target]
    plan = make_plan(lowered(recipe)[1], machine)
    kinds = ("route", "scores", "combine", "expert_blocks")
    own = [label for label in plan.kernels if label.startswith(kinds) or "decode_8x3" in label or "gemv_e" in label]
    assert len({label.split("_")[0] for label in own}) >= 5
    for label in own:
        built = compiled(plan.kernels[label], machine.capability)
        assert built.spill_bytes == 0 and built.shared_bytes <= machine.shared_bytes, label
        if label.startswith("gemm"):
            assert any("bf16" in name or "s8" in name or "kind::" in name for name in built.matrix), built.matrix


def test_what_experts_have_no_kernel_for_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="node expert_gemm: experts of 40 outputs"):
        make_plan(lowered("qserve", inner=40)[1], TARGETS["h200"])
    with pytest.raises(UnsupportedError, match="groups of 5 scores: GPU kernels take powers of 2"):
        make_plan(lowered("qserve", experts=5)[1], TARGETS["h200"])
    with pytest.raises(UnsupportedError, match="1280 scores"):
        RouteSpec((RouteStep("softmax", 1280, 1280),))
    program = lowered("bf16")[1]
    exact = [replace(c, format="f32", activation="f32") if isinstance(c, ExpertGemm) else c for c in program.calls]
    with pytest.raises(UnsupportedError, match="experts in f32"):
        make_plan(replace(program, calls=tuple(exact)), TARGETS["h200"])
    experts = gemm.Experts(4, 2, False, 128, 32)
    with pytest.raises(UnsupportedError, match="have no kernel for"):
        gemm.KernelSpec("bf16", 256, 512, Tile(16, 64, split_k=2), out="f32", width=64, experts=experts)
    with pytest.raises(UnsupportedError, match="experts of 64 outputs do not divide"):
        gemm.KernelSpec("bf16", 256, 512, Tile(16, 128), out="f32", width=64, experts=experts)
    assert tiles.choose_for_experts("bf16", 96, 512, 16, TARGETS["h200"]).rows == 32


def test_steps_of_a_router_go_apart_where_rows_would_meet() -> None:
    """What one step stores must not lie where another's rows are, which other programs may not have read."""
    program = lowered("qserve")[1]
    names = [launch.name for launch in make_plan(program, TARGETS["h200"]).launches]
    routes = [call for call in program.calls if isinstance(call, Route)]
    first, last = routes[0], routes[4]
    assert (first.kind, last.kind) == ("softmax", "normalize") and first.name in names and last.name not in names
    moved = replace(program.buffer(last.out), offset=program.buffer(first.x).offset)
    buffers = tuple(moved if b.name == last.out else b for b in program.buffers)
    names = [launch.name for launch in make_plan(replace(program, buffers=buffers), TARGETS["h200"]).launches]
    assert first.name in names and last.name in names


@pytest.mark.parametrize("target", ["a100", "h200", "b200"])
@pytest.mark.parametrize(("experts", "slots"), [(512, 10), (128, 8), (16, 1)])
def test_kernels_of_chunks_compile_without_spills(experts: int, slots: int, target: str, compiled: Record) -> None:
    capability = TARGETS[target].capability
    for kernel, _ in BlocksSpec(experts, slots, 32, 64, 8192).chunk_kernels(capability):
        assert compiled(kernel, capability).spill_bytes == 0, kernel.name


def test_inputs_and_orders_are_made_once_while_they_stay() -> None:
    names = [launch.name for launch in make_plan(lowered("qserve")[1], TARGETS["h200"]).launches]
    made = [name for name in names if name.startswith("expert_gemm") and "." in name]
    # The first inputs of a layer are rounded by the norm that makes them.
    first, last = (
        [f"{name}.order{stage}" for stage in (".counts", ".sums", "")] for name in ("expert_gemm", "expert_gemm_3")
    )
    assert made == [*first, "expert_gemm_2.round", "expert_gemm_3.round", *last]


def test_inputs_and_orders_are_made_anew_where_they_changed() -> None:
    program = lowered("qserve")[1]
    first = next(place for place, call in enumerate(program.calls) if isinstance(call, ExpertGemm))
    gemm_call: Any = program.calls[first]
    choice = next(call for call in program.calls if isinstance(call, Route) and call.kind == "top_k")
    touched = Elementwise("touched", "scale", gemm_call.x, gemm_call.x, factor=2.0)
    other = replace(gemm_call, name="other", x=next(c.x for c in program.calls if isinstance(c, Combine)), x_slots=1)
    plan = make_plan(replace(program, calls=(*program.calls[:first], other, *program.calls[first:])), TARGETS["h200"])
    names = [launch.name for launch in plan.launches]
    assert "other.round" in names and "expert_gemm.round" in names  # another's inputs are rounded in between
    for call, made in ((touched, "expert_gemm_1.round"), (replace(choice, name="again"), "expert_gemm_1.order")):
        calls = (*program.calls[: first + 1], call, *program.calls[first + 1 :])
        names = [launch.name for launch in make_plan(replace(program, calls=calls), TARGETS["h200"]).launches]
        assert made in names, made


def test_rows_filled_up_apart_lie_apart() -> None:
    """What is behind a row's inputs stays zero: rows of other lengths must not be written there."""
    program = lowered("qserve gated", hidden=128)[1]
    last = [call for call in program.calls if isinstance(call, ExpertGemm)][-1]
    calls = [replace(call, format="w8_sym_channel") if call is last else call for call in program.calls]
    work = make_plan(replace(program, calls=tuple(calls)), TARGETS["h200"]).scratch
    assert {"expert_x_128_256_int8", "expert_x_128_128_int8"} <= set(work)


def test_gates_of_experts_are_one_gemm() -> None:
    """One gated GEMM where gate and up are of one choice and one input, and nothing comes between."""
    plain, gated = lowered("qserve")[1], lowered("qserve gated")[1]
    of = [[c for c in program.calls if isinstance(c, ExpertGemm)] for program in (plain, gated)]
    assert [c.epilogue for c in of[0]] == ["store"] * 4
    others = [("store", 256, 256)] * 2
    assert [(c.epilogue, c.n, c.rows) for c in of[1]] == [("silu_mul", 64, 128), *others]
    for change in ("", "input", "bias"):
        graph = decoder(clamped=False)
        nodes: Any = {node.name: node for node in graph.nodes}
        mul: Any = graph.calls("mul")[0]
        _, up = mul.args
        if change == "input":
            up.args = (nodes["add"], *up.args[1:])
        elif change == "bias":
            up.args = up.args[:3]
        for node in graph.calls("linear", "expert_linear"):
            node.meta["precision"] = {"weight": "bf16", "activation": "bf16"}
        assert len(apply(Merge(), graph).graph.calls("gated_experts")) == (not change), change


@pytest.mark.parametrize("change", ["", "one", "other", "low", "twice"])
def test_limits_of_gates_are_part_of_the_gemm(change: str) -> None:
    """Where both have the one limit, up on both sides, and nobody else reads what is limited."""
    graph = decoder(clamped=False, limit=0.5)
    mul: Any = graph.calls("mul")[0]
    shift: Any = mul.args[1]
    gate, up, reader = mul.args[0].args[0], shift.args[0], next(iter(mul.users))
    if change == "one":
        shift.args = (up.args[0], 1.0)
    elif change == "other":
        up.args = (up.args[0], -0.5, 0.6)
    elif change == "low":
        gate.args = (gate.args[0], -0.5, 0.5)
    elif change == "twice":
        with graph.fx.inserting_before(reader):
            reader.args = (graph.call("add", mul, gate), *reader.args[1:])
    for node in graph.calls("linear", "expert_linear"):
        node.meta["precision"] = {"weight": "bf16", "activation": "bf16"}
    joined = apply(Merge(), graph).graph.calls("gated_experts")
    assert [node.args[4:] for node in joined] == ([] if change else [("gelu_quick", 24, 0.5, 1.0)])
