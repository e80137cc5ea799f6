"""GPU kernels that sort slots by expert: a slot is one (token, chosen expert) pair."""

from __future__ import annotations

from dataclasses import dataclass

from qcompile.codegen.gpu.kernel import Argument, Kernel, render_template
from qcompile.codegen.gpu.operands import Grid, GridSize, grid_size
from qcompile.codegen.sizes import power_of_two
from qcompile.targets import has_pdl


@dataclass(frozen=True)
class BlocksSpec:
    """Sorts slots by expert, in blocks of up to `tokens` slots, given index [M, stride] with `slots` experts per token.

    `order` gets the slot numbers (token * slots + slot) sorted by expert, then by number. `blocks` [.., 3] gets for
    each block its expert, and its begin and end in `order`; -1 after the last block. One program per expert. If
    `every`, slot i is of expert i, so that nothing is compared. With more slots than a program compares at once
    (`in_chunks`), three kernels run instead: each chunk's slots of each expert are counted, the counts become sums over
    earlier chunks, and each chunk's slots get their places.
    """

    experts: int
    slots: int
    stride: int
    tokens: int
    most: int
    """Most rows of a step."""
    every: bool = False

    PART = 4096
    """Most slots that a program compares at once."""
    CHUNK = 256
    """Most slots of a chunk, if each of them is compared to all others."""
    SUMMED = 16
    """Experts of a program that sums over chunks."""

    @property
    def grid(self) -> GridSize:
        """An upper bound on the number of blocks, as a grid size."""
        if self.every:
            return GridSize("tokens", self.tokens, self.experts)
        if self.most <= self.tokens:
            return GridSize("tokens", times=self.slots)
        times = -(-self.slots // self.tokens)
        return GridSize("tokens", self.tokens * times // self.slots, times, self.experts)

    @property
    def list(self) -> int:
        """Entries of `blocks`, including unused ones."""
        return grid_size(self.grid, {"tokens": self.most})

    @property
    def in_chunks(self) -> bool:
        """Whether slots are sorted in chunks."""
        return self.most * self.slots > self.PART and not self.every

    @property
    def chunk(self) -> int:
        """Rows of a chunk."""
        return max(1, power_of_two(self.CHUNK // self.slots + 1) // 2)

    @property
    def chunks(self) -> int:
        """Most chunks."""
        return -(-self.most // self.chunk)

    def chunk_kernels(self, capability: int) -> tuple[tuple[Kernel, Grid], ...]:
        """The kernels of sorting in chunks, in order, and their grids. `counts`, `before`, `totals`: scratch memory."""
        experts, room, pdl = power_of_two(self.experts), power_of_two(self.chunk * self.slots), has_pdl(capability)

        def kernel(stem: str, names: tuple[str, ...], warps: int, **values: int) -> Kernel:
            name = f"{stem}_{self.experts}x{self.slots}"
            arguments = (*(Argument(name, "*i32") for name in names), Argument("M", "i32"))
            values |= {"experts": experts, "room": room}
            source = render_template(f"{stem}.py.jinja", spec=self, name=name, arguments=arguments, pdl=pdl, **values)
            return Kernel(name, source, arguments, warps, 1, pdl)

        summed = min(self.SUMMED, experts)
        order = ("index", "before", "totals", "order", "blocks")
        return (
            (kernel("expert_counts", ("index", "counts"), 4), (GridSize("tokens", self.chunk), 1, 1)),
            (
                kernel(
                    "expert_sums", ("counts", "before", "totals"), 16, part=summed, chunks=power_of_two(self.chunks)
                ),
                (experts // summed, 1, 1),
            ),
            (kernel("expert_order", order, 8), (GridSize("tokens", self.chunk, plus=1), 1, 1)),
        )

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The kernel's arguments in order."""
        return (*(Argument(name, "*i32") for name in ("index", "order", "blocks")), Argument("M", "i32"))

    def kernel(self, capability: int) -> Kernel:
        """The kernel for a compute capability, of slots that are not sorted in chunks."""
        kind, pdl = "every_blocks" if self.every else "expert_blocks", has_pdl(capability)
        name = f"{kind}_{self.experts}x{self.slots}_{self.tokens}"
        values = {"name": name, "arguments": self.arguments, "pdl": pdl}
        rooms = {
            "room": min(power_of_two(self.most * (1 if self.every else self.slots)), self.PART),
            "experts": power_of_two(self.experts),
            "list_room": power_of_two(self.list // (self.experts if self.every else 1)),
        }
        source = render_template("expert_blocks.py.jinja", spec=self, **values, **rooms)
        warps = 8 if rooms["room"] > 1024 else 1
        return Kernel(name, source, self.arguments, warps, 1, pdl)
