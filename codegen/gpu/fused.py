"""Calls of fused programs (codegen/gpu/fuse.py): kernels that do the work of several calls, and helpers of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qcompile.codegen.calls import (
    AllReduce,
    Attention,
    Call,
    ExpertGemm,
    Gemm,
    Norm,
    NormHeads,
    QuantizeRows,
    RopeAppend,
    Route,
)
from qcompile.codegen.state_calls import ConvStep


@dataclass(frozen=True)
class FusedCall(Call):
    """Several calls as one; reads what the calls in `parts` read, and writes what they write.

    `part_fields` of a class name its fields that hold calls: one, a tuple of them, or None.
    """

    read_fields: ClassVar[tuple[str, ...]] = ()
    write_fields: ClassVar[tuple[str, ...]] = ()
    part_fields: ClassVar[tuple[str, ...]]

    @property
    def parts(self) -> tuple[Call, ...]:
        """The fused calls in order."""
        values = (getattr(self, each) for each in self.part_fields)
        calls = (call for value in values for call in (value if isinstance(value, tuple) else (value,)))
        return tuple(call for call in calls if call is not None)

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the buffers that the calls read, each once."""
        return tuple(dict.fromkeys(name for part in self.parts for name in part.reads))

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of the buffers that the calls write, each once."""
        return tuple(dict.fromkeys(name for part in self.parts for name in part.writes))


@dataclass(frozen=True)
class GatedQuantize(Call):
    """QuantizeRows of act(gate) * up; x: bf16 or f32 [rows, 2 * width], alternating blocks of gate and up columns."""

    kernel: ClassVar[str] = "gated_quantize"
    x: str
    out: str
    act: str


@dataclass(frozen=True)
class GatedHadamard(Call):
    """Hadamard of act(gate) * up; x: bf16 [rows, 2 * width], alternating blocks of gate and up columns."""

    kernel: ClassVar[str] = "gated_hadamard"
    x: str
    out: str
    block: int
    core: str
    core_order: int
    act: str


@dataclass(frozen=True)
class MeasuredQuantize(FusedCall):
    """A GEMM or attention that also stores the largest magnitudes of parts of each row, and `quantize` of its result.

    With the magnitudes, several programs can quantize one row with one scale.
    """

    kernel: ClassVar[str] = "measured_quantize"
    part_fields: ClassVar[tuple[str, ...]] = ("maker", "quantize")
    maker: Gemm | Attention
    quantize: QuantizeRows


@dataclass(frozen=True)
class NormedAppend(FusedCall):
    """An append to the KV cache that first normalizes the heads of q, of k, or of both."""

    kernel: ClassVar[str] = "normed_append"
    part_fields: ClassVar[tuple[str, ...]] = ("norm_q", "norm_k", "append")
    append: RopeAppend
    norm_q: NormHeads | None = None
    norm_k: NormHeads | None = None


@dataclass(frozen=True)
class CombineAdd(Call):
    """out = other + the sum over slots of Combine; all f32."""

    kernel: ClassVar[str] = "combine_add"
    read_fields: ClassVar[tuple[str, ...]] = ("x", "scores", "other")
    x: str
    out: str
    other: str
    slots: int
    scores: str | None = None


@dataclass(frozen=True)
class SumAdd(Call):
    """out = other + the sum over ranks of AllReduce; all f32."""

    kernel: ClassVar[str] = "sum_add"
    read_fields: ClassVar[tuple[str, ...]] = ("x", "other")
    x: str
    out: str
    other: str
    ranks: int


@dataclass(frozen=True)
class SumNorm(FusedCall):
    """A sum over ranks, and the norm of its rows, which is the next to read it."""

    kernel: ClassVar[str] = "sum_norm"
    part_fields: ClassVar[tuple[str, ...]] = ("sum", "norm")
    sum: AllReduce | SumAdd
    norm: Norm

    @property
    def x(self) -> str:
        """The buffer of which ranks have parts."""
        return self.sum.x

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.sum.ranks

    @property
    def total(self) -> str:
        """The buffer of the sum itself."""
        return self.sum.out

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the buffers that the sum reads."""
        return self.sum.reads


@dataclass(frozen=True)
class ActivatedConv(FusedCall):
    """A ConvStep that applies the activation `act` to its results."""

    kernel: ClassVar[str] = "activated_conv"
    part_fields: ClassVar[tuple[str, ...]] = ("conv",)
    conv: ConvStep
    act: str


@dataclass(frozen=True)
class RouteChain(FusedCall):
    """Consecutive steps of a router; `stored` tells of each step whether another call reads its result."""

    kernel: ClassVar[str] = "route_chain"
    part_fields: ClassVar[tuple[str, ...]] = ("steps",)
    steps: tuple[Route, ...]
    stored: tuple[bool, ...]

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the buffers that steps read, except results of earlier steps."""
        made: set[str] = set()
        names: dict[str, None] = {}
        for step in self.steps:
            names |= dict.fromkeys(name for name in step.reads if name not in made)
            made.add(step.out)
        return tuple(names)

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of the buffers with the stored results."""
        pairs = zip(self.steps, self.stored, strict=True)
        return tuple(dict.fromkeys(step.out for step, stored in pairs if stored))


# ---- experts: a slot is one (token, chosen expert) pair --------------------------------------------


@dataclass(frozen=True)
class QuantizeSlots(Call):
    """Quantizes x, f32, to `activation` for the GEMMs of experts, into scratch memory with rows of `padded_k` inputs.

    x has `x_slots` rows of k elements for each token.
    """

    kernel: ClassVar[str] = "quantize_slots"
    write_fields: ClassVar[tuple[str, ...]] = ()
    x: str
    x_slots: int
    k: int
    padded_k: int
    activation: str


@dataclass(frozen=True)
class NormSlots(FusedCall):
    """A norm that also quantizes its result for the GEMMs of experts."""

    kernel: ClassVar[str] = "norm_slots"
    part_fields: ClassVar[tuple[str, ...]] = ("norm", "slots")
    norm: Norm
    slots: QuantizeSlots

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the buffers that the norm reads."""
        return self.norm.reads


@dataclass(frozen=True)
class SortSlots(Call):
    """Sorts the slots of buffer `index`, int32 [tokens, slots], by expert, into scratch memory.

    With `gemv`, GEMMs of experts need no order for few tokens. If `every`, the index chooses all experts in their
    order.
    """

    kernel: ClassVar[str] = "sort_slots"
    read_fields: ClassVar[tuple[str, ...]] = ("index",)
    write_fields: ClassVar[tuple[str, ...]] = ()
    index: str
    experts: int
    slots: int
    gemv: bool
    every: bool = False


@dataclass(frozen=True)
class SlotGemm(FusedCall):
    """A GEMM of experts over what an earlier call like `inputs` quantized and one like `order` sorted."""

    kernel: ClassVar[str] = "slot_gemm"
    part_fields: ClassVar[tuple[str, ...]] = ("gemm",)
    gemm: ExpertGemm
    inputs: QuantizeSlots
    order: SortSlots
