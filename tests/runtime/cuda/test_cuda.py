"""The CUDA runtime's own logic, over a driver that only writes down what it is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qcompile.errors import ArtifactError, ResourceError, UsageError
from qcompile.runtime.cuda import driver as cuda_driver
from qcompile.runtime.cuda import launching, load, sampling
from qcompile.runtime.cuda.executor import CudaExecutor
from qcompile.runtime.cuda.memory import activation_bytes, pages_in
from qcompile.runtime.cuda.speculate import CudaLookup, CudaSpeculator
from qcompile.runtime.engine.blocks import requested_pages
from qcompile.runtime.sampling.inputs import GREEDY
from qcompile.runtime.sampling.logprobs import empty_reports
from qcompile.runtime.speculation.host import HostSpeculator
from qcompile.runtime.speculation.reencode import Reencoder
from qcompile.runtime.speculation.stages import DraftStage
from qcompile.runtime.step import Limits, Rows
from tests.support.fake import byte_tokenizer, listed
from tests.support.fake_driver import LIMITS, PLAN, FakeDriver, FakeLaunch


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> CudaExecutor:
    monkeypatch.setattr(launching, "LaunchCall", FakeLaunch)
    monkeypatch.setattr(launching, "GRAPH_FROM", 2)
    functions: Any = {name: name for name in PLAN["kernels"]}
    return CudaExecutor(FakeDriver(), PLAN, functions, {"w": 99}, 4, LIMITS)  # type: ignore[arg-type]


def test_counts_choose_kernels_grids_and_arguments(opened: CudaExecutor) -> None:
    log = opened.driver.log  # type: ignore[attr-defined]
    opened.step([Rows([1, 2, 3], 5, [2], 1), Rows([4], 0, [3], 0)], logits=False)
    head = opened.memory._arenas["tokens"] + 64 * 4
    layer_1 = opened.memory.cache + 5 * 512  # of five pages, one to lose things in
    assert log == [("few", (1, 3, 1), (4,)), ("split", (2, 1, 2), (layer_1,)), ("few", (1, 1, 1), (head,))]
    log.clear()
    opened.step([Rows(list(range(17)), 0, [1], 0)], logits=False)
    assert log == [("many", (2, 3, 1), (99,))]  # too many queries for the split kernel, no outputs


def test_launches_that_are_kept_take_what_is_new_in_a_step(opened: CudaExecutor) -> None:
    driver: Any = opened.driver
    opened.launcher._plan = PLAN | {"launches": PLAN["launches"][:2] + PLAN["feedback"]}
    opened.step([Rows([1, 2, 3], 5, [2], 1)], logits=False)
    first = opened.memory.scratch["parts"].address
    driver.allocate(100, "something behind")  # so that scratch memory moves when it grows
    opened.step([Rows([1, 2, 3], 253, [2, 3, 1, 0, 4], 1), Rows([4], 0, [3], 0)], logits=False)
    second, layer_1 = opened.memory.scratch["parts"].address, opened.memory.cache + 5 * 512
    assert first != second and driver.log == [
        *(("few", (1, 3, 1), (3,)), ("split", (2, 1, 1), (layer_1,)), ("next", (1, 1, 1), (first,))),
        *(("few", (1, 3, 1), (4,)), ("split", (2, 1, 2), (layer_1,)), ("next", (1, 1, 1), (second,))),
    ]


def test_counts_of_long_steps_are_not_remembered(opened: CudaExecutor) -> None:
    """A server's would grow without end."""
    for rows in range(17, 30):
        opened.step([Rows(list(range(rows)), 0, [1], 1)], logits=False)
    assert not opened.launcher._seen
    opened.step([Rows([1, 2], 0, [1], 1)], logits=False)
    assert len(opened.launcher._seen) == 1


def test_a_step_of_greedy_sequences_has_the_counts_of_any_other(opened: CudaExecutor) -> None:
    """They name the step's graph, so their order counts, too."""
    assert opened._sampling is not None
    inputs = [GREEDY, GREEDY]
    assert not opened._sampling.lacks_room(inputs)
    assert list(opened._sampling.send(inputs, 2).items()) == list(sampling._counts(inputs, 2, 0).items())


