"""Adapters of requests on two GPUs, interpreted: each rank in a process, with its part of the factors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from qcompile.artifact.adapted import Adapted
from qcompile.artifact.layout import ADAPTER_TABLE
from qcompile.checkpoints.adapters import read_adapter
from qcompile.clock import Clock, silent
from qcompile.codegen.gpu import peer_memory as layouts
from qcompile.codegen.gpu.fill import padded_program
from qcompile.codegen.gpu.gemm.pack import GPU_PACKING
from qcompile.codegen.gpu.plan import make_plan
from qcompile.codegen.lower import lower
from qcompile.codegen.packing import WeightTable
from qcompile.codegen.rank_programs import rank_programs
from qcompile.passes.lora import described
from qcompile.passes.rank_graphs import other_ranks
from qcompile.passes.rewrite import ImportOptions, rewrite
from qcompile.passes.schedule import Schedule
from qcompile.recipe_files.resolved import resolve
from qcompile.runtime.lora.factors import factors
from qcompile.targets import TARGETS
from tests.conftest import MadeOnce
from tests.support.adapters import adapter_of, merged_logits, save, save_llama
from tests.support.interpreted import interpreted
from tests.support.ranks import TWO
from tests.support.tiny import Chunk

TEXTS = [[0, 17, 40, 202, 12], [5, 6, 7], [0, 17, 40, 202, 12]]
NUMBERS = [1, 0, 0]
"""The adapters of the texts; 0 for none."""
FEW = 4
"""Most rows of a sum that all ranks compute, here: one text has fewer rows, all together have more."""


def _save(path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64, "vocab_size": 256}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    model = save_llama(path, **sizes, **heads)
    tensors = adapter_of(model, rank=5)
    save(path / "all", tensors, r=5)
    torch.save(tensors, path / "all.pt")


def interpret(folder: str) -> None:
    """A step of texts with an adapter and without, and each text alone."""
    from qcompile.runtime.cuda.adapters import DeviceAdapters
    from tests.support.exchanges import Exchanging, shared, together
    from tests.support.gpu_machine import HostDriver
    from tests.support.rank_interpreter import RankInterpreter

    layouts.FEW_ROWS = FEW
    passes = Schedule(resolve("bf16", TWO | {"lora.rank": "6"}), "h200").model_passes()
    graphs, _ = rewrite(folder, passes, ImportOptions(), Clock(silent))
    finals, table = [graphs[-1], *other_ranks(graphs, passes)], WeightTable(GPU_PACKING)
    programs = rank_programs(padded_program(lower(finals[0], table)), finals[1:], table, padded_program)
    blobs = {name: blob for w in table.weights for (name, _), blob in zip(w.blobs, w.produce(), strict=True)}
    plans = [make_plan(program, TARGETS["h200"], split=64, inline_asm=False) for program in programs]
    sums = plans[0].sums
    memory = [shared(-(-(sums["data"] + 64 * sums["group"]) // 8), dtype=torch.int64) for _ in programs]
    adapter = read_adapter(Path(folder) / "all")
    count = sum(map(len, TEXTS))
    results = [shared(2, count, 256) for _ in memory]

    def work(own: Exchanging) -> None:
        machine: Any = RankInterpreter(programs[own.rank], plans[own.rank], blobs, own.rank, memory)
        driver: Any = HostDriver()
        adapted = Adapted.from_bytes(described(finals[own.rank], 6).to_bytes())
        address = driver.keep(machine.weights[ADAPTER_TABLE])
        DeviceAdapters(driver, {"all": factors(adapted, adapter)}, address, [])
        fill = machine._fill

        def filled(chunks: Any, outputs: Any) -> Any:
            counts, numbers = fill(chunks, outputs), [NUMBERS[chunk.pages[0]] for chunk in chunks]
            machine.inputs["adapters"] = torch.tensor(numbers, dtype=torch.int32)
            return counts | {"adapted": counts["tokens"] * any(numbers)}

        machine._fill = filled
        chunks = [Chunk(text, 0, [page]) for page, text in enumerate(TEXTS)]
        results[own.rank][0] = machine.step(chunks)[0]
        results[own.rank][1] = torch.cat([machine.step([chunk])[0] for chunk in chunks])

    together(memory, work)
    assert torch.equal(results[0], results[1])
    every, alone = results[0]
    assert torch.equal(every, alone)  # whatever shares the step
    moved, _, plain = every.split([len(text) for text in TEXTS])
    tensors = torch.load(Path(folder) / "all.pt")
    want, without = (merged_logits(Path(folder), tensors, torch.tensor(TEXTS[:1]), each)[0] for each in (1.2, 0.0))
    change, expected = (moved - plain).flatten(), (want - without).flatten()
    assert torch.cosine_similarity(change, expected, 0) > 0.99  # as on one GPU (test_lora.py): bf16 moves logits too
    assert 0.8 < change.norm() / expected.norm() < 1.25


def test_two_ranks_have_their_parts_of_adapters_interpreted(made_once: MadeOnce) -> None:
    folder = made_once("gpu-rank-adapters", _save)
    interpreted(__name__, f"interpret({str(folder)!r})")
