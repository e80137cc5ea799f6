"""A divided model in two processes: its results, its failures, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import qcompile
from qcompile import SamplingParams, check, pipeline
from qcompile.artifact.manifest import check_manifest
from qcompile.artifact.packed_weights import PackedWeights
from qcompile.artifact.reader import read_checked_manifest
from qcompile.errors import ArtifactError, PassError, QCompileError, ResourceError, UnsupportedError, UsageError
from qcompile.passes.base import run_passes
from qcompile.passes.schedule import configure
from qcompile.recipes import get_recipe
from qcompile.runtime.cpu.ranks import RankProcesses, RankSettings, SharedMemory
from qcompile.runtime.loader import Arena, _forget
from qcompile.runtime.ranks import sleeping
from qcompile.runtime.ranks.sleeping import DividedMemory, FollowerMemory
from tests.conftest import MadeOnce
from tests.support.cases import first
from tests.support.graphs import decoder, logits_whatever_the_step, sequence_inputs
from tests.support.ranks import TWO, save_for_two, small

QUICK = 5.0
"""Seconds within which everything must have ended after a process of a rank has."""


@pytest.fixture(scope="module")
def artifact(made_once: MadeOnce) -> Path:
    return made_once("two-ranks", save_for_two)


def gone(pid: int) -> bool:
    """Whether a process has ended; it counts as ended also if its parent has not noticed (a zombie)."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    return True


def soon(what: Any) -> bool:
    """Whether `what()` becomes true within QUICK seconds."""
    end = time.monotonic() + QUICK
    while time.monotonic() < end:
        if what():
            return True
        time.sleep(0.02)
    return False


def test_two_processes_compute_the_model_whatever_the_step(artifact: Path) -> None:
    ids, positions = sequence_inputs(70, vocab=257)
    logits = logits_whatever_the_step(artifact, ids)
    passes = configure(get_recipe("w4a16").settings(), {})[1:]
    graph = next(graph for graph in run_passes(small(), passes)[0][::-1] if graph.stage == "quantize")
    expected = graph.run(ids, positions, dtype=torch.float32)
    assert check.max_relative_error(logits, expected) < 0.02  # a cache in 16 bits, which the graph does not have


def test_texts_depend_neither_on_neighbours_nor_on_the_run(artifact: Path) -> None:
    prompts = [[1, 2, 3], [4, 5], list(range(40))]
    params = [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=1, max_tokens=30, ignore_eos=True, presence_penalty=0.5),
    ]
    result: list[Any] = []
    for _ in range(2):
        with qcompile.load(artifact, threads=2, tensor_parallel_size=2) as llm:
            executor: Any = llm.executor
            pids = executor.ranks.pids
            for each in params:
                together = [output.outputs[0].token_ids for output in llm.generate(prompts, each)]
                assert together == [llm.generate([prompt], each)[0].outputs[0].token_ids for prompt in prompts]
                result.append(together)
        assert len(pids) == 1 and all(map(gone, pids))
    assert result[:2] == result[2:] and result[0] != result[1]


def resident(pid: int) -> int:
    """KiB of memory that a process has to itself, so without the libraries' files."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1])


def test_all_ranks_sleep_and_wake_as_they_were(artifact: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with qcompile.load(artifact, threads=1) as llm:
        executor: Any = llm.executor
        [pid] = executor.ranks.pids
        [before] = llm.generate([list(range(40))], params)
        for level in (1, 2):
            awake = resident(pid)
            llm.sleep(level)
            freed = 1024 * (awake - resident(pid))
            assert freed > 0.4 * sum(entry["bytes"] for entry in llm.manifest["runtime"]["weights"])  # of two ranks
            llm.wake_up()
            [again] = llm.generate([list(range(40))], params)
            assert again.outputs[0].token_ids == before.outputs[0].token_ids


def test_a_divided_model_that_has_changed_sleeps_on(artifact: Path, tmp_path: Path) -> None:
    """All ranks sleep on, until the file is as it was."""
    copy = shutil.copytree(artifact, tmp_path / "copy")
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    with qcompile.load(copy, threads=1) as llm:
        executor: Any = llm.executor
        [pid] = executor.ranks.pids
        [before] = llm.generate([[1, 2, 3]], params)
        llm.sleep()
        asleep = resident(pid)
        file = copy / "weights-00001.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(ArtifactError, match="has changed since the model was loaded"):
            llm.wake_up()
        assert llm.is_sleeping and resident(pid) < asleep + 256  # KiB, for what reading has left
        file.write_bytes(content)
        llm.wake_up()
        [again] = llm.generate([[1, 2, 3]], params)
        assert again.outputs[0].token_ids == before.outputs[0].token_ids


class FakeMemory:
    """The memory of a rank, which may refuse to be taken again."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.problem: ArtifactError | ResourceError | None = None
        self.full = False

    def release(self, level: int) -> None:
        if self.full:
            raise ResourceError("a copy has no room")
        self.log.append("released" if level == 1 else f"released {level}")

    def restore(self) -> None:
        if self.problem:
            raise self.problem
        self.log.append("restored")


