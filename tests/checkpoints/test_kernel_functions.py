"""Kernel functions of transformers: each replacement equals the torch code, or is refused."""

from __future__ import annotations

import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qcompile.checkpoints import kernel_functions
from qcompile.errors import UnsupportedError

hub_kernels = pytest.importorskip("transformers.integrations.hub_kernels")


def random(*shape: int, negative: bool = False) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return -values.abs() if negative else values


def repeats_heads() -> bool:
    """Whether the delta rule of the installed transformers repeats heads of keys itself; older versions' callers do."""
    space = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    return GROUPED in inspect.getsource(space.torch_chunk_gated_delta_rule)


GROUPED = "query.repeat_interleave(num_v_heads // num_k_heads, dim=2)"
GROUPS = 2 if repeats_heads() else 4


def heads(groups: int = GROUPS, by_key: bool = False, **more: Any) -> dict[str, Any]:
    """Arguments of a delta rule over 70 tokens with 4 heads of values."""
    decay = random(2, 70, 4, 6, negative=True) if by_key else random(2, 70, 4, negative=True)
    q, k, v = random(2, 70, groups, 6), random(2, 70, groups, 6) + 1, random(2, 70, 4, 5)
    return {"query": q, "key": k * 0.3, "value": v, "g": decay, "beta": random(2, 70, 4).sigmoid(), **more}


def spaces(**more: Any) -> dict[str, Any]:
    """Arguments of SSD with 4 heads and 2 groups."""
    x, dt, b, c = random(2, 9, 4, 5), random(2, 9, 4), random(2, 9, 2, 6), random(2, 9, 2, 6) + 1
    return {"hidden_states": x, "dt": dt.abs(), "A": random(4, negative=True), "B": b, "C": c, "chunk_size": 4} | more


def scans(**more: Any) -> dict[str, Any]:
    """Arguments of a selective scan with 5 features."""
    x, dt, b, c = random(2, 5, 9), random(2, 5, 9), random(2, 6, 9), random(2, 6, 9) + 1
    return {"hidden_states": x, "dt": dt.abs(), "A": random(5, 6, negative=True), "B": b, "C": c} | more


MAMBA_2 = "mamba_chunk_scan_combined"
CALLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "convolution": ("lfm2", "causal_conv1d_fn", {"hidden_states": random(2, 5, 9), "weight": random(5, 3)}),
    "convolution with an activation": (
        "mamba",
        "causal_conv1d_fn",
        {"hidden_states": random(2, 5, 9), "weight": random(5, 4), "bias": random(5), "activation": "silu"},
    ),
    "delta rule": ("qwen3_next", "chunk_gated_delta_rule", heads()),
    "delta rule, unit vectors": ("qwen3_5", "chunk_gated_delta_rule", heads(4, use_qk_l2norm_in_kernel=True)),
    "delta rule by key": ("kimi_linear", "chunk_kda", heads(4, True, use_qk_l2norm_in_kernel=True)),
    "SSD": ("mamba2", MAMBA_2, spaces()),
    "SSD, softplus": ("bamba", MAMBA_2, spaces(D=random(4), dt_bias=random(4), dt_softplus=True)),
    "SSD, bounded steps": ("zamba2", MAMBA_2, spaces(dt_bias=random(4), dt_limit=[0.1, 0.9])),
    "SSD, bounded steps of a softplus": ("zamba2", MAMBA_2, spaces(dt_softplus=True, dt_limit=(0.3, math.inf))),
    "selective scan": ("jamba", "selective_scan_fn", scans()),
    "selective scan, gated": (
        "falcon_mamba",
        "selective_scan_fn",
        scans(D=random(5), z=random(2, 5, 9), delta_bias=random(5), delta_softplus=True),
    ),
}


def host(function: Callable[..., Any], name: str = "a_module_with_kernels") -> nn.Module:
    """A module with code that can call `function` by the name `hook`."""
    space = types.ModuleType(name)
    space.hook = function  # type: ignore[attr-defined]
    sys.modules[name] = space
    return type("Host", (nn.Module,), {"__module__": name})()


@pytest.fixture(autouse=True)
def _without_hosts() -> Iterator[None]:
    yield
    sys.modules.pop("a_module_with_kernels", None)


