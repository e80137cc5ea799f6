"""Operators: the fake kernel promises what the reference returns, and references agree with torch's own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from qcompile import ops
from qcompile.formats.activations import activation_format
from qcompile.formats.hadamard import core_matrix
from qcompile.formats.registry import STORED_FORMATS, weight_format

G = torch.Generator().manual_seed(0)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=G)


POSITIONS, SEQUENCE = torch.tensor([0, 1, 5]), torch.tensor([0, 0, 1])
TABLE, CACHE = torch.tensor([[1, 0], [2, 3]]), rand(2, 2, 256, 2, 8)
STEP = (POSITIONS, SEQUENCE, TABLE)
SLOTS, CERTAIN, STATES = torch.tensor([1, 0]), torch.tensor([1, 9]), torch.zeros(2, 2600)
WEIGHT = weight_format("w4_asym_g128").quantize(rand(64, 40))
INT8 = activation_format("int8").quantize(rand(3, 40), 128)
CHOICE = torch.tensor([[3, 0], [1, 3], [0, 2]])
INV_FREQ = torch.tensor([1.0, 0.1, 0.01, 0.001])

CASES: dict[str, tuple[Any, ...]] = {
    "embedding": (torch.tensor([[1, 2, 3]]), rand(10, 6)),
    "linear": (rand(2, 3, 6), rand(5, 6), rand(5)),
    "rms_norm": (rand(2, 6), rand(6), 1e-6),
    "layer_norm": (rand(2, 6), rand(6), rand(6), 1e-5),
    "unary": (rand(2, 6), "gelu"),
    "xielu": (torch.linspace(-2, 2, 12).view(2, 6), torch.tensor([0.8, 1.3, 0.5, -1e-6])),
    "scale": (rand(2, 6), 2.0),
    "add": (rand(2, 6), rand(6)),
    "mul": (rand(2, 6), rand(2, 6)),
    "slice_features": (rand(2, 6), 1, 4),
    "read_features": (rand(2, 6),),
    "write_features": (rand(3, 6),),
    "gather_features": ([rand(2, 6), rand(2, 3)], torch.tensor([7, 7, -1, 0, 8])),
    "lora_shrink": (INT8, 2, 12),
    "lora_expand": (rand(3, 40), rand(3, 12), 2),
    "gate_rows": (rand(3, 64), "silu", 20),
    "split_heads": (rand(2, 6), 3),
    "merge_heads": (rand(2, 3, 2),),
    "within": (rand(2, 6), 64),
    "rope": (rand(3, 2, 8), POSITIONS, INV_FREQ, 1.0, False),
    "attention": (rand(2, 5, 4, 8), rand(2, 5, 2, 8), rand(2, 5, 2, 6), 0.3, 3, 5.0, rand(4), None, rand(16)),
    "rotate": (rand(6, 16), torch.tensor([1.0, -1.0, 1.0, 1.0]), 1),
    "scale_axis": (rand(6, 16), rand(8), 1, True),
    "row_size": (rand(6, 16), rand(6)),
    "column_max": ([rand(6, 16), rand(3, 16)],),
    "key_scale": (rand(32).abs(), 16, 8, False, True, 0.5),
    "repeat_heads": (rand(32), 3, 16),
    "max_heads": (rand(32), 2, 8),
    "smooth_factor": (rand(16).abs(), 0.5, rand(16).abs()),
    "zero_bias": (rand(3, 4),),
    "rope_heads": (
        *(rand(3, 64), INV_FREQ, STEP[0], 8, 4, 8, 1.0, True, rand(32), 8),
        *(rand(64, 1), rand(8)),
    ),
    "norm_heads": (rand(3, 40), rand(8), None, 1e-6, "rms", 8, 3, 8),
    "concat_rows": ([rand(3, 4), rand(2, 4)],),
    "slice_rows": (rand(5, 4), 1, 3),
    "head_rows": (rand(7, 4), torch.tensor([5, 0, 2, 2, 6, 1]), 2, True),
    "matvec": (rand(3, 4), rand(4)),
    "interleave_rows": (rand(20, 4), rand(20, 4), 16),
    "quantize_weight": (rand(17, 200), "qoq_g128"),
    "quantize_mixed": (rand(17, 200), torch.arange(17) % 3 == 0),
    "dequantize": (weight_format("w8_sym_channel").quantize(rand(17, 200)), "w8_sym_channel", 200),
    "worst_rows": (rand(17, 200), 0.2),
    "upper_nibble": (weight_format("nested_8_4").quantize(rand(17, 200)),),
    "quantize_activation": (rand(2, 3, 200), "int8", 128),
    "hadamard": (rand(2, 3, 48), core_matrix(12).flatten(), 24),
    "hadamard_quantize": (rand(3, 64), torch.ones(1), 32, "int8", 32),
    "column_order": ([rand(6, 16), rand(3, 16)],),
    "head_order": ([rand(5, 24)], 2, 4, True),
    "take_axis": (rand(3, 4), torch.tensor([2, 0, 1, 3]), 1),
    "center": (rand(6, 4), 0),
    "gemm": (INT8, WEIGHT, rand(64), rand(3, 64), "w4_asym_g128", "add", 64),
    "gated_linear": (rand(3, 6), rand(64, 6), rand(64), "silu", 20),
    "norm_quantize": (rand(3, 40), None, None, 1e-6, "rms", "int8", 32),
    "kv_append": (rand(3, 2, 8), rand(3, 2, 8), *STEP, CACHE, 1, "kv4"),
    "kv_attention": (rand(3, 4, 8), *STEP, CACHE, 1, 0.3, 0, 5.0, None, None, 4, rand(16)),
    "rope_append": (
        *(rand(3, 64), INV_FREQ, *STEP, CACHE, [0, 32, 48], 4, 2, 8, 1.0, False, 0, "kv8", rand(16), 8),
        *(rand(64, 1), rand(8)),
    ),
    "proved": (rand(3), torch.ones(2, 3), torch.ones(2, 3), [rand(3)], "the loop"),
    "log_decay": (rand(2, 5, 6).abs() + 0.1,),
    "causal_conv": (rand(2, 5, 6), rand(6, 4), rand(6)),
    "linear_recurrence": (rand(2, 5, 2, 3), rand(2, 5, 2, 3), rand(2, 5, 4, 2), rand(2, 5, 4), rand(4), rand(2, 5, 4)),
    "conv_step": (rand(3, 6), rand(6, 4), None, POSITIONS, SEQUENCE, SLOTS, STATES, 64),
    "recurrence_step": (
        *(rand(3, 2, 3), rand(3, 2, 3), rand(3, 4, 2), rand(3, 4, 3), rand(4), None, POSITIONS, SEQUENCE),
        *(SLOTS, CERTAIN, STATES, True, 64),
    ),
    "rotate_heads": (rand(2, 5, 4, 8), rand(32), 4),
    "take_rows": (rand(3, 4), torch.tensor([2, 0])),
    "softmax": (rand(3, 6),),
    "top_k": (rand(3, 6), 2),
    "every_expert": (POSITIONS, 4),
    "pick": (rand(3, 6), CHOICE),
    "bound_choice": (CHOICE, 1),
    "near_share": (rand(3, 6), CHOICE, 0.5),
    "normalize": (rand(3, 2).abs(), 1e-9, 0.1),
    "limit_groups": (rand(3, 6), 3, 1, 2),
    "expert_linear": (rand(3, 8), CHOICE, rand(4, 5, 8), rand(4, 5)),
    "expert_rows": (rand(4, 5, 8),),
    "expert_gemm": (rand(3, 2, 40), CHOICE, WEIGHT, rand(64), "w4_asym_g128", "int8", 128, 4, 13, "store", None, 0.0),
    "scale_slots": (rand(3, 2, 8), rand(3, 2)),
    "combine": (rand(3, 2, 8), rand(3, 2)),
    "clamp": (rand(3, 6), None, 0.3),
    "shift": (rand(3, 6), 1.0),
    "power": (rand(3, 6).abs(), -0.5),
    "mean": (rand(3, 2, 6),),
    "mix": (rand(3, 4, 6), rand(3, 2, 4)),
    "interleave_experts": (rand(3, 20, 4), rand(3, 20, 4), 16),
    "all_reduce": (rand(3, 8), 1),
    "all_gather": (rand(3, 8), 1, 7),
    "take_spans": (rand(3, 8, 2), [5, 8, 0, 2, 5, 6], 1),
    "take_parts": (WEIGHT, "w4_asym_g128", [3, 9, 0, 1], 0),
    "gated_experts": (rand(3, 8), CHOICE, rand(4, 64, 8), rand(4, 64), "silu", 20, 0.5, 1.0),
}


def shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    return [shapes(v) for v in value]


def to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return [to_meta(v) for v in value] if isinstance(value, list) else value


def test_every_operator_has_a_case() -> None:
    assert set(CASES) == set(ops.DEFINED)


@pytest.mark.parametrize("name", CASES)
def test_fake_matches_reference(name: str) -> None:
    real = ops.op(name)(*CASES[name])
    fake = ops.op(name)(*(to_meta(a) for a in CASES[name]))
    assert shapes(real) == shapes(fake)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_turns_pairs_by_position_times_frequency(interleaved: bool) -> None:
    x = rand(3, 2, 10)
    y = ops.rope(x, POSITIONS, INV_FREQ, 1.0, interleaved)
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + 4) for i in range(4)]
    for row, position in enumerate(POSITIONS.tolist()):
        for (a, b), freq in zip(pairs, INV_FREQ.tolist(), strict=True):
            turned = torch.complex(x[row, :, a], x[row, :, b]) * torch.polar(
                torch.tensor(1.0), torch.tensor(position * freq)
            )
            assert torch.allclose(torch.complex(y[row, :, a], y[row, :, b]), turned, atol=1e-6)  # float32 rounding
    assert torch.equal(y[..., 8:], x[..., 8:])


def test_attention_is_scaled_dot_product_attention() -> None:
    q, k, v = rand(2, 6, 4, 8), rand(2, 6, 2, 8), rand(2, 6, 2, 8)
    mine = ops.attention(q, k, v, 0.25)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, scale=0.25, enable_gqa=True
    ).transpose(1, 2)
    assert torch.allclose(mine, theirs, atol=1e-6)  # float32, another order of summation


def test_a_window_hides_older_keys_and_a_sink_takes_weight() -> None:
    q, k, v = rand(1, 6, 2, 8), rand(1, 6, 2, 8), rand(1, 6, 2, 8)
    last = ops.attention(q, k, v, 0.25, 2)[:, -1]
    assert torch.allclose(last, ops.attention(q[:, 4:], k[:, 4:], v[:, 4:], 0.25)[:, -1], atol=1e-6)
    drained = ops.attention(q, k, v, 0.25, 0, 0.0, torch.full((2,), 100.0))
    assert drained.abs().max() < 1e-6


@pytest.mark.parametrize("bias", [None, rand(24)])
def test_weights_of_a_norm_by_head(bias: torch.Tensor | None) -> None:
    x, weight = rand(2, 5, 3, 8), rand(24)
    for head in range(3):
        own = slice(8 * head, 8 * head + 8)
        one = ops.layer_norm(x[:, :, head], weight[own], None if bias is None else bias[own], 1e-5)
        assert torch.allclose(ops.layer_norm(x, weight, bias, 1e-5)[:, :, head], one, atol=1e-6)  # another order
        one = ops.rms_norm(x[:, :, head], weight[own], 1e-5)
        assert torch.equal(ops.rms_norm(x, weight, 1e-5)[:, :, head], one)


def test_a_bias_by_key_is_a_linear_bias_by_distance() -> None:
    q, k, v = rand(1, 6, 2, 8), rand(1, 6, 2, 8), rand(1, 6, 2, 8)
    slopes, place = torch.tensor([0.5, 0.25]), torch.arange(6.0)
    mine = ops.attention(q, k, v, 0.25, 0, 0.0, None, slopes[:, None] * place)
    far = (place - place[:, None]).masked_fill(place > place[:, None], float("-inf"))
    mask = (slopes[:, None, None] * far)[None]
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=mask, scale=0.25
    ).transpose(1, 2)
    assert torch.allclose(mine, theirs, atol=1e-6)  # float32, another order of summation


def test_experts_are_each_tokens_own_linears() -> None:
    x, weight, bias = rand(3, 8), rand(4, 5, 8), rand(4, 5)
    y = ops.expert_linear(x, CHOICE, weight, bias)
    for token in range(3):
        for slot in range(2):
            expert = CHOICE[token, slot]
            assert torch.allclose(y[token, slot], weight[expert] @ x[token] + bias[expert], atol=1e-6)
    assert torch.equal(ops.top_k(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 3), torch.tensor([[1, 2, 3]]))
    scores, hidden = torch.tensor([[9.0, 0.0, 5.0, 5.0]]), -float("inf")
    assert ops.limit_groups(scores, 2, 1, 2).tolist() == [[hidden, hidden, 5.0, 5.0]]
    assert ops.limit_groups(scores, 2, 1, 1).tolist() == [[9.0, 0.0, hidden, hidden]]


def test_xielu_is_a_parabola_above_0_and_an_exponential_below() -> None:
    x = torch.tensor([2.0, 1e-3, 0.0, -0.01, -3.0, math.nan])
    below = [1.2 * (math.expm1(min(v, -0.1)) - v) + 0.5 * v for v in (0.0, -0.01, -3.0)]
    result = ops.xielu(x, torch.tensor([0.8, 1.2, 0.5, -0.1]))
    assert result[:5].tolist() == pytest.approx([0.8 * 4 + 1, 0.8e-6 + 0.5e-3, *below], rel=1e-6) and result[5].isnan()


def test_features_are_gathered_by_their_place_and_zeros_by_none() -> None:
    a, b = rand(2, 3, 4), rand(2, 3, 2)
    result = ops.gather_features([a, b], torch.tensor([5, -1, 0, 5]))
    assert torch.equal(result, torch.stack((b[..., 1], torch.zeros(2, 3), a[..., 0], b[..., 1]), -1))


def test_kv_attention_over_pages_is_attention() -> None:
    tokens = 70
    q, k, v = rand(tokens, 4, 8), rand(tokens, 2, 8), rand(tokens, 2, 8)
    place = (torch.arange(tokens), torch.zeros(tokens, dtype=torch.long), torch.tensor([[3, 1]]))
    cache = ops.kv_append(k, v, *place, torch.full((1, 2, 256, 2, 8), float("nan")), 0, "kv32")
    paged = ops.kv_attention(q, *place, cache, 0, 0.3, 5, 2.0)
    assert torch.allclose(paged, ops.attention(q[None], k[None], v[None], 0.3, 5, 2.0)[0], atol=1e-6)


@pytest.mark.parametrize("format", sorted(set(STORED_FORMATS) - {"mix_4_8"}))
def test_gemm_multiplies_what_its_parts_stand_for(format: str) -> None:
    dtype = format if format in ("f32", "bf16") else "int8"
    x, w = rand(3, 200), rand(20, 200)
    parts, weight = activation_format(dtype).quantize(x, 200), weight_format(format).quantize(w)
    y = ops.gemm(parts, weight, None, None, format, "store", 20)
    most = {2: 0.4, 3: 0.3}.get(weight_format(format).bits, 0.2)  # the own error of weights in 4 bits is 0.11
    assert (y - x @ w.T).norm() / (x @ w.T).norm() < most


def test_gated_epilogue_pairs_gate_and_up_rows() -> None:
    x, gate, up = rand(3, 16), rand(20, 16), rand(20, 16)
    joined = ops.interleave_rows(gate, up, ops.GATE_BLOCK)
    expected = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
    for y in (
        ops.gemm([x], [joined], None, None, "f32", "silu_mul", 20),
        ops.gated_linear(x, joined, None, "silu", 20),
    ):
        assert torch.allclose(y, expected, atol=1e-5)  # float32, sums of 16


def test_gated_experts_are_gated_linears_of_each_token() -> None:
    x, gate, up, bias = rand(3, 8), rand(4, 20, 8), rand(4, 20, 8), rand(4, 20)
    joined, both = (ops.interleave_experts(*pair, ops.GATE_BLOCK) for pair in ((gate, up), (bias, bias)))
    y = ops.gated_experts(x, CHOICE, joined, both, "silu", 20, None, 0.0)
    of_gate, of_up = (ops.expert_linear(x, CHOICE, weight, bias) for weight in (gate, up))
    assert torch.allclose(y, torch.nn.functional.silu(of_gate) * of_up, atol=1e-5)  # float32, another order
    rows = [ops.expert_rows(joined)]
    packed = ops.expert_gemm(x, CHOICE, rows, ops.expert_rows(both), "f32", "f32", 0, 4, 20, "silu_mul", None, 0.0)
    assert torch.equal(packed, y)
    limited = ops.gated_experts(x, CHOICE, joined, both, "gelu_quick", 20, 0.7, 1.0)
    of_gate, of_up = of_gate.clamp(max=0.7), of_up.clamp(-0.7, 0.7) + 1
    assert torch.allclose(limited, of_gate * torch.sigmoid(1.702 * of_gate) * of_up, atol=1e-5)
