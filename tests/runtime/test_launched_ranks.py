"""A divided model in processes that torchrun or srun has started: rank 0 runs it, and all end together."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import qcompile
from qcompile.cli import launching
from qcompile.errors import QCompileError, ResourceError, UnsupportedError, UsageError
from qcompile.runtime.cuda.plans import SharedPlan
from qcompile.runtime.cuda.ranks import GpuRankSettings
from qcompile.runtime.options import LoadOptions
from qcompile.runtime.ranks import crew as crews
from qcompile.runtime.ranks import member
from qcompile.runtime.ranks.crew import TIMEOUT, Crew
from qcompile.runtime.ranks.launcher import LaunchedRank, launched
from qcompile.runtime.ranks.link import Link, place_of
from qcompile.runtime.ranks.meeting import meet
from tests.conftest import MadeOnce
from tests.support.ranks import save_for_two

QUICK = 5.0
"""Seconds within which all must have ended after one process has."""
PROMPT = "import os"


@pytest.fixture(scope="module")
def artifact(made_once: MadeOnce) -> Path:
    return made_once("two-ranks", save_for_two)


def of_torchrun(rank: int = 0, size: int = 2, **more: Any) -> dict[str, str]:
    """The environment of a rank."""
    given = {"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": size} | more
    return {name: str(value) for name, value in (given | {"RANK": rank, "WORLD_SIZE": size}).items()}


def of_srun(rank: int = 0, size: int = 2, job: int = 7, nodes: int = 1) -> dict[str, str]:
    """The environment of a rank."""
    given = {"JOB_ID": job, "STEP_ID": 0, "STEP_NUM_TASKS": size, "STEP_NUM_NODES": nodes, "PROCID": rank}
    return {f"SLURM_{name}": str(value) for name, value in given.items()}


@pytest.fixture
def srun() -> Iterator[Callable[..., list[subprocess.Popen[str]]]]:
    """srun(command): both ranks of a step, started as srun does; at the end they are killed if they remain."""
    job, started = random.getrandbits(20), list[subprocess.Popen[str]]()

    def start(command: Sequence[object]) -> list[subprocess.Popen[str]]:
        for rank in range(2):
            environment = os.environ | of_srun(rank, job=job)
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            given = [sys.executable, *map(str, command)]
            started.append(subprocess.Popen(given, env=environment, stdin=subprocess.DEVNULL, **pipes))
        return started

    yield start
    for process in started:
        process.kill()
        process.communicate()


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    return True


def test_a_command_under_torchrun_gives_the_tokens_of_ranks_that_it_starts_itself(artifact: Path) -> None:
    with qcompile.load(artifact, threads=1) as llm:
        expected = llm.generate(PROMPT, temperature=0, max_tokens=12)[0].outputs[0].token_ids
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "qcompile"]
    options = ["--prompt", PROMPT, "--max-tokens", "12", "--json"]
    done = subprocess.run([sys.executable, *command, "run", artifact, *options], stdout=subprocess.PIPE, check=True)
    assert json.loads(done.stdout)["token_ids"] == expected  # so rank 1 has printed nothing


PROGRAM = """
import sys, qcompile
for times in map(int, sys.argv[2:]):
    with qcompile.load(sys.argv[1], threads=1) as llm:
        print(*llm.executor.ranks.pids, flush=True)
        for _ in range(times):
            llm.generate("import os", temperature=0, max_tokens=200, ignore_eos=True)
