"""What Triton makes of kernels, out of committed records: tests compile only what has changed since.

tests/golden/compiled/NAME.json is the record of tests/codegen/gpu/NAME.py: for each test the kernels that it asks for,
and what was found of them. A kernel is known by its label, which covers its source and all that it is compiled with,
and by the compute capability. A record is valid for one version of Triton and for the code that found the facts.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from qcompile.codegen.gpu import compile as gpu_compile
from qcompile.codegen.gpu import sass
from qcompile.codegen.gpu.kernel import Kernel

RECORDS = Path(__file__).parents[1] / "golden" / "compiled"
_COUNTED = re.compile(r"\b(?:st\.shared|griddepcontrol|dp4a|(?:div|fma|mad)[\w.]*\.f(?:32|64))[\w.]*")
"""Instructions of PTX that tests ask for."""


@dataclass(frozen=True)
class Facts:
    """A kernel compiled for one architecture, as `Compiled` has it.

    `ptx` counts the instructions of PTX that tests ask for. `waits` has the instructions of the tensor cores of sm_90
    and the waits for them in order: "16m 1 8m 0" are 16 instructions, a wait until 1 group of them is in flight, 8
    more, and a wait for all. `overwritten` says whether registers are written that they still read.
    """

    registers: int
    shared_bytes: int
    spill_bytes: int
    threads: int
    matrix: tuple[str, ...]
    ptx: dict[str, int]
    waits: str
    overwritten: bool

    @property
    def order(self) -> list[int | None]:
        """For each instruction of the tensor cores None, for each wait for them how many may still be in flight."""
        result: list[int | None] = []
        for part in self.waits.split():
            result += [None] * int(part[:-1]) if part.endswith("m") else [int(part)]
        return result


def facts_of(kernel: Kernel, capability: int) -> dict[str, Any]:
    """The facts of a kernel that is compiled now."""
    built = gpu_compile.compile_kernel(kernel, capability)
    assert built.cubin[:4] == b"\x7fELF"
    code = sass.instructions(built.cubin) if "wgmma" in built.ptx else []
    sizes = built.registers, built.shared_bytes, built.spill_bytes, built.threads
    counted = dict(sorted(Counter(_COUNTED.findall(built.ptx)).items()))
    return asdict(Facts(*sizes, built.matrix, counted, _waits(code), sass.overwritten(code) is not None))


def _waits(code: list[sass.Instruction]) -> str:
    parts = [
        "m" if "GMMA" in opcode else str(int(operands.rsplit("0x", 1)[1], 16))
        for opcode, operands in code
        if "GMMA" in opcode or opcode.startswith("WARPGROUP.DEPBAR")
    ]
    runs = [(part, len(list(same))) for part, same in groupby(parts)]
    return " ".join(f"{count}m" if part == "m" else " ".join([part] * count) for part, count in runs)


def sizes_of_sums(kernel: Kernel, capability: int) -> list[int]:
    """How many numbers each sum over features is of: Triton chose its layout, or made it of one that it chose."""
    ttgir = _laid_out(kernel, capability)
    layouts = re.findall(r"^(#\w+) = #ttg\.(?:blocked|linear)<", ttgir, re.MULTILINE)
    reduce = r'"tt\.reduce"\([^)]*\) <\{axis = (\d)[^}]*\}>.*?\}\) : \(tensor<([\dx]+)xf32, (#\w+)>'
    sums = [
        (int(axis), [int(size) for size in shape.split("x")])
        for axis, shape, name in re.findall(reduce, ttgir, re.DOTALL)
        if name in layouts
    ]
    # Those over tokens are of rows in two warps, eight lanes and what each has of them.
    return sorted({shape[axis] for axis, shape in sums if len(shape) < 4 and shape[:2] != [2, 8]})


def _laid_out(kernel: Kernel, capability: int) -> str:
    """A kernel as Triton has chosen its layouts; what follows takes a third of the time.

    A pass over addresses of copies alone, which changes no layout of what is summed, takes half of the rest: left out.
    """
    from triton.backends.nvidia.compiler import CUDABackend, passes

    class LaidOut(Exception):
        pass

    def make_llir(self: Any, module: Any, *rest: Any) -> None:
        raise LaidOut(str(module))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(LaidOut) as result:
        patch.setattr(CUDABackend, "make_llir", make_llir)
        patch.setattr(passes.ttgpuir, "add_coalesce_async_copy", lambda manager: None)
        gpu_compile.build(kernel, capability)
    return str(result.value)


class Record:
    """What is recorded for one test, and what it asks for. `Record(...)(kernel, capability)` are a kernel's facts."""

    def __init__(self, path: Path, test: str) -> None:
        self.path, self.test = path, test
        whole = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        self.other_triton = whole.get("triton", gpu_compile.triton_version()) != gpu_compile.triton_version()
        valid = not self.other_triton and whole.get("found by") == _found_by()
        self.rows: dict[str, Any] = whole.get("tests", {}).get(test, {}) if valid else {}
        self.asked: dict[str, Any] = {}

    def __call__(self, kernel: Kernel, capability: int) -> Facts:
        result = self.find(facts_of, kernel, capability)
        return Facts(**{**result, "matrix": tuple(result["matrix"])})

    def find(self, find: Callable[[Kernel, int], Any], kernel: Kernel, capability: int) -> Any:
        """What a function of this module finds of a kernel: it is only called if that is not recorded."""
        key = f"{find.__name__} {kernel.label} sm_{capability}"
        if key not in self.asked:
            self.asked[key] = self.rows[key] if key in self.rows else find(kernel, capability)
        return self.asked[key]

    def check(self) -> None:
        """The test has asked for what is recorded, and for nothing else; by another version of Triton all is new."""
        new, gone = sorted(self.asked.keys() - self.rows.keys()), sorted(self.rows.keys() - self.asked.keys())
        command = f"pytest --update-golden tests/codegen/gpu/{self.path.stem}.py"
        assert self.other_triton or not (new or gone), (
            f"{self.path.name} lacks {new}, and has {gone} for nothing: run {command}, and read what changed"
        )

    def write(self) -> None:
        """What the test has asked for becomes its part of the record."""
        whole = json.loads(self.path.read_text(encoding="utf-8")) if self.path.is_file() else {}
        now = {"triton": gpu_compile.triton_version(), "found by": _found_by()}
        known = whole.get("tests", {}) if now.items() <= whole.items() else {}
        write_record(self.path, now, known | {self.test: self.asked})


def write_record(path: Path, head: dict[str, str], tests: dict[str, dict[str, Any]]) -> None:
    """A record as text, a line for each kernel, in the order of names."""
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    parts = []
    for test, rows in sorted(tests.items()):
        kept = [f"   {json.dumps(key)}: {json.dumps(row)}" for key, row in sorted(rows.items())]
        parts.append(f"  {json.dumps(test)}: {{\n" + ",\n".join(kept) + "\n  }")
    text = "\n".join(["{", *lines, ' "tests": {', ",\n".join(parts), " }", "}"]) + "\n"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")


@cache
def _found_by() -> str:
    """A digest of the code that finds facts out of kernels."""
    compiling = gpu_compile.load, gpu_compile.build, gpu_compile._compile, gpu_compile._resources
    finding = Facts, facts_of, _waits, sizes_of_sums, _laid_out, sass
    patterns = gpu_compile._MATRIX.pattern, _COUNTED.pattern
    text = "\n".join((*map(inspect.getsource, (*compiling, *finding)), *patterns))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
