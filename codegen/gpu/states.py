"""GPU kernels of recurrent states: short convolutions and linear recurrences (slots: qcompile/formats/states.py).

A program of a recurrence holds a tile of one sequence's state in registers. It replays the log, then computes the
sequence's rows one after the other, while it loads the operands of the next ones. One kernel serves decoding,
verification and prompts, so that a row's arithmetic does not depend on the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from qcompile.codegen.gpu.kernel import Argument, Kernel, render_template
from qcompile.codegen.sizes import power_of_two, round_up
from qcompile.errors import UnsupportedError
from qcompile.formats.states import LOG_TOKENS, ConvState, RecurrenceState

TILE = 2048
"""Numbers of a state that a program holds."""
INT8_TILE = 1024
"""That of a state in int8: a thread loads up to 16 columns at once, and in TILE takes more registers than it has."""
SCAN_TILE = 512
"""Numbers of a state that a program holds if each has a factor of its own, which takes an exponential."""
WARP = 2048
"""Most numbers of a state that a warp holds."""
MOST_KEYS = 4096
"""Most key features, so that a column of a state fits into the registers of few warps."""
LOAD_BYTES = 16
"""Bytes of a state that a thread loads at once, as Triton chooses: 4 columns of float32."""
FEW_ROWS = 64
"""Most rows of a sequence that RecurrenceSpec computes where PromptSpec can as well."""
FUSED_ROWS = LOG_TOKENS
"""Most rows of a sequence for which a convolution's rows may store to the ring that others of them read."""


