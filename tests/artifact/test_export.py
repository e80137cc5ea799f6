"""Export: operators in ATen's operators, artifacts read back, and MLIR that runs (where torch-mlir is there)."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qcompile import check, ops, pipeline, recipes
from qcompile.artifact import export
from qcompile.calibration import Calibration
from qcompile.codegen.cpu import compiler
from qcompile.errors import UnsupportedError, UsageError
from qcompile.graph import Graph
from qcompile.passes.base import apply, run_passes
from qcompile.passes.center_keys import CenterKeys
from qcompile.passes.schedule import configure
from tests.cli.test_app import refusal
from tests.ops.test_ops import CASES
from tests.support.cases import first
from tests.support.graphs import decoder, step_inputs

PAGED = {name for name in CASES if any(a.name in ("cache", "states") for a in ops.op(name)._schema.arguments)}
"""Operators over a paged cache or states, which export replaces by what they are over one text."""

ALIKE = 1e-5
"""Sums of float32 in another order; integers and rounding are the same."""


# ---- operators -------------------------------------------------------------------------------------


class OneCall(torch.nn.Module):
    """A call of an operator: its tensors are inputs, the rest is as in the case."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.op, self.case = ops.op(name), CASES[name]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        result: list[torch.Tensor] = []
        for argument in self.case:
            result += [argument] if isinstance(argument, torch.Tensor) else _tensors_of(argument)
        return tuple(result)

    def forward(self, *tensors: torch.Tensor) -> Any:
        rest = list(tensors)
        arguments: list[Any] = []
        for argument in self.case:
            count = len(_tensors_of(argument))
            if isinstance(argument, torch.Tensor):
                arguments.append(rest.pop(0))
            elif count:
                arguments.append([rest.pop(0) for _ in range(count)])
            else:
                arguments.append(argument)
        return self.op(*arguments)


def _tensors_of(argument: Any) -> list[torch.Tensor]:
    return [t for t in argument if isinstance(t, torch.Tensor)] if isinstance(argument, list) else []


def foreign(program: torch.export.ExportedProgram) -> set[str]:
    """Operators of a program that are not ATen's."""
    calls = (node.target for node in program.graph.nodes if node.op == "call_function")
    return {str(t) for t in calls if getattr(t, "namespace", "aten") not in ("aten", "prims")}


def on_weights(name: str) -> bool:
    """Whether an artifact holds only the operator's result: it never runs in an exported graph."""
    return ops.reference(name).__module__ == "qcompile.ops.weights"


RESOLVED = {"log_decay", "proved"}
"""Operators that look at values, of which raising leaves none."""


EXPORTED = sorted(name for name in set(CASES) - PAGED - RESOLVED if not on_weights(name))


