"""Adapters of requests in two processes: rows as in one process, whatever shares the step, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import qcompile
from qcompile import LLM, SamplingParams
from qcompile.artifact.layout import ADAPTER_TABLE_BYTES, ADAPTERS_FILE, adapters_file
from qcompile.artifact.reader import read_checked_manifest
from qcompile.errors import UsageError
from qcompile.runtime.cpu.ranks import _COUNT, _PLANNED, RankProcesses, SharedMemory
from qcompile.runtime.loader import Arena
from qcompile.runtime.lora.table import AdapterTable, read_adapters, read_same_adapters
from tests.conftest import MadeOnce
from tests.support.adapters import adapter_of, merged_logits, pair, save, save_llama
from tests.support.fake import byte_tokenizer
from tests.support.ranks import TWO

IDS = torch.tensor([[0, 17, 40, 202, 12, 12, 81, 3, 9], [5, 6, 7, 8, 9, 10, 11, 12, 13]])
PROMPTS = [[0, 17, 40, 202], [5, 6], [0, 17, 40, 202], list(range(70)), [5, 6], [1]]
NAMES: list[str | None] = ["all", None, "some", "all", "some", None]


@pytest.fixture(scope="module")
def checkpoint(made_once: MadeOnce) -> Path:
    """A checkpoint with adapters for it, of different ranks and linears."""
    return made_once("rank-adapters", _save)


def _save(path: Path) -> None:
    sizes = {"hidden_size": 72, "intermediate_size": 104, "head_dim": 24}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 2}
    model = save_llama(path, **sizes, **heads)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    tensors = adapter_of(model, rank=5)
    save(path / "all", tensors, r=5)
    torch.save(tensors, path / "all.pt")
    save(path / "some", adapter_of(model, "1.self_attn.v_proj gate_proj", seed=50))


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, made_once: MadeOnce) -> Path:
    options = TWO | {"lora.rank": "6"}
    return made_once("rank-adapters-f32", lambda out: qcompile.build(checkpoint, out, recipe="f32", options=options))


@pytest.fixture(scope="module")
def llm(checkpoint: Path, artifact: Path) -> Iterator[LLM]:
    adapters = {"all": checkpoint / "all", "some": checkpoint / "some"}
    with qcompile.load(artifact, threads=1, lora=adapters) as loaded:
        yield loaded


def test_rows_are_those_of_the_merged_model(llm: LLM, checkpoint: Path) -> None:
    want = merged_logits(checkpoint, torch.load(checkpoint / "all.pt"), IDS, 6 / 5)
    got = llm.logits(IDS, lora="all")
    # As in one process (test_lora.py): what f32 sums in another order differ by.
    assert (got - want).abs().max() < 2e-4 < (want - llm.logits(IDS)).abs().max()
    for chunk in (1, 2, 5):
        assert torch.equal(llm.logits(IDS, chunk, lora="all"), got)


def outputs(llm: LLM, prompts: list[list[int]], names: list[str | None]) -> list[Any]:
    """Tokens and log probabilities, of requests that run together."""
    given: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 2}
    result = llm.generate(prompts, [SamplingParams(**given, lora=name) for name in names])
    return [(one.outputs[0].token_ids, one.outputs[0].cumulative_logprob) for one in result]


def test_requests_do_not_change_each_other_and_sleep_keeps_adapters(llm: LLM) -> None:
    together = outputs(llm, PROMPTS, NAMES)
    llm.sleep()
    llm.wake_up()
    alone = [outputs(llm, [prompt], [name])[0] for prompt, name in zip(PROMPTS, NAMES, strict=True)]
    assert together == alone
    assert len({str(one) for one in together}) == len(together)
    embedded = [tuple(llm.embed("x = 1", lora=name)[0].tolist()) for name in (None, "all", "some")]
    assert len(set(embedded)) == 3
    llm.engine.check()


def test_rows_without_adapter_are_those_of_the_plain_artifact(llm: LLM, artifact: Path) -> None:
    with qcompile.load(artifact, threads=1) as plain:
        assert torch.equal(llm.logits(IDS), plain.logits(IDS))


def test_all_ranks_read_the_same_adapter(artifact: Path, tmp_path: Path) -> None:
    manifest = read_checked_manifest(artifact)
    assert {ADAPTERS_FILE, adapters_file(1)} <= set(manifest["files"])
    module = "model.layers.0.self_attn.o_proj"
    folder = save(tmp_path / "tuned", pair(module, 72, 96))
    read = read_adapters(artifact, manifest, {"tuned": folder})
    [own] = [site for site in read.named["tuned"] if site]
    [other] = [site for site in read_same_adapters(artifact, manifest, read.folders, 1)["tuned"] if site]
    assert torch.equal(own.b, other.b) and not torch.equal(own.a, other.a)  # half of the inputs each
    (folder / "adapter_config.json").write_text((folder / "adapter_config.json").read_text() + " ")
    with pytest.raises(UsageError, match=r"adapter tuned: .* has changed while the model was loaded"):
        read_same_adapters(artifact, manifest, read.folders, 1)


def test_a_page_changes_its_adapter_when_no_rank_reads_it() -> None:
    """Rank 1 may still run a step of which rank 0 has the result."""
    memory, place, asked = SharedMemory([4096], numbers=3), Arena(ADAPTER_TABLE_BYTES), list[list[int]]()
    ranks = object.__new__(RankProcesses)
    ranks.memory, ranks._processes = memory, [object()]  # type: ignore[list-item]
    words = memory._words[0]
    words[_PLANNED] = 5
    threading.Timer(0.05, lambda: words.__setitem__(_PLANNED + 2 * _COUNT, 5)).start()  # rank 1 has finished its step

    def settle() -> None:
        assert not memory.settled(1)
        ranks.settle()
        assert memory.settled(1)
        asked.append(list(memory.numbers))

    table = AdapterTable({"tuned": [None]}, memory.numbers, place.address, settle)
    for name in ("tuned", "tuned"):  # the second time nothing changes
        table.mark(1, name)
    assert asked == [[0, 0, 0]] and list(memory.numbers) == [0, 1, 0]
    words[_PLANNED] += 1
    memory.fail()
    ranks.settle()  # no step ends any more
    memory.close()