class FakeRanks:
    """Other ranks in this process. steps: of each rank, whether its last step has ended."""

    def __init__(self, memories: list[Any]) -> None:
        self.steps = [True] * len(memories)
        self._each = [FollowerMemory(memory, self, rank) for rank, memory in enumerate(memories)]

    def settled(self, rank: int) -> bool:
        return self.steps[rank]

    def ask(self, what: dict[str, Any]) -> list[dict[str, Any]]:
        return [one.obey(json.loads(json.dumps(what))) for one in self._each]


def test_all_ranks_sleep_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleeping, "_STEP_SECONDS", 0.01)
    memories: list[Any] = [FakeMemory() for _ in range(3)]
    own, *others = memories
    ranks = FakeRanks(others)
    divided = DividedMemory(own, ranks)
    others[1].problem = ArtifactError("it has changed")
    with pytest.raises(ArtifactError, match="rank 2: it has changed"):
        divided.restore()
    assert [memory.log[-1] for memory in memories] == ["released"] * 3
    others[1].problem = ResourceError("no memory")
    with pytest.raises(ResourceError, match="rank 2: no memory"):
        divided.restore()
    others[1].problem = None
    divided.restore()
    assert [memory.log[-1] for memory in memories] == ["restored"] * 3
    ranks.steps[0] = False
    with pytest.raises(ResourceError, match="rank 1: its last step does not end"):
        divided.release(1)
    ranks.steps[0] = True
    assert [memory.log[-1] for memory in memories] == ["restored"] * 3
    own.full = True
    with pytest.raises(ResourceError, match="a copy has no room"):
        divided.release(1)
    assert [memory.log[-2:] for memory in others] == [["released", "restored"]] * 2
    own.full = False
    divided.release(2)
    assert [memory.log[-1] for memory in memories] == ["released 2"] * 3
    others[0].problem = ResourceError("no memory")
    with pytest.raises(ResourceError, match="rank 1: no memory"):
        divided.restore()
    assert [memory.log[-1] for memory in memories] == ["released 2"] * 3