def test_the_step_that_is_sent(opened: CudaExecutor) -> None:
    opened.step([Rows([1, 2, 3], 5, [2], 2), Rows([4], 9, [3, 1], 1)], logits=False)
    sent, place = opened.driver.sent, opened.inputs._offsets  # type: ignore[attr-defined]

    def part(name: str, count: int) -> list[int]:
        return sent[place[name] : place[name] + count]

    assert part("token_ids", 4) == [1, 2, 3, 4] and part("positions", 4) == [5, 6, 7, 9]
    assert part("query_start", 3) == [0, 3, 4] and part("row_sequence", 4) == [0, 0, 0, 1]
    assert part("output_rows", 3) == [1, 2, 3]
    assert part("block_table", 1) == [2] and sent[place["block_table"] + 8 :][:2] == [3, 1]


def test_steps_are_queued_behind_each_other_from_memory_in_turn(opened: CudaExecutor) -> None:
    """Two steps after a step, its memory on the host is used again: that step first waits for two events, the end of
    the copy of the earlier step's inputs, and the copy of its tokens. A step that is not queued waits for all."""
    driver: Any = opened.driver
    chunks = [[Rows([token] * 20, 0, [1], token % 2)] for token in range(6)]
    sources, targets, waits = [], [], []
    for turn, chunk in enumerate(chunks):
        waits.append(opened.start(chunk, 1))
        sources.append(driver.source)
        sent, result = driver.recorded[-2:]
        assert driver.passed == [result] * (turn > 1) + [sent]
        driver.passed.clear()
        targets.append(result)
        assert driver.sent[opened.inputs._offsets["token_ids"]] == chunk[0].tokens[0]
    for mine in (sources, targets):
        assert mine == [mine[0], mine[1]] * 3 and mine[0] != mine[1]
    assert opened._started.turns == [0, 1] and [len(wait()) for wait in waits[:4]] == [0, 1] * 2
    opened.step(chunks[0], logits=False)
    assert not opened._started.turns and len(waits[5]()) == 1


def test_tokens_that_the_step_before_gives_are_replaced_on_the_gpu(opened: CudaExecutor) -> None:
    """Also where the host waits for that step because its reports are to be read."""
    log = opened.driver.log  # type: ignore[attr-defined]
    first = opened.start([Rows([1, 2, 3], 5, [2], 1)], 1)
    log.clear()
    opened.start([Rows([-1], 8, [2], 1), Rows([4], 0, [3], 1)], 1, [GREEDY, GREEDY])
    assert log[0] == ("follow", (1, 1, 1), (2,)) and len(opened._started.turns) == 2
    log.clear()
    reports = empty_reports(1, 0)
    opened.start([Rows([-2], 1, [3], 1)], 1, [GREEDY._replace(reports=reports)])
    assert log[0] == ("follow", (1, 1, 1), (1,)) and len(opened._started.turns) == 1 and len(first()) == 1
    opened.start([Rows([-1], 2, [3], 1)], 1)
    assert len(opened._started.turns) == 1


def test_what_lies_past_the_end_of_a_ring_goes_elsewhere_than_what_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "LaunchCall", FakeLaunch)
    functions: Any = {name: name for name in PLAN["kernels"]}
    limits = LIMITS._replace(ring_tokens=384)
    with_ring = CudaExecutor(FakeDriver(), PLAN, functions, {"w": 99}, 40, limits)  # type: ignore[arg-type]
    with_ring.fill([Rows([1], 250, list(range(8)), 1)], ahead=10)
    table = with_ring.driver.sent[with_ring.inputs._offsets["block_table"] :]  # type: ignore[attr-defined]
    assert table[:14] == [*range(8), 40, 40, 40, 40, 41, 41]
    assert with_ring.memory.layer_places == [0, 42 * 512, 84 * 512]


