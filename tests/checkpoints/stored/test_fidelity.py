"""What a build makes of weights that are stored in few bits: kept to the bit, or rounded again with a measured loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qcompile import pipeline
from qcompile.cli import inspect
from qcompile.clock import silent
from qcompile.codegen.packing import stream
from qcompile.formats.registry import weight_format
from qcompile.report.stored_weights import PLACE, placed, sentence
from tests.checkpoints.stored.test_formats import rewritten, saved
from tests.checkpoints.stored.test_groups import awq, eight_bits

Plain = list[Tensor]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Plain]]:
    """Checkpoints by how they are stored, with the numbers of their projections."""
    folder = tmp_path_factory.mktemp("models")
    tensors = saved("llama", folder / "source")

    def made() -> Iterator[tuple[str, tuple[Path, Plain]]]:
        for way in (awq, eight_bits):
            stored, plain, settings = way(tensors)
            numbers = [value for name, value in plain.items() if "proj" in name]
            yield way.__name__, (rewritten(folder / "source", folder / way.__name__, stored, settings), numbers)
        yield "floats", (folder / "source", [])

    return dict(made())


def facts(model: Path, recipe: str, options: Mapping[str, object] | None = None) -> Mapping[str, Any] | None:
    """What a build finds while it packs weights; no kernel is compiled."""
    planned = pipeline.plan(model, recipe=recipe, options=options)
    for _ in stream(planned.weights, silent):
        pass
    return planned.fidelity.facts()


def test_all_are_kept(models: dict[str, tuple[Path, Plain]]) -> None:
    result = facts(models["awq"][0], "w4a16-g32")
    assert result == {"weights": 7, "kept": 7, "changed": 0, "rows_kept": 1.0, "error": 0.0, "worst": {}}
    assert sentence(result).startswith("7 of 7 weights")


def test_the_loss_of_those_rounded_again(models: dict[str, tuple[Path, Plain]]) -> None:
    """Also of those that are joined before they are rounded."""
    model, numbers = models["awq"]
    result = facts(model, "w4a16")
    format = weight_format("w4_asym_g128")
    moved = [format.dequantize(format.quantize(w), w.shape[1]) - w for w in numbers]
    expected = math.sqrt(sum(float(m.square().sum()) for m in moved) / sum(float(w.square().sum()) for w in numbers))
    largest = max(float(m.norm() / w.norm()) for m, w in zip(moved, numbers, strict=True))
    assert result is not None and (result["weights"], result["kept"]) == (7, 0)
    assert result["error"] == pytest.approx(expected, rel=1e-5) and 0.01 < expected < 0.2
    assert list(result["worst"].values()) == pytest.approx([largest], rel=1e-5)
    assert f"7 are rounded again, which moves them by {100 * expected:.2g} %" in sentence(result)


def test_rows_that_are_kept(models: dict[str, tuple[Path, Plain]]) -> None:
    """Symmetric codes of 8 bits are kept in rows without -128."""
    model, numbers = models["eight_bits"]
    result = facts(model, "w8a8")
    format = weight_format("w8_sym_channel")
    rows = torch.cat([format.dequantize(format.quantize(w), w.shape[1]).eq(w).all(1) for w in numbers])
    assert result is not None and result["kept"] == 0
    assert result["rows_kept"] == pytest.approx(float(rows.double().mean())) and 0.1 < result["rows_kept"] < 0.9
    assert "of their rows kept" in sentence(result)


def test_what_passes_change_is_not_kept(models: dict[str, tuple[Path, Plain]]) -> None:
    result = facts(models["awq"][0], "f32", {"rotate.enabled": True, "fold_norms.enabled": True})
    assert result is not None and result["changed"] == 7 and result["kept"] == 0
    assert result["error"] == 0  # f32 holds what the passes made of them


def test_floats_are_not_told_of(models: dict[str, tuple[Path, Plain]]) -> None:
    assert facts(models["floats"][0], "w4a8") is None
    assert sentence(None) == "" and placed(b"a" + PLACE + b"b", None) == b"ab"


def test_last_bits_are_told_apart_from_rounding() -> None:
    told = {"weights": 7, "kept": 1, "changed": 0, "rows_kept": 0.9, "error": 2**-27, "worst": {"a": 1e-8}}
    assert sentence(told).endswith("; 6 differ in the last bits, by 7.5e-07 % of their norm")
    assert "6 are rounded again" in sentence(told | {"error": 2**-22})
    assert "6 are rounded again, 6 of them after passes" in sentence(told | {"changed": 6})


def test_the_artifact_tells(models: dict[str, tuple[Path, Plain]], tmp_path: Path) -> None:
    report = pipeline.build(models["awq"][0], tmp_path / "out", recipe="w4a16")
    contents = inspect.summary(tmp_path / "out")
    assert report.stored_weights == contents["stored_weights"]
    told = sentence(report.stored_weights)
    assert f"stored   {told}\n" in inspect.as_text(contents)
    assert told in (tmp_path / "out" / "report.html").read_text()
