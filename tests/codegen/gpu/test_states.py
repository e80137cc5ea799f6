"""GPU kernels of recurrent states: interpreted against their references, bits at any step size, and compiled."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from qcompile import ops
from qcompile.codegen.calls import Call, Elementwise, TakeRows
from qcompile.codegen.gpu import fused
from qcompile.codegen.gpu.fuse import activate_convolutions, fuse
from qcompile.codegen.gpu.plan import make_plan
from qcompile.codegen.gpu.states import FUSED_ROWS, ConvSpec, RecurrenceSpec, log_spec
from qcompile.codegen.state_calls import ConvStep
from qcompile.errors import UnsupportedError
from qcompile.formats.states import LOG_TOKENS, ROUND_TOKENS, ConvState, RecurrenceState, StateFormat
from qcompile.targets import TARGETS
from tests.support.compiled import Record
from tests.support.graphs import recurrent, step_inputs
from tests.support.interpreted import interpreted
from tests.support.lowering import gpu_program
from tests.support.tiny import Chunk

Shape = tuple[int, int, int, int, bool, Any, bool, bool] | tuple[int, int, int, int, bool, Any, bool, bool, StateFormat]
"""Heads, key heads, key size, value size, decay by key, rates, gain, delta; how the state is stored, if not in f32."""

RECURRENCES: dict[str, Shape] = {
    "gated delta": (4, 2, 16, 8, False, "heads", True, True),
    "odd": (3, 3, 5, 7, False, "", False, True),
    "decay by key": (4, 2, 8, 20, True, "", True, True),
    "several tiles": (2, 1, 128, 40, True, "keys", True, False),
    "few registers": (3, 1, 64, 33, False, "heads", False, False),
    "scan": (150, 1, 16, 1, False, "keys", True, False),
    "scan with groups": (6, 2, 4, 1, True, "heads", True, True),
    "scan of numbers": (5, 5, 1, 1, False, "", False, False),
    "scan by head": (6, 3, 4, 1, False, "heads", True, False),
    "bf16": (4, 2, 16, 8, False, "heads", True, True, "bf16"),
    "odd bf16": (3, 3, 5, 7, False, "", False, True, "bf16"),
    "several tiles of bf16": (2, 1, 128, 40, True, "keys", True, False, "bf16"),
    "int8": (4, 2, 16, 8, False, "heads", True, True, "int8"),
    "odd int8": (3, 3, 5, 7, False, "", False, True, "int8"),
    "several tiles of int8": (2, 1, 128, 40, True, "keys", True, False, "int8"),
}
OFFSET, SLOTS = 32, 4
LOG_INPUTS = ("row_sequence", "positions", "state_slots")
CODES = {"bf16": torch.bfloat16, "int8": torch.int8}
"""Numbers of states in fewer bits."""
ROUNDING = 1e-6
"""float32 sums of up to 128 terms in another order."""
FLIPPED = 2e-3
"""One number of 128 with the next code: 2^-8 of it in bf16, 1 / 127 of a column's largest number in int8."""