def test_a_rank_that_has_ended_lets_no_other_sleep(artifact: Path) -> None:
    with qcompile.load(artifact, threads=1) as llm:
        executor: Any = llm.executor
        [pid] = executor.ranks.pids
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ResourceError, match="rank 1"):
            llm.sleep()
        assert not llm.is_sleeping


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with drafts of the first process: a separate model, and a lookup."""
    out = tmp_path_factory.mktemp("ranks") / "drafted"
    pipeline.build(small(), out, recipe="w4a16", options=TWO, drafts=[small(), "lookup"])
    return out


def test_drafts_of_the_first_process_change_no_token(drafted: Path) -> None:
    """All drafts are accepted but those that rounding changes."""
    texts, params = [[5, 6, 7, 8], [9], [11] * 40], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    tokens = {}
    for gamma in (0, 3):
        with qcompile.load(drafted, threads=1, gamma=gamma) as llm:
            outputs = llm.generate(texts, params)
            llm.engine.check()
        tokens[gamma] = [output.outputs[0].token_ids for output in outputs]
    told = [output.speculation for output in outputs]
    assert tokens[3] == tokens[0] and all(one and sum(one.accepted) > 5 for one in told)


def save_with_draft(path: Path, recipe: str) -> None:
    """Write a model for two processes with a draft of `recipe`: their parts of rows are whole groups of 128 inputs."""
    model = decoder(vocab=257, hidden=256, heads=8, kv_heads=4, head_dim=64, ffn=512, bias=True)
    pipeline.build(model, path, recipe=recipe, options=TWO)


@pytest.fixture(scope="module")
def nested(made_once: MadeOnce) -> Path:
    return made_once("two-ranks-nested", partial(save_with_draft, recipe="nested"))


@pytest.mark.parametrize("recipe", first(("nested",), ("nested", "qspec", "quantspec", "ml-specqd")))
def test_drafts_that_all_processes_compute_change_no_token(recipe: str, tmp_path: Path, nested: Path) -> None:
    path = nested
    if recipe != "nested":
        path = tmp_path / recipe
        save_with_draft(path, recipe)
    texts = [[5, 6, 7, 8], [9], list(range(200)), [11] * 40]
    tokens: dict[int, list[list[int]]] = {}
    for gamma in (0, 1, 4):
        with qcompile.load(path, threads=2, gamma=gamma) as llm:
            for params in (
                SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
                SamplingParams(temperature=0.8, seed=1, max_tokens=24, ignore_eos=True),
            ):
                outputs = llm.generate(texts, params)
                tokens.setdefault(gamma, []).extend(list(output.outputs[0].token_ids) for output in outputs)
                told = [output.speculation for output in outputs]
                # Of 96 tokens. A draft that ranks divide wrongly proposes others: of 257, few are the model's.
                assert gamma == 0 or sum(sum(one.accepted) for one in told if one) > (24 if params.seed is None else 12)
            llm.engine.check()
    assert tokens[1] == tokens[0] and tokens[4] == tokens[0]


def test_drafts_that_all_processes_compute_have_no_weights_of_their_own(nested: Path) -> None:
    runtime = read_checked_manifest(nested)["runtime"]
    [stage] = runtime["levels"]
    assert stage["ranks"][0] == stage["weights"]
    for ours, drafts in zip(runtime["ranks"], stage["ranks"], strict=True):
        assert set(drafts) <= set(ours)


def test_a_manifest_has_as_many_weights_of_a_draft_for_each_process(nested: Path) -> None:
    for change in (
        lambda runtime: runtime["ranks"][1].pop(),
        lambda runtime: runtime["levels"][0]["ranks"].pop(),
        lambda runtime: runtime["levels"][0]["ranks"][1].pop(),
        lambda runtime: runtime["levels"][0]["weights"].pop(),
        lambda runtime: runtime.pop("ranks"),
    ):
        manifest = read_checked_manifest(nested)
        change(manifest["runtime"])
        with pytest.raises(ArtifactError, match=r"ranks does not have as many weights for each process"):
            check_manifest(manifest)


def test_a_model_with_a_draft_sleeps_and_wakes(nested: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with qcompile.load(nested, threads=1, gamma=3) as llm:
        [before] = llm.generate([list(range(40))], params)
        llm.sleep()
        llm.wake_up()
        [again] = llm.generate([list(range(40))], params)
    assert again.outputs[0].token_ids == before.outputs[0].token_ids


@pytest.mark.parametrize("kind", ["artifact", "drafted", "nested"])
def test_the_end_of_a_rank_ends_all_requests_and_names_it(kind: str, request: pytest.FixtureRequest) -> None:
    """Of steps, and of rounds with drafts."""
    with qcompile.load(request.getfixturevalue(kind), threads=1, gamma=0 if kind == "artifact" else 3) as llm:
        executor: Any = llm.executor
        (pid,) = executor.ranks.pids
        params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        stream, told = llm.stream([1, 2], params), list[str]()
        executor.ranks.failure.listen(told.append)
        next(stream)
        os.kill(pid, signal.SIGKILL)
        start = time.monotonic()
        for _ in range(2):
            with pytest.raises(ResourceError, match=rf"rank 1 \(process {pid}\) was ended by signal 9: load"):
                list(stream)
            stream = llm.stream([1, 2], params)
        assert time.monotonic() - start < QUICK and len(told) == 1


def test_a_rank_that_does_not_run_ends_all_requests(artifact: Path) -> None:
    """A stopped process, as a debugger or a suspended container leaves it, does not end, but answers no more."""
    with qcompile.load(artifact, threads=1) as llm:
        executor: Any = llm.executor
        (pid,) = executor.ranks.pids
        os.kill(pid, signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(ResourceError, match=rf"rank 1 \(process {pid}\) does not respond: load the model again"):
            llm.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=8))
        assert 2 < time.monotonic() - start < 2 * QUICK and soon(lambda: gone(pid))


def test_a_rank_that_stops_does_not_keep_the_model_open(artifact: Path) -> None:
    llm = qcompile.load(artifact, threads=1)
    executor: Any = llm.executor
    (pid,) = executor.ranks.pids
    llm.close()
    llm.close()
    assert gone(pid)
    with pytest.raises(UsageError, match="closed"):
        llm.generate([[1]], SamplingParams(max_tokens=1))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_of_the_first_process_ends_the_others(how: signal.Signals, artifact: Path) -> None:
    program = (
        "import sys, time, qcompile; llm = qcompile.load(sys.argv[1], threads=1); "
        "print(*llm.executor.ranks.pids, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, artifact], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        pid = int(process.stdout.readline())
        assert not gone(pid)
        process.send_signal(how)
        assert soon(lambda: gone(pid))


def test_a_command_whose_rank_has_ended_goes_on_to_say_so() -> None:
    """Commands obey SIGPIPE, which writing to a process that has ended must not send them."""
    program = (
        "import signal; from qcompile.runtime.ranks.processes import SpawnedProcess; "
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL); rank = SpawnedProcess(1, 'cpu', []); rank.kill(); "
        "rank.wait(9); rank.tell({}); rank.tell({}); rank.finish(1); print('goes on')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "goes on\n")


def test_a_rank_that_cannot_open_the_model_says_why(tmp_path: Path) -> None:
    memory = SharedMemory([1 << 16])
    settings = RankSettings(str(tmp_path), 1, 4, 1, 1, 8, 64, memory.sizes, False, "")
    with pytest.raises(QCompileError, match=f"rank 1: {tmp_path}"):
        RankProcesses(memory, [settings])


def test_load_refuses_another_number(artifact: Path) -> None:
    with pytest.raises(UsageError, match=r"3: .* was built for 2 processes; build it with --tensor-parallel-size 3"):
        qcompile.load(artifact, tensor_parallel_size=3)
    for wrong in (0, "2"):
        with pytest.raises(UsageError, match="tensor_parallel_size must be a whole number"):
            qcompile.load(artifact, tensor_parallel_size=wrong)  # type: ignore[arg-type]


def test_weights_of_ranks_lie_in_the_artifact_and_are_not_exported(artifact: Path) -> None:
    manifest = read_checked_manifest(artifact)
    first, second = manifest["runtime"]["ranks"]
    assert len(first) == len(second) and set(first) != set(second)
    with pytest.raises(UnsupportedError, match="divided over 2 processes; build it for one"):
        PackedWeights(artifact)
    second[0] = len(manifest["runtime"]["weights"])
    with pytest.raises(ArtifactError, match=r"runtime.ranks\[1\]\[0\] is not a whole number between 0 and"):
        check_manifest(manifest)


def test_only_the_pages_of_own_weights_stay_in_memory() -> None:
    page = 4096
    arena = Arena(8 * page)
    arena.view[:] = b"x" * (8 * page)
    _forget(arena, [arena.address + 5 * page + 7, arena.address + 2 * page], [page, page])
    kept = [bool(arena.view[at * page + 9]) for at in range(8)]
    assert kept == [False, False, True, False, False, True, True, False]


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a draft model": (
        {"drafts": [small()], "target": "h100"},
        UnsupportedError,
        "draft models and heads on cuda targets do not run on 2",
    ),
    "checks": ({"check_passes": True}, UsageError, "a rank alone has no logits to check"),
    "a rank": ({"options": TWO | {"shard.rank": "1"}}, UsageError, "a build makes all ranks"),
    "rows of other bits": ({"recipe": "mixllm", "drafts": ()}, UnsupportedError, "rank 1 would need other kernels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_builds_refuse_what_ranks_do_not_do(name: str, tmp_path: Path) -> None:
    given, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        pipeline.build(small(), tmp_path / "out", **({"recipe": "w4a16", "options": TWO} | given))
    assert not list(tmp_path.iterdir())


def test_a_model_of_which_nothing_divides_is_refused(tmp_path: Path) -> None:
    from tests.support.graphs import latent

    with pytest.raises(PassError, match="nothing of this model can be divided over 2"):
        pipeline.build(latent(heads=4), tmp_path / "out", recipe="f32", options=TWO)