def test_steps_that_come_again_are_graphs(opened: CudaExecutor) -> None:
    log = opened.driver.log  # type: ignore[attr-defined]
    row = [Rows([1], 5, [2], 1)]
    for _ in range(3):
        opened.step(row, logits=False)
    assert [line for line in log if isinstance(line, str)] == ["captured", "replay", "replay"]
    log.clear()
    assert len(opened.decode(row, 5)) == 5
    assert log.count("replay") == 5 and log.count("captured") == 1


def test_steps_that_seldom_come_are_no_graphs(opened: CudaExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a call count one by one, and no more counts are remembered than a server needs."""
    monkeypatch.setattr(launching, "GRAPH_FROM", 6)
    monkeypatch.setattr(launching, "_MOST_SEEN", 3)
    log, row = opened.driver.log, [Rows([1], 5, [2], 1)]  # type: ignore[attr-defined]
    opened.decode(row, 3)
    opened.decode(row, 2)
    assert "captured" not in log
    opened.decode(row, 1)
    assert log.count("captured") == log.count("replay") == 1 and not opened.launcher._seen
    for count in range(1, 6):
        opened.step([Rows([1], 5, [page], 1) for page in range(count)], logits=False)
        assert len(opened.launcher._seen) <= 3
    opened.decode([Rows([1], 5, [2], 1), Rows([1], 5, [3], 1)], 6)
    assert log.count("captured") == 2 and log.count("replay") == 7


def test_larger_scratch_memory_ends_the_graphs_that_hold_the_old(opened: CudaExecutor) -> None:
    log = opened.driver.log  # type: ignore[attr-defined]
    row = [Rows([1], 5, [2], 1)]
    opened.decode(row, 2)
    opened.step([Rows([1], 5, [2], 1), Rows([1], 5, [3], 1)], logits=False)
    assert "drop" in log and not opened.launcher.graphs


def test_scratch_memory_that_cannot_grow_is_not_used_any_more(
    opened: CudaExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old was given back to make room: the next step, of however few rows, asks for its own."""
    driver: Any = opened.driver
    one, two = [Rows([1], 5, [2], 1)], [Rows([1], 5, [2], 1), Rows([1], 5, [3], 1)]
    opened.step(one, logits=False)
    with monkeypatch.context() as patch:
        patch.setattr(driver, "allocate", lambda size, what: _refuse(what))
        with pytest.raises(ResourceError, match="scratch"):
            opened.step(two, logits=False)
    opened.step(one, logits=False)
    assert opened.memory.scratch["parts"].address in driver.memory
    with monkeypatch.context() as patch:
        patch.setattr(driver, "allocate", lambda size, what: _refuse(what))
        with pytest.raises(ResourceError, match="scratch"):
            opened.step(two, logits=False)
    opened.close()
    assert driver.memory == {}


def _refuse(what: str) -> None:
    raise ResourceError(f"the GPU has no memory left for {what}")


def test_launches_are_timed_within_a_graph(opened: CudaExecutor) -> None:
    """One interval with nothing in it, which does not count; a step that comes again is no new graph."""
    log, row = opened.driver.log, [Rows([1], 5, [2], 1)]  # type: ignore[attr-defined]
    opened.decode(row, 2)
    log.clear()
    opened.driver.events = 0  # type: ignore[attr-defined]
    opened.profile(True)
    opened.decode(row, 3)
    result = opened.profile_read()
    launched = [line[0] for line in log if isinstance(line, tuple)]
    assert [line if isinstance(line, str) else "launch" for line in log] == [
        *("record 1", "record 2"),
        *(word for event in range(3, 3 + len(launched)) for word in ("wait", "launch", f"record {event}")),
        *("captured", "replay", "replay", "replay"),
    ]
    assert list(result) == [launch["name"] for launch in (*PLAN["launches"], *PLAN["feedback"])]
    assert list(result.values()) == [(3 * (10.0 * event - 1), 3) for event in range(3, 3 + len(launched))]
    log.clear()
    opened.profile(False)
    assert sorted(log) == ["drop", *["drop event"] * (2 + len(launched))] and not opened.profile_read()
    opened.decode(row, 1)
    assert log[-1] == "replay"


def test_larger_scratch_memory_ends_timed_graphs_too(opened: CudaExecutor) -> None:
    opened.profile(True)
    log = opened.driver.log  # type: ignore[attr-defined]
    opened.decode([Rows([1], 5, [2], 1)], 2)
    opened.decode([Rows([1], 253, [2, 3, 1, 0, 4], 1), Rows([1], 5, [3], 1)], 1)
    assert "drop event" in log
    log.clear()
    opened.decode([Rows([1], 5, [2], 1)], 1)
    assert "captured" in log


def test_closing_gives_everything_back(opened: CudaExecutor) -> None:
    opened.step([Rows([1], 5, [2], 1)], logits=False)
    opened.close()
    opened.close()
    assert not opened.driver.memory  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="closed"):
        opened.step([Rows([1], 5, [2], 1)], logits=False)


