"""Compile the kernels of a program for one NVIDIA GPU architecture, and report the resources they use."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from threading import Event
from typing import Any

from qcompile.artifact.abi import GPU_ABI
from qcompile.codegen.backend import Backend, CompileFiles, Files
from qcompile.codegen.calls import Attention
from qcompile.codegen.gpu.compile import Compiled, compile_all, triton_version
from qcompile.codegen.gpu.fill import padded_program
from qcompile.codegen.gpu.fuse import fuse
from qcompile.codegen.gpu.gemm.pack import GPU_PACKING
from qcompile.codegen.gpu.kernel import Kernel
from qcompile.codegen.gpu.launches import MOST_OUTPUTS, MOST_ROWS, Launch, LaunchPlan
from qcompile.codegen.gpu.plan import kv_of, make_plan
from qcompile.codegen.gpu.rounds import head_round_launches, lookup_launch, round_launches
from qcompile.codegen.program import Program
from qcompile.errors import UnsupportedError
from qcompile.targets import Target

SUFFIX = ".plan.json"
"""Suffix of the file with a path's plan."""


def prepare(programs: Mapping[str, Program], target: Target, lookup: bool = False) -> CompileFiles:
    """Plan the program of each path for `target`, the verifier's (`model`) first; `lookup`: n-gram lookup drafts.

    Needs no GPU. The function returned compiles the plans into the files of kernels/<target>: machine code, PTX and
    Triton source of each kernel (shared by all paths), a plan for each path, and report.json with each kernel's
    resources. Raises UnsupportedError naming a call without a kernel, ResourceError if Triton is not installed.
    """
    triton_version()
    plans = plan(programs, target, lookup)
    return lambda given_up: _compiled(plans, programs, target, given_up)


def plan(programs: Mapping[str, Program], target: Target, lookup: bool = False) -> dict[str, LaunchPlan]:
    """The plan of each path; needs neither Triton nor a GPU. UnsupportedError naming a call without a kernel."""
    plans = {}
    for name, program in programs.items():
        try:
            plans[name] = make_plan(program, target)
        except UnsupportedError as error:
            if name == "model":
                raise
            raise UnsupportedError(f"{name}, {error}") from error
    return with_rounds(plans, lookup)


def launches(program: Program) -> int:
    """Launches of a decoding step: one for each fused call, one that merges parts of attention, two to sample."""
    calls = fuse(program).calls
    return len(calls) + sum(isinstance(call, Attention) for call in calls) + 2


def with_rounds(plans: Mapping[str, LaunchPlan], lookup: bool) -> dict[str, LaunchPlan]:
    """The plans, that of `model` with the launches of speculation rounds if another path or n-gram lookup drafts."""
    model, drafts = plans["model"], [plan for name, plan in plans.items() if name != "model"]
    states, draft_states = model.slot_bytes > 0, any(draft.slot_bytes for draft in drafts)
    rounds: tuple[Launch, ...] = round_launches(states, draft_states) if drafts or lookup else ()
    if any(draft.drafting for draft in drafts):
        rounds = head_round_launches(model.features, states)
    looking_up = (lookup_launch(),) if lookup and not drafts else ()
    return {**plans, "model": replace(model, rounds=rounds, lookup=looking_up)}


def _compiled(
    plans: dict[str, LaunchPlan], programs: Mapping[str, Program], target: Target, given_up: Event | None
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
    for name, plan in plans.items():
        launched = {label: _launched(kernels[label], compiled[label]) for label in plan.kernels}
        files[name + SUFFIX] = plan.to_json(launched, programs[name], peaks_of(target))
    report = [_report(*item) for item in sorted(compiled.items())]
    files["report.json"] = json.dumps(report, sort_keys=True, indent=1) + "\n"
    return files


def peaks_of(target: Target) -> dict[str, float]:
    """The target's peak rates, as in a launch plan."""
    rates = {"int8_gops": target.int8_tops, "f32_gflops": target.f32_tflops, "bf16_gflops": target.bf16_tflops}
    return {"memory_gb_s": target.memory_gb_s} | {name: 1e3 * rate for name, rate in rates.items()}


def _launched(kernel: Kernel, compiled: Compiled) -> dict[str, Any]:
    """What the runtime needs to launch a kernel."""
    how = {"function": kernel.name, "threads": compiled.threads, "shared_bytes": compiled.shared_bytes}
    return how | {"prelaunch": kernel.pdl}


def _report(label: str, kernel: Compiled) -> dict[str, Any]:
    """The GPU resources that a kernel uses."""
    used = {"registers": kernel.registers, "shared_bytes": kernel.shared_bytes, "spill_bytes": kernel.spill_bytes}
    return {"kernel": label, "threads": kernel.threads, **used, "matrix_instructions": list(kernel.matrix)}


def adapted(program: Program) -> Program:
    """`program` with the KV page layout of GPU kernels, and with rows padded where GEMMs read whole blocks."""
    blocks = tuple(kv_of(program, layer).block_bytes for layer in range(program.kv.layers))
    return replace(padded_program(program), kv=replace(program.kv, own_block_bytes=blocks))


def compiler() -> str:
    """The compiler's name and version. ResourceError if it is not installed."""
    return f"triton {triton_version()}"


BACKEND = Backend(
    SUFFIX,
    GPU_ABI,
    GPU_PACKING,
    compiler,
    prepare,
    adapt=adapted,
    check=plan,
    launches=launches,
    most_rows=MOST_ROWS,
    most_outputs=MOST_OUTPUTS,
)
"""Code generation for NVIDIA GPUs."""