"""


def test_a_program_under_srun_loads_models_one_after_the_other(artifact: Path, srun: Any) -> None:
    first, second = srun(["-c", PROGRAM, artifact, 1, 1])
    said, problem = first.communicate(timeout=60)
    followers = [int(line) for line in said.splitlines()]
    assert first.returncode == 0, problem
    assert second.communicate(timeout=60) == ("", "") and second.returncode == 0
    assert len(set(followers)) == 2 and all(map(gone, followers))


@pytest.mark.parametrize(
    "which", ["rank 0", "rank 1", pytest.param("the process of rank 1", marks=pytest.mark.exhaustive)]
)
def test_the_end_of_a_process_ends_all_and_is_named(which: str, artifact: Path, srun: Any) -> None:
    ranks = srun(["-c", PROGRAM, artifact, 1_000_000])
    follower = int(ranks[0].stdout.readline())
    killed = {"rank 0": ranks[0].pid, "rank 1": ranks[1].pid}.get(which, follower)
    start = time.monotonic()
    os.kill(killed, signal.SIGKILL)
    problems = [process.communicate(timeout=QUICK)[1] for process in ranks]
    while not gone(follower):
        time.sleep(0.02)
    assert time.monotonic() - start < QUICK
    told = problems[0] if killed != ranks[0].pid else problems[1]
    assert f"{which.removeprefix('the process of ')} (process {killed}) " in told.splitlines()[-1]
    assert all(process.returncode for process in ranks)


def test_commands_of_other_sizes_are_refused_by_all_ranks(artifact: Path, srun: Any) -> None:
    command = ["-m", "qcompile", "run", artifact, "--prompt", PROMPT]
    for process in srun([*command, "--tensor-parallel-size", "3"]):  # before anything is loaded
        problem = process.communicate(timeout=60)[1]
        rank_0 = "qcompile: --tensor-parallel-size 3: srun started 2 ranks; leave it out, or start 3\n"
        assert process.returncode == 2 and problem in (rank_0, "")


def test_commands_on_several_machines_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in of_srun(nodes=2).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UnsupportedError, match="srun started 2 ranks on several machines"):
        launching.take_part(None)
    monkeypatch.setenv("SLURM_PROCID", "1")  # it says nothing
    with pytest.raises(SystemExit) as left:
        launching.take_part(2)
    assert left.value.code == 3


def test_options_that_start_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in of_srun().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="--replicas 2 starts processes of its own, and srun started 2 ranks"):
        launching.check_alone("--replicas 2", None)
    launching.check_alone("--replicas 2", 1)
    assert launching.take_part(1) == 1


def test_a_server_answers_and_ends_on_the_signal_that_all_ranks_get(artifact: Path, srun: Any) -> None:
    ranks = srun(["-m", "qcompile", "serve", artifact, "--port", "0", "--json"])
    url = json.loads(ranks[0].stdout.readline())["url"]
    body = json.dumps({"prompt": PROMPT, "max_tokens": 5, "model": artifact.name}).encode()
    asked = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 5
    (follower,) = map(int, Path(f"/proc/{ranks[1].pid}/task/{ranks[1].pid}/children").read_text().split())
    for pid in (follower, *(process.pid for process in reversed(ranks))):
        os.kill(pid, signal.SIGTERM)
    problems = [process.communicate(timeout=60)[1] for process in ranks]
    assert problems[0].endswith("ended by SIGTERM\n") and problems[1] == "", problems
    assert [process.returncode for process in ranks] == [0, 0] and gone(follower)


# ---- what the environment says -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "2"}, None),  # of a launcher that is not known
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}, None),  # a batch script
        (of_srun(size=1), None),
        (of_torchrun(size=1), None),
        (of_srun(1), ("srun", 1, 2, 2)),
        (of_srun(1, nodes=2), ("srun", 1, 2, 1)),
        (of_srun(3, size=8) | of_torchrun(1), ("torchrun", 1, 2, 2)),
        (of_torchrun(1, size=4, LOCAL_WORLD_SIZE=2), ("torchrun", 1, 4, 2)),
    ],
)
def test_launchers_are_known_by_their_variables(given: dict[str, str], expected: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "environ", given)
    own = launched()
    assert (own and (own.launcher, own.rank, own.size, own.local)) == expected


def test_wrong_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", of_torchrun(2))
    with pytest.raises(UsageError, match="torchrun started 2 ranks, and rank 2 is none of them"):
        launched()
    monkeypatch.setattr(os, "environ", of_torchrun() | {"RANK": "one"})
    with pytest.raises(UsageError, match="RANK is 'one'"):
        launched()


def test_load_refuses_another_number_and_leaves_whole_models_alone(artifact: Path, monkeypatch: Any) -> None:
    for name, value in of_srun(size=3).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"srun started 3 ranks, and .* was built for 2 processes: start 2, or build"):
        qcompile.load(artifact)
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "3")
    with pytest.raises(UnsupportedError, match="srun started 3 ranks on several machines"):
        qcompile.load(artifact)
    meet(1, "a model of one process")  # each rank loads it for itself
    with pytest.raises(UsageError, match=r"3 ranks, and out was built for one process: build it .* run it alone"):
        LoadOptions(tensor_parallel_size=3).check("out", {"max_tokens": 512})


# ---- how ranks meet ------------------------------------------------------------------------------


@pytest.fixture
def own() -> Iterator[LaunchedRank]:
    """Rank 0 of two of a run of its own."""
    result = LaunchedRank("srun", 0, 2, f"test {random.getrandbits(64)}", 2)
    yield result
    place_of(result.run).unlink(missing_ok=True)


@pytest.fixture
def crew(own: LaunchedRank, monkeypatch: pytest.MonkeyPatch) -> Iterator[Crew]:
    """Rank 0, which waits for nobody for long."""
    monkeypatch.setenv(TIMEOUT, "0.2")
    monkeypatch.setattr(crews, "_LATE_SECONDS", 0.2)
    result = Crew(own)
    yield result
    result.finish(0)


def following(own: LaunchedRank) -> tuple[threading.Thread, list[BaseException]]:
    """Rank 1 in a thread, and how it ends."""
    ends: list[BaseException] = []

    def run() -> None:
        try:
            member.follow(replace(own, rank=1))
        except (SystemExit, QCompileError) as end:
            ends.append(end)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ends


def test_ranks_that_do_not_come_are_named(own: LaunchedRank, crew: Crew) -> None:
    with pytest.raises(
        ResourceError, match=r"srun started 2 ranks, and rank 1 did not come within 0.2 s \(QCOMPILE_LA"
    ):
        crew.gather()
    crew.finish(5)
    assert not place_of(own.run).exists()
    with pytest.raises(ResourceError, match=r"rank 1: rank 0 did not come within 0.2 s"):
        member.follow(replace(own, rank=1))


def test_a_rank_that_comes_late_is_told_the_end(own: LaunchedRank, crew: Crew) -> None:
    thread, ends = following(own)
    crew.finish(3)
    thread.join(QUICK)
    assert [getattr(end, "code", None) for end in ends] == [3]


def test_the_socket_of_a_killed_run_is_replaced_and_that_of_another_kept(own: LaunchedRank) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as killed:
        killed.bind(str(place_of(own.run)))
    crew = Crew(own)
    with pytest.raises(ResourceError, match="another process is rank 0 of the ranks that srun started"):
        Crew(own)
    thread, ends = following(own)
    crew.gather()
    assert crew.missing == []
    crew.finish(0)
    thread.join(QUICK)
    assert [getattr(end, "code", None) for end in ends] == [0]


def test_a_rank_starts_what_rank_0_asks_for_and_kills_it(
    own: LaunchedRank, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of a GPU's rank has two files, and rank 0's choice of GPUs."""
    seen: list[dict[str, str]] = []

    def sleeping(follower: str, descriptors: list[int], given: int, said: int, more: dict[str, str]) -> Any:
        seen.append(more)
        return subprocess.Popen(["sleep", "60"], stdin=given, stdout=said)

    thread, ends = following(own)
    crew.gather()
    memory, bell = SharedPlan(1024), os.eventfd(0)
    opened = crew.start(1, "cuda", [memory.descriptor, bell])
    opened.tell(GpuRankSettings("/no/such/artifact", 1, 1024, False, "")._asdict())
    with pytest.raises(ResourceError, match=r"^rank 1: "):  # no driver, or no artifact
        opened.answer(60)
    opened.finish(60)
    assert opened.ending() == "ended with status 1"
    monkeypatch.setattr(member, "popen", sleeping)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,2")
    hanging = crew.start(1, "cuda", [memory.descriptor, bell])
    with pytest.raises(UsageError, match="the ranks that srun started run another model: close that first"):
        crew.start(1, "cuda", [])
    hanging.finish(0.05)
    assert hanging.ending() == "was ended by signal 9" and seen == [{"CUDA_VISIBLE_DEVICES": "4,2"}]
    crew.finish(0)
    thread.join(QUICK)
    assert [getattr(end, "code", None) for end in ends] == [0]
    os.close(bell)
    memory.close()