def test_a_plan_of_another_version_is_refused() -> None:
    with pytest.raises(ArtifactError, match="build the artifact again"):
        CudaExecutor(FakeDriver(), {**PLAN, "abi": 99}, {}, {}, 4, LIMITS)  # type: ignore[arg-type]


def test_more_rows_than_kernels_take_are_refused() -> None:
    with pytest.raises(UsageError, match="65 rows a step, the artifact's kernels take 64"):
        CudaExecutor(FakeDriver(), PLAN, {}, {}, 4, LIMITS._replace(max_tokens=65))  # type: ignore[arg-type]


def test_pages_that_fit() -> None:
    assert pages_in(1000, 100, most=4, share=1.0) == 4
    assert pages_in(1000, 100, most=40, share=0.55) == 5
    with pytest.raises(ResourceError, match="no GPU memory"):
        pages_in(50, 100, most=4, share=1.0)
    assert requested_pages(250, 100) == 2
    with pytest.raises(UsageError, match="kv_cache_bytes 50 is less than one page of 100 bytes"):
        requested_pages(50, 100)


def test_no_driver_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", missing)
    with pytest.raises(ResourceError, match="no NVIDIA driver"):
        cuda_driver.Driver()


def test_a_closed_model_leaves_nothing_on_the_gpu(opened: CudaExecutor) -> None:
    """Its weights and kernels neither: the next model needs their memory."""
    driver: Any = opened.driver
    modules: Any = ["few", "many"]
    opened.adopt([driver.allocate(100, "weights")], modules)
    opened.step([Rows([1, 2, 3], 0, [2], 1)], logits=True)
    assert driver.memory
    opened.close()
    opened.close()
    assert driver.memory == {} and driver.pages == []
    assert [line for line in driver.log if "unload" in line] == ["unload few", "unload many"]


def test_levels_that_draft_work_in_the_targets_cache_or_in_their_own(opened: CudaExecutor) -> None:
    functions: Any = {name: name for name in PLAN["kernels"]}
    common = {"max_position": 512, "vocab_size": 10, "gamma": 4, "threshold": 0.0}
    own = {"kv": None, "path": "draft1", **common}
    other = {"kv": {"page_tokens": 64}, "path": "draft2", **common}
    lookup = {"lookup": 8, "gamma": 7}
    driver: Any = opened.driver
    before = dict(driver.memory)
    result = []
    for stages in ([own], [other], [lookup], [other | {"threshold": 0.3}], [own, other, lookup]):
        plans = [PLAN if "path" in stage else None for stage in stages]
        pairs = zip(stages, plans, strict=True)
        every = [load._stage(opened, stage, plan, functions, {"w": 99}) for stage, plan in pairs]
        drafter = load._drafter(Path(), {}, opened, stages, every, None)
        caches = [one.executor.memory.cache for one in every if isinstance(one.executor, CudaExecutor)]
        shared = [cache == opened.memory.cache for cache in caches]
        assert len(set(caches)) == len(caches)
        assert {opened.memory.cache, *caches} <= set(opened.memory.caches)  # what sleep gives back
        result.append((type(drafter), shared))
        drafter.close()
        assert driver.memory == before  # the target's cache is not theirs to free
    assert result == [
        (CudaSpeculator, [True]),
        (CudaSpeculator, [False]),
        (CudaLookup, []),
        (HostSpeculator, [False]),
        (HostSpeculator, [True, False]),
    ]