@dataclass(frozen=True)
class ConvSpec:
    """A causal convolution over rows, one program for each row and BLOCK features of x [tokens, x_stride], f32.

    With `computes` it computes out [tokens, out_stride], with `keeps` it stores the inputs to the ring at number
    `state` of slots of `slot_numbers`; in steps with more than FUSED_ROWS rows of a sequence only one of both.
    """

    layer: ConvState
    x_stride: int
    out_stride: int
    state: int
    slot_numbers: int
    bias: bool = False
    computes: bool = True
    keeps: bool = True
    act: str = ""
    """An activation of ops.UNARY that results get, or none."""

    BLOCK = 512

    @property
    def title(self) -> str:
        """Title of the generated source."""
        done = [f"Convolution, {self.act}".rstrip(", ")] * self.computes + ["ring"] * self.keeps
        return f"{' and '.join(done)} of {self.layer.features} features, {self.layer.width} taps"

    @property
    def padded_features(self) -> int:
        """Numbers of a tap's weights."""
        return round_up(self.layer.features, 16)

    @property
    def programs(self) -> int:
        """Programs per row."""
        return -(-self.layer.features // self.BLOCK)

    def kernel(self, capability: int) -> Kernel:
        """The kernel for a compute capability."""
        names = ["x", "states", *["out", "weight"] * self.computes, *["bias"] * (self.computes and self.bias)]
        arguments = [Argument(name, "*fp32") for name in names]
        arguments += [Argument(name, "*i32") for name in ("row_sequence", "positions", "query_start", "state_slots")]
        name = "_".join(["conv", *[self.act] * (self.act != ""), "step"] if self.computes else ["conv", "keep"])
        pdl = capability >= 90
        values: dict[str, Any] = {"spec": self, "name": name, "arguments": arguments, "pdl": pdl}
        return Kernel(name, render_template("conv_step.py.jinja", **values), tuple(arguments), 4, 1, pdl)


@dataclass(frozen=True)
class RecurrenceSpec:
    """A linear recurrence over rows, from the part of each slot at number `state`; all operands f32.

    A state in fewer bits is the argument `codes`: the memory of `states` in its format.

    `strides` are the rows' distances in the operands q, k, v, decay, and gain if there is one. A program has a tile
    [key features, `columns`] of a sequence's state: value features of one head, or heads if values have one feature.
    The tile has about `tile` numbers; 0 stands for TILE, INT8_TILE or SCAN_TILE.
    """

    layer: RecurrenceState
    strides: dict[str, int]
    out_stride: int
    state: int
    slot_numbers: int
    delta: bool
    rates: Literal["", "heads", "keys"] = ""
    tile: int = 0
    logs_shared: bool = True
    """Whether keys and decay, which several programs read, enter the log here. Else LogSpec puts them there."""

    AHEAD = 2
    """Number of tokens by which operands are loaded ahead."""

    def __post_init__(self) -> None:
        if self.layer.key_dim > MOST_KEYS:
            raise UnsupportedError(f"{self.layer.key_dim} key features: GPU recurrences take at most {MOST_KEYS}")

    @property
    def title(self) -> str:
        """Title of the generated source."""
        layer = self.layer
        return f"Recurrence of {layer.heads} heads, states of {layer.key_dim} x {layer.value_dim}"

    @property
    def gain(self) -> bool:
        """Whether updates have a gain."""
        return "gain" in self.strides

    @property
    def scan(self) -> bool:
        """Whether a program's columns are heads."""
        return self.layer.value_dim == 1

    @property
    def keys(self) -> int:
        """Key features, rounded up to a power of two."""
        return power_of_two(self.layer.key_dim)

    @property
    def tile_numbers(self) -> int:
        """About how many numbers a tile has."""
        return self.tile or (SCAN_TILE if self.scan else INT8_TILE if self.layer.stored == "int8" else TILE)

    @property
    def few_columns(self) -> int:
        """Columns of a tile of RecurrenceSpec."""
        every = self.layer.heads if self.scan else self.layer.value_dim
        return min(power_of_two(every), max(self.tile_numbers // self.keys, 4), 128)

    @property
    def columns(self) -> int:
        """Columns of a program's tile."""
        return self.few_columns

    @property
    def staged(self) -> bool:
        """Whether PromptSpec sums in the same order: as Triton lays out tiles of 16 bytes a thread, rows of 4 keys."""
        keys = (self.strides["q"], self.strides["k"]) if self.delta else ()
        aligned = not any(number % 4 for number in (self.slot_numbers, self.state, *keys))
        aligned = aligned and self.layer.value_dim % self.thread_loads == 0
        whole = self.keys == self.layer.key_dim == 128 if self.delta else 64 <= self.keys <= 256
        one_warp = self.keys * self.few_columns == (INT8_TILE if self.layer.stored == "int8" else WARP)
        return aligned and whole and not self.scan and one_warp

    @property
    def thread_loads(self) -> int:
        """Adjacent columns of a state that a thread loads."""
        return min(LOAD_BYTES // self.layer.state_bytes, self.few_columns)

    @property
    def padded_heads(self) -> int:
        """Numbers of a key feature's transposed rates."""
        return round_up(self.layer.heads, 16)

    @property
    def programs(self) -> tuple[int, int]:
        """Programs per sequence: the first two sizes of a grid. Its last size is the number of sequences.

        Programs that are launched one after the other have adjacent columns: parts of the same lines of memory.
        """
        blocks = -(-(self.layer.heads if self.scan else self.layer.value_dim) // self.columns)
        return blocks, 1 if self.scan else self.layer.heads

    def kernel(self, capability: int) -> Kernel:
        """The kernel for a compute capability."""
        names = [*self.strides, *["rates"] * bool(self.rates), "out", "states"]
        arguments = [Argument(name, "*fp32") for name in names]
        if self.layer.stored != "f32":
            arguments.append(Argument("codes", {"bf16": "*bf16", "int8": "*i8"}[self.layer.stored]))
        arguments += [Argument(name, "*i32") for name in ("positions", "query_start", "state_slots", "certain")]
        name, pdl = "scan_step" if self.scan else "recurrence_step", capability >= 90
        source = render_template(
            "recurrence_step.py.jinja", spec=self, name=name, arguments=arguments, log=self.layer.log_tokens, pdl=pdl
        )
        return Kernel(name, source, tuple(arguments), max(1, self.keys * self.columns // WARP), 1, pdl)


@dataclass(frozen=True)
class LogSpec:
    """Keys and decay enter the log, after a recurrence: one program for each row and BLOCK numbers.

    The log of a state in fewer bits also has certain rows. Where a step has more than ROUND_TOKENS rows of a sequence,
    these may take the entries of positions before the step, which other programs of the recurrence have yet to replay.
    """

    layer: RecurrenceState
    strides: dict[str, int]
    state: int
    slot_numbers: int

    BLOCK = 512

    @property
    def title(self) -> str:
        """Title of the generated source."""
        return f"Log of keys and decay of {self.layer.heads} heads"

    @property
    def programs(self) -> int:
        """Programs per row."""
        return -(-max(self.layer.key_heads * self.layer.key_dim, self.layer.decays) // self.BLOCK)

    def kernel(self, capability: int) -> Kernel:
        """The kernel for a compute capability."""
        arguments = [Argument(name, "*fp32") for name in ("k", "decay", "states")]
        arguments += [Argument(name, "*i32") for name in ("row_sequence", "positions", "state_slots")]
        name, pdl = "recurrence_log", capability >= 90
        source = render_template("recurrence_log.py.jinja", spec=self, name=name, arguments=arguments, pdl=pdl)
        return Kernel(name, source, tuple(arguments), 4, 1, pdl)


def log_spec(spec: RecurrenceSpec) -> LogSpec:
    """What follows a recurrence that does not log keys and decay."""
    return LogSpec(spec.layer, spec.strides, spec.state, spec.slot_numbers)


@dataclass(frozen=True)
class PromptSpec(RecurrenceSpec):
    """A linear recurrence over many rows of a sequence, with the results of RecurrenceSpec to the bit.

    A program has `thread_columns` value features for each of its threads that have other columns, and copies the
    operands of BLOCK rows at a time to shared memory. It is not launched while the kernel before it runs (PDL):
    its few long programs would share the multiprocessors that become free first.
    """

    thread_columns: int = 1

    BLOCK = 16
    WARPS = 4

    @property
    def key_lanes(self) -> int:
        """Threads of a warp that have other keys of the same columns."""
        return 32 * self.thread_loads // self.few_columns

    @property
    def columns(self) -> int:
        """Columns of a program's tile."""
        return self.WARPS * 32 // self.key_lanes * self.thread_columns

    def kernel(self, capability: int) -> Kernel:
        """The kernel for a compute capability."""
        name, arguments = "recurrence_prompt", super().kernel(capability).arguments
        values = {"name": name, "arguments": arguments, "log": self.layer.log_tokens}
        source = render_template("recurrence_prompt.py.jinja", spec=self, **values)
        return Kernel(name, source, arguments, self.WARPS, 1)


def prompt_spec(spec: RecurrenceSpec, multiprocessors: int) -> PromptSpec | None:
    """The kernel for many rows of a sequence, if there is one: the largest programs that nearly fill a GPU."""
    if not spec.staged:
        return None
    least = max(1, spec.thread_loads // 4)
    fields = vars(spec) | {"logs_shared": spec.layer.stored == "f32"}
    made = [PromptSpec(**fields, thread_columns=columns * least) for columns in (4, 2, 1)]
    return next((each for each in made if 4 * math.prod(each.programs) >= 3 * multiprocessors), made[-1])
