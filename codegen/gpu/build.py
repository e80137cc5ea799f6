"""Compile the kernels of a program for one NVIDIA GPU architecture, and report the resources they use."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from threading import Event
from typing import Any

from qcompile.codegen import program as p
from qcompile.codegen.gpu.compile import Compiled, Kernel, compile_all, triton_version
from qcompile.codegen.gpu.fill import padded_program
from qcompile.codegen.gpu.launches import Plan
from qcompile.codegen.gpu.plan import kv_of, make_plan
from qcompile.errors import UnsupportedError
from qcompile.targets import Target

SUFFIX = ".plan.json"
"""Suffix of the file with a path's plan."""

Files = dict[str, str | bytes]


def prepare(programs: Mapping[str, p.Program], target: Target, lookup: bool = False) -> Callable[[Event | None], Files]:
    """Plan the program of each path for `target`, the verifier's (`model`) first; `lookup`: n-gram lookup drafts.

    Needs no GPU. The function returned compiles the plans into the files of kernels/<target>: machine code, PTX and
    Triton source of each kernel (shared by all paths), a plan for each path, and report.json with each kernel's
    resources. Raises UnsupportedError naming a call without a kernel, ResourceError if Triton is not installed.
    """
    triton_version()
    plans = plan(programs, target, lookup)
    return lambda given_up: _compiled(plans, programs, target, given_up)


def plan(programs: Mapping[str, p.Program], target: Target, lookup: bool = False) -> dict[str, Plan]:
    """The plan of each path; needs neither Triton nor a GPU. UnsupportedError naming a call without a kernel."""
    plans = {}
    for name, program in programs.items():
        try:
            plans[name] = make_plan(program, target)
        except UnsupportedError as error:
            if name == "model":
                raise
            raise UnsupportedError(f"{name}, {error}") from error
    add_rounds(plans, lookup)
    return plans


def add_rounds(plans: Mapping[str, Plan], lookup: bool) -> None:
    """Add the kernels of speculation rounds to the plan of `model`, if another path or n-gram lookup drafts."""
    if len(plans) > 1 or lookup:
        plans["model"].add_rounds()
    if len(plans) == 1 and lookup:
        plans["model"].add_lookup()


def _compiled(
    plans: dict[str, Plan], programs: Mapping[str, p.Program], target: Target, given_up: Event | None
) -> Files:
    # Half of the cores are left for packing the weights, which runs meanwhile.
    processes = max(1, len(os.sched_getaffinity(0)) // 2)
    kernels = {label: kernel for plan in plans.values() for label, kernel in plan.kernels.items()}
    compiled = compile_all(list(kernels.values()), target.capability, processes, given_up)
    too_large = [label for label, each in compiled.items() if each.shared_bytes > target.shared_bytes]
    if too_large:
        raise UnsupportedError(f"kernel {too_large[0]} takes more shared memory than {target.name} has")
    files: Files = {}
    for label, each in sorted(compiled.items()):
        files |= {f"{label}.cubin": each.cubin, f"{label}.ptx": each.ptx, f"{label}.py": kernels[label].source}
    peaks = [target.memory_gb_s, *(1e3 * t for t in (target.int8_tops, target.f32_tflops, target.bf16_tflops))]
    for name, plan in plans.items():
        launched = {label: _launched(kernels[label], compiled[label]) for label in plan.kernels}
        files[name + SUFFIX] = plan.to_json(launched, programs[name], peaks)
    report = [_report(*item) for item in sorted(compiled.items())]
    files["report.json"] = json.dumps(report, sort_keys=True, indent=1) + "\n"
    return files


def _launched(kernel: Kernel, compiled: Compiled) -> dict[str, Any]:
    """What the runtime needs to launch a kernel."""
    how = {"function": kernel.name, "threads": compiled.threads, "shared_bytes": compiled.shared_bytes}
    return how | {"prelaunch": kernel.pdl}


def _report(label: str, kernel: Compiled) -> dict[str, Any]:
    """The GPU resources that a kernel uses."""
    used = {"registers": kernel.registers, "shared_bytes": kernel.shared_bytes, "spill_bytes": kernel.spill_bytes}
    return {"kernel": label, "threads": kernel.threads, **used, "matrix_instructions": list(kernel.matrix)}


def adapted(program: p.Program) -> p.Program:
    """`program` with the KV page layout of GPU kernels, and with rows padded where GEMMs read whole blocks."""
    return replace(padded_program(program), kv=replace(program.kv, own_block_bytes=kv_of(program).block_bytes))
