"""Checks the machine code of GPU kernels for a register hazard that the assembler does not exclude.

wgmma (sm_90) is asynchronous. If its A operand is in registers, nothing may write them before it is done. Kernels that
unpack weights meanwhile keep the registers alive in their source, and loops that Triton pipelines wait; but it is the
assembler that allocates registers, and whoever builds an artifact may have another version of it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence

from qcompile.errors import ResourceError

Instruction = tuple[str, str]
"""Opcode and operands."""

_LEFT_REGISTERS = 4
"""32-bit registers of a thread that hold the A operand of one wgmma."""
_WIDTHS = {"64": 2, "WIDE": 2, "128": 4, "4": 4}


def instructions(cubin: bytes) -> list[Instruction]:
    """A kernel's instructions in order, by the disassembler that comes with Triton. ResourceError where it fails."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # Control flow analysis takes a third of its time, and changes nothing for code that has labels.
        command = [knobs.nvidia.nvdisasm.path, "-c", "--no-dataflow", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = parse(done.stdout)
    if done.returncode or not found:
        raise ResourceError(f"nvdisasm gives no instructions: {done.stderr.strip()[:200]}")
    return found


def parse(text: str) -> list[Instruction]:
    """nvdisasm's output as instructions; loops with wgmma twice, so that their end is checked against their start."""
    lines: list[Instruction] = []
    places: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            places[label[1]] = len(lines)
        if found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*) ?(.*?) ?;", line):
            lines.append((found[2], found[3]))
            target = re.search(r"`\((\.L_\w+)\)", found[3])
            if found[2] == "BRA" and found[1] and target and target[1] in places:
                start = places.pop(target[1])
                if any("GMMA" in opcode for opcode, _ in lines[start:]):
                    lines += lines[start:]
    return lines


def overwritten(code: Sequence[Instruction]) -> Instruction | None:
    """The first instruction that writes a register which a wgmma in flight reads; None where there is none."""
    pending = [set[int]()]  # registers by wgmma group, the newest last
    for opcode, operands in code:
        named = [int(number) for number in re.findall(r"\bR(\d+)", operands)]
        if "GMMA" in opcode:
            if not operands.split(",")[1].strip().startswith("gdesc"):
                pending[-1] |= set(range(named[1], named[1] + _LEFT_REGISTERS))
            if "gsb0" in operands:
                pending.append(set())
        elif opcode.startswith("WARPGROUP.DEPBAR"):
            pending = pending[-int(operands.rsplit("0x", 1)[1], 16) - 1 :]
        elif named and operands.startswith("R"):
            width = re.search(r"\.(64|128|4|WIDE)\b", opcode)
            written = range(named[0], named[0] + (_WIDTHS[width[1]] if width else 1))
            if set.union(*pending) & set(written):
                return opcode, operands
    return None
