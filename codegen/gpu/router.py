"""GPU kernels of routers: float32 scores, the choice of experts, sums over slots.

A slot is one (token, chosen expert) pair.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcompile.codegen.gpu.kernel import Argument, Kernel, render_template
from qcompile.codegen.gpu.operands import Grid, Size
from qcompile.codegen.sizes import power_of_two
from qcompile.errors import UnsupportedError
from qcompile.targets import has_pdl

WARPS = 4
MOST_SCORES = 1024
"""Most scores per token, which one warp handles."""


@dataclass(frozen=True)
class ScoresSpec:
    """out[M, N] = x[M, K] . w[N, K]^T (+ bias) in float32 without tensor cores, for the small N of a router.

    A program computes `tokens` rows of x by as many rows of w. With `rows_first`, programs that share rows of x run
    together, else those that share rows of w. Strides are in elements. The order of summation depends on neither.
    """

    n: int
    k: int
    x_stride: int
    out_stride: int
    bias: bool = False
    tokens: int = 1
    rows_first: bool = False

    PART = 1024

    @property
    def rows(self) -> int:
        """Rows of w per program."""
        return self.tokens

    @property
    def unrolled(self) -> bool:
        """Whether the loop over K is unrolled, so that all loads are in flight at once."""
        return self.tokens == 1 or self.k <= 4 * self.PART

    @property
    def programs(self) -> int:
        """Programs over the rows of w."""
        return -(-self.n // self.rows)

    def grid(self, blocks: Size) -> Grid:
        """The grid for `blocks` of `tokens` rows of x, 65,535 at most with `rows_first`."""
        return (self.programs, blocks, 1) if self.rows_first else (blocks, self.programs, 1)

    def kernel(self, capability: int) -> Kernel:
        """The kernel for a compute capability."""
        arguments = [Argument(name, "*fp32") for name in ("x", "w", "out", *["bias"] * self.bias)]
        arguments.append(Argument("M", "i32"))
        name, pdl = f"scores_{self.n}x{self.k}{'_bias' if self.bias else ''}", has_pdl(capability)
        values = {"name": name, "arguments": arguments, "pdl": pdl}
        source = render_template("scores.py.jinja", spec=self, **values)
        return Kernel(name, source, tuple(arguments), WARPS, 1, pdl)


@dataclass(frozen=True)
class RouteStep:
    """One step of a router, see program.Route: from `width` numbers per token it makes `made`.

    `x` and `index` are numbers of the earlier steps that made them, or None to read memory, with rows `x_stride` and
    `index_stride` elements apart. Rows of the result are stored `out_stride` elements apart, or not at all (0).
    """

    kind: str
    width: int
    made: int
    eps: float = 0.0
    floor: float = 0.0
    groups: int = 0
    keep: int = 0
    count: int = 0
    tolerance: float = 0.0
    x: int | None = None
    index: int | None = None
    x_stride: int = 0
    index_stride: int = 0
    out_stride: int = 0

    @property
    def run(self) -> int:
        """Scores per group (limit_groups)."""
        return self.width // self.groups


@dataclass(frozen=True)
class RouteSpec:
    """Consecutive steps of a router, fused: one warp computes all of them for one token.

    The kernel's arguments are x, index and out, each with the number of the step that needs it.
    """

    steps: tuple[RouteStep, ...]

    def __post_init__(self) -> None:
        for step in self.steps:
            if step.width > MOST_SCORES:
                raise UnsupportedError(f"{step.width} scores: GPU kernels choose of at most {MOST_SCORES}")
            if step.kind == "limit_groups" and step.run & (step.run - 1):
                raise UnsupportedError(f"groups of {step.run} scores: GPU kernels take powers of 2")

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The kernel's arguments in order."""
        arguments = []
        for number, step in enumerate(self.steps):
            arguments += [Argument(f"x{number}", "*fp32")] * (step.x is None and step.kind != "bound_choice")
            indexed = step.kind in ("pick", "near_share", "bound_choice")
            arguments += [Argument(f"index{number}", "*i32")] * (indexed and step.index is None)
            kind = "*i32" if step.kind in ("top_k", "bound_choice") else "*fp32"
            arguments += [Argument(f"out{number}", kind)] * (step.out_stride > 0)
        return tuple(arguments)

    def kernel(self, capability: int) -> Kernel:
        """The kernel for a compute capability."""
        name, pdl = "route_" + "_".join(step.kind for step in self.steps), has_pdl(capability)
        values = {"name": name, "arguments": self.arguments, "power_of_two": power_of_two, "pdl": pdl}
        return Kernel(name, render_template("route.py.jinja", spec=self, **values), self.arguments, 1, 1, pdl)


@dataclass(frozen=True)
class EverySpec:
    """out int32 [M, stride] chooses all `experts`, in their order. One program per token."""

    experts: int
    stride: int

    def kernel(self, capability: int) -> Kernel:
        """The kernel for a compute capability."""
        name, pdl, arguments = f"every_expert_{self.experts}", has_pdl(capability), (Argument("out", "*i32"),)
        values = {"name": name, "arguments": arguments, "pdl": pdl, "room": power_of_two(self.experts)}
        source = render_template("every_expert.py.jinja", spec=self, **values)
        return Kernel(name, source, arguments, 1, 1, pdl)


@dataclass(frozen=True)
class CombineSpec:
    """out[t] = sum over slots s, in order, of x[t, s] (times scores[t, s]), f32; x has rows of `slots` times `width`.

    If `other_stride` is not 0, the buffer `other` is added to it. With `results` > 1, a row of scores has that many
    sets of weights of the slots, and a row of out as many sums. Strides are in elements.
    """

    slots: int
    width: int
    x_stride: int
    out_stride: int
    score_stride: int = 0
    """0 if there are no scores."""
    other_stride: int = 0
    results: int = 1

    PART = 512

    @property
    def programs(self) -> int:
        """Programs per row."""
        return -(-self.width // self.PART) * self.results

    def kernel(self, capability: int) -> Kernel:
        """The kernel for a compute capability."""
        more = ["scores"] * (self.score_stride > 0) + ["other"] * (self.other_stride > 0)
        arguments = tuple(Argument(n, "*fp32") for n in ("x", "out", *more))
        kind = f"mix_{self.results}" if self.results > 1 else "combine"
        name, pdl = f"{kind}_{self.slots}{'_add' if self.other_stride else ''}", has_pdl(capability)
        values = {"name": name, "arguments": arguments, "part": self.PART, "pdl": pdl}
        return Kernel(name, render_template("combine.py.jinja", spec=self, **values), arguments, 4, 1, pdl)
