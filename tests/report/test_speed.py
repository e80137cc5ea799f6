"""Predicted speed: by hand for small programs, and in `doctor` for a model on GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from qcompile.cli.predicting import text_of
from qcompile.errors import UsageError
from qcompile.report import speed
from qcompile.report.speed import Divided, Machines
from qcompile.roofline import StepShape, call_cost
from qcompile.targets import TARGETS
from tests.cli.test_app import Capture, code_of, json_of
from tests.support.families import COMMON

H100 = TARGETS["h100"]


def one_gemm(ranks: int) -> dict[str, Any]:
    """A program of one GEMM of 1,024 to 512 values, and of a sum over `ranks`."""
    buffers = [{"name": "x", "dtype": "q8", "width": 1024}, {"name": "y", "dtype": "f32", "width": 512}]
    gemm = {"kernel": "gemm", "x": "x", "out": "y", "n": 512, "k": 1024, "weights": {"codes": "w"}, "bias": None}
    calls = [gemm, {"kernel": "all_reduce", "x": "y", "out": "y", "ranks": ranks}]
    return {"buffers": buffers, "kv": {}, "calls": calls[: 1 + (ranks > 1)]}


def test_a_step_takes_its_launches_bytes_and_operations() -> None:
    result = Divided(one_gemm(1), {"w": 1 << 30}, 10).step_ns(Machines(H100), StepShape(0.0))
    moved = (1 << 30) + 1024 + 4 * 512
    expected = 1e3 * (10 * speed.LAUNCH_US + 1e6 * moved / (3350e9 * speed.MEMORY))
    expected += 1e9 * 2 * 512 * 1024 / (1979e12 * speed.MATRIX["int8"])
    assert result == {"all": pytest.approx(expected, abs=1), "sums": 0}


def test_few_rows_compute_as_many_as_a_tile_has() -> None:
    part = Divided(one_gemm(1), {"w": 0}, 0)
    rows = [part.step_ns(Machines(H100), StepShape(0.0, rows, rows))["all"] for rows in (2, 64, 640)]
    assert 0 < rows[1] - rows[0] < rows[2] - rows[1]
    one, tile = (call_cost(one_gemm(1)["calls"][0], one_gemm(1), {"w": 0}, StepShape(0.0, n, n)).ops for n in (2, 32))
    assert tile == 16 * one


def test_sums_grow_with_gpus_machines_and_bytes() -> None:
    small, large = 4.0 * 8192, 4.0 * 8192 * 64
    assert Machines(H100).sum_us(large) == 0
    two, four = Machines(H100, 2), Machines(H100, 4)
    assert speed.EXCHANGE_US < two.sum_us(small) < four.sum_us(small) < four.sum_us(large)
    assert Machines(TARGETS["l40s"], 4).sum_us(large) > 5 * four.sum_us(large)  # by PCIe
    assert Machines(H100, 8, 2).sum_us(small) > four.sum_us(small) + 2 * speed.NETWORK_US
    assert (
        Machines(H100, 8).gather_us(large) < Machines(H100, 8, 2).gather_us(large) and Machines(H100).gather_us(1) == 0
    )
    divided = Divided(one_gemm(2), {"w": 0}, 0).step_ns(two, StepShape(0.0, 4, 4))
    assert divided["sums"] == round(1e3 * two.sum_us(4 * 4 * 512)) < divided["all"]


def test_experts_are_read_as_often_as_rows_choose_them() -> None:
    program = {"buffers": [{"name": "x", "dtype": "f32", "width": 8}], "kv": {}}
    call = {"kernel": "expert_gemm", "x": "x", "weights": {"w": "w"}, "slots": 2, "experts": 8, "rows": 4, "k": 8}
    one, many = (call_cost(call, program, {"w": 1 << 20}, StepShape(0.0, n, n)) for n in (1, 1000))
    assert one.bytes == 32 + (1 << 20) / 4 and many.bytes == pytest.approx(32000 + (1 << 20))
    assert many.ops == 1000 * one.ops


def test_positions_are_read_once_for_all_rows_of_a_sequence() -> None:
    program = {"buffers": [], "kv": {"page_tokens": 64, "layer_page_bytes": [640]}}
    call = {"kernel": "attention", "layer": 0, "heads": 2, "head_dim": 4, "value": None}
    decoding = call_cost(call, program, {}, StepShape(100.0, 8, 8))
    prompt = call_cost(call, program, {}, StepShape(100.0, 8))
    assert decoding.bytes == 8 * 100 * 10 == 8 * prompt.bytes and decoding.ops == prompt.ops == 8 * 2.0 * 100 * 16
    for limit in ("window", "chunk"):
        assert call_cost(call | {limit: 50}, program, {}, StepShape(100.0, 8)).ops == prompt.ops / 2


def checkpoint(folder: Path) -> Path:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", **COMMON | sizes | {"head_dim": 128, "num_hidden_layers": 2})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return folder


def test_doctor_predicts_for_gpus(capsys: Capture, tmp_path: Path) -> None:
    model = checkpoint(tmp_path)
    common = ("doctor", model, "--recipe", "w4a16", "--target", "h100", "--context", "64")
    one = json_of(capsys, *common)["prediction"]
    two = json_of(capsys, *common, "--tensor-parallel-size", 2)["prediction"]
    assert (one["gpus"], two["gpus"], two["context"]) == (1, 2, 64)
    assert two["gpu_weight_bytes"] < one["gpu_weight_bytes"]
    for alone, divided in zip(one["decode"], two["decode"], strict=True):
        assert alone["sums_share"] == 0 < divided["sums_share"] < 1 and alone["fits"]
        assert alone["tokens_per_second"] == pytest.approx(1e3 * alone["sequences"] / alone["milliseconds"])
    text = text_of(two | {"nodes": 2})
    assert "predicted, not measured, on 2 h100 in 2 machines" in text and "a prompt of 64 tokens" in text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--target", "cpu", "--nodes", "2"), "is no GPU"),
        (("--target", "h100", "--tensor-parallel-size", "2", "--nodes", "4"), "cannot be spread evenly"),
        (("--target", "h100", "--recipe", "w4a16", "--context", "4096"), "the model has a context of"),
    ],
)
def test_what_cannot_be_predicted_is_refused(
    options: tuple[str, ...], reason: str, capsys: Capture, tmp_path: Path
) -> None:
    assert code_of("doctor", checkpoint(tmp_path), *options) == 2
    assert reason in capsys.readouterr().err


def test_several_processes_on_cpus_are_examined_without_prediction(capsys: Capture, tmp_path: Path) -> None:
    result = json_of(capsys, "doctor", checkpoint(tmp_path), "--recipe", "w8a8", "--tensor-parallel-size", 2)
    assert "all_reduce" in result["plan"]["kernels"] and result["prediction"] == {}
    one = json_of(capsys, "doctor", tmp_path, "--recipe", "w8a8")["plan"]
    assert (one["processes"], result["plan"]["processes"]) == (1, 2)
    assert one["cache_bytes"] == result["plan"]["cache_bytes"]  # each process has the half of it


def test_machines_must_be_even() -> None:
    with pytest.raises(UsageError, match="3 GPUs cannot be spread evenly over 2 machines"):
        Machines(H100, 3, 2)