def test_a_draft_of_another_tokenizer_has_pages_of_its_own(opened: CudaExecutor, tmp_path: Path) -> None:
    functions: Any = {name: name for name in PLAN["kernels"]}
    stage = {"kv": {"page_tokens": 64}, "path": "draft1", "tokenizer": "draft1/tokenizer.json", "gamma": 4}
    stage |= {"max_position": 512, "vocab_size": 10, "threshold": 0.4, "bos_token_id": 1}
    every = [load._stage(opened, stage, PLAN, functions, {"w": 99})]
    with pytest.raises(ArtifactError, match="needs two tokenizers"):
        load._drafter(tmp_path, {}, opened, [stage], every, byte_tokenizer())
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().to_str())
    stage["tokenizer"] = "tokenizer.json"
    drafter = load._drafter(tmp_path, listed(tmp_path), opened, [stage], every, byte_tokenizer())
    assert isinstance(drafter, Reencoder)
    assert drafter.executor is every[0].executor and drafter.pool.total == opened.kv_pages
    drafter.close()


def test_rounds_are_no_more_than_sequences_want(opened: CudaExecutor) -> None:
    """What all drafts kept would take at once, then as much of what is left."""
    driver: Any = opened.driver
    speculator = CudaLookup(opened, DraftStage(None, 7, match=8))
    calls: list[int] = []

    def download(to: int, source: int, size: int, pinned: bool = True) -> None:
        calls.append(driver.log.count("replay"))
        brought = 2 * calls[-1]  # tokens a round
        speculator.state.write("left", [max(0, 20 - brought), max(0, 9 - brought)])

    driver.download = download
    graph: Any = "graph"
    for rounds, made, looks in ((64, 10, [4, 7, 9, 10]), (8, 8, [4, 7]), (3, 3, [])):
        driver.log.clear()
        calls.clear()
        speculator.state.write("left", [20, 9])
        assert speculator._replay(graph, rounds, count=2, rows=5) == made
        assert driver.log.count("replay") == made and calls == looks
    speculator.close()


