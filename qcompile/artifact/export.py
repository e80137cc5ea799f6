"""Export an artifact's quantized graph as an ExportedProgram of ATen operators, and that as MLIR.

Each of our operators is replaced by its reference body, so torch-mlir need not know them. The step over a paged cache
becomes one pass over one text: attention reads the keys and values of its own rows, rounded as by the cache.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.artifact import swap
from qcompile.artifact.packed_weights import PackedWeights
from qcompile.artifact.reader import read_manifest
from qcompile.errors import ResourceError, UnsupportedError, UsageError
from qcompile.formats.activations import F32
from qcompile.formats.kv import kv_format
from qcompile.ops.epilogues import gate
from qcompile.ops.model import attend, key_offsets, visible, whole_keys
from qcompile.ops.step import HeadLayout, HeadTransform, transform_heads

FORMATS = {"torch-mlir": "torch", "linalg": "linalg-on-tensors"}
"""Formats of `qcompile export`, with torch-mlir's names of the dialects."""

WHOLE_CACHE = "kv32"
"""The format of a KV cache that rounds nothing."""

Cached = dict[int, tuple[Tensor, Tensor]]
"""Keys and values [T, Hk, D] by layer, as attention reads them back."""


# ---- one text through the step graph --------------------------------------------------------------------


class Sequence(torch.nn.Module):
    """The model of an artifact: token_ids int64 [T], a text from its start -> logits f32 [T, vocab].

    `artifact` is its path or its weights. Raises UsageError or ArtifactError if there is no intact artifact, and
    UnsupportedError with the node for weights that cannot be unpacked.
    """

    def __init__(self, artifact: Path | PackedWeights) -> None:
        super().__init__()
        weights = artifact if isinstance(artifact, PackedWeights) else PackedWeights(artifact)
        self.graph = weights.graph
        self.leaves: dict[str, int] = {}
        for node in self.graph.nodes:
            if node.op == "call_function" and not self.graph.is_weight(node):
                for source in filter(self.graph.is_weight, node.all_input_nodes):
                    self._keep(source, weights)

    def unrounded(self) -> Sequence:
        """The model with weights as they are, and with activations and cache in float32; changes this one."""
        for node in self.graph.calls("quantize_activation", "norm_quantize", "hadamard_quantize"):
            ops.set_operands(node, **{"dtype" if ops.has_operand(node, "dtype") else "kind": F32.name})
        for node in self.graph.calls("kv_append", "rope_append"):
            ops.set_operands(node, format=WHOLE_CACHE)
        for node in self.graph.calls("kv_attention"):
            ops.set_operands(node, bits=0)
        return self

    def _keep(self, node: fx.Node, weights: PackedWeights) -> None:
        if node.name in self.leaves:
            return
        value = weights.value(node)
        parts = value if isinstance(value, list) else [value]
        self.leaves[node.name] = len(parts) if isinstance(value, list) else 0
        for index, part in enumerate(parts):
            self.register_buffer(f"{node.name}_{index}", part.contiguous())

    def _leaf(self, name: str) -> Any:
        count = self.leaves[name]
        parts = [getattr(self, f"{name}_{index}") for index in range(max(count, 1))]
        return parts if count else parts[0]

    def forward(self, token_ids: Tensor) -> Tensor:
        positions = torch.arange(token_ids.shape[0])
        values: dict[fx.Node, Any] = dict.fromkeys(self.graph.inputs)
        values.update(zip(self.graph.inputs, (token_ids, positions), strict=False))
        values[next(node for node in self.graph.inputs if node.target == "step_cache")] = {}
        for node in self.graph.nodes:
            if node.name in self.leaves:
                values[node] = self._leaf(node.name)
            elif node.op == "call_function" and not self.graph.is_weight(node):
                values[node] = _call(node, values)
        logits: Any = self.graph.output.args[0]
        return values[logits[0]]


