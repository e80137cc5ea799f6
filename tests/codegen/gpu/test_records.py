"""Records of what Triton makes of kernels: what is unchanged is not compiled, and what changed is told."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from qcompile.codegen.gpu import compile as gpu_compile
from qcompile.codegen.gpu.rows import RowSpec
from tests.support import compiled as records
from tests.support.compiled import RECORDS, Record, facts_of
from tests.support.interpreted import needs_triton

KERNELS = [RowSpec(width, 88, 88, unary="softplus").kernel(80) for width in (44, 88)]
FOUND: dict[str, Any] = {
    **{"registers": 20, "shared_bytes": 0, "spill_bytes": 0, "threads": 128, "matrix": [], "ptx": {"dp4a.u32": 2}},
    **{"waits": "2m 1 1m 0", "overwritten": False},
}


@pytest.fixture
def compiled_now(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Labels of kernels that are compiled, which is not done."""
    needs_triton()
    labels: list[str] = []

    def facts_of(kernel: Any, capability: int) -> dict[str, Any]:
        labels.append(kernel.label)
        return FOUND

    monkeypatch.setattr(records, "facts_of", facts_of)
    monkeypatch.setattr(records, "_found_by", lambda: "this code")
    return labels


def kept(path: Path, *kernels: Any) -> Record:
    """The record of a test that has asked for `kernels`, written and read again."""
    record = Record(path, "test_one")
    for kernel in kernels:
        record(kernel, 80)
    record.write()
    return Record(path, "test_one")


def test_what_is_recorded_is_not_compiled(tmp_path: Path, compiled_now: list[str]) -> None:
    record = kept(tmp_path / "r.json", *KERNELS)
    assert compiled_now == [kernel.label for kernel in KERNELS]
    result = [record(kernel, 80) for kernel in KERNELS]
    record.check()
    assert len(compiled_now) == 2 and result[0].registers == 20 and result[0].ptx == {"dp4a.u32": 2}
    assert result[0].order == [None, None, 1, None, 0] and result[0].matrix == ()


def test_what_changed_is_compiled_and_told(tmp_path: Path, compiled_now: list[str]) -> None:
    record = kept(tmp_path / "r.json", KERNELS[0])
    record(KERNELS[1], 80)
    with pytest.raises(AssertionError, match=rf"lacks \['facts_of {KERNELS[1].label} sm_80'\], and has \[.*sm_80'\]"):
        record.check()
    record = Record(tmp_path / "r.json", "test_one")
    record(KERNELS[0], 90)  # the same source for another architecture
    assert compiled_now == [KERNELS[0].label, KERNELS[1].label, KERNELS[0].label]
    with pytest.raises(AssertionError, match="sm_90"):
        record.check()
    with pytest.raises(AssertionError, match=r"lacks \[\], and has \['facts_of rows"):
        Record(tmp_path / "r.json", "test_one").check()


@pytest.mark.parametrize(("what", "told"), [("triton", False), ("found by", True)])
def test_facts_of_other_software_are_not_taken(what: str, told: bool, tmp_path: Path, compiled_now: list[str]) -> None:
    """By another Triton all is compiled, and is right as it is; other code that finds facts needs a new record."""
    path = tmp_path / "r.json"
    kept(path, KERNELS[0])
    path.write_text(json.dumps(json.loads(path.read_text()) | {what: "another"}))
    record = Record(path, "test_one")
    record(KERNELS[0], 80)
    assert len(compiled_now) == 2
    if told:
        with pytest.raises(AssertionError, match="lacks"):
            record.check()
    else:
        record.check()
    record.write()
    Record(path, "test_one")(KERNELS[0], 80)
    assert len(compiled_now) == 2


def test_records_are_true() -> None:
    """Kernels that take little time are compiled anew."""
    needs_triton()
    rows = json.loads((RECORDS / "test_step.json").read_text(encoding="utf-8"))
    if rows["triton"] != gpu_compile.triton_version():
        pytest.skip(f"the records are of triton {rows['triton']}")
    kernel = RowSpec(88, 88, 88, unary="softplus").kernel(90)
    assert rows["tests"]["test_softplus_compiles[h200]"] == {
        f"facts_of {kernel.label} sm_90": json.loads(json.dumps(facts_of(kernel, 90)))
    }


def test_records_have_no_tests_that_are_gone(request: pytest.FixtureRequest) -> None:
    """Nor parameters of tests, where all are collected."""
    here = Path(__file__).parent
    config = request.config
    names = {(item.path.stem, item.name) for item in request.session.items if item.path.parent == here}
    chosen = config.option.keyword or config.option.markexpr.replace("not exhaustive", "")
    whole = not (chosen or any("::" in given for given in config.args))
    collected = {stem for stem, _ in names} if whole else set()
    assert len(list(RECORDS.iterdir())) >= 15
    for path in RECORDS.iterdir():
        tree = ast.parse((here / f"{path.stem}.py").read_text(encoding="utf-8"))
        known = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        tests = json.loads(path.read_text(encoding="utf-8"))["tests"]
        gone = {name for name in tests if name.split("[")[0] not in known}
        gone |= {name for name in tests if path.stem in collected and (path.stem, name) not in names}
        assert not gone, f"remove {sorted(gone)} from {path.name}"
