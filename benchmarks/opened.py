"""What build, verify, run and serve open, run and connect to, of inputs that want them to open what is not theirs.

    python benchmarks/opened.py [--random 4] [--model samples/pycode-1m] [--out FILE]

strace (Linux, package strace) sees each file that a command and its processes open, compilers and kernels included,
and each connection. tests/support/traps.py has checkpoints and artifacts that name files elsewhere, link to them, hold
pickles, bring code, or have templates that want files. With --random, files of tests/support/hostile.py with random
damage, that many of each kind. Exit code 4 if a command reads anything but the input, the output, the user's cache,
temporary files and libraries, writes anything but output, cache and temporary files, connects to another machine,
opens a pickle, or runs code of the input.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.common import RESULTS, write_result
from qcompile.cli import console
from qcompile.errors import QualityError
from tests.support import hostile
from tests.support.opened import Opened, watch
from tests.support.traps import ARTIFACTS, CHECKPOINTS, ran, trapped

SAMPLE = Path(__file__).parents[1] / "samples" / "pycode-1m"
ASKS = [
    {"prompt": "def main(", "max_tokens": 4},
    {"messages": [{"role": "user", "content": "def main("}], "max_tokens": 4},
]
RANDOM = ("header", "configuration", "tokenizer", "gguf")
Done = tuple[str, str, Opened, list[str]]
"""The input, the command, what it did, and what of that is strange."""


def used(what: str, given: Path, home: Path) -> Iterator[Done]:
    """Verify, run and serve an artifact."""
    for command in (["verify", str(given)], ["run", str(given), "-p", "def", "--max-tokens", "4"]):
        yield _done(what, command, watch(command, home), [given], [home])
    command = ["serve", str(given), "--port", "0", "--json", "-q"]
    yield _done(what, command, watch(command, home, ASKS), [given], [home])


def built(what: str, given: Path, home: Path) -> Iterator[Done]:
    """Build a checkpoint, and use the artifact, if there is one."""
    out = home / "out"
    command = ["build", str(given), "-o", str(out), "-q"]
    yield _done(what, command, watch(command, home), [given], [home])
    if out.exists():
        yield from used(what, out, home)
        shutil.rmtree(out)


def _done(what: str, command: Sequence[str], opened: Opened, given: Sequence[Path], made: Sequence[Path]) -> Done:
    strange = opened.strange(given, made)
    strange += [f"ended with {opened.code}: {opened.said[-200:]}"] * (opened.code not in {0, *hostile.CODES})
    strange += ["ran code of the input"] * any(ran(path.parent) for path in given)
    console.log(f"{command[0]}, {what}: {opened.code} {strange or ''}")
    return what, command[0], opened, strange


def every(model: Path, count: int, folder: Path) -> Iterator[Done]:
    """All inputs. Caches are shared, as a user's are."""
    home, artifact = folder / "home", folder / "artifact"
    home.mkdir()
    qcompile.build(str(model), artifact, recipe="w4a8")
    for number, (name, trap) in enumerate(CHECKPOINTS.items()):
        yield from built(f"checkpoint, {name}", trapped(model, trap, folder / f"c{number}", "model"), home)
    for number, (name, trap) in enumerate(ARTIFACTS.items()):
        yield from used(f"artifact, {name}", trapped(artifact, trap, folder / f"a{number}", "model"), home)
    for kind in RANDOM:
        for seed in range(count):
            given = folder / f"{kind}{seed}" / "model"
            shutil.copytree(model, given)
            hostile.KINDS[kind](seed, given)
            source = next(given.glob("*.gguf")) if kind == "gguf" else given
            yield from built(f"{kind} {seed}", source, home)


def main() -> int:
    """Watch all; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=4, help="files with random damage, of each kind")
    parser.add_argument("--model", type=Path, default=SAMPLE)
    parser.add_argument("--out", type=Path, default=RESULTS / "opened.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        done = list(every(given.model, given.random, Path(folder).resolve()))
    codes: dict[str, Counter[str]] = {}
    for _, command, opened, _ in done:
        codes.setdefault(command, Counter())[str(opened.code)] += 1
    strange = [{"input": what, "command": command, "strange": each} for what, command, _, each in done if each]
    facts: dict[str, Any] = {"inputs": len({what for what, *_ in done}), "commands": len(done), "exit_codes": codes}
    facts |= {"files_opened": sum(len(one.read | one.written) for _, _, one, _ in done), "strange": strange}
    write_result(given.out, {"model": given.model.name, "recipe": "w4a8", **facts})
    return QualityError.exit_code if strange else 0


if __name__ == "__main__":
    sys.exit(main())