@pytest.mark.parametrize("short_of", ["activations", "the KV cache", "inputs", "logits"])
def test_a_model_that_does_not_fit_leaves_nothing_on_the_gpu(short_of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, allocate = FakeDriver(), FakeDriver.allocate

    def short(self: FakeDriver, size: int, what: str) -> int:
        if what == short_of:
            raise ResourceError(f"the GPU has no memory left for {what}")
        return allocate(self, size, what)

    monkeypatch.setattr(FakeDriver, "allocate", short)
    functions: Any = {name: name for name in PLAN["kernels"]}
    with pytest.raises(ResourceError, match=short_of):
        CudaExecutor(driver, PLAN, functions, {"w": 99}, 4, LIMITS)  # type: ignore[arg-type]
    assert driver.memory == {} and driver.pages == []


def test_rounds_without_memory_of_the_host_leave_nothing_on_the_gpu(
    opened: CudaExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver: Any = opened.driver
    before = dict(driver.memory)
    monkeypatch.setattr(driver, "pinned", lambda size: _refuse("pinned memory"))
    with pytest.raises(ResourceError, match="pinned"):
        CudaLookup(opened, DraftStage(None, 7, match=8))
    assert driver.memory == before


def test_weights_of_a_model_without_room_for_a_page_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: dict[int, str] = {}
    loaded: list[str] = []
    free = [(512 << 20) + 10_000]
    gpu = SimpleNamespace(
        allocate_releasable=lambda size, what: (held.update({5: what}), 5)[1],
        free=held.pop,
        upload=lambda *_, **how: None,
        synchronize=lambda: None,
        memory=lambda: (free[0], 1 << 32),
        module=lambda *_: loaded.append("module") or "module",
        function=lambda *_: 7,
        unload=loaded.remove,
    )
    plan = {"kernels": {"k": {"function": "k", "shared_bytes": 0}}, "arena_bytes": {"tokens": 100, "outputs": 10}}
    plan |= {"scratch": {}, "most_rows": 48}
    for name, content in {"weights": bytes(4096), "plan": json.dumps(plan).encode(), "k.cubin": b""}.items():
        (tmp_path / name).write_bytes(content)
    runtime = {"max_tokens": 64, "vocab_size": 10, "kv": {"page_bytes": 1 << 20, "page_tokens": 64}, "library": "plan"}
    runtime["weights"] = [{"name": "w", "file": "weights", "offset": 0, "bytes": 64}]
    manifest = {"runtime": runtime, "model": {"max_position": 64}, "files": listed(tmp_path)}
    monkeypatch.setattr(load, "driver", lambda: gpu)
    with pytest.raises(ResourceError, match="no GPU memory for one KV page"):
        load.open_cuda(tmp_path, manifest, 1, None, 1.0, drafts=False)
    free[0] = 1 << 20
    with pytest.raises(ResourceError, match=r"steps of 48 rows take [\d,]+ bytes .* lower max_num_batched_tokens"):
        load.open_cuda(tmp_path, manifest, 1, None, 1.0, drafts=False)
    with pytest.raises(UsageError, match="less than one page"):  # before anything is on the GPU
        load.open_cuda(tmp_path, manifest, 1, 1, 0.9, drafts=False)
    assert held == {} and loaded == []


def test_unpacked_pages_take_memory_where_steps_have_enough_rows() -> None:
    scratch = {"unpacked": {"bytes": 1000, "counts": ["unpacked_room"]}}
    plan = PLAN | {"unpacked_pages": 7, "unpacked_rows": 48, "scratch": scratch}
    for rows, size in ((47, 0), (48, 7000)):
        limits = LIMITS._replace(max_tokens=rows)
        assert activation_bytes(plan, limits) - activation_bytes(PLAN, limits) == size


@pytest.mark.parametrize(("free", "rows"), [(64 << 30, 2048), (5 << 29, 1024), (1 << 31, 512), (5 << 28, 512)])
def test_steps_are_smaller_where_their_buffers_would_take_much_of_the_memory(
    free: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless their size was asked for. What scratch memory takes by row counts as well."""
    made: list[tuple[int, Any]] = []
    monkeypatch.setattr(load, "CudaExecutor", lambda gpu, plan, fs, ws, pages, limits: made.append((pages, limits)))
    gpu: Any = SimpleNamespace(memory=lambda: (free, free))
    plan = PLAN | {"arena_bytes": {"tokens": 90_000, "outputs": 10}, "scratch": {"by_row": {"bytes": 10_000}}}
    plan["scratch"]["by_row"]["counts"] = ["room"]
    limits = Limits(2048, 1000, 64, 1024, slots=4, most_outputs=512)
    load._open_target(gpu, [plan], {}, {}, limits, load._Room(1 << 20, 0, 1 << 20, 1.0, fewer_rows=True))
    [(pages, result)] = made
    buffers = rows * 100_000 + 512 * (10 + 4 * 1000) + (512 << 20)
    assert result == limits._replace(max_tokens=rows) and pages == (free - buffers) >> 20
    load._open_target(gpu, [plan], {}, {}, limits, load._Room(1 << 20, 0, 1 << 20, 1.0))
    assert made[1][1] == limits


def test_memory_for_logits_does_not_grow_with_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "LaunchCall", FakeLaunch)
    functions: Any = {name: name for name in PLAN["kernels"]}
    drivers: list[Any] = [FakeDriver(), FakeDriver()]
    plan = PLAN | {"most_rows": 8192}
    for driver, rows in zip(drivers, (64, 8000), strict=True):
        CudaExecutor(driver, plan, functions, {"w": 9}, 3, LIMITS._replace(max_tokens=rows, most_outputs=64))
    small, large = (list(driver.memory.values()) for driver in drivers)
    grown = [after - before for before, after in zip(small, large, strict=True) if before != after]
    assert grown == [100 * (8000 - 64), 4 * 7 * (8000 - 64)]  # activations, and seven arrays of inputs