def test_another_version_is_refused_on_both_sides(
    own: LaunchedRank, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "__version__", "0.0.1")
    thread, ends = following(own)
    with pytest.raises(
        ResourceError, match=rf"rank 1 \(process {os.getpid()}\) runs qcompile 0.0.1, and rank 0 {qcompile.__version__}"
    ):
        crew.gather()
    thread.join(QUICK)
    assert "rank 0 refuses it: rank 1" in str(ends[0])


def test_another_user_is_neither_taken_in_nor_followed(
    own: LaunchedRank, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stranger(Link):
        def __init__(self, connection: socket.socket) -> None:
            super().__init__(connection)
            self.uid += 1

    monkeypatch.setattr(crews, "Link", Stranger)
    thread, ends = following(own)
    with pytest.raises(ResourceError, match="rank 1 did not come"):
        crew.gather()
    thread.join(QUICK)
    assert "has ended" in str(ends[0])
    monkeypatch.setattr(member, "Link", Stranger)
    with pytest.raises(ResourceError, match="is another user's"):
        member.follow(replace(own, rank=1))


def test_ranks_meet_in_a_folder_of_their_user_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        place = place_of("a run")
        assert place != place_of("another run") and place.parent.parent == Path(folder)
        place.parent.chmod(0o755)
        with pytest.raises(ResourceError, match="is not this user's alone"):
            place_of("a run")
        (long := Path(folder, "x" * 80)).mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        with pytest.raises(UsageError, match="too long for the path of a socket: set TMPDIR"):
            place_of("a run")


def test_threads_are_divided_over_the_cores_of_all_ranks(own: LaunchedRank, crew: Crew, monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert crews.threads_of_each(2) == 2
    monkeypatch.setattr(crews, "_crews", [crew])
    for cores, expected in (({0, 1, 2, 3}, 2), ({4, 5, 6, 7}, 4), ({4, 5}, 2), ({0}, 1)):
        crew.cores = {1: cores}
        assert crews.threads_of_each(2) == expected
