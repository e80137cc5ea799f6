"""Recurrent operators against their definitions, written in another way."""

import pytest
import torch

from qcompile import ops

HEADS, GROUP, KEYS, VALUES = 4, 2, 3, 5


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def test_causal_conv_is_a_grouped_convolution():
    x, weight, bias = drawn(2, 7, 6), drawn(6, 4), drawn(6)
    padded = torch.nn.functional.pad(x.transpose(1, 2), (3, 0))
    wanted = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=6).transpose(1, 2)
    torch.testing.assert_close(ops.causal_conv(x, weight, bias), wanted)


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("gained", [False, True])
def test_a_recurrence_without_delta_is_attention_with_decaying_weights(by_key, gained):
    q, k, v = drawn(2, 6, HEADS // GROUP, KEYS), drawn(2, 6, HEADS // GROUP, KEYS) + 1, drawn(2, 6, HEADS, VALUES)
    decay = -drawn(2, 6, HEADS, KEYS).abs() if by_key else -drawn(2, 6, HEADS).abs()
    gain = drawn(2, 6, HEADS).exp() if gained else None
    y = ops.linear_recurrence(q, k, v, decay, None, gain, False)
    whole = decay if by_key else decay[..., None].expand(2, 6, HEADS, KEYS)
    total = whole.cumsum(1)
    q, k = (t.repeat_interleave(GROUP, 2) for t in (q, k))
    kept = (total[:, :, None] - total[:, None]).exp()  # [B, T, S, H, K]: what is left at T of token S
    scores = torch.einsum("bthk,bshk,btshk->bths", q, k, kept)
    scores = scores * torch.ones(6, 6, dtype=v.dtype).tril()[None, :, None]
    u = v if gain is None else v * gain[..., None]
    torch.testing.assert_close(y, torch.einsum("bths,bshd->bthd", scores, u))


def test_the_delta_rule_reads_back_what_was_written():
    k = torch.nn.functional.normalize(drawn(1, 1, HEADS, KEYS), dim=-1)
    v = drawn(1, 3, HEADS, VALUES)
    k = k.expand(1, 3, HEADS, KEYS)
    no_decay, whole = torch.zeros(1, 3, HEADS, dtype=v.dtype), torch.ones(1, 3, HEADS, dtype=v.dtype)
    torch.testing.assert_close(ops.linear_recurrence(k, k, v, no_decay, None, whole, True), v)


def test_rates_multiply_the_exponent():
    q, k, v = drawn(1, 4, HEADS, KEYS), drawn(1, 4, HEADS, KEYS) + 1, drawn(1, 4, HEADS, VALUES)
    step, rates = drawn(1, 4, HEADS).abs(), -drawn(HEADS, KEYS).abs()
    wanted = ops.linear_recurrence(q, k, v, step[..., None] * rates)
    torch.testing.assert_close(ops.linear_recurrence(q, k, v, step, rates), wanted)
