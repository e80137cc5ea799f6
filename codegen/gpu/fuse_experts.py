"""Fusion for mixtures of experts: inputs are quantized once, and slots are sorted once, for all GEMMs that share them.

Quantized inputs and the order of slots are in scratch memory, which holds one of each at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qcompile.codegen.calls import Call, EveryExpert, ExpertGemm, Norm
from qcompile.codegen.gpu import fused
from qcompile.codegen.program import Program
from qcompile.errors import PassError, UnsupportedError
from qcompile.formats.registry import gpu_kernel, gpu_packing, is_row_major, kernel_of, packing_of


def prepare_slots(program: Program) -> Program:
    """Inserts the calls that quantize inputs and sort slots before GEMMs of experts, unless scratch memory has both.

    If the next experts read the rows of a norm, the norm quantizes them itself. When a call writes the inputs or the
    index, what scratch memory holds of them is no longer valid.
    """
    for call in program.calls:
        if isinstance(call, ExpertGemm):
            _inputs_of(program, call)  # raises for experts without kernels
    calls: list[Call] = []
    order: fused.SortSlots | None = None
    inputs: fused.QuantizeSlots | None = None
    for place, call in enumerate(program.calls):
        order = None if order and order.index in call.writes else order
        inputs = None if inputs and inputs.x in call.writes else inputs
        if isinstance(call, Norm) and (own_inputs := _quantized_by(program, call, program.calls[place + 1 :])):
            inputs, call = own_inputs, fused.NormSlots(call.name, call, own_inputs)
        elif isinstance(call, ExpertGemm):
            wanted_inputs, wanted_order = _inputs_of(program, call), _order_of(program, call)
            if inputs is None or replace(inputs, name=wanted_inputs.name) != wanted_inputs:
                inputs = wanted_inputs
                calls.append(inputs)
            if order is None or replace(order, name=wanted_order.name) != wanted_order:
                order = wanted_order
                calls.append(order)
            call = fused.SlotGemm(call.name, call, inputs, order)
        calls.append(call)
    return replace(program, calls=tuple(calls))


def _inputs_of(program: Program, call: ExpertGemm) -> fused.QuantizeSlots:
    """The call that quantizes the inputs of a GEMM of experts. Raises PassError if there are no kernels for it."""
    try:
        packing = packing_of(call.format, call.activation)
        if call.rows % 32:
            raise UnsupportedError(f"experts of {call.n} outputs: GPU kernels take multiples of 32")
        if is_row_major(call.format, call.activation):
            raise UnsupportedError("experts in f32 have no GPU kernels")
        x = program.buffer(call.x)
        if x.dtype != "f32" or (call.x_slots > 1 and x.stride != call.x_slots * call.k):
            given = f"{call.x_slots} slots of {call.k} {x.dtype} in rows of {x.stride}"
            raise UnsupportedError(f"expert kernels read f32 slots without padding between them, not {given}")
    except UnsupportedError as error:
        raise PassError("codegen", call.name, str(error)) from error
    padded = gpu_packing(packing).padded_inputs(call.k)
    return fused.QuantizeSlots(f"{call.name}.round", call.x, call.x_slots, call.k, padded, call.activation)


def _order_of(program: Program, call: ExpertGemm) -> fused.SortSlots:
    """The call that sorts slots; GEMVs need no order if all experts' linears that use the index have GEMV kernels."""
    users = [each for each in program.calls if isinstance(each, ExpertGemm) and each.index == call.index]
    kernels = [kernel_of(packing_of(each.format, each.activation), each.activation) for each in users]
    gemv = all(gpu_kernel(kernel).gemv for kernel in kernels)
    every = any(isinstance(each, EveryExpert) and each.out == call.index for each in program.calls)
    return fused.SortSlots(f"{call.name}.order", call.index, call.experts, call.slots, gemv, every)


def _quantized_by(program: Program, norm: Norm, later: Sequence[Call]) -> fused.QuantizeSlots | None:
    """The quantization of a norm's rows that the norm can do, if the next experts read the rows; else None."""
    call = next((each for each in later if isinstance(each, ExpertGemm)), None)
    out = program.buffer(norm.out)
    if call is None or (call.x, call.x_slots, call.k, out.dtype) != (norm.out, 1, out.width, "f32"):
        return None
    return _inputs_of(program, call)
