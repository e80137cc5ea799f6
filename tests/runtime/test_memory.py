"""The memory that a model takes beside its weights: pages of the cache that are used, and rows of the running step."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import qcompile
from benchmarks import memory
from qcompile.runtime.cpu import load as opening
from qcompile.runtime.loader import Arena

WIDE = memory.SHAPE | {"vocab_size": 512, "intermediate_size": 4096, "num_hidden_layers": 1}
"""Of each of the values of a step, 512 rows take at least a huge page of 2 MiB."""


def test_a_page_of_the_cache_is_contiguous_over_layers(
    tiny_artifact: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each layer would take a huge page from the first token on."""
    arenas: list[Arena] = []

    def arena(size: int) -> Arena:
        arenas.append(Arena(size))
        return arenas[-1]

    monkeypatch.setattr(opening, "Arena", arena)
    with qcompile.load(tiny_artifact("w4a8"), threads=1, max_batch=4) as llm:
        page = llm.manifest["runtime"]["kv"]["page_bytes"]
        llm.generate([[5, 6, 7]], max_tokens=4, temperature=0, ignore_eos=True)
        used = [any(arenas[0].view[at : at + page]) for at in range(0, arenas[0].size, page)]
    assert sum(used) == 1 < len(used)


def test_a_short_request_takes_little_memory(tmp_path: Path) -> None:
    memory.write_checkpoint(tmp_path / "model", WIDE)
    qcompile.build(str(tmp_path / "model"), tmp_path / "out", recipe="w4a8")
    command = [sys.executable, memory.__file__, "--artifact", str(tmp_path / "out"), "--prompts", "4", "--tokens", "4"]
    said = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    assert not said["imports_torch"]
    taken = said["runs"][0]["memory"]["resident"] - said["loaded"]["resident"]
    assert taken < 17 << 20  # six or seven areas, each at least a huge page of 2 MiB; eleven before
