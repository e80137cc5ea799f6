"""The recurrence by chunks against the recurrence token by token."""

from __future__ import annotations

import math

import pytest
import torch

from qcompile import ops
from qcompile.ops import recurrent, recurrent_chunks

HEADS, KEYS, VALUES = 4, 12, 24


def operands(tokens: int, by_key: bool, strong: bool = False) -> dict[str, torch.Tensor]:
    """q, k, v, decay, rates and gain of two texts; keys have length 1, as the delta rule needs."""
    torch.manual_seed(tokens)
    q, k = torch.nn.functional.normalize(torch.randn(2, 2, tokens, 2, KEYS, dtype=torch.float64), dim=-1)
    decay = -torch.rand(2, tokens, HEADS, *[KEYS] * by_key, dtype=torch.float64)
    if strong:
        decay[:, ::3] *= 900  # what is older is forgotten: exp of the sum is 0, and of its negation infinite
    rates = torch.rand(HEADS, KEYS, dtype=torch.float64) if by_key else torch.rand(HEADS, dtype=torch.float64)
    v, gain = torch.randn(2, tokens, HEADS, VALUES, dtype=torch.float64), torch.rand(2, tokens, HEADS).double()
    return {"q": q, "k": k, "v": v, "decay": decay, "rates": rates, "gain": gain}


def by_token(delta: bool, **given: torch.Tensor) -> torch.Tensor:
    """The definition: one token after the other."""
    q, k = (given[name].repeat_interleave(2, 2) for name in "qk")
    state = torch.zeros(2, HEADS, KEYS, VALUES, dtype=torch.float64)
    outputs = []
    for t in range(q.shape[1]):
        at = (given[name][:, t] for name in ("v", "decay"))
        state, y = recurrent.recurrence_token(state, q[:, t], k[:, t], *at, given["rates"], given["gain"][:, t], delta)
        outputs.append(y)
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize(("tokens", "strong"), [(64, False), (151, False), (130, True)])
def test_chunks_give_what_tokens_give(delta, by_key, tokens, strong):
    given = operands(tokens, by_key, strong)
    assert recurrent_chunks.pays(given["v"], given["decay"])
    got = ops.linear_recurrence(**given, delta=delta)
    # Sums in another order, in float64: rounding of 150 tokens at most.
    torch.testing.assert_close(got, by_token(delta, **given), rtol=1e-11, atol=1e-12)


def test_rates_and_gain_may_be_missing():
    given = operands(70, False) | {"rates": None, "gain": None}
    ones = {"rates": torch.ones(HEADS, dtype=torch.float64), "gain": torch.ones(2, 70, HEADS, dtype=torch.float64)}
    torch.testing.assert_close(ops.linear_recurrence(**given, delta=True), by_token(True, **given | ones))


def test_a_state_that_is_set_to_zero_is_computed_by_tokens():
    given = operands(80, False)
    given["decay"][:, 40] = -math.inf
    assert not recurrent_chunks.pays(given["v"], given["decay"])
    torch.testing.assert_close(ops.linear_recurrence(**given, delta=True), by_token(True, **given))
    assert not recurrent_chunks.pays(given["v"].bfloat16(), given["decay"])  # no triangular systems in bf16
    assert not recurrent_chunks.pays(given["v"][..., :1], given["decay"])  # a selective scan: states are small
