"""PTX of few instructions, run one by one on registers of many threads at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

Words = np.ndarray  # uint32 [...]


def floats(x: Words, kind: str) -> np.ndarray:
    """The lower and the upper halves of words [n] as float64 [n, 2], of f16 or bf16."""
    halves = np.stack((x & 0xFFFF, x >> 16), -1).astype(np.uint16)
    if kind == "f16x2":
        return halves.view(np.float16).astype(np.float64)
    return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def words(values: np.ndarray, kind: str) -> Words:
    """Words [n] of float64 [n, 2], each rounded to the nearest, to even ones."""
    if kind == "f16x2":
        halves = values.astype(np.float16).view(np.uint16).astype(np.uint32)
    else:
        bits = values.astype(np.float32).view(np.uint32)
        halves = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return halves[..., 0] | halves[..., 1] << 16


def lop3(a: Words, b: Words, c: Words, table: int) -> Words:
    """Bit i of `table` where the bits of a, b and c are those of i, the lowest c's."""
    result = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return result


def permute(a: Words, b: Words, selector: Words) -> Words:
    """The bytes that the nibbles of a selector name, or their signs."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    nibbles = [selector.astype(np.uint64) >> np.uint64(4 * i) & np.uint64(15) for i in range(4)]
    picked = [both >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(255) for nibble in nibbles]
    signs = [(byte >> np.uint64(7)) * np.uint64(255) for byte in picked]
    picked = [np.where(nibble > 7, sign, byte) for nibble, sign, byte in zip(nibbles, signs, picked, strict=True)]
    return sum(byte << np.uint64(8 * i) for i, byte in enumerate(picked)).astype(np.uint32)


def bytes_of(x: Words) -> np.ndarray:
    """The bytes of words [n] with their signs, int64 [n, 4]."""
    return x.view(np.int8).reshape(-1, 4).astype(np.int64)


def _pair(high: Words, low: Words, kind: str) -> Words:
    """Two float32 rounded to one word."""
    return words(np.stack((low.view(np.float32), high.view(np.float32)), -1), kind)


_PLAIN: dict[str, Callable[..., Words]] = {
    "mov": lambda x: x,
    "shl": lambda x, n: x << n,
    "shr": lambda x, n: x >> n,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "mad": lambda x, y, z: x * y + z,
    "mul": lambda x, y: x * y,
    "prmt": permute,
    "ex2": lambda x: np.exp2(x.view(np.float32)).view(np.uint32),
    "dp4a": lambda x, y, z: z + (bytes_of(x) * bytes_of(y)).sum(-1).astype(np.uint32),
}

_OF_HALVES: dict[str, Callable[..., np.ndarray]] = {
    "fma": lambda x, y, z: x * y + z,
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
}


_OF_FLOATS: dict[str, Callable[..., Words]] = {
    "mul": lambda x, y: (x.view(np.float32) * y.view(np.float32)).view(np.uint32),
    "setp": lambda x, y: (x.view(np.float32) != y.view(np.float32)).astype(np.uint32),
}


def run(asm: str, outputs: int, *inputs: Words, tied: Sequence[int] = ()) -> list[Words]:
    """What PTX makes of registers: those of the operations that kernels have.

    The first inputs are the outputs `tied`, too. A branch is one that all threads take, or none.
    """
    registers = {f"${outputs + i}": x for i, x in enumerate(inputs)}
    registers |= {f"${to}": x for to, x in zip(tied, inputs, strict=False)}
    label = ""  # up to which nothing runs

    def read(name: str) -> Words:
        number = f"0x{name[2:]}" if name.startswith("0f") else name
        return registers[name] if name in registers else np.full_like(inputs[0], int(number, 0))

    for line in re.split(r"[;{}]", re.sub(r"\.reg[^;]*;", "", asm)):
        line = line.strip()
        if not line or label:
            label = label if not line.startswith(f"{label}:") else ""
            continue
        if line.endswith(":"):
            continue
        if line.startswith("@!"):
            predicate, _, to = line[2:].split()
            label = "" if registers[predicate].any() else to
            continue
        operation, rest = line.split(" ", 1)
        to, *names = (name.strip() for name in rest.split(","))
        base, *_, kind = operation.split(".")
        if base == "vote":
            registers[to] = np.full_like(registers[names[0]], registers[names[0]].any())
            continue
        if base == "lop3":
            *names, last = names
            registers[to] = lop3(*map(read, names), int(last, 0))
            continue
        given = [read(name) for name in names]
        if base == "cvt":
            registers[to] = _pair(*given, kind=operation.split(".")[2])
        elif kind == "f32" and base in _OF_FLOATS:
            registers[to] = _OF_FLOATS[base](*given)
        elif base == "add" and kind == "u32":
            registers[to] = given[0] + given[1]
        elif kind in ("f16x2", "bf16x2"):
            registers[to] = words(_OF_HALVES[base](*(floats(x, kind) for x in given)), kind)
        else:
            registers[to] = _PLAIN[base](*given)
    return [registers[f"${i}"] for i in range(outputs)]
