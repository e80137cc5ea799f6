"""Kernel functions of transformers' recurrent layers, as qcompile's operators while a model is traced.

transformers marks functions for which optimized kernels exist, with the name of the kernel, such as `causal_conv1d_fn`.
In place of the torch code of such a function, this module writes the operators of qcompile/ops/recurrent.py. Each
replacement is proved where it is called: the function's own torch code and the replacement must agree on random inputs
with the sizes and flags of the call.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qcompile import ops
from qcompile.errors import UnsupportedError

ALIKE = 1e-4
"""Largest difference in a proof, relative to the largest value: 100 times what float32 rounding gives, and far less
than any other scale, bound, order of heads or epsilon."""

MOST_COMPARED = 1 << 26
"""Most numbers of a kernel's arguments in a proof: six times those of the largest models, which takes seconds."""
IGNORED = {
    *("position_ids", "position_embeddings", "use_cache", "cache_position"),
    *("output_attentions", "output_hidden_states", "return_dict"),
}
"""Arguments that a model passes to all its layers, and that say nothing of padding or packed sequences."""


@dataclass(frozen=True)
class KernelFunction:
    """What is known of a kernel: the layouts of its tensors, and a function of its arguments that replaces it.

    A layout has a letter for each dimension; B and T are batch and tokens. Tensors in `falling` are negative.
    """

    layouts: Mapping[str, str]
    replacement: Callable[..., Any]
    falling: tuple[str, ...] = ()


@contextmanager
def replaced(module: nn.Module) -> Iterator[None]:
    """Replace, for as long as the context lasts, the kernel functions that the code of `module` calls by name.

    A replacement raises UnsupportedError if it does not understand an argument, or differs from the function.
    """
    spaces = {kind.__module__ for part in module.modules() for kind in type(part).__mro__}
    kept: list[tuple[dict[str, Any], str, Any]] = []
    for space in (vars(sys.modules[name]) for name in sorted(spaces) if name in sys.modules):
        for name, value in space.items():
            if (marked := _marked(value)) is not None and marked[0] in KERNELS:
                kept.append((space, name, value))
                space[name] = _substitute(*marked)
    try:
        yield
    finally:
        for space, name, value in kept:
            space[name] = value


def _marked(value: Any) -> tuple[str, Callable[..., Any]] | None:
    """(name of the kernel, torch code) of a function that transformers marks as one with a kernel; else None."""
    if not inspect.isfunction(value) or not hasattr(value, "__wrapped__"):
        return None
    held = inspect.getclosurevars(value).nonlocals
    return (held["func_name"], value.__wrapped__) if {"func_name", "torch_function"} <= held.keys() else None


def _substitute(kernel: str, function: Callable[..., Any]) -> Callable[..., Any]:
    known = KERNELS[kernel]
    own, ours = inspect.signature(function), inspect.signature(known.replacement)
    proved: set[Any] = set()

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = own.bind(*args, **kwargs)
        extra = next((name for name, p in own.parameters.items() if p.kind is p.VAR_KEYWORD), "")
        given = bound.arguments | bound.arguments.pop(extra, {})
        taken = {}
        for name, value in given.items():
            if name in ours.parameters:
                taken[name] = value
            elif not (name in IGNORED or value is None or value is False):
                raise UnsupportedError(f"argument {name} of {kernel} is not supported")
        case = _case(kernel, known, taken)
        if case not in proved:
            _prove(kernel, known, function, taken)
            proved.add(case)
        return known.replacement(**taken)

    return call


# ---- proofs --------------------------------------------------------------------------------------------


def _case(kernel: str, known: KernelFunction, given: Mapping[str, Any]) -> tuple[Any, ...]:
    """All of a call on which the meaning of the function may depend: its flags, and the sizes but batch and tokens."""
    case: list[Any] = []
    for name, value in sorted(given.items()):
        if isinstance(value, Tensor):
            layout = known.layouts.get(name, "")
            if len(layout) != value.dim():
                raise UnsupportedError(f"argument {name} of {kernel} has {value.dim()} dimensions, not {len(layout)}")
            value = tuple(size for size, axis in zip(value.shape, layout, strict=True) if axis not in "BT")
        case.append((name, repr(value)))
    return tuple(case)


