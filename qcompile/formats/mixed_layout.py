"""Order and packing of the rows of a mix_4_8 weight for CPU kernels.

A kernel computes the features of each width as a dense part, in blocks of 16 rows, and writes each result directly to
its output column: blocks carry the columns of their rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from qcompile.formats.blocks import BYTES, NIBBLES, as_blob, blob_bytes, padded_inputs, unpack_side
from qcompile.formats.mixed import EIGHT_BIT_ZERO
from qcompile.formats.rounding import Parts, groups_of

ROLES = ("codes", "scale", "zero", "columns", "starts")
"""The roles of the blobs of a packed weight, in order."""


@dataclass(frozen=True)
class Layout:
    """The row order of a mixed weight: blocks of 16 rows with one width.

    `rows` and `columns` [blocks, 16] are the rows of each block and their output columns (-1: padding at the end of a
    block); `wide` bool [blocks]. `runs` are the numbers of pairs of blocks of each kind but the last, in order.
    """

    rows: Tensor
    columns: Tensor
    wide: Tensor
    runs: tuple[int, ...]

    @property
    def starts(self) -> Tensor:
        """int32 [blocks + 1]: start and end of each block's codes, in units of the codes of a 4-bit block."""
        ends = (self.wide.int() + 1).cumsum(0)
        return torch.cat((torch.zeros(1), ends)).int()


def row_layout(wide: Tensor, pairs: bool) -> Layout:
    """The layout for rows marked `wide` [N]; with `pairs`, gate and up rows alternate in blocks of 16, and N is even.

    Blocks of the same width (of a pair: combination of widths) are contiguous, narrow ones first, because memory
    streams fastest through blocks of one size. Threads divide each of the `runs` separately, so that all get the same
    share.
    """
    if pairs:
        features = torch.arange(wide.shape[0] // 2)
        gate = features // 16 * 32 + features % 16
        widths = torch.stack((wide[gate], wide[gate + 16]), 1)
        rows = torch.stack((gate, gate + 16), 1)
    else:
        features, widths = torch.arange(wide.shape[0]), wide[:, None]
        rows = features[:, None]
    kind = (widths.int() * torch.tensor([2, 1])[: widths.shape[1]]).sum(1)
    by_kind = [features[kind == value] for value in kind.unique().tolist()]  # ascending
    blocks = [torch.nn.functional.pad(each, (0, -len(each) % 16), value=-1).view(-1, 16) for each in by_kind]
    chosen = torch.cat(blocks)  # [items, 16]
    each = rows.shape[1]
    ends = [each * end // 2 for end in accumulate(map(len, blocks))]
    columns = chosen.repeat_interleave(each, 0)
    source = torch.where(chosen[:, None] >= 0, rows[chosen].transpose(1, 2), -1).flatten(0, 1)
    runs = tuple(end - start for start, end in pairwise([0, *ends[:-1]]))
    return Layout(source, columns, widths[chosen[:, 0]].flatten(), runs)


def packed_bytes(order: Layout, k: int) -> dict[str, int]:
    """Size in bytes of each blob of `pack` for a weight with k inputs."""
    blocks = len(order.rows)
    side = blocks * groups_of(padded_inputs(k), 128) * 16
    sizes = {
        "codes": int(order.starts[-1]) * padded_inputs(k) * 8,
        "scale": 4 * side,
        "zero": side,
        "columns": 64 * blocks,
        "starts": 4 * (blocks + 1),
    }
    return {role: blob_bytes(size) for role, size in sizes.items()}


def pack(parts: Parts, order: Layout) -> dict[str, Tensor]:
    """The parts of a mixed weight as blobs: codes, scale and zero as in their own formats, block by block.

    A 4-bit block of codes is [K / 8][16 rows][4 bytes], an 8-bit block [K / 4][16 rows][4 inputs]; scale and zero are
    [blocks][groups][16]. `columns` int32 [blocks][16] and `starts` int32 [blocks + 1] are those of the layout.
    """
    codes, scale, zero, _ = parts
    unit = padded_inputs(codes.shape[1]) * 8
    starts = order.starts
    out = torch.zeros(int(starts[-1]), unit, dtype=torch.uint8)
    for wide, layout in ((False, NIBBLES), (True, BYTES)):
        chosen = order.wide == wide
        if not bool(chosen.any()):
            continue
        rows = _rows(codes, order.rows[chosen].flatten(), EIGHT_BIT_ZERO if wide else 0)
        if wide:
            rows = (rows.to(torch.int16) - EIGHT_BIT_ZERO).to(torch.int8)
        packed = layout.pack(rows).reshape(int(chosen.sum()), -1, unit)
        for i in range(packed.shape[1]):
            out[starts[:-1][chosen] + i] = packed[:, i]
    sides = {"scale": scale, "zero": zero}
    return {
        "codes": as_blob(out),
        **{role: as_blob(_blocks(_rows(side, order.rows.flatten(), 0))) for role, side in sides.items()},
        "columns": as_blob(order.columns.int()),
        "starts": as_blob(starts),
    }


def unpack(blobs: dict[str, Tensor], n: int, k: int, pairs: bool) -> Parts:
    """The parts of a mixed weight [n, k] from the blobs of `pack`; `pairs` as in `row_layout`."""
    columns = blobs["columns"].view(torch.int32).view(-1, 16)
    blocks, groups = len(columns), groups_of(padded_inputs(k), 128)
    starts = blobs["starts"].view(torch.int32)[: blocks + 1].long()
    rows = columns.long()
    if pairs:  # blocks of gate and up in alternation
        up = torch.arange(blocks)[:, None] % 2
        rows = torch.where(columns >= 0, columns // 16 * 32 + columns % 16 + 16 * up, -1).long()
    wide_blocks = starts.diff() == 2
    unit = padded_inputs(k) * 8
    stored = blobs["codes"][: int(starts[-1]) * unit].view(-1, unit)
    codes = torch.zeros(n, k, dtype=torch.uint8)
    for wide, layout in ((False, NIBBLES), (True, BYTES)):
        chosen = wide_blocks == wide
        if not bool(chosen.any()):
            continue
        units = (starts[:-1][chosen][:, None] + torch.arange(1 + wide)).flatten()
        values = layout.unpack(stored[units].flatten(), 16 * int(chosen.sum()), k).to(torch.int16)
        real = rows[chosen].flatten() >= 0
        codes[rows[chosen].flatten()[real]] = (values + EIGHT_BIT_ZERO * wide).to(torch.uint8)[real]
    real = rows.flatten() >= 0
    sides = []
    for role, dtype in (("scale", torch.float32), ("zero", torch.uint8)):
        side = unpack_side(blobs[role], (16 * blocks, groups), dtype)
        sides.append(torch.zeros(n, groups, dtype=dtype).index_copy(0, rows.flatten()[real], side[real]))
    marked = torch.zeros(n, dtype=torch.bool)
    marked[rows[wide_blocks][rows[wide_blocks] >= 0]] = True
    return [codes, *sides, marked]


def _rows(part: Tensor, rows: Tensor, fill: int) -> Tensor:
    """part[rows], with `fill` for rows of -1."""
    return torch.where((rows >= 0)[:, None], part[rows], torch.full_like(part[:1], fill))


def _blocks(part: Tensor) -> Tensor:
    """[16 * blocks, groups] -> [blocks, groups, 16]."""
    return part.unflatten(0, (-1, 16)).transpose(1, 2)
