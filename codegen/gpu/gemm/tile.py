"""Tiles of GEMM kernels: how M, N and K are cut, and the schedule of a program."""

from __future__ import annotations

from dataclasses import dataclass, field

DECODE_TOKENS = 16
"""Most rows of the decode class. Its float kernels sum in one order for every M."""

MMA_MIN_TOKENS = 16
"""Least tokens of a tile for the tensor cores; smaller ones are GEMV tiles, unless warp-specialized."""

WS_MIN_TOKENS = 8
"""Least tokens of a warp-specialized tile."""


@dataclass(frozen=True)
class Tile:
    """Tile shape and schedule: a program computes `tokens` (of M) x `rows` (of N) outputs.

    K is cut into parts in three ways. With `split_k`, each of that many programs sums a part, and the last to arrive
    adds the partial sums in order. With `sliced_k`, groups of warps of one program do. With `serial_k` (float
    accumulators, large M), one program sums the parts one after the other and adds them in the order of `split_k`. A
    main loop step takes `unroll` blocks of K; `stages` steps are in flight.

    `prefetch_bytes` (sm_90 on; 0: off) enables programmatic dependent launch (PDL): the kernel starts while the one
    before it ends, prefetches that many bytes (a power of two) of each 32 rows of weights into L2, and waits before it
    touches anything else. `fused_planes` feeds two planes of a block to one tensor core instruction (wgmma of sm_90;
    elsewhere it costs registers).

    GEMV tiles have fewer than MMA_MIN_TOKENS tokens and use no tensor cores. All threads share the 8 to 32 rows of
    weights; a thread loads 16 bytes of a row and block. A step takes `unroll` blocks or, where accumulators are floats,
    one block of each of the `sliced_k` parts. The next `stages` steps are in registers; with PDL they are loaded before
    the kernel waits.

    `unpack_k` (sm_90) overlaps unpacking of weights with the tensor cores (wgmma):

    - 64 (bf16 weights): nothing is unpacked; `stages` chunks of 64 inputs are in flight to or in shared memory.
    - 16, 32 or 64 (other weights, bf16 activations): each warp unpacks that many inputs of K while the tensor cores
      take the previous ones. `stages` is 1: the chunks of 64 inputs of `unroll` blocks are in flight, and with PDL they
      are loaded before the kernel waits.
    - 128: the kernel is warp-specialized. `warps` consumer warps, four per 64 rows, unpack and multiply; four producer
      warps copy, `stages` blocks ahead, and with PDL they start on the weights before the kernel waits. `unroll` is the
      number of blocks that share a word of parameters. With `token_halves` the tokens are multiplied in two halves, and
      the sums of a group of one half are scaled while the tensor cores compute the other. Tiles of 256 tokens are for
      integer sums of all of K.

    A `persistent` kernel has one program per multiprocessor, which loops over tiles of 128 by 128, or for bf16
    activations and for integer sums of 256 or 128 tokens, and copies the next tile's inputs while it stores this one's
    outputs. With bf16 activations the last tiles are halved where they would leave most programs idle.
    """

    tokens: int
    rows: int
    sliced_k: int = 1
    split_k: int = 1
    unroll: int = 1
    warps: int = 4
    stages: int = 4
    prefetch_bytes: int = 0
    fused_planes: bool = True
    unpack_k: int = 0
    serial_k: int = field(default=1, repr=False)  # not in the repr, which sources quote, so that they stay the same
    token_halves: bool = field(default=False, repr=False)
    persistent: bool = field(default=False, repr=False)

    @property
    def gemv(self) -> bool:
        """Whether this is a GEMV tile: each row of x by itself, without the tensor cores."""
        return self.tokens < MMA_MIN_TOKENS and not self.unpack_k

    @property
    def warp_specialized(self) -> bool:
        """Whether producer warps copy and consumer warps multiply."""
        return self.unpack_k == 128