def _call(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    own = _OVER_ONE_TEXT.get(ops.name_of(node.target) or "")
    if own is not None:
        return own(SimpleNamespace(**fx.node.map_arg(ops.named(node), values.__getitem__)))
    assert callable(node.target), node
    return node.target(*fx.node.map_arg(node.args, values.__getitem__))


def _kv_append(given: Any) -> Cached:
    return _appended(given, given.k, given.v)


def _appended(given: Any, k: Tensor, v: Tensor | None) -> Cached:
    """The cache of `given`, operands of kv_append or rope_append, with the rounded k and v of its layer."""
    format, cache = kv_format(given.format), cast(Cached, given.cache)
    if v is None:
        return cache | {given.layer: (format.round_trip_latent(k),) * 2}
    return cache | {given.layer: (format.round_trip(k), format.round_trip(v))}


def _rope_append(given: Any) -> list[Any]:
    layout = HeadLayout(given.offsets, given.heads, given.kv_heads, given.head_dim)
    transform = HeadTransform(
        given.positions,
        given.inv_freq,
        given.scaling,
        given.interleaved,
        given.center,
        given.block,
        given.query_table,
        given.query_weight,
    )
    qkv, k, v = transform_heads(given.qkv, layout, transform)
    return [qkv, _appended(given, k, v)]


def _kv_attention(given: Any) -> Tensor:
    if given.bits:
        raise UnsupportedError("export: a hierarchical cache rounds tokens as they age; take another recipe")
    k, v = given.cache[given.layer]
    v = v if given.value is None else v[..., slice(*given.value)]
    positions = given.positions
    mask = visible(positions, positions, given.window, given.chunk)
    bias = key_offsets(given.key_bias, positions, positions)
    return attend(given.q, whole_keys(k, given.center), v, mask, given.scale, given.softcap, given.sinks, bias)


def _conv_step(given: Any) -> list[Any]:
    return [_batched("causal_conv", given.x, (given.weight, given.bias)), None]


def _recurrence_step(given: Any) -> list[Any]:
    if given.stored != "f32":
        raise UnsupportedError(
            f"export: states in {given.stored} are rounded as a text grows; leave cache.states at f32"
        )
    rows = [None if t is None else t[None] for t in (given.k, given.v, given.decay, given.gain)]
    k, v, decay, gain = rows
    return [_batched("linear_recurrence", given.q, (k, v, decay, given.rates, gain, given.delta)), None]


def _batched(name: str, x: Tensor, others: tuple[Any, ...]) -> Tensor:
    """The operator `name` over one sequence: x [T, ...] -> [T, ...]."""
    y: Tensor = ops.reference(name)(x[None], *others)
    return y[0]


_OVER_ONE_TEXT: dict[str, Callable[[Any], Any]] = {
    "kv_append": _kv_append,
    "kv_attention": _kv_attention,
    "rope_append": _rope_append,
    "take_rows": lambda given: given.x,
    "conv_step": _conv_step,
    "recurrence_step": _recurrence_step,
}
"""Replacements for operators on a paged cache or states if these hold the text itself and all logits are requested."""


# ---- reference bodies ------------------------------------------------------------------------------------


def _expert_linear(x: Tensor, index: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """expert_linear without data-dependent shapes: the weights of each slot are gathered."""
    if x.dim() == index.dim():
        x = x.unsqueeze(-2).expand(*index.shape, x.shape[-1])
    y = (weight[index] @ x[..., None]).squeeze(-1)
    return y if bias is None else y + bias[index]


def _gated_experts(x: Tensor, index: Tensor, weight: Tensor, bias: Tensor | None, *gating: Any) -> Tensor:
    return gate(_expert_linear(x, index, weight, bias), *gating)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The body of each of our operators in ATen, for ExportedProgram.run_decompositions."""
    table = {ops.op(name): ops.reference(name) for name in ops.DEFINED}
    table[ops.op("expert_linear")] = _expert_linear
    table[ops.op("gated_experts")] = _gated_experts
    return table


def to_aten(module: torch.nn.Module, inputs: tuple[Any, ...]) -> torch.export.ExportedProgram:
    """`module` exported for the shapes of `inputs`, with our operators decomposed."""
    with torch.no_grad():
        program = torch.export.export(module, inputs, strict=False)
        table = torch.export.default_decompositions()
        table.update(decompositions())
        return program.run_decompositions(table)


# ---- MLIR -------------------------------------------------------------------------------------------------


def to_mlir(program: torch.export.ExportedProgram, format: str) -> Any:
    """`program` as a torch_mlir.ir.Module with a function `main`, in one of FORMATS.

    Raises ResourceError if torch-mlir is not installed, UnsupportedError if it cannot lower the program.
    """
    torch_mlir = _torch_mlir()
    try:
        return torch_mlir.export_and_import(program, output_type=FORMATS[format])
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UnsupportedError(f"export: torch-mlir cannot lower this model to {format}: {reason[0][:300]}") from error


def _torch_mlir() -> Any:
    try:
        return importlib.import_module("torch_mlir.fx")
    except ImportError as error:
        raise ResourceError(f"export needs torch-mlir ({error}): pip install 'qcompile[mlir]'") from error


def write(root: Path, out: Path, format: str, tokens: int) -> int:
    """Export the artifact at `root`, for texts of `tokens` tokens, to the file `out`; returns its size in bytes.

    Raises UsageError for an unknown format or a bad number of tokens, ResourceError if `out` cannot be written, and the
    errors of Sequence.
    """
    if format not in FORMATS:
        raise UsageError(f"--format {format} is unknown; there are {', '.join(FORMATS)}")
    _torch_mlir()  # raises before a minute's work if it is missing
    most = read_manifest(root)["model"]["max_position"]
    if not 1 <= tokens <= most:
        raise UsageError(f"--tokens {tokens}: the model's context is {most}")
    with torch.no_grad():
        model = Sequence(root)
    program = to_aten(model, (torch.zeros(tokens, dtype=torch.int64),))
    module = to_mlir(program, format)
    try:
        with swap.whole_file(out) as file:
            module.operation.print(file=file, binary=True)
            file.write(b"\n")
        return out.stat().st_size
    except OSError as error:
        raise ResourceError(f"{out} cannot be written: {error.strerror}") from error
