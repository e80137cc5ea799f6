"""Shared by all tests: golden files, a tiny checkpoint with random weights, and artifacts built from it."""

from __future__ import annotations

import fcntl
import gc
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qcompile.report.stored_weights import PLACE
from qcompile.targets import Target

SAMPLE = Path(__file__).parents[1] / "samples" / "pycode-1m"
GOLDEN = Path(__file__).parent / "golden"
KERNELS = Path(__file__).parents[1] / "codegen" / "cpu" / "templates"
SLOW_CASES = Path(__file__).parent / "slow_cases.txt"
"""A file of test ids, chosen by measured times: cases that `make test` leaves to `make test-all`."""
SLOWEST = """
runtime/speculation/test_speculation heads/test_mtp codegen/cpu/test_step codegen/cpu/test_gemm codegen/gpu/test_latent
checkpoints/test_own_models runtime/server/test_page_browser cli/test_app codegen/gpu/test_step test_every_recipe
passes/raising/test_families codegen/gpu/test_prompts passes/raising/test_experts artifact/test_export
runtime/sampling/test_prompt_logprobs_kernels runtime/test_states checkpoints/test_multimodal codegen/gpu/test_attention
checkpoints/test_frontend checkpoints/test_traces codegen/gpu/test_speculation test_calibrated_families
report/test_report passes/raising/test_token_loops codegen/gpu/test_gluon test_variations runtime/engine/test_prefixes
runtime/speculation/test_quantspec codegen/cpu/test_hier_cache codegen/cpu/test_experts passes/test_latent
runtime/test_prompt_embeds checkpoints/stored/test_groups passes/calibration/test_calibrate codegen/gpu/test_experts
checkpoints/test_families codegen/gpu/test_sample codegen/gpu/test_scores passes/test_exact
passes/raising/test_recurrent passes/raising/test_scaled passes/raising/test_raise passes/test_center_keys
runtime/speculation/test_heads checkpoints/stored/test_formats codegen/gpu/test_heads checkpoints/test_hub
"""
"""Files that take more than 20 s, the slowest first."""
AS_BUILT = re.compile(
    r"tests/codegen/cpu/(test_attention\.py|test_gemm\.py|test_state_kernels\.py|"
    r"test_step\.py::test_\w+\[(\d-)?(bf16|w4a8)\])"
)
"""Tests of what the optimizer makes of the CPU kernels: each kernel alone, and whole steps by products of floats and of
integers."""
MadeOnce = Callable[[str, Callable[[Path], object]], Path]


def pytest_configure(config: pytest.Config) -> None:
    """Each of the processes that share the tests takes cores of its own: pools of threads that spin do not share.

    One that dies fails the test that it ran, and is not replaced: xdist may wait for ever for what replaces it.
    torch traces without its cache of fake tensors, which costs more than it saves for models of few layers.
    """
    if getattr(config.option, "maxworkerrestart", "") is None:
        config.option.maxworkerrestart = 0
    os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")  # read when torch._dynamo is imported
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        first, step = int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        cores = sorted(os.sched_getaffinity(0))[first::step]
        if cores:
            os.sched_setaffinity(0, cores)
            os.environ["OMP_NUM_THREADS"] = str(len(cores))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cases of SLOW_CASES are marked `exhaustive` before pytest selects by marks.

    Files that take long begin first: processes that share the tests, by files, then end at about the same time."""
    slow = frozenset(SLOW_CASES.read_text(encoding="utf-8").splitlines())
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.exhaustive)
    place = {name: at for at, name in enumerate(SLOWEST.split())}
    folder = Path(__file__).parent
    items.sort(key=lambda item: place.get(item.path.relative_to(folder).with_suffix("").as_posix(), len(place)))


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: the garbage collector need not look through them again and again."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-golden` writes what the tests produce instead of comparing."""
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what the tests produce")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """golden(name, text): text equals the file tests/golden/<name>."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"{path} is missing: run pytest --update-golden and read what it wrote"
        assert text == path.read_text(encoding="utf-8"), f"{name} changed: read the change, then pytest --update-golden"

    return check


