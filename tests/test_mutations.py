"""The seeded mistakes of benchmarks/mutations.py still fit the code: each replaces a text that occurs once."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.mutation_list import MUTATIONS, Mutation
from benchmarks.mutation_list_gpu import GPU_MUTATIONS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("mutation", [*MUTATIONS, *GPU_MUTATIONS], ids=lambda mutation: mutation.fault)
def test_a_mutation_applies(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1 and mutation.new != mutation.old
    assert all((ROOT / part).exists() for part in mutation.tests.split() if part.startswith("tests/"))
