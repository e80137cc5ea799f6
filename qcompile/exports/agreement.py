"""Whether an exported model computes what its artifact computes, where passes have changed values of weights.

Passes change several weights together so that the function stays. That a model with the changed weights, and with the
operators of the checkpoint, still has that function is checked by running both on a text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qcompile import check
from qcompile.artifact.export import Sequence
from qcompile.artifact.packed_weights import PackedWeights
from qcompile.checkpoints.configuration import auto_class
from qcompile.errors import UnsupportedError
from qcompile.exports.tensors import Tensors

TOKENS = 24
ALIKE = 1e-3
"""Sums of float32 in another order, after changes of basis; a change that is missing moves logits by far more."""


def require_same(weights: PackedWeights, tensors: Tensors, config: Any, vocabulary: int) -> None:
    """Raise UnsupportedError unless transformers' model of `config` with the numbers of `tensors` is the artifact's."""
    online = weights.graph.calls("hadamard", "hadamard_quantize")
    if online:
        raise UnsupportedError(
            f"export: node {online[0].name} rotates activations while the model runs, and checkpoints have no place "
            "for that; build with --set rotate.online=false"
        )
    ids = torch.randint(0, vocabulary, (TOKENS,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = Sequence(weights).unrounded()(ids)
        logits = _logits(tensors, config, ids)
    error = check.max_relative_error(logits, expected)
    if not error < ALIKE:
        raise UnsupportedError(
            f"export: passes have changed weights so that a model without their operators computes other logits "
            f"(by {error:.1%}); build without them (qcompile inspect --passes)"
        )


def _logits(tensors: Tensors, config: Any, ids: Tensor) -> Tensor:
    """Logits [T, vocab] of transformers' model for token ids [T]."""
    import transformers

    auto = auto_class(config.model_type, config.architectures or ()) or "AutoModelForCausalLM"
    model = getattr(transformers, auto).from_config(config, dtype=torch.float32, attn_implementation="eager")
    state = model.state_dict()
    for name in tensors.rows:
        state[name].copy_(tensors.floats(name))
    for name, number in tensors.neutral.items():
        state[name].fill_(number)
    logits: Tensor = model.eval()(ids[None]).logits[0]
    return logits