class UndrawnPage:
    """A PageWriter that draws nothing."""

    def __enter__(self) -> UndrawnPage:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def ask(self, report: bytes) -> Callable[[], bytes]:
        return lambda: b"<!doctype html><title>not drawn</title>" + PLACE


@pytest.fixture(scope="session", autouse=True)
def undrawn_pages() -> Iterator[None]:
    """Builds inside of the tests draw no plots, which takes a second each; tests/report and commands draw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qcompile.pipeline.PageWriter", UndrawnPage)
        yield


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """made_once(name, make): a path that one of the processes that share the tests had make(path) write, for all."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "made-once"
    folder.mkdir(exist_ok=True)

    def made(name: str, make: Callable[[Path], object]) -> Path:
        path, part = folder / name, folder / f"{name}.part"
        with open(folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                make(part)
                part.rename(path)
        return path

    return made


@pytest.fixture(scope="session", autouse=True)
def quick_libraries(made_once: MadeOnce) -> Iterator[None]:
    """Tests AS_BUILT compile libraries as builds do; others with the optimizer's first steps, and loops as they are.

    All find the system's headers parsed. That takes a fifth of the time, and moves no bit: what may be rounded
    otherwise is a flag of its own, and stays.
    """
    from qcompile.codegen.cpu import compiler

    flags, run = compiler.flags, compiler.children.run

    def quick(target: Target) -> tuple[str, ...]:
        as_built = AS_BUILT.match(os.environ.get("PYTEST_CURRENT_TEST", ""))
        return flags(target) if as_built else tuple("-Og" if flag == "-O3" else flag for flag in flags(target))

    def parsed(command: list[str], source: str, *rest: Any, **more: Any) -> Any:
        given = [each for each in command if each.startswith(("-O", "-f", "-m", "-p", "-s")) and "map" not in each]
        if Path(command[0]).name == "g++" and "-x" in command:
            name = f"headers-{hashlib.sha256(' '.join(given).encode()).hexdigest()[:16]}"
            folder = made_once(name, lambda folder: _parse_headers(folder, [command[0], *given]))
            command = [command[0], "-include", str(folder / "system.h"), *command[1:]]
        if "-Og" in command:
            source = re.sub(r"(?m)^#define QC_UNROLL .*$", "#define QC_UNROLL", source)
        return run(command, source, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "flags", quick)
        patch.setattr(compiler, "children", SimpleNamespace(run=parsed))
        yield


def _parse_headers(folder: Path, command: list[str]) -> None:
    """What all kernels include of the system, as the compiler keeps it when it has read it."""
    folder.mkdir()
    texts = [path.read_text(encoding="utf-8") for path in sorted(KERNELS.glob("*.h"))]
    lines = dict.fromkeys(re.findall(r"^#include <.*>$", "\n".join(texts), re.MULTILINE))
    (folder / "system.h").write_text("\n".join(lines) + "\n")
    subprocess.run([*command, "-x", "c++-header", "system.h"], cwd=folder, check=True)


@pytest.fixture(scope="session")
def tiny_checkpoint(made_once: MadeOnce) -> Path:
    """A Llama of 2 layers and hidden size 64 with the samples' tokenizer; context of 256 tokens."""
    return made_once("tiny", _save_tiny)


def _save_tiny(path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SAMPLE / name, path / name)


@pytest.fixture(scope="session")
def tiny_artifact(tiny_checkpoint: Path, made_once: MadeOnce) -> Callable[[str], Path]:
    """The tiny model as an artifact of a recipe, which no test changes; built when first asked for."""
    import qcompile

    return lambda recipe: made_once(
        f"tiny-{recipe}", lambda out: qcompile.build(str(tiny_checkpoint), out, recipe=recipe)
    )
