"""Build the kernels of a program for one NVIDIA GPU architecture, and say what they take of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from qcompile.codegen import program as p
from qcompile.codegen.gpu_compile import Compiled, compile_all, triton_version
from qcompile.codegen.gpu_plan import Plan, kv_of, make_plan
from qcompile.errors import UnsupportedError
from qcompile.targets import Target

PLAN = "plan.json"


def prepare(program: p.Program, target: Target) -> Callable[[], dict[str, str | bytes]]:
    """Plan `program` for `target`; what is returned compiles it into the files of kernels/<target>. Needs no GPU.

    They are machine code, PTX and Triton source of each kernel, the plan, and report.json: what each kernel takes.
    Raises UnsupportedError naming a call without a kernel, ResourceError when Triton is not installed.
    """
    triton_version()
    plan = make_plan(program, target.capability)
    return lambda: _compiled(plan, program, target)


def _compiled(plan: Plan, program: p.Program, target: Target) -> dict[str, str | bytes]:
    # Half the cores stay for the weights, which are packed meanwhile.
    processes = max(1, len(os.sched_getaffinity(0)) // 2)
    compiled = compile_all(list(plan.kernels.values()), target.capability, processes)
    too_large = [label for label, each in compiled.items() if each.shared_bytes > target.shared_bytes]
    if too_large:
        raise UnsupportedError(f"kernel {too_large[0]} takes more shared memory than {target.name} has")
    peaks = [target.memory_gb_s, *(1e3 * t for t in (target.int8_tops, target.f32_tflops, target.bf16_tflops))]
    return _files(plan, program, compiled, peaks)


def _files(plan: Plan, program: p.Program, compiled: dict[str, Compiled], peaks: list[float]) -> dict[str, str | bytes]:
    files: dict[str, str | bytes] = {}
    launched: dict[str, dict[str, Any]] = {}
    report: list[dict[str, Any]] = []
    for label, each in sorted(compiled.items()):
        kernel = plan.kernels[label]
        files |= {f"{label}.cubin": each.cubin, f"{label}.ptx": each.ptx, f"{label}.py": kernel.source}
        launched[label] = {
            "function": kernel.name,
            "threads": each.threads,
            "shared_bytes": each.shared_bytes,
            "prelaunch": kernel.prelaunch,
        }
        used = {"registers": each.registers, "shared_bytes": each.shared_bytes, "spill_bytes": each.spill_bytes}
        report.append({"kernel": label, "threads": each.threads, **used, "matrix_instructions": list(each.matrix)})
    files[PLAN] = plan.to_json(launched, program, peaks)
    files["report.json"] = json.dumps(report, sort_keys=True, indent=1) + "\n"
    return files


def adapted(program: p.Program) -> p.Program:
    """`program` with KV pages as GPU kernels lay them out."""
    return replace(program, kv=replace(program.kv, own_block_bytes=kv_of(program).block_bytes))
