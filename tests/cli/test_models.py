"""Models given in place of artifacts: built into the cache once, found again, and what the cache's commands do."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from qcompile import pipeline
from qcompile.artifact import kept
from qcompile.checkpoints import identity as hashing
from qcompile.cli import console, estimate, machine, models
from qcompile.cli.options import Building
from qcompile.clock import silent
from qcompile.errors import ResourceError, UsageError
from qcompile.targets import get_target
from tests.cli.test_app import code_of, json_of, no_progress, refusal

Build = Callable[[str], Path]
Capture = pytest.CaptureFixture[str]
__all__ = ["no_progress"]  # a fixture that applies here, too
RUN = ("--prompt", "ab", "--max-tokens", "4", "--threads", "1")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of its own."""
    monkeypatch.setenv("QCOMPILE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def builds(tiny_artifact: Build, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The builds that commands ask for, which are copies of an artifact that is there already."""
    asked: list[dict[str, Any]] = []
    made = tiny_artifact("w8a8")

    def build(model: str, out: Path, **options: Any) -> pipeline.BuildReport:
        asked.append({"model": model} | options)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(made, out)
        return pipeline.BuildReport(out, (), {}, 8.0, {})

    monkeypatch.setattr(pipeline, "build", build)
    return asked


def test_a_model_is_built_once_and_says_why(tiny_checkpoint: Path, tiny_artifact: Build, capfd: Capture) -> None:
    """The real thing, with the recipe that fits any machine for so small a model."""
    assert code_of("run", tiny_artifact("w8a8"), *RUN) == 0
    built = capfd.readouterr()
    assert code_of("run", tiny_checkpoint, *RUN) == 0
    first = capfd.readouterr()
    assert first.out == built.out
    assert "recipe w8a8 fits" in first.err and "8-bit weights lose least" in first.err and "core" in first.err
    assert code_of("run", tiny_checkpoint, *RUN) == 0
    second = capfd.readouterr()
    assert second.out == built.out and "building" not in second.err and "generated" in second.err


@pytest.mark.parametrize("command", [["run", "-p", "a"], ["eval", "--data", "/dev/null"], ["bench", "--tg", "2"]])
def test_other_commands_build_as_well(
    command: list[str], tiny_checkpoint: Path, builds: list[dict[str, Any]], capfd: Capture
) -> None:
    code_of(command[0], tiny_checkpoint, *command[1:], "--recipe", "w4a8", "--set", "cache.format=kv8")
    assert [(one["recipe"].facts(), one["target"]) for one in builds] == [
        ({"name": "w4a8", "options": {"cache.format": "kv8"}, "head_dtype": None}, "cpu")
    ]


def test_a_recipe_is_known_by_its_contents(tiny_checkpoint: Path, builds: list[dict[str, Any]], tmp_path: Path) -> None:
    file, same = tmp_path / "mine.toml", tmp_path / "folder" / "mine.toml"
    same.parent.mkdir()
    for path, layers in ((file, "0"), (same, "0"), (file, "1")):
        path.write_text(f"[rules.down]\nrole = 'down'\nlayers = '{layers}'\nweight = 'w8_sym_channel'\n")
        models.artifact_of(str(tiny_checkpoint), Building(recipe=str(path)))
    assert [one["recipe"].rules[0].layers for one in builds] == ["0", "1"]


def test_what_differs_is_built_anew(tiny_checkpoint: Path, builds: list[dict[str, Any]], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))
    first = models.artifact_of(str(tiny_checkpoint), Building())
    name = tiny_checkpoint.resolve().name
    moved = Path(shutil.copytree(tiny_checkpoint, tmp_path / "elsewhere" / name))
    assert models.artifact_of(str(moved), Building()).path == first.path and len(builds) == 1  # equal contents
    others = [
        models.artifact_of(str(copy), Building()),
        models.artifact_of(str(tiny_checkpoint), Building(recipe="w4a8")),
        models.artifact_of(str(tiny_checkpoint), Building(target="cpu-portable")),
        models.artifact_of(str(tiny_checkpoint), Building(options=["cache.format=kv8"])),
    ]
    (moved / "generation_config.json").write_text("{}")
    others.append(models.artifact_of(str(moved), Building()))
    assert len({first.path, *(other.path for other in others)}) == 6 and len(builds) == 6
    assert models.artifact_of(str(tiny_checkpoint), Building(rebuild=True)).path == first.path and len(builds) == 7


def test_another_compiler_builds_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kept.place("m", {"recipe": "w4a8"})
    monkeypatch.setattr(kept, "_compiler", lambda: "other")
    assert kept.place("m", {"recipe": "w4a8"}) != before


