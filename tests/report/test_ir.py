"""Graphs as text and drawings."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from qcompile import pipeline, recipes
from qcompile.passes.base import run_passes
from qcompile.passes.schedule import configure
from qcompile.report import ir
from tests.support.graphs import decoder


def graphs():  # type: ignore[no-untyped-def]
    passes = configure(recipes.get_recipe("w4a8").settings(), {})
    return run_passes(decoder(layers=1), passes[1:])[0]


def test_text_has_a_line_for_every_operator_and_its_weights() -> None:
    text = ir.to_text(graphs()[-1])
    assert "gemm(norm_quantize, quantize_weight(concat_rows([q0, k0, v0]), w4_asym_g128)" in text
    assert "# w4_asym_g128 x int8; in gemm +0" in text
    assert text.splitlines()[-1].startswith("  return [gemm")


def test_a_drawing_holds_every_node_and_edge() -> None:
    for graph in graphs():
        svg = ElementTree.fromstring(ir.to_svg(graph))
        names = {title.text.split("\n")[0] for title in svg.iter("{http://www.w3.org/2000/svg}title") if title.text}
        shown = [
            node
            for node in graph.nodes
            if node.op in ("placeholder", "output") or (node.op == "call_function" and not graph.is_weight(node))
        ]
        assert {node.name for node in shown} <= names
        edges = sum(len({s for s in node.all_input_nodes if s in shown}) for node in shown)
        assert len(list(svg.iter("{http://www.w3.org/2000/svg}path"))) == edges


def test_build_dumps_every_stage(tmp_path: Path) -> None:
    pipeline.build(decoder(layers=1), tmp_path / "out", recipe="f32", dump_ir=tmp_path / "ir")
    stages = sorted(path.name for path in (tmp_path / "ir").glob("*.txt"))
    assert stages[0] == "01-split.txt" and stages[-1].endswith("plan_memory.txt")
    assert len(list((tmp_path / "ir").glob("*.svg"))) == len(stages)


def test_build_dumps_every_stage_of_drafts(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The recipe's own from where it parts with the target, that of another model from the start."""
    pipeline.build(tiny_checkpoint, tmp_path / "out", recipe="qspec", drafts=tiny_checkpoint, dump_ir=tmp_path / "ir")
    stages = {
        name: [path.stem[3:] for path in sorted((tmp_path / "ir" / name).glob("*.txt"))]
        for name in ("", "draft1", "draft2")
    }
    assert stages[""][0] == stages["draft2"][0] == "raise" and stages["draft1"][0] == "speculate"
    assert {names[-1] for names in stages.values()} == {"plan_memory"}
    last = [path.read_text() for path in sorted((tmp_path / "ir").rglob("*plan_memory.txt"))]
    assert len(last) == len(set(last)) == 3
