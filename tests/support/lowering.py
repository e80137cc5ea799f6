"""Small graphs as far as GPU kernels need them: their programs and packed weights."""

from __future__ import annotations

from typing import Any

import torch

from qcompile import recipes
from qcompile.codegen.gpu.fill import padded_program
from qcompile.codegen.gpu.gemm.pack import GPU_PACKING
from qcompile.codegen.lower import lower
from qcompile.codegen.packing import WeightTable
from qcompile.codegen.program import Program
from qcompile.graph import Graph
from qcompile.passes.base import run_passes
from qcompile.passes.schedule import configure


def gpu_program(
    graph: Graph, recipe: str, options: dict[str, Any] | None = None
) -> tuple[Graph, Program, dict[str, torch.Tensor]]:
    """The last graph that a recipe's passes, with `options`, make of a raised one, its program, and its weights."""
    passes = configure(recipes.get_recipe(recipe).settings(kind="cuda"), options or {})
    graphs, _ = run_passes(graph, passes[1:])
    table = WeightTable(GPU_PACKING)
    program = padded_program(lower(graphs[-1], table))
    blobs = {name: blob for w in table.weights for (name, _), blob in zip(w.blobs, w.produce(), strict=True)}
    return graphs[-1], program, blobs