def test_an_interrupted_build_leaves_nothing(
    tiny_checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    def interrupted(*given: Any, **options: Any) -> None:
        assert [place.ready for place in kept.places()] == [False]
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "build", interrupted)
    assert code_of("run", tiny_checkpoint, *RUN) == 130
    assert kept.places() == [] and list((cache / "artifacts").iterdir()) == []


def test_two_at_once_build_once(cache: Path) -> None:
    place, building, waited = kept.place("m", {}), [], threading.Event()

    def command() -> None:
        with place.locked(waited.set):
            if not place.ready:
                building.append(1)
                waited.wait(20)
                place.artifact.mkdir()
                (place.artifact / "qcompile.json").touch()

    threads = [threading.Thread(target=command) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(building) == 1 and waited.is_set()


def test_who_waited_for_a_build_that_failed_builds(cache: Path) -> None:
    place, waited, built = kept.place("m", {}), threading.Event(), []

    def command() -> None:
        with place.locked(waited.set):
            built.append(place.folder.is_dir())

    with place.locked(lambda: None):
        other = threading.Thread(target=command)
        other.start()
        assert waited.wait(20)
    other.join()
    assert built == [True] and kept.places() == []


def test_what_a_killed_build_left_is_deleted_by_the_next(
    tiny_checkpoint: Path, builds: list[dict[str, Any]], cache: Path
) -> None:
    left, running = kept.place("left", {}), kept.place("running", {})
    (left.folder / ".artifact.tmp-1").mkdir(parents=True)
    with running.locked(lambda: None):
        made = models.artifact_of(str(tiny_checkpoint), Building())
        assert {place.folder for place in kept.places()} == {made.path.parent, running.folder}


def test_a_damaged_artifact_of_the_cache_is_built_again(
    tiny_checkpoint: Path, builds: list[dict[str, Any]], capfd: Capture
) -> None:
    path = models.artifact_of(str(tiny_checkpoint), Building()).path
    weights = next(path.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    assert code_of("run", tiny_checkpoint, *RUN) == 0
    assert "is damaged" in capfd.readouterr().err and len(builds) == 2


def test_what_cannot_be_built_is_refused(
    tiny_checkpoint: Path, tiny_artifact: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    made = tiny_artifact("w4a8")
    assert "--set is for models" in refusal(capsys, 2, "run", made, *RUN, "--set", "cache.format=kv8")
    assert "--device tpu: write one of" in refusal(capsys, 2, "run", tiny_checkpoint, *RUN, "--device", "tpu")
    other = ("--device", "cpu", "--target", "h200")
    assert "target h200 is for another device" in refusal(capsys, 2, "run", tiny_checkpoint, *RUN, *other)
    assert "(did you mean w8a8?)" in refusal(capsys, 2, "run", tiny_checkpoint, *RUN, "--recipe", "w8a9")
    assert "neither an artifact" in refusal(capsys, 2, "run", tmp_path, *RUN)
    (tmp_path / "config.json").write_text("{}")
    assert "no *.safetensors" in refusal(capsys, 2, "run", tmp_path, *RUN)
    monkeypatch.setenv("QCOMPILE_CACHE", "/dev/null/here")
    assert "set QCOMPILE_CACHE to a folder" in refusal(capsys, 5, "run", tiny_checkpoint, *RUN)


# ---- the identity of a checkpoint --------------------------------------------------------------------


def test_files_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"a": 1}')
    (tmp_path / "README.md").write_text("not read")
    monkeypatch.setattr(hashing, "_SETTLED", 0)
    time.sleep(0.02)
    first = hashing.identity(tmp_path, silent)
    with monkeypatch.context() as patched:
        patched.setattr(hashing, "_pieces", lambda path: pytest.fail("read again"))
        assert hashing.identity(tmp_path, silent) == first
    file.write_text('{"a": 2}')  # of the same size
    second = hashing.identity(tmp_path, silent)
    assert second != first
    file.rename(tmp_path / "other.json")
    assert hashing.identity(tmp_path, silent) not in (first, second)


def test_a_file_that_was_just_written_is_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    hashing.identity(tmp_path, silent)
    monkeypatch.setattr(hashing, "_pieces", lambda path: iter([b"read again"]))
    read: list[str] = []
    hashing.identity(tmp_path, lambda stage, done, total: read.append(stage))
    assert read == ["reading the checkpoint"]


# ---- the recipe that fits ----------------------------------------------------------------------------

GIB = 1 << 30


def checkpoint(folder: Path, weights: int, config: dict[str, Any]) -> Path:
    """A checkpoint of `weights` weights, of which only the header is there."""
    header = json.dumps({"w": {"dtype": "BF16", "shape": [weights], "data_offsets": [0, 2 * weights]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("weights", "cores", "memory", "gpu", "config", "fit"),
    [
        (26_000_000, 2, 8 * GIB, 0, {}, ("cpu", "w8a8", "lose least")),
        (1_100_000_000, 2, 8 * GIB, 0, {}, ("cpu", "w4a8", "many for 2 cores")),
        (1_100_000_000, 4, 8 * GIB, 0, {}, ("cpu", "w8a8", "fit well")),
        (8_000_000_000, 64, 8 * GIB, 0, {}, ("cpu", "w4a8", "more than half of the memory")),
        (8_000_000_000, 2, 8 * GIB, 80 * GIB, {}, ("h100", "w8a8", "fit well")),
        (70_000_000_000, 2, 8 * GIB, 80 * GIB, {}, ("h100", "w4a8", "more than half of the memory")),
        (9, 2, GIB, 0, {"quantization_config": {"quant_method": "mxfp4"}}, ("cpu", "mxfp4", "keeps the numbers")),
        (9, 2, GIB, 0, {"quantization_config": {"quant_method": "gptq", "bits": 8}}, ("cpu", "w8a8", "lose least")),
        (9, 2, GIB, 0, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, ("cpu", "w4a8", "keeps")),
        *(
            (9, 2, GIB, 0, {"quantization_config": {"quant_method": "bitsandbytes", said: True}}, ("cpu", "w8a8", why))
            for said, why in (("load_in_8bit", "keeps"), ("load_in_4bit", "lose least"))
        ),
        *(
            (9, 2, GIB, 0, {"quantization_config": {"quant_method": "modelopt", "quant_algo": said}}, ("cpu", *result))
            for said, result in (("NVFP4", ("nvfp4", "keeps")), ("FP8", ("w8a8", "lose least")))
        ),
        *(
            (9, 2, GIB, gpu, {"quantization_config": {"quant_method": "gptq", **said}}, (*result, ""))
            for gpu, said, result in (
                (0, {"bits": 4, "group_size": 64}, ("cpu", "w4a8-g32")),
                (80 * GIB, {"bits": 4, "group_size": 64}, ("h100", "w8a8")),  # which has no kernels for these groups
                (80 * GIB, {"bits": 4, "group_size": 128}, ("h100", "w4a8")),
                (0, {"bits": 8, "group_size": 32, "sym": True}, ("cpu", "w8a8-g32")),
                (0, {"bits": 8, "group_size": 32, "sym": False}, ("cpu", "w8a8")),
                (0, {"bits": 3, "group_size": 32}, ("cpu", "w8a8")),
                (0, {"bits": "many"}, ("cpu", "w8a8")),
            )
        ),
        (
            *(9, 2, GIB, 0),
            {
                "quantization_config": {
                    **{"quant_method": "compressed-tensors", "format": "pack-quantized"},
                    "config_groups": {"a": {"weights": {"num_bits": 8, "symmetric": True, "group_size": 32}}},
                }
            },
            ("cpu", "w8a8-g32", "keeps"),
        ),
        (
            *(9, 2, GIB, 0),
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}},
            ("cpu", "nvfp4", "keeps"),
        ),
    ],
)
def test_the_recipe_fits_the_machine(
    weights: int, cores: int, memory: int, gpu: int, config: dict[str, Any], fit: tuple[str, ...], tmp_path: Path
) -> None:
    given = ("NVIDIA H100 80GB HBM3", "h100", gpu) if gpu else ()
    here = machine.Machine(cores, get_target("cpu-avx2"), memory, *given)
    result = machine.fit(here, checkpoint(tmp_path, weights, config))
    assert (result.target, result.recipe) == fit[:2] and fit[2] in result.reason
    assert (
        f"{cores} cores (AVX2), {memory // GIB}.0 GiB, {'NVIDIA H100 80GB HBM3 (80.0 GiB)' if gpu else 'no GPU'}"
        == (here.text())
    )


@pytest.mark.parametrize(
    ("stored", "dtype", "shape"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, torch.uint8, (64, 1)),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, torch.int8, (16, 8)),
        ({"quant_method": "awq", "bits": 4}, torch.int32, (16, 1)),
        ({"quant_method": "gptq", "bits": 8}, torch.int32, (16, 2)),
        ({"quant_method": "mxfp4"}, torch.uint8, (2, 2, 16)),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, torch.uint8, (16, 4)),
        ({"config_groups": {"a": {"weights": {"num_bits": 4}}}}, torch.int32, (16, 1)),
        ({"quant_method": "gptq", "bits": "many"}, torch.uint8, (16, 8)),
        (None, torch.bfloat16, (16, 8)),
    ],
)
def test_packed_codes_are_counted(stored: Any, dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors = {"codes": torch.zeros(shape, dtype=dtype), "norm": torch.ones(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": stored} if stored else {}))
    assert machine.count_weights(tmp_path) == 128 + 8


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpu:
        name, capability = "NVIDIA H200", 90

        def memory(self) -> tuple[int, int]:
            return GIB, 141 * GIB

    driver = "qcompile.runtime.cuda.driver.driver"
    monkeypatch.setattr(driver, Gpu)
    here = machine.this_machine("auto")
    assert (here.gpu, here.gpu_target, here.gpu_memory) == ("NVIDIA H200", "h200", 141 * GIB)
    assert machine.this_machine("cpu").gpu == ""
    monkeypatch.setattr(Gpu, "capability", 75)
    assert machine.this_machine("auto").gpu == ""
    with pytest.raises(ResourceError, match=r"no target for NVIDIA H200 \(compute capability 7.5\)"):
        machine.this_machine("gpu")


# ---- the commands of the cache -----------------------------------------------------------------------


def test_the_cache_is_listed_and_pruned(
    tiny_checkpoint: Path, builds: list[dict[str, Any]], cache: Path, capsys: Capture
) -> None:
    assert json_of(capsys, "cache", "path") == {"path": str(cache)}
    assert json_of(capsys, "cache", "list")["artifacts"] == []
    one, two = (models.artifact_of(str(tiny_checkpoint), Building(recipe=name)).path for name in ("w8a8", "w4a8"))
    (cache / "kernel.so").write_bytes(b"12345")
    (cache / "mine.txt").write_text("not ours")
    listed = json_of(capsys, "cache", "list")["artifacts"]
    assert [entry["about"]["recipe"] for entry in listed] == ["w4a8", "w8a8"]  # the last used first
    assert listed[0]["path"] == str(two) and listed[0]["bytes"] > 10_000 and listed[0]["ready"]
    assert code_of("cache", "list") == 0
    table = capsys.readouterr().out
    assert one.parent.name in table and "today" in table and "w8a8" in table

    message = refusal(capsys, 2, "cache", "remove", one.parent.name + "0")
    assert f"did you mean {one.parent.name}?" in message
    assert "say what to remove" in refusal(capsys, 2, "cache", "remove")
    assert json_of(capsys, "cache", "remove", "--unused", "1")["removed"] == []
    assert json_of(capsys, "cache", "remove", one.parent.name)["removed"] == [one.parent.name]
    assert not one.exists() and two.exists()
    with kept.KeptArtifact(two.parent).locked(lambda: None):
        assert code_of("cache", "remove", tiny_checkpoint.resolve().name) == 0
        assert "is being built, so it stays" in capsys.readouterr().err and two.exists()
    assert code_of("cache", "remove", "--all") == 0
    assert "1 artifact removed" in capsys.readouterr().out
    assert kept.places() == [] and not (cache / "kernel.so").exists() and (cache / "mine.txt").exists()


@pytest.mark.parametrize("command", ["list", "remove", "path"])
def test_each_has_help_with_an_example(command: str, capsys: Capture) -> None:
    assert code_of("cache", command, "--help") == 0
    text = capsys.readouterr().out
    assert "Example:" in text and "qcompile cache" in text and "--json" in text


# ---- the time left -----------------------------------------------------------------------------------


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_the_time_left_follows_the_last_build(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(estimate, "time", clock)

    def build(weights: int, slower: float) -> list[tuple[int, int]]:
        """A build that takes `slower` times as long; returns percent and seconds left, at the middle of each part."""
        expected, seen = estimate.Estimate(weights), []
        for stage, seconds in (("import", 8), ("raise", 1), ("fuse", 1), ("weights", 4), ("kernels", 6)):
            expected.enter(stage)
            clock.now += seconds * slower / 2
            percent, left = expected.left(0.5 if stage == "weights" else None)
            seen.append((percent, round(left)))
            clock.now += seconds * slower / 2
        expected.finish()
        return seen

    build(100_000_000, 1.0)
    assert build(100_000_000, 1.0) == [(20, 16), (42, 12), (47, 10), (60, 8), (85, 3)]
    assert build(100_000_000, 3.0)[2:] == [(48, 30), (62, 21), (89, 6)]  # a busy machine is noticed
    assert build(300_000_000, 1.0)[0][1] > 30  # three times the weights; the last build was slow


def test_the_time_left_is_shown_for_the_whole_build(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(estimate, "time", clock)
    monkeypatch.setattr(console, "time", clock)
    progress = console.Progress(estimate.Estimate(1_000_000))
    progress("import", 0, 1)
    clock.now = 3.0
    assert progress.line(clock.now) == "14 %, 18 s left (import)"
    progress("weights", 5, 10)
    clock.now = 4.0
    assert progress.line(clock.now).endswith(" s left (weights)")


def test_unused_options_are_named() -> None:
    assert Building().given() is None
    assert Building(options=["a=b"]).given() == "--set"
    assert Building(allow_remote_code=True).given() == "--allow-remote-code"
    with pytest.raises(UsageError, match="empty"):
        models.artifact_of("", Building())