@dataclass
class Layer:
    """A recurrence with random rates, its kernel, and random operands of a text."""

    spec: RecurrenceSpec
    rates: Tensor | None

    @classmethod
    def of(cls, shape: Shape, gap: int = 3) -> Layer:
        """Of a shape as RECURRENCES has them. Rows of operands and of the result lie `gap` numbers apart."""
        (heads, key_heads, key_dim, value_dim, by_key, rates, gain, delta), stored = shape[:8], shape[8:]
        state = RecurrenceState(heads, key_heads, key_dim, value_dim, by_key, *stored)
        keys, values = key_heads * key_dim, heads * value_dim
        widths = {"q": keys, "k": keys, "v": values, "decay": state.decays} | ({"gain": heads} if gain else {})
        strides = {each: width + gap for each, width in widths.items()}
        numbers = OFFSET + state.size + 16
        spec = RecurrenceSpec(state, strides, values + gap, OFFSET, numbers, delta, rates)
        made = torch.rand(*((heads, key_dim) if rates == "keys" else (heads,))) if rates else None
        return cls(spec, made)

    def operands(self, rows: int) -> dict[str, Tensor]:
        """Operands [rows, width] of a text: keys short enough for the delta rule, decay negative, gain positive."""
        state = self.spec.layer
        keys = state.key_heads, state.key_dim
        made = {each: torch.randn(rows, *keys) * state.key_dim**-0.5 for each in ("q", "k")}
        made |= {"v": torch.randn(rows, state.heads, state.value_dim)}
        made["decay"] = -torch.rand(rows, state.heads, *[state.key_dim] * state.by_key)
        return made | ({"gain": torch.rand(rows, state.heads)} if self.spec.gain else {})

    def run(self, operands: dict[str, Tensor], states: Tensor, chunks: list[Chunk]) -> Tensor:
        """The interpreted kernel: the rows' results; changes `states`."""
        from qcompile.codegen.gpu.compile import load

        many = self.spec.layer.stored != "f32" and max(len(chunk.tokens) for chunk in chunks) > ROUND_TOKENS
        spec, rows, gap = dataclasses.replace(self.spec, logs_shared=not many), len(operands["q"]), 3
        out = torch.full((rows, spec.out_stride), float("nan"))
        padded = [torch.nn.functional.pad(x.reshape(rows, -1), (0, gap), value=float("nan")) for x in operands.values()]
        rates = [] if self.rates is None else [self.rates]
        if rates and spec.scan and self.rates is not None and self.rates.dim() == 2:
            rates = [torch.nn.functional.pad(self.rates.t(), (0, spec.padded_heads - spec.layer.heads)).contiguous()]
        step = _step_arrays(chunks, "positions", "query_start", "state_slots", "certain")
        codes = [] if spec.layer.stored == "f32" else [states.view(CODES[spec.layer.stored])]
        load(spec.kernel(80))[(*spec.programs, len(chunks))](*padded, *rates, out, states, *codes, *step)
        if many:
            log = log_spec(spec)
            made = dict(zip(operands, padded, strict=True)) | {"states": states}
            made |= dict(zip(LOG_INPUTS, _step_arrays(chunks, *LOG_INPUTS), strict=True))
            kernel = log.kernel(80)
            load(kernel)[rows, log.programs, 1](*(made[each.name] for each in kernel.arguments))
        return out[:, :-gap].reshape(rows, spec.layer.heads, spec.layer.value_dim)

    def reference(self, operands: dict[str, Tensor], states: Tensor, chunks: list[Chunk]) -> list[Tensor]:
        positions, sequence, slots, certain = (
            each.long() for each in _step_arrays(chunks, "positions", "row_sequence", "state_slots", "certain")
        )
        q, k, v, decay, gain = (operands.get(each) for each in ("q", "k", "v", "decay", "gain"))
        result: list[Tensor] = ops.reference("recurrence_step")(
            *(q, k, v, decay, self.rates, gain, positions, sequence, slots, certain, states, self.spec.delta, OFFSET),
            stored=self.spec.layer.stored,
        )
        return result


def _step_arrays(chunks: list[Chunk], *names: str) -> list[Tensor]:
    """Inputs of a step of these chunks, of which only the number of tokens counts."""
    lengths = [len(c.tokens) for c in chunks]
    values = {
        "positions": [c.start + i for c, length in zip(chunks, lengths, strict=True) for i in range(length)],
        "row_sequence": [i for i, length in enumerate(lengths) for _ in range(length)],
        "query_start": [sum(lengths[:i]) for i in range(len(chunks) + 1)],
        "state_slots": [c.slot for c in chunks],
        "certain": [c.certain for c in chunks],
    }
    return [torch.tensor(values[name], dtype=torch.int32) for name in names]


def _rows(count: int, start: int, slot: int, certain: int = 1 << 30) -> Chunk:
    return Chunk(range(count), start, (), slot, certain)


# ---- recurrences -----------------------------------------------------------------------------------


