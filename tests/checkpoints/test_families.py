"""A few decoder families through the whole compiler against transformers; benchmarks/families.py has all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import families, family_list
from tests.support.cases import first

BUILT = (
    "llama, odd vocabulary and widths",  # everything that can be uneven is
    "gemma2, soft caps",  # caps of scores and logits, windows of some layers, norms around blocks
    "gpt_oss",  # sinks, experts with biases and clamped gates
    "qwen2_moe, dense layers between",  # a router before all, shared experts behind a gate
    "gpt_neo, local layers",  # attention of its own, in ATen operators
    "deepseek_v3",  # keys of two linears in new memory, values narrower, groups of experts
    "apertus",  # an activation with learned scalars, a kernel of its own
    "stablelm, parallel, norms in heads",  # weights of norms that differ by head
    "hunyuan_v1_moe",  # norms behind the rotation
    "ministral3",  # queries that grow with their position
)
KINDS = {name: (kind, settings) for name, kind, settings in family_list.FAMILIES}


FIRST = ("llama, odd vocabulary and widths", "gpt_oss", "deepseek_v3")
"""Others use kernels that tests of their own try, and tests of raising have their graphs."""


@pytest.mark.parametrize("name", first(FIRST, BUILT))
def test_family(name: str, tmp_path: Path) -> None:
    with families.quiet():
        row = families.examine(*KINDS[name], tmp_path)
    assert row["outcome"] == "right", row
    assert row["largest_logit"] > 0.1 and row["torn"] < 100  # there was something to compare


def test_committed_table() -> None:
    rows = families.read()
    assert rows.keys() == KINDS.keys()  # else: python benchmarks/families.py
    assert not [name for name, row in rows.items() if row["outcome"] not in ("right", "refused")]
    assert all(row["reason"] for row in rows.values() if row["outcome"] == "refused")
    assert len(rows) >= 45 and len({row["type"] for row in rows.values()}) >= 30