class EveryCall(torch.nn.Module):
    """A call of each operator of EXPORTED. Exported one by one, most of the time would go into what all have alike."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = [OneCall(name) for name in EXPORTED]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for call in self.calls for tensor in call.tensors())

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        rest = iter(tensors)
        return [call(*islice(rest, len(call.tensors()))) for call in self.calls]


@pytest.fixture(scope="module")
def in_aten() -> dict[str, Any]:
    """What the exported program has for each operator."""
    every = EveryCall()
    program = export.to_aten(every, every.tensors())
    assert not foreign(program)
    return dict(zip(EXPORTED, program.module()(*every.tensors()), strict=True))


@pytest.mark.parametrize("name", EXPORTED)
def test_every_operator_has_a_body_in_aten(name: str, in_aten: dict[str, Any]) -> None:
    call = OneCall(name)
    expected, result = call(*call.tensors()), in_aten[name]
    pairs = zip(expected, result, strict=True) if isinstance(expected, list) else [(expected, result)]
    for one, other in pairs:
        assert one.dtype == other.dtype
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


# ---- artifacts -------------------------------------------------------------------------------------


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Path, torch.Tensor, torch.Tensor]]:
    """Builds an artifact without compiling its kernels: (path, token ids [11], logits by reference bodies)."""
    monkeypatch.setattr(compiler, "compile", lambda source, target, given_up: b"")

    def build(recipe: str, graph: Graph | None = None) -> tuple[Path, torch.Tensor, torch.Tensor]:
        graph = decoder(layers=1, bias=True, head_norm="heads") if graph is None else graph
        pipeline.build(graph, tmp_path / "out", recipe=recipe)
        passes = configure(recipes.get_recipe(recipe).settings(), {})
        step = run_passes(graph, passes[1:])[0][-1]
        ids = torch.randint(0, 50, (1, 11), generator=torch.Generator().manual_seed(1))
        return tmp_path / "out", ids[0], step.run(*step_inputs(ids, None, step))[0]

    return build


@pytest.mark.parametrize(
    "recipe",
    first(
        ("bf16", "qserve", "mxfp4", "nested"),
        ["f32", "bf16", "w4a8", "w2t16", "qserve", "mxfp4", "nested", "w4a4", "mixllm"],
    ),
)
def test_an_artifact_is_read_back(recipe: str, built: Any) -> None:
    path, ids, expected = built(recipe)
    model = export.Sequence(path)
    with torch.no_grad():
        assert check.max_relative_error(model(ids), expected) < ALIKE
    program = export.to_aten(model, (ids,))
    assert not foreign(program)
    assert check.max_relative_error(program.module()(ids), expected) < ALIKE


def test_windows_hide_what_is_far(built: Any) -> None:
    path, ids, expected = built("f32", decoder(window=3))
    with torch.no_grad():
        assert check.max_relative_error(export.Sequence(path)(ids), expected) < ALIKE


def test_capped_scores_are_of_keys_with_what_came_off_them(built: Any) -> None:
    graph = decoder(softcap=1.0)
    graph.calibration = Calibration(torch.tensor([[3, 1, 4, 1, 5]]))
    path, ids, expected = built("f32", apply(CenterKeys(), graph).graph)
    with torch.no_grad():
        assert check.max_relative_error(export.Sequence(path)(ids), expected) < ALIKE
    assert check.max_relative_error(expected, graph.run(ids[None], torch.arange(11)[None])[0]) < ALIKE


def test_a_hierarchical_cache_is_refused(built: Any) -> None:
    path, *_ = built("quantspec")
    with pytest.raises(UnsupportedError, match="hierarchical cache"):
        export.Sequence(path)(torch.zeros(3, dtype=torch.int64))


# ---- MLIR --------------------------------------------------------------------------------------------


def test_without_torch_mlir_it_says_what_to_install(
    built: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, *_ = built("f32", decoder(layers=1))
    monkeypatch.setitem(sys.modules, "torch_mlir.fx", None)
    assert "pip install 'qcompile[mlir]'" in refusal(capsys, 5, "export", path, "-o", path / "x.mlir")
    assert not (path / "x.mlir").exists()


def test_formats(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="torch-mlir, linalg"):
        export.write(tmp_path, tmp_path / "x", "onnx", 4)


LOWER = ",".join(
    (
        "func.func(linalg-generalize-named-ops)",
        "one-shot-bufferize{bufferize-function-boundaries=1 function-boundary-type-conversion=identity-layout-map}",
        "func.func(convert-linalg-to-loops)",
        "convert-bufferization-to-memref,expand-strided-metadata,func.func(lower-affine),convert-scf-to-cf",
        "func.func(arith-expand,convert-math-to-llvm),convert-math-to-libm,convert-arith-to-llvm",
        "finalize-memref-to-llvm,convert-func-to-llvm,convert-cf-to-llvm,convert-index-to-llvm",
        "reconcile-unrealized-casts",
    )
)
"""From linalg on tensors to LLVM, in loops: slow, and nothing but the passes that MLIR comes with."""


@ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_int64))
def memref_copy(size: int, source: Any, target: Any) -> None:
    """Copy a buffer with strides, elements of `size` bytes: MLIR's runtime has it, torch-mlir does not."""

    def elements(memref: Any) -> Any:
        rank, place = memref[0], memref[1]
        _, start, offset, *extents = (ctypes.c_int64 * (3 + 2 * rank)).from_address(place)
        shape, strides = extents[:rank], [size * stride for stride in extents[rank:]]
        length = size + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
        data = (ctypes.c_char * length).from_address(start + size * offset)
        return np.ndarray(shape, f"V{size}", data, strides=strides)

    elements(target)[...] = elements(source)


def run_linalg(text: str, ids: torch.Tensor) -> torch.Tensor:
    """What function `main` of a module of linalg on tensors returns for token ids [T]: logits f32 [T, vocab]."""
    from torch_mlir import ir, runtime
    from torch_mlir.dialects import torch as torch_dialect
    from torch_mlir.execution_engine import ExecutionEngine
    from torch_mlir.passmanager import PassManager

    with ir.Context() as context:
        torch_dialect.register_dialect(context)
        module = ir.Module.parse(text)
        for function in module.body.operations:
            if "sym_name" in function.attributes:
                function.attributes["llvm.emit_c_interface"] = ir.UnitAttr.get()
        PassManager.parse(f"builtin.module({LOWER})").run(module.operation)
        engine = ExecutionEngine(module, opt_level=1)
        engine.raw_register_runtime("memrefCopy", ctypes.cast(memref_copy, ctypes.c_void_p))
        result = runtime.make_nd_memref_descriptor(2, ctypes.c_float)()
        given = runtime.get_ranked_memref_descriptor(np.ascontiguousarray(ids.numpy()))
        engine.invoke("main", *(ctypes.pointer(ctypes.pointer(value)) for value in (result, given)))
        return torch.from_numpy(runtime.ranked_memref_to_numpy(ctypes.pointer(result)).copy())


@pytest.mark.parametrize("recipe", ["f32", "w4a8", "qserve", "mxfp4"])
def test_emitted_linalg_runs(recipe: str, built: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch_mlir", reason="torch-mlir is not installed")
    path, ids, expected = built(recipe)
    assert export.write(path, tmp_path / "model.mlir", "linalg", len(ids)) > 1000
    text = (tmp_path / "model.mlir").read_text()
    assert "linalg.generic" in text and "torch.aten" not in text and "qcompile" not in text
    assert check.max_relative_error(run_linalg(text, ids), expected) < ALIKE


def test_emitted_torch_dialect_parses(built: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch_mlir", reason="torch-mlir is not installed")
    from torch_mlir import ir
    from torch_mlir.dialects import torch as torch_dialect

    path, ids, _ = built("w4a8")
    export.write(path, tmp_path / "model.mlir", "torch-mlir", len(ids))
    text = (tmp_path / "model.mlir").read_text()
    assert "torch.aten.mm" in text and "qcompile" not in text
    with ir.Context() as context:
        torch_dialect.register_dialect(context)
        ir.Module.parse(text)