def functions(family: str, kernel: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The function of `family` that is marked as `kernel`, and what it is while a model is traced."""
    space = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    marked = [value for value in vars(space).values() if (kernel_functions._marked(value) or ("",))[0] == kernel]
    (function,) = marked
    module = host(function)
    with kernel_functions.replaced(module):
        traced = sys.modules[type(module).__module__].hook
    assert sys.modules[type(module).__module__].hook is function and traced is not function
    return function, traced


def output(result: Any) -> Tensor:
    tensor: Tensor = result[0] if isinstance(result, tuple) else result
    return tensor


@pytest.mark.parametrize("name", CALLS)
def test_equal(name: str) -> None:
    family, kernel, given = CALLS[name]
    function, traced = functions(family, kernel)
    expected, result = output(function(**given)), output(traced(**given))
    assert result.shape == expected.shape
    assert (result - expected).abs().max() <= 2e-6 * expected.abs().max()  # rounding of sums in another order


def test_all_kernels_are_tested() -> None:
    assert {kernel for _, kernel, _ in CALLS.values()} == set(kernel_functions.KERNELS)


@pytest.mark.parametrize(
    ("name", "argument", "message"),
    [
        ("delta rule", {"initial_state": random(2, 4, 6, 5)}, "argument initial_state of chunk_gated_delta_rule"),
        ("delta rule", {"output_final_state": True}, "returns its state"),
        ("delta rule", {"head_first": True}, "argument head_first"),
        ("delta rule", {"g": random(2, 70, 4, 6)}, "g of chunk_gated_delta_rule has 4 dimensions, not 3"),
        ("SSD", {"initial_states": random(2, 4, 5, 6)}, "argument initial_states of mamba_chunk_scan_combined"),
        ("SSD", {"return_final_states": True}, "returns its state"),
        ("selective scan", {"return_last_state": True}, "returns its state"),
    ],
)
def test_arguments_that_are_not_understood(name: str, argument: dict[str, Any], message: str) -> None:
    family, kernel, given = CALLS[name]
    _, traced = functions(family, kernel)
    with pytest.raises(UnsupportedError, match=message):
        traced(**given | argument)


CHANGES: dict[str, tuple[str, str, str]] = {
    "another epsilon": ("delta rule, unit vectors", "eps=1e-6", "eps=1e-5"),
    "another scale": ("delta rule", "** -0.5", "** -0.25"),
    "another order of heads": ("delta rule", GROUPED, "query.repeat(1, 1, num_v_heads // num_k_heads, 1)"),
    "no activation": ("convolution with an activation", "activation is not None", "activation is None"),
    "no bound": ("SSD, bounded steps", "min=dt_limit[0]", "min=0.0"),
    "a residual of another value": ("selective scan, gated", "hidden_states * D[None", "dt * D[None"),
    "a bound of decays": ("delta rule", "decay = g ", "decay = g.clamp(min=-5) "),
    "a state lost at the second border": ("SSD", "C_times_states =", "states[:, 2:] = 0; C_times_states ="),
    "sequences mixed at the second border": (
        "SSD",
        "C_times_states =",
        "states[:, 2:] = states[:, 2:].flip(0); C_times_states =",
    ),
    "later tokens": ("convolution", "[:, :, :seq_len]", "[:, :, -seq_len:]"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_function_that_computes_something_else(name: str) -> None:
    case, old, new = CHANGES[name]
    family, kernel, given = CALLS[case]
    function, _ = functions(family, kernel)
    text = inspect.getsource(function)
    if old == GROUPED and not repeats_heads():
        pytest.skip("this version of transformers repeats heads before the call")
    assert old in text, "the torch code was written anew: change it in another place"
    space = dict(vars(sys.modules[function.__module__]))
    exec(text.replace(old, new), space)  # the installed library's own text, with one change
    module = host(space[function.__name__])
    with kernel_functions.replaced(module), pytest.raises(UnsupportedError, match="computes something else"):
        sys.modules[type(module).__module__].hook(**given)


def test_functions_without_a_mark_stay() -> None:
    def causal_conv1d_fn(x: Tensor) -> Tensor:
        return x

    module = host(causal_conv1d_fn)
    with kernel_functions.replaced(module):
        assert sys.modules[type(module).__module__].hook is causal_conv1d_fn


@pytest.mark.parametrize("hostile", ["features", "chunk"])
def test_functions_of_too_many_numbers_are_not_compared(hostile: str) -> None:
    """A configuration may state any number of features or length of a chunk: memory and time would have no bound."""
    if hostile == "features":
        kernel, given = "causal_conv1d_fn", {"hidden_states": (2, 1 << 24, 9), "weight": (1 << 24, 4)}
        arguments: dict[str, Any] = {name: torch.empty(shape, device="meta") for name, shape in given.items()}
    else:
        kernel, arguments = MAMBA_2, spaces(chunk_size=1 << 30)
    known = kernel_functions.KERNELS[kernel]
    with pytest.raises(UnsupportedError, match=rf"{kernel} takes [\d,]+ numbers for \d+ tokens; .* in config.json"):
        kernel_functions._prove(kernel, known, known.replacement, arguments)
