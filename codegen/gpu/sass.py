"""Checks the machine code of GPU kernels for a register hazard that the assembler does not rule out.

wgmma (sm_90) is asynchronous: if its A operand is in registers, nothing may write them until it is done. Kernels that
unpack weights meanwhile keep those registers alive in their source, and loops that Triton pipelines wait. But the
assembler allocates registers, and its version on the machine that builds an artifact may differ from the tested one.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence

from qcompile.errors import ResourceError

Instruction = tuple[str, str]
"""Opcode and operands."""

_A_REGISTERS = 4
"""32-bit registers of a thread that hold the A operand of one wgmma."""
_REGISTERS_WRITTEN = {"64": 2, "WIDE": 2, "128": 4, "4": 4}


def instructions(cubin: bytes) -> list[Instruction]:
    """A kernel's instructions in order, from the disassembler in Triton's package. ResourceError if it fails."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # Skip data flow analysis, a third of its time; the labels that `parse` needs are printed without it.
        command = [knobs.nvidia.nvdisasm.path, "-c", "--no-dataflow", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    functions = parse(done.stdout)
    if done.returncode or not functions:
        raise ResourceError(f"nvdisasm gives no instructions: {done.stderr.strip()[:200]}")
    return functions


def parse(text: str) -> list[Instruction]:
    """nvdisasm's output as instructions. Loops with wgmma appear twice, to check their end against their start."""
    lines: list[Instruction] = []
    places: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            places[label[1]] = len(lines)
        if instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*) ?(.*?) ?;", line):
            lines.append((instruction[2], instruction[3]))
            target = re.search(r"`\((\.L_\w+)\)", instruction[3])
            if instruction[2] == "BRA" and instruction[1] and target and target[1] in places:
                start = places.pop(target[1])
                if any("GMMA" in opcode for opcode, _ in lines[start:]):
                    lines += lines[start:]
    return lines


def overwritten(code: Sequence[Instruction]) -> Instruction | None:
    """The first instruction that writes a register which a wgmma in flight reads, or None."""
    pending = [set[int]()]  # A registers by wgmma group, the newest last
    for opcode, operands in code:
        named = [int(number) for number in re.findall(r"\bR(\d+)", operands)]
        if "GMMA" in opcode:
            if not operands.split(",")[1].strip().startswith("gdesc"):
                pending[-1] |= set(range(named[1], named[1] + _A_REGISTERS))
            if "gsb0" in operands:
                pending.append(set())
        elif opcode.startswith("WARPGROUP.DEPBAR"):
            pending = pending[-int(operands.rsplit("0x", 1)[1], 16) - 1 :]
        elif named and operands.startswith("R"):
            width = re.search(r"\.(64|128|4|WIDE)\b", opcode)
            written = range(named[0], named[0] + (_REGISTERS_WRITTEN[width[1]] if width else 1))
            if set.union(*pending) & set(written):
                return opcode, operands
    return None