def _prove(kernel: str, known: KernelFunction, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Compare the torch code of a kernel function with its replacement, for arguments like `given`."""
    chunk = given.get("chunk_size", inspect.signature(function).parameters.get("chunk_size"))
    chunk = getattr(chunk, "default", chunk) or 0
    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        for batch, tokens in ((2, 7), (2, 2 * chunk + 6)):  # within a chunk, and over two borders of chunks
            sizes = {"B": batch, "T": tokens}
            numbers = sum(math.prod(_shape(known, name, value, sizes)) for name, value in _tensors(given))
            if numbers > MOST_COMPARED:
                raise UnsupportedError(
                    f"{kernel} takes {numbers:,} numbers for {tokens} tokens; at most {MOST_COMPARED:,} are computed "
                    "to compare it with qcompile's replacement: check the sizes in config.json"
                )
            inputs = _random(known, given, sizes)
            expected, replaced = (_first(run(**inputs)) for run in (function, known.replacement))
            alike = expected.shape == replaced.shape and bool(expected.isfinite().all())
            if not alike or bool((expected - replaced).abs().max() > ALIKE * expected.abs().max()):
                raise UnsupportedError(f"{kernel} computes something else than qcompile's replacement of it")


def _first(result: Any) -> Tensor:
    tensor: Tensor = result[0] if isinstance(result, tuple) else result
    return tensor


def _tensors(given: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Those of the arguments that are tensors."""
    return [(name, value) for name, value in given.items() if isinstance(value, Tensor)]


def _shape(known: KernelFunction, name: str, value: Tensor, sizes: Mapping[str, int]) -> list[int]:
    """The shape of an argument for other numbers of sequences and tokens."""
    return [sizes.get(axis, size) for axis, size in zip(known.layouts[name], value.shape, strict=True)]


def _random(known: KernelFunction, given: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Arguments like `given` with random tensors.

    They have very different magnitudes, so that an epsilon shows, and decays between nearly 0 and nearly 1.
    """
    generator = torch.Generator().manual_seed(0)
    made = dict(given)
    for name, value in _tensors(given):
        layout, shape = known.layouts[name], _shape(known, name, value, sizes)
        tensor = torch.randn(shape, generator=generator)
        if "T" in layout:
            place = layout.index("T")
            small = 10.0 ** -torch.randint(0, 4, (shape[place],), generator=generator)
            tensor = tensor * small.reshape([-1 if axis == place else 1 for axis in range(len(shape))])
        spread = 10 ** (0.5 - 3.5 * torch.rand(shape, generator=generator))
        made[name] = -tensor.abs() * spread if name in known.falling else tensor
    return made


# ---- replacements --------------------------------------------------------------------------------------


def _convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """hidden_states [B, F, T], weight [F, W] -> [B, F, T]."""
    from transformers.activations import ACT2FN

    y = ops.op("causal_conv")(hidden_states.transpose(1, 2), weight, bias)
    return (y if activation is None else ACT2FN[activation](y)).transpose(1, 2)


def _delta_rule(  # parameters: those of the kernel
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, None]:
    """query and key [B, T, Hk, K], value [B, T, H, D], g [B, T, H] or [B, T, H, K], beta [B, T, H] -> [B, T, H, D]."""
    _require_stateless(output_final_state)
    if use_qk_l2norm_in_kernel:
        query, key = _unit(query, query.shape[-1] ** -0.5), _unit(key)
    else:
        query = query * query.shape[-1] ** -0.5
    return ops.op("linear_recurrence")(query, key, value, g, None, beta, True), None


def _unit(x: Tensor, factor: float = 1.0, eps: float = 1e-6) -> Tensor:
    """factor * x / sqrt(sum(x²) + eps) over the last dimension, K: an RMS norm with eps / K, times factor / sqrt(K)."""
    size = x.shape[-1]
    return F.rms_norm(x, (size,), torch.full((size,), factor * size**-0.5), eps / size)


def _mamba_2(  # parameters: those of the kernel
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
) -> Tensor:
    """hidden_states [B, T, H, P], dt [B, T, H], A [H], B and C [B, T, G, N] -> [B, T, H, P]."""
    _require_stateless(return_final_states)
    dt = _time_step(dt, dt_bias, dt_softplus, dt_limit)
    y = ops.op("linear_recurrence")(C, B, hidden_states, dt, A, dt)
    return y if D is None else y + hidden_states * D[:, None]


def _selective_scan(  # parameters: those of the kernel
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
) -> Tensor:
    """hidden_states, dt and z [B, F, T], A [F, N], B and C [B, N, T] -> [B, F, T]. The last two say how to compute."""
    _require_stateless(return_last_state)
    x, dt, B, C = (t.transpose(1, 2) for t in (hidden_states, dt, B, C))
    dt = _time_step(dt, delta_bias, delta_softplus, (-math.inf, math.inf))
    y = ops.op("linear_recurrence")(C.unsqueeze(2), B.unsqueeze(2), x.unsqueeze(3), dt, A, dt).squeeze(3)
    y = y if D is None else y + x * D
    return (y if z is None else y * F.silu(z.transpose(1, 2))).transpose(1, 2)


def _time_step(dt: Tensor, bias: Tensor | None, softplus: bool, limit: tuple[float, float]) -> Tensor:
    dt = dt if bias is None else dt + bias
    dt = F.softplus(dt) if softplus else dt
    least = -math.inf if softplus and limit[0] <= 0 else limit[0]
    return dt if (least, limit[1]) == (-math.inf, math.inf) else dt.clamp(*limit)


def _require_stateless(returns_state: bool) -> None:
    if returns_state:
        raise UnsupportedError("a recurrent layer returns its state, although the model runs without a cache")


_SELECTIVE = {"hidden_states": "BFT", "dt": "BFT", "A": "FN", "B": "BNT", "C": "BNT", "D": "F", "z": "BFT"}
_SCALAR = {"query": "BTGK", "key": "BTGK", "value": "BTHD", "g": "BTH", "beta": "BTH"}
_CHUNKED = {"hidden_states": "BTHP", "dt": "BTH", "A": "H", "B": "BTGN", "C": "BTGN", "D": "H", "dt_bias": "H"}

KERNELS: Mapping[str, KernelFunction] = {
    "causal_conv1d_fn": KernelFunction({"hidden_states": "BFT", "weight": "FW", "bias": "F"}, _convolution),
    "chunk_gated_delta_rule": KernelFunction(_SCALAR, _delta_rule, ("g",)),
    "chunk_kda": KernelFunction(_SCALAR | {"g": "BTHK"}, _delta_rule, ("g",)),
    "mamba_chunk_scan_combined": KernelFunction(_CHUNKED, _mamba_2, ("A",)),
    "selective_scan_fn": KernelFunction(_SELECTIVE | {"delta_bias": "F"}, _selective_scan, ("A",)),
}
"""The kernels that are replaced; others run as torch code, and are raised or refused like any code of a model."""