def interpret_recurrence(name: str) -> None:
    """Sequences that begin, that continue with replayed positions, that verify drafts, and that leave their base."""
    torch.manual_seed(1)
    layer = Layer.of(RECURRENCES[name])
    chunks = [_rows(3, 5, 3, 7), _rows(4, 0, 1), _rows(2, 9, 0, 0), _rows(5, 40, 2, 38), _rows(9, 36, 4)]
    states = random_states(layer, SLOTS + 1)
    for chunk in chunks:
        set_base(layer, states[chunk.slot], (chunk.start - 3) // layer.spec.layer.block * layer.spec.layer.block)
    states[1] = float("nan")  # a slot of garbage: its sequence begins
    operands = layer.operands(23)
    wanted, after = layer.reference(operands, states, chunks)
    result = layer.run(operands, states, chunks)
    compare_results(layer, result, wanted)
    compare_slots(layer, states, after)


def random_states(layer: Layer, slots: int) -> Tensor:
    """Slots of small numbers. Decay is negative, and so large that states stay small."""
    spec, (_, state, keys, _, decay, end) = layer.spec, layer.spec.layer.places
    states = 0.3 * torch.randn(slots, spec.slot_numbers)
    states[:, OFFSET + decay : OFFSET + end] = -states[:, OFFSET + decay : OFFSET + end].abs()
    if spec.layer.scales:
        states[:, OFFSET + spec.layer.scales : OFFSET + state] /= 127
    if spec.layer.stored != "f32":
        codes = states[:, OFFSET + state : OFFSET + keys].view(CODES[spec.layer.stored])
        whole = spec.layer.stored == "int8"
        codes.copy_(torch.randint(-127, 128, codes.shape) if whole else 0.3 * torch.randn(codes.shape))
    return states


def set_base(layer: Layer, slot: Tensor, positions: int) -> None:
    """Say that the state in a slot covers that number of positions."""
    base = OFFSET + layer.spec.layer.places[0]
    slot[base : base + layer.spec.layer.heads * layer.spec.layer.value_dim] = positions


def compare_results(layer: Layer, result: Tensor, wanted: Tensor) -> None:
    """Results are those of the reference; of a state in fewer bits, few columns have a code that is the next one."""
    stored = layer.spec.layer.stored
    assert ((result - wanted).norm() / wanted.norm()).item() < (ROUNDING if stored == "f32" else FLIPPED)
    assert stored == "f32" or _near(result - wanted, stored)


def _near(difference: Tensor, stored: StateFormat) -> bool:
    if stored == "f32":
        return difference.abs().max().item() < 10 * ROUNDING
    few = (difference.abs() < 10 * ROUNDING).float().mean().item() > 0.97
    return few and difference.abs().max().item() < 10 * FLIPPED


def compare_slots(layer: Layer, states: Tensor, after: Tensor) -> None:
    """Slots hold what those of the reference hold; a state in fewer bits may have a few other codes."""
    _, state, keys, *_ = (OFFSET + place for place in layer.spec.layer.places)
    if layer.spec.layer.stored != "f32":
        kind = torch.int16 if layer.spec.layer.stored == "bf16" else torch.int8
        codes, wanted = (each[:, state:keys].clone().view(kind).int() for each in (states, after))
        assert (codes == wanted).float().mean() > 0.99
        states, after = (torch.cat([each[:, :state], each[:, keys:]], 1) for each in (states, after))
    held = after.isfinite()
    assert torch.equal(states.isfinite(), held)
    assert _near((states - after)[held], layer.spec.layer.stored)


@pytest.mark.parametrize("name", RECURRENCES)
def test_recurrences_interpreted(name: str) -> None:
    interpreted(__name__, f"interpret_recurrence({name!r})")


def interpret_divisions(name: str) -> None:
    """A row has the bits of a whole prompt, however the text is cut, beside any neighbours, after rejected drafts."""
    torch.manual_seed(2)
    layer = Layer.of(RECURRENCES[name])
    text, other = layer.operands(12), layer.operands(12)
    states = torch.full((SLOTS, layer.spec.slot_numbers), float("nan"))
    whole = layer.run(text, states, [_rows(12, 0, 2)])

    def part(start: int, end: int, slot: int, certain: int = 1 << 30, right: int = 12) -> Tensor:
        """Positions of the text, but from `right` on others; beside another sequence."""
        mine = {each: torch.cat([text[each][start:right], other[each][max(start, right) : end]]) for each in text}
        given = {each: torch.cat([other[each][:2], mine[each][: end - start]]) for each in text}
        return layer.run(given, states, [_rows(2, 0, 3), _rows(end - start, start, slot, certain)])[2:]

    for slot, cuts in ((0, [1, 2, 3, 12]), (1, [7, 12])):
        pieces = [part(start, end, slot) for start, end in zip([0, *cuts], cuts, strict=False)]
        assert torch.equal(torch.cat(pieces), whole), cuts
    part(0, 4, 0)
    part(4, 9, 0, 5, right=5)  # position 4, and drafts that are rejected
    part(5, 8, 0, 0, right=6)  # drafts of a path over the same states
    assert torch.equal(part(5, 8, 0, 6), whole[5:8])  # all three are right
    for _ in range(2):  # rounds of a sequence that has ended
        part(8, 11, 0, 0, right=9)
    assert torch.equal(part(8, 10, 0, 9), whole[8:10])
    assert torch.equal(part(10, 12, 0), whole[10:])


@pytest.mark.parametrize("name", ["gated delta", "several tiles", "scan", "bf16", "several tiles of int8"])
def test_bits_do_not_depend_on_the_step(name: str) -> None:
    interpreted(__name__, f"interpret_divisions({name!r})")


def interpret_long_parts(name: str) -> None:
    """Rows at the end of a part may have the entries of a log that its beginning replays."""
    torch.manual_seed(4)
    layer = Layer.of(RECURRENCES[name])
    text = layer.operands(52)
    states = torch.full((SLOTS, layer.spec.slot_numbers), float("nan"))
    whole = layer.run(text, states, [_rows(52, 0, 2)])
    for slot, cuts in ((0, [5, 47, 52]), (1, [3, 10, 27, 52])):
        for start, end in zip([0, *cuts], cuts, strict=False):
            part = {each: x[start:end] for each, x in text.items()}
            assert torch.equal(layer.run(part, states, [_rows(end - start, start, slot)]), whole[start:end])


@pytest.mark.parametrize("name", ["several tiles", "several tiles of bf16", "several tiles of int8"])
def test_long_parts_that_begin_within_a_block(name: str) -> None:
    interpreted(__name__, f"interpret_long_parts({name!r})")


# ---- convolutions ----------------------------------------------------------------------------------


def interpret_convolution(features: int, width: int, bias: bool, act: str = "") -> None:
    """Few rows in one launch, many in two, which together do what the reference does."""
    from qcompile.codegen.gpu.compile import load

    torch.manual_seed(3)
    state, gap = ConvState(features, width), 5
    numbers = OFFSET + state.size
    base = ConvSpec(state, features + gap, features + 1, OFFSET, numbers, bias, act=act)
    weight, shift = torch.randn(features, width), torch.randn(features) if bias else None
    packed = torch.nn.functional.pad(weight.t(), (0, base.padded_features - features)).contiguous()
    short = [_rows(3, 5, 3), _rows(4, 0, 1), _rows(1, 70, 0)]
    many = [*short, _rows(2 * state.ring + 3, 9, 2)]
    for chunks, kinds in ((short, [base]), (many, [_only(base, "computes"), _only(base, "keeps")])):
        rows = sum(len(c.tokens) for c in chunks)
        x, states = torch.randn(rows, features), torch.randn(SLOTS, numbers)
        states[1] = float("nan")
        arrays = _step_arrays(chunks, "row_sequence", "positions", "query_start", "state_slots")
        sequence, positions, _, slots = (each.long() for each in arrays)
        wanted, after = ops.reference("conv_step")(x, weight, shift, positions, sequence, slots, states, OFFSET)
        wanted = ops.UNARY[act](wanted) if act else wanted
        out = torch.full((rows, features + 1), float("nan"))
        padded = torch.nn.functional.pad(x, (0, gap), value=float("nan"))
        for spec in kinds:
            made = {"x": padded, "states": states, "out": out, "weight": packed, "bias": shift}
            names = ("row_sequence", "positions", "query_start", "state_slots")
            made |= dict(zip(names, arrays, strict=True))
            kernel = spec.kernel(80)
            load(kernel)[rows, spec.programs, 1](*(made[a.name] for a in kernel.arguments))
        assert (out[:, :-1] - wanted).abs().max().item() < 10 * ROUNDING  # a few products near 1
        assert torch.equal(states.nan_to_num(7.0), after.nan_to_num(7.0))


def _only(spec: ConvSpec, what: str) -> ConvSpec:
    return dataclasses.replace(spec, computes=what == "computes", keeps=what == "keeps")


@pytest.mark.parametrize("shape", [(7, 4, True), (600, 2, False), (33, 1, True, "silu")])
def test_convolutions_interpreted(shape: tuple[int, int, bool, str]) -> None:
    interpreted(__name__, f"interpret_convolution{shape}")


def test_rows_of_one_launch_store_nothing_that_others_read() -> None:
    """A sequence's row may store entry p % ring only if no row of the launch reads a position that much older."""
    for width in (2, 4, 9):
        ring = ConvState(8, width).ring
        for start in (0, 5):
            rows = range(start, start + FUSED_ROWS)
            read = {(p - back) % ring for p in rows for back in range(1, width) if p - back < start}
            assert not read & {p % ring for p in rows}


# ---- plans -----------------------------------------------------------------------------------------


def interpret_step(attention: bool, states: str = "f32") -> None:
    """A whole step of a small model against its graph, and the same text in several steps."""
    from tests.support.gpu_interpreter import Interpreter

    graph, program, blobs = gpu_program(
        recurrent(hidden=64, layers=1, attention=attention), "bf16", {"cache.states": states}
    )
    plan = make_plan(program, TARGETS["h200"], split=64, inline_asm=False)
    ids = torch.randint(0, 50, (2, 20), generator=torch.Generator().manual_seed(1))
    inputs = step_inputs(ids, None, graph)
    wanted = graph.run(*inputs)[0]
    pages = inputs[3].tolist()
    machine = Interpreter(program, plan, blobs)
    result, _ = machine.step([Chunk(ids[s].tolist(), 0, pages[s], slot=s) for s in range(2)])
    assert ((result.double() - wanted).norm() / wanted.norm()).item() < 0.02  # weights and inputs in bf16
    again, last = Interpreter(program, plan, blobs), result
    for start, end in ((0, 17), (17, 18), (18, 20)):
        last, _ = again.step([Chunk(ids[s, start:end].tolist(), start, pages[s], slot=s) for s in range(2)])
    assert ((last[-1] - result[-1]).norm() / result[-1].norm()).item() < 1e-3  # other GEMM kernels for few rows


@pytest.mark.parametrize(("attention", "states"), [(True, "f32"), (False, "f32"), (False, "int8")])
def test_a_step_with_states_interpreted(attention: bool, states: str) -> None:
    interpreted(__name__, f"interpret_step({attention}, {states!r})")


def test_a_convolution_of_few_rows_is_one_launch() -> None:
    _, program, _ = gpu_program(recurrent(hidden=64, layers=1), "bf16", {})
    plan = make_plan(program, TARGETS["h200"])
    first, keep = (launch for launch in plan.launches if launch.name.startswith("conv_step"))
    assert first.by == keep.by == "queries"
    assert [variant.most for variant in first.variants] == [FUSED_ROWS, 0] == [v.most for v in keep.variants]
    assert keep.variants[0].code is None and "conv_keep" in keep.variants[1].kernel
    assert FUSED_ROWS <= LOG_TOKENS


def test_a_convolution_applies_the_activation_that_follows() -> None:
    program = gpu_program(recurrent(hidden=64, layers=1), "bf16", {})[1]
    [conv] = [call for call in fuse(program).calls if isinstance(call, fused.ActivatedConv)]
    assert conv.act == "silu" and conv.writes == ("unary",) and conv.reads == ("gemm",)
    assert "conv_silu_step" in " ".join(make_plan(program, TARGETS["h200"]).kernels)


@pytest.mark.parametrize("change", ["kind", "column", "reader", "place", "gap"])
def test_what_a_convolution_does_not_apply(change: str) -> None:
    program = gpu_program(recurrent(hidden=64, layers=1), "bf16", {})[1]
    at = next(i for i, call in enumerate(program.calls) if isinstance(call, ConvStep))
    conv, silu, *rest = program.calls[at:]
    assert isinstance(silu, Elementwise) and isinstance(conv, ConvStep)
    after: dict[str, list[Call]] = {
        "kind": [dataclasses.replace(silu, kind="scale", factor=2.0), *rest],
        "column": [dataclasses.replace(silu, x_offset=4), *rest],
        "reader": [silu, *rest, TakeRows("take", conv.out, "taken")],
        "place": [silu, *rest],  # its result lies where other rows have yet to read
        "gap": [TakeRows("take", conv.x, "taken"), silu, *rest],
    }
    moved = dataclasses.replace(program.buffer(silu.out), offset=program.buffer(conv.x).offset)
    buffers = tuple(moved if change == "place" and b.name == silu.out else b for b in program.buffers)
    changed = dataclasses.replace(program, calls=(*program.calls[:at], conv, *after[change]), buffers=buffers)
    assert activate_convolutions(changed) == changed


def test_steps_with_many_rows_log_keys_apart() -> None:
    sizes: dict[str, Any] = {"hidden": 64, "layers": 1, "key_dim": 128, "value_dim": 64}
    for value_dim, count in ((64, 3), (60, 2)):  # with a kernel for prompts, and without
        sizes |= {"value_dim": value_dim}
        program = gpu_program(recurrent(**sizes), "bf16", {"cache.states": "bf16"})[1]
        launches = make_plan(program, TARGETS["h200"]).launches
        step, log = (launch for launch in launches if launch.name.startswith("recurrence_step"))
        assert step.by == log.by == "queries" and [variant.most for variant in log.variants] == [ROUND_TOKENS, 0]
        assert len(step.variants) == count and step.variants[0].most == ROUND_TOKENS
        assert log.variants[0].code is None and "recurrence_log" in log.variants[1].kernel
        codes = [variant.code for variant in step.variants]
        keys = f"{program.states.layers[1].places[2]} + entry"  # type: ignore[union-attr]
        assert [code.source.count(f"tl.store(part + {keys}") for code in codes if code] == [1] + [0] * (count - 1)


def test_keys_that_fit_no_registers_are_refused() -> None:
    state = RecurrenceState(1, 1, 8192, 16, False)
    with pytest.raises(UnsupportedError, match="8192 key features: GPU recurrences take at most 4096"):
        RecurrenceSpec(state, {}, 16, 0, state.size, False)


SHAPES: dict[str, Shape] = {
    "gated delta of 128": (32, 16, 128, 128, False, "heads", True, True),
    "decay by key of 128": (32, 32, 128, 128, True, "", True, True),
    "state space of 128 x 64": (128, 8, 128, 64, False, "heads", True, False),
    "scan of 16": (8192, 1, 16, 1, False, "keys", True, False),
    "keys of 256": (8, 8, 256, 256, False, "", False, False),
    "gated delta of 128 in bf16": (32, 16, 128, 128, False, "heads", True, True, "bf16"),
    "gated delta of 128 in int8": (32, 16, 128, 128, False, "heads", True, True, "int8"),
    "state space of 128 x 64 in bf16": (128, 8, 128, 64, False, "heads", True, False, "bf16"),
    "decay by key of 128 in int8": (32, 32, 128, 128, True, "", True, True, "int8"),
}


def aligned_spec(name: str) -> RecurrenceSpec:
    """The kernel of a shape of SHAPES, over aligned operands."""
    (heads, key_heads, key_dim, value_dim, by_key, rates, gain, delta), stored = SHAPES[name][:8], SHAPES[name][8:]
    state = RecurrenceState(heads, key_heads, key_dim, value_dim, by_key, *stored)
    strides = dict.fromkeys(("q", "k", "v", "decay", *["gain"] * gain), 1 << 14)
    return RecurrenceSpec(state, strides, heads * value_dim, 0, state.size, delta, rates)


@pytest.mark.parametrize("target", ["a100", "l40s", "h200", "b200"])
@pytest.mark.parametrize("name", SHAPES)
def test_recurrences_compile_without_spills(name: str, target: str, compiled: Record) -> None:
    spec = aligned_spec(name)
    built = compiled(spec.kernel(TARGETS[target].capability), TARGETS[target].capability)
    assert built.spill_bytes == 0 and built.threads == 32, built.registers


@pytest.mark.parametrize("target", ["a100", "h200"])
def test_logs_compile_without_spills(target: str, compiled: Record) -> None:
    kernel = log_spec(aligned_spec("gated delta of 128 in bf16")).kernel(TARGETS[target].capability)
    assert compiled(kernel, TARGETS[target].capability).spill_bytes == 0


@pytest.mark.parametrize("target", ["a100", "l40s", "h200", "b200"])
def test_convolutions_compile_without_spills(target: str, compiled: Record) -> None:
    capability = TARGETS[target].capability
    for computes, keeps in ((True, True), (True, False), (False, True)):
        spec = ConvSpec(ConvState(8192, 4), 8192, 8192, 0, 1 << 20, True, computes, keeps)
        assert compiled(spec.kernel(capability), capability).spill_bytes == 0
