"""What a command opens, runs and connects to, by strace, which sees what compiled code does as well."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARIES = (
    *{sys.prefix, sys.base_prefix, str(ROOT), "/usr", "/lib", "/lib64", "/bin"},
    *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    *("/sbin/ldconfig", "/sbin/ldconfig.real"),  # Python runs them to find a library, as torch for GPUs has it do
    *("/proc", "/sys/devices/system", "/sys/fs/cgroup", "/dev/null", "/dev/urandom"),
    *("/etc/ld.so.cache", "/etc/ld.so.preload", "/etc/localtime", "/etc/mime.types", "/etc/alternatives"),
    *("/etc/locale.alias", "/etc/ssl/openssl.cnf", "/etc/fonts", "/var/cache/fontconfig"),
    *("/etc/nsswitch.conf", "/etc/passwd", "/etc/group", "/etc/hosts", "/etc/host.conf", "/etc/resolv.conf"),
)
"""What any program of Python reads: itself, libraries, compilers, and what the system tells of the machine: its fonts
(for drawn reports), the names of its users and hosts."""
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_CALLS = "open,openat,openat2,creat,connect,execve"
_UNFINISHED, _RESUMED = (
    re.compile(r"^(\d+) +(.*) <unfinished \.\.\.>$"),
    re.compile(r"^(\d+) +<\.\.\. \w+ resumed>(.*)$"),
)
_OPENED = re.compile(r"^(?:open|openat|openat2|creat)\((.*)\) += \d+<(/.*?)(?:<[^<>]*>)?>$")
_CONNECTED, _RUN = re.compile(r"^connect\(\d+<[^>]*>, \{(.*)\}, \d+\)"), re.compile(r'^execve\("([^"]*)".* = 0$')
_WRITES = ("O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC")
_SECONDS = 120.0


@dataclass(frozen=True)
class Opened:
    """What a command and all its processes did. code: its exit code. read, written: files that were opened, by their
    real paths. run: programs. connected: addresses."""

    code: int
    read: frozenset[str]
    written: frozenset[str]
    run: frozenset[str]
    connected: frozenset[str]
    said: str = field(compare=False, default="")

    def strange(self, given: Sequence[Path], made: Sequence[Path]) -> list[str]:
        """What it should not have done. given: what it may read. made: what it may write and read."""
        own = [os.path.realpath(path) for path in made]
        result = [f"read {path}" for path in self.read if not _within(path, [*map(os.path.realpath, given), *own])]
        result += [f"wrote {path}" for path in self.written if not (_within(path, own, "") or path == "/dev/null")]
        result += [f"ran {path}" for path in self.run if not _within(path, own)]
        result += [f"opened a pickle: {path}" for path in self.read if _is_pickle(path)]
        local = ("127.0.0.1", "::1", "sun_path")
        return sorted(result + [f"connected to {each}" for each in self.connected if not any(a in each for a in local)])


def _within(path: str, folders: Sequence[str], libraries: str = "all") -> bool:
    every = [*folders, *(LIBRARIES if libraries else ())]
    return any(path == folder or path.startswith(f"{folder.rstrip('/')}/") for folder in every)


def _is_pickle(path: str) -> bool:
    return path.endswith(PICKLES) and not _within(path, ())


def parsed(trace: str) -> tuple[set[str], set[str], set[str], set[str]]:
    """What a log of strace (options -f and -y) tells: read, written, run, connected."""
    read, written, run, connected = set[str](), set[str](), set[str](), set[str]()
    begun: dict[str, str] = {}
    for line in trace.splitlines():
        if match := _UNFINISHED.match(line):
            begun[match[1]] = match[2]
            continue
        if match := _RESUMED.match(line):
            call = begun.pop(match[1], "") + match[2]
        else:
            call = line.partition(" ")[2].lstrip()
        if match := _OPENED.match(call):
            (written if any(word in match[1] for word in _WRITES) else read).add(match[2])
        elif match := _CONNECTED.match(call):
            connected.add(match[1])
        elif match := _RUN.match(call):
            run.add(match[1])
    return read, written, run, connected


def _environment(home: Path) -> dict[str, str]:
    """An environment in which caches and temporary files lie in a folder."""
    for name in ("tmp", "cache", "home"):
        (home / name).mkdir(parents=True, exist_ok=True)
    more = {"TMPDIR": "tmp", "QCOMPILE_CACHE": "cache", "HOME": "home"}
    return os.environ | {name: str(home / folder) for name, folder in more.items()} | {"PYTHONDONTWRITEBYTECODE": "1"}


def watch(arguments: Sequence[str], home: Path, asks: Sequence[Mapping[str, object]] = ()) -> Opened:
    """Run a command of qcompile. home: a folder for its caches and temporary files. asks: bodies of completions and
    conversations to send, if the command serves; then SIGTERM ends it."""
    log, environment = home / "trace", _environment(home)
    command = ["strace", "-f", "-qq", "-y", "-s", "4096", "-e", f"trace={_CALLS}", "-e", "signal=none", "-o", str(log)]
    command += [sys.executable, "-m", "qcompile", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, cwd=home) as process:
        assert process.stdout
        if asks and (line := process.stdout.readline()):
            port = int(json.loads(line)["url"].rpartition(":")[2])
            for ask in asks:
                _ask(port, ask)
            _end(process.pid)
        try:
            _, said = process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            _end(process.pid, signal.SIGKILL)
            _, said = process.communicate()
    read, written, run, connected = map(frozenset, parsed(log.read_text(encoding="utf-8", errors="replace")))
    return Opened(process.returncode, read, written, run, connected, said)


def _ask(port: int, body: Mapping[str, object]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        connection.getresponse().read()
    connection.close()


def _end(tracer: int, number: int = signal.SIGTERM) -> None:
    """Send a signal to what strace runs."""
    for child in Path(f"/proc/{tracer}/task/{tracer}/children").read_text(encoding="ascii").split():
        os.kill(int(child), number)
