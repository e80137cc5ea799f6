"""`serve --replicas N`: which processor cores or GPUs each replica gets, and how its process is started."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcompile.artifact.reader import read_manifest
from qcompile.cli import console
from qcompile.cli.options import Logging, ServedLoading, Serving
from qcompile.errors import ResourceError, UsageError

if TYPE_CHECKING:
    from qcompile.runtime.server.connections import ConnectionLimits
    from qcompile.runtime.server.replicas.replica import ReplicaLaunch

_MOST_PATH = 100
"""Bytes of a Unix socket's path: the kernel takes 107."""


@dataclass(frozen=True)
class Given:
    """The options of the command. serving: with the model's name. keys: the API keys. foreign: as of Artifact."""

    artifact: Path
    serving: Serving
    logging: Logging
    loading: ServedLoading
    keys: Sequence[str]
    foreign: bool = False


def serve(
    given: Given, listening: socket.socket, url: str, limits: ConnectionLimits, say: Callable[[str], None], json: bool
) -> bool:
    """Serve by replicas until a signal. url: of the socket `listening`.

    Returns whether it was SIGTERM. Raises QCompileError.
    """
    from qcompile.runtime.server.access import as_bytes

    try:
        from qcompile.runtime.server.replicas.router import Routed
        from qcompile.runtime.server.replicas.serving import serve_replicas
    except ModuleNotFoundError as error:
        raise ResourceError(f"--replicas needs {error.name}: pip install 'qcompile[serve]'") from error

    serving = given.serving
    name = serving.name or given.artifact.name

    def ready(facts: dict[str, Any]) -> None:
        console.heed_interrupts()
        if json:
            told = {"context": facts["context"], "max_batch": serving.max_batch, "replicas": serving.replicas}
            console.print_json_line({"url": url, "model": name, **told})
        for line in (*facts["lines"], f"{name} answers at {url} by {serving.replicas} replicas (Ctrl-C ends)"):
            say(line)

    with tempfile.TemporaryDirectory(prefix="qcompile-") as place:
        launches = _launches(given, Path(place))
        routed = Routed(name, as_bytes(given.keys), serving.isolate_keys, serving.enable_sleep)
        return serve_replicas(routed, launches, listening, limits, serving.drain_seconds, say, ready)


def _launches(given: Given, place: Path) -> list[ReplicaLaunch]:
    """How to start each replica. place: a folder for their sockets, which is this user's alone."""
    from qcompile.runtime.server.replicas.replica import ReplicaLaunch
    from qcompile.system.python_process import module_command

    count = given.serving.replicas
    if len(os.fsencode(place)) + len("/999") > _MOST_PATH:
        raise UsageError(f"{place} is too long for the path of a socket: set TMPDIR to a shorter folder")
    if read_manifest(given.artifact)["target"].get("kind", "cpu") == "cpu":
        shares = cpu_shares(sorted(os.sched_getaffinity(0)), given.loading.threads, count)
    else:
        shares = gpu_shares(_gpus(), given.loading.tensor_parallel_size or 1, count)
    options = {
        "artifact": os.fsdecode(given.artifact.resolve()),
        "serving": asdict(replace(given.serving, api_keys=None)),
        "logging": asdict(given.logging),
        "loading": asdict(given.loading),
        "keys": list(given.keys),
        "rebuild": given.foreign,
    }
    command = module_command("qcompile.cli.replica")
    return [
        ReplicaLaunch(command, options | {"share": asdict(share), "socket": str(place / str(at))}, place / str(at))
        for at, share in enumerate(shares)
    ]


@dataclass(frozen=True)
class ReplicaShare:
    """What a replica gets of the machine. cores: processor cores; none if it may use all.

    threads: None is one for each core. gpus: the value of CUDA_VISIBLE_DEVICES; None leaves it as it is.
    """

    cores: Sequence[int] = ()
    threads: int | None = None
    gpus: str | None = None


def cpu_shares(cores: Sequence[int], threads: int | None, count: int) -> list[ReplicaShare]:
    """Cores, and `threads` if given, divided between replicas; replicas share cores if there are fewer of these.

    Raises UsageError for fewer threads than replicas.
    """
    if threads is not None and threads < count:
        raise UsageError(f"--threads {threads}: {count} replicas divide them, so give at least {count}")
    shares = []
    for at in range(count):
        own = cores[at * len(cores) // count : (at + 1) * len(cores) // count]
        own = own if len(cores) >= count else [cores[at % len(cores)]]
        mine = None if threads is None else (at + 1) * threads // count - at * threads // count
        shares.append(ReplicaShare(tuple(own), mine))
    return shares


def gpu_shares(gpus: Sequence[str], each: int, count: int) -> list[ReplicaShare]:
    """`each` of the GPUs for every replica. Raises UsageError if there are too few."""
    if len(gpus) < each * count:
        visible = console.counted(len(gpus), "GPU")
        raise UsageError(f"--replicas {count}: they need {each * count} GPUs, and this process may use {visible}")
    return [ReplicaShare(gpus=",".join(gpus[at * each : (at + 1) * each])) for at in range(count)]


def _gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them. Raises ResourceError."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ResourceError("nvidia-smi does not list the GPUs: name them in CUDA_VISIBLE_DEVICES") from error
    return [line.strip() for line in listed.splitlines() if line.strip()]
