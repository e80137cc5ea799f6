"""Adapters on a GPU from the options of `load` to the inputs of a step, over a driver that only writes down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qcompile.artifact.adapted import Adapted, AdaptedWeight, FactorChange, Site
from qcompile.artifact.layout import ADAPTER_TABLE, ADAPTERS_FILE, adapters_file
from qcompile.errors import UnsupportedError, UsageError
from qcompile.runtime.cuda import launching, load
from qcompile.runtime.cuda.adapters import plan_for
from qcompile.runtime.cuda.executor import CudaExecutor
from qcompile.runtime.devices import open_model
from qcompile.runtime.lora.table import read_adapters, read_same_adapters
from qcompile.runtime.options import LoadOptions
from qcompile.runtime.step import Rows
from tests.support.adapters import pair, save
from tests.support.fake import listed
from tests.support.fake_driver import PLAN, FakeDriver, FakeLaunch, variant


class Driver(FakeDriver):
    """One that loads kernels."""

    def module(self, cubin: bytes, *_: object) -> str:
        return "module"

    def function(self, module: str, name: str, shared: int) -> str:
        return name


def artifact(root: Path, *launches: dict[str, Any]) -> dict[str, Any]:
    """A manifest and its files; `launches` precede those of PLAN."""
    root.mkdir()
    kernels = {name: kernel | {"function": name} for name, kernel in PLAN["kernels"].items()}
    plan = PLAN | {"launches": [*launches, *PLAN["launches"]], "kernels": kernels}
    site = Site("g", 32, 16, "bf16", (AdaptedWeight("q.weight", (16, 32), (), ()),))
    content = {"weights": bytes(4096), "plan": json.dumps(plan).encode()} | {f"{name}.cubin": b"" for name in kernels}
    if launches:
        content[ADAPTERS_FILE] = Adapted(4, (site,), {}, {}).to_bytes()
    for name, data in content.items():
        (root / name).write_bytes(data)
    runtime = {"max_tokens": 64, "vocab_size": 10, "kv": {"page_bytes": 1024, "page_tokens": 64}, "library": "plan"}
    names = enumerate(["w", ADAPTER_TABLE])
    runtime["weights"] = [{"name": name, "file": "weights", "offset": 64 * i, "bytes": 64} for i, name in names]
    target = {"target": {"kind": "cuda"}}
    return target | {"runtime": runtime, "model": {"max_position": 128}, "files": listed(root)}


def test_adapters_of_the_load_options_reach_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(load, "driver", lambda: driver)
    monkeypatch.setattr(launching, "LaunchCall", FakeLaunch)
    monkeypatch.setattr(
        load, "_open_target", lambda *given: CudaExecutor(given[0], given[1][0], *given[2:4], 4, given[4])
    )
    variants = [variant("many", ["adapted", 1, 1], {"kind": "weight", "name": ADAPTER_TABLE})]
    adapted = {"name": "add", "by": "adapted", "site": 0, "variants": variants}
    manifest = artifact(tmp_path / "places", adapted)
    tuned = save(tmp_path / "tuned", pair("q", 16, 32))
    options = LoadOptions(max_batch=2, lora={"tuned": tuned, "again": tuned})
    opened = open_model(tmp_path / "places", manifest, options)
    executor: Any = opened.executor
    assert opened.adapters is not None and opened.adapters.names == ("tuned", "again")
    steps = [Rows([1, 2, 3], 5, [2], 1), Rows([4], 0, [3], 0)]
    executor.step(steps, logits=False)
    assert "many" not in [line[0] for line in driver.log]
    driver.log.clear()
    opened.adapters.mark(3, "again")
    executor.step(steps, logits=False)
    (table,) = driver.log[0][2]
    assert driver.log[0][:2] == ("many", (4, 1, 1)) and table == executor.launcher._weights[ADAPTER_TABLE]
    place = executor.inputs._offsets["adapters"]
    assert driver.sent[place : place + 2] == [0, 2]
    opened.adapters.mark(3, None)
    assert executor.fill(steps)["adapted"] == 0 and driver.sent[place : place + 2] == [0, 0]
    executor.close()
    assert not driver.memory
    with pytest.raises(UsageError, match="rank 7, the artifact takes 4 at most"):
        wide = save(tmp_path / "wide", pair("q", 16, 32, 7), r=7)
        open_model(tmp_path / "places", manifest, LoadOptions(max_batch=2, lora={"wide": wide}))


def test_linears_that_no_adapter_changes_run_no_kernels() -> None:
    launches = [{"name": "gemm"}, *({"name": f"add{site}", "site": site} for site in range(4))]
    change: Any = object()
    named = {"a": [None, change, None, None], "b": [None, None, None, change]}
    assert [each["name"] for each in plan_for({"launches": launches}, named)["launches"]] == ["gemm", "add1", "add3"]
    for none in (None, {}):
        assert plan_for({"launches": launches}, none) == {"launches": launches}


def test_artifacts_without_places_refuse_adapters(tmp_path: Path) -> None:
    manifest = artifact(tmp_path / "none")
    with pytest.raises(UnsupportedError, match=r"has no places for adapters: build it with --set lora\.rank=16"):
        open_model(tmp_path / "none", manifest, LoadOptions(max_batch=2, lora={"tuned": tmp_path}))


def test_a_rank_of_several_gpus_has_its_own_factors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 reads its half of the inputs from the folder that rank 0 names, and launches what rank 0 does."""
    driver = Driver()
    monkeypatch.setattr(load, "driver", lambda *_: driver)
    monkeypatch.setattr(launching, "LaunchCall", FakeLaunch)
    variants = [variant("many", ["adapted", 1, 1], {"kind": "weight", "name": ADAPTER_TABLE})]
    launches = [{"name": "add", "by": "adapted", "site": site, "variants": variants} for site in (0, 1)]
    root = tmp_path / "places"
    manifest = artifact(root, *launches)
    half = FactorChange("take_spans", {"axis": 1, "spans": [16, 32]})
    sites = [Site(name, 16, 16, "bf16", (AdaptedWeight(f"{name}.weight", (16, 32), (half,), ()),)) for name in "qk"]
    (root / adapters_file(1)).write_bytes(Adapted(4, tuple(sites), {}, {}).to_bytes())
    (root / ADAPTERS_FILE).write_bytes(Adapted(4, tuple(sites), {}, {}).to_bytes())
    manifest["files"] = listed(root)
    manifest["runtime"]["ranks"] = [[0, 1], [0, 1]]
    folder = save(tmp_path / "tuned", tensors := pair("q", 16, 32))
    read = read_adapters(root, manifest, {"tuned": folder})
    named = read_same_adapters(root, manifest, read.folders, 1)
    [own, none] = named["tuned"]
    assert own is not None and none is None
    assert torch.equal(own.a[:4, :16], tensors["q.lora_A.weight"][:, 16:].bfloat16())
    rank = load.load_rank(root, manifest, 1, False, named)
    assert [each.get("site") for each in rank.plans[0]["launches"] if each["name"] == "add"] == [0]
    [executor] = rank.open(pages=4, rows=8, slots=2, copies=0)
    assert executor.inputs.adapters is rank.adapters is not None and rank.adapters.names == ("tuned",)
    assert "adapters" in executor.inputs._offsets
    executor.close()
