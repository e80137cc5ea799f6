"""Build the source distribution and the wheel, and use the wheel in an environment without this checkout.

    .venv/bin/python .ci/check_wheel.py        (make wheel-check)

A package that extends qcompile (samples/extension) is installed beside the wheel: its tests run, and a model is built
with its pass, recipe and format, twice to the byte.

Checks that the source distribution holds every file that its Makefile and tests need, that the wheel holds every
module, template and `py.typed`, and that `qcompile --help`, `build` and `run` work from the wheel alone. The new
environment reads the dependencies of the environment that runs this script, so nothing is installed twice.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("passes", "codegen", "runtime")
NEEDED = (*LAYERS, "qcompile", "tests", "samples", "benchmarks", "docs", ".ci")
"""Folders that the source distribution must hold completely."""
SINGLE = ("Makefile", "constraints.txt", "pyproject.toml", "setup.py", "mkdocs.yml", "README.md", "LICENSE")
EXTENSION = ROOT / "samples" / "extension"
MODEL = ROOT / "samples" / "pycode-1m"


def files_below(folder: Path) -> set[str]:
    """Paths from ROOT of the files and symbolic links below a folder, compiled modules and egg-info left out."""
    paths: set[str] = set()
    for place, folders, names in os.walk(folder):
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        folders[:] = [name for name in folders if name != "__pycache__"]
        paths |= {(Path(place) / name).relative_to(ROOT).as_posix() for name in (*names, *links)}
    return {path for path in paths if not path.endswith(".pyc") and "__pycache__" not in path}


def missing_from_sdist(sdist: Path) -> set[str]:
    """Files of the checkout that the source distribution lacks, and layers that it does not hold as links."""
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2]: member for member in archive}
    needed = set(SINGLE).union(*(files_below(ROOT / folder) for folder in NEEDED))
    links = {f"qcompile/{layer}" for layer in LAYERS}
    return {path for path in needed if path not in members or (path in links and not members[path].issym())}


def missing_from_wheel(wheel: Path) -> set[str]:
    """Files of the package that the wheel lacks: layers are folders in it."""
    with zipfile.ZipFile(wheel) as archive:
        members = set(archive.namelist())
    needed = {path for path in files_below(ROOT / "qcompile") if path.removeprefix("qcompile/") not in LAYERS}
    needed |= {f"qcompile/{path}" for layer in LAYERS for path in files_below(ROOT / layer)}
    return needed - members


def new_environment(folder: Path, wheel: Path) -> Path:
    """A virtual environment with the wheel, and with the dependencies of this environment; returns its bin folder.

    A .pth file names this environment's site-packages. Python does not read the .pth files there, such as the one of an
    editable install, so only the wheel provides qcompile.
    """
    venv.create(folder, with_pip=True)
    programs = folder / "bin"
    subprocess.run([programs / "python", "-m", "pip", "install", "-q", "--no-deps", wheel], check=True)
    paths = {"base": str(folder), "platbase": str(folder)}
    own = Path(sysconfig.get_path("purelib", "venv", paths))
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return programs


def use(programs: Path, folder: Path) -> None:
    """Import the package, and build and run a model, from `folder`; raises CalledProcessError or AssertionError."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def output(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        return done.stdout

    package = output(programs / "python", "-c", "import qcompile; print(qcompile.__file__)").strip()
    assert Path(package).is_relative_to(programs.parent), f"qcompile is imported from {package}, not from the wheel"
    assert "build" in output(programs / "qcompile", "--help")
    output(programs / "qcompile", "build", MODEL, "-o", "built", "--recipe", "w8a8")
    text = output(programs / "qcompile", "run", "built", "--prompt", "import ", "--max-tokens", "8")
    assert text.strip(), "`qcompile run` printed nothing"


def extend(programs: Path, folder: Path) -> None:
    """Install samples/extension, run its tests, and build with it; raises CalledProcessError or AssertionError."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*command: str | Path) -> None:
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)

    package = shutil.copytree(EXTENSION, folder / "extension")
    run(programs / "python", "-m", "pip", "install", "-q", "--no-deps", package)
    run(programs / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", package / "tests")
    build = (programs / "qcompile", "build", MODEL, "-o")
    run(*build, "extended", "--recipe", "wide-ends", "--pass", "widen_narrow")
    run(*build, "again", "--recipe", folder / "extended" / "recipe.toml")
    first, second = ((folder / name / "qcompile.json").read_bytes() for name in ("extended", "again"))
    assert first == second, "a build from the recipe of an artifact differs from it"


def main() -> int:
    """Run all checks; the exit code is 1 where a file is missing."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True, stdout=subprocess.DEVNULL)
        (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
        for archive, missing in ((sdist, missing_from_sdist(sdist)), (wheel, missing_from_wheel(wheel))):
            if missing:
                print(f"{archive.name} lacks: {', '.join(sorted(missing))}", file=sys.stderr)
                return 1
        programs = new_environment(folder / "environment", wheel)
        use(programs, folder)
        extend(programs, folder)
        print(f"{sdist.name} and {wheel.name} are complete; the wheel builds and runs a model, and can be extended")
    return 0


if __name__ == "__main__":
    sys.exit(main())
