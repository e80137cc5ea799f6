"""Loading: every bit is checked before the library is opened, and the machine fits."""

from __future__ import annotations

import copy
import ctypes
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qcompile.artifact import layout, reader
from qcompile.artifact.abi import CPU_ABI
from qcompile.artifact.manifest import SHAPE, Maybe
from qcompile.artifact.reader import read_manifest
from qcompile.artifact.shards import WeightSpec
from qcompile.artifact.writer import ArtifactWriter
from qcompile.cli.inspect import summary
from qcompile.errors import ArtifactError, ResourceError, UsageError
from qcompile.runtime import loader
from qcompile.runtime.cpu import executor
from qcompile.runtime.load import load
from qcompile.runtime.loader import Arena, load_artifact
from qcompile.runtime.sampling.params import SamplingParams
from tests.support.fake import byte_tokenizer

parsed = reader.parse_manifest
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
STUB = r"""
#include <stdint.h>
typedef struct { int32_t tokens, sequences, outputs, stride; const int32_t *ids, *positions, *start, *table,
  *rows; float* logits; int32_t* argmax; const void* sampling; } batch;
typedef struct { const void* const* weights; void* kv; int64_t pages; int32_t threads, max_tokens, outputs; } config;
static const uint8_t* first;
const char* qc_describe(void) { return "{\"abi\": CPU_ABI, \"isa\": \"stub\", \"calls\": [\"a\", \"b\"]}"; }
void* qc_open(const config* c) {
  if (c->threads == 13) return 0;
  first = c->weights[0];
  return ((uintptr_t)c->kv | (uintptr_t)c->weights[0]) % 64 ? 0 : (void*)first;
}
int qc_step(void* m, const batch* b) {  /* the next token is this one plus the first weight's first byte */
  for (int r = 0; r < b->outputs; ++r) b->argmax[r] = (b->ids[b->rows[r]] + first[0]) % 260;
  return 0;
}
int qc_decode(void* m, const batch* b, int32_t steps, int32_t* out) {
  for (int i = 0; i < steps * b->sequences; ++i)
    out[i] = ((i < b->sequences ? b->ids[i] : out[i - b->sequences]) + first[0]) % 260;
  return 0;
}
void* qc_thread_pool(void* m) { return m; }
int qc_speculate(const void* q) { return 1; }
int qc_profile(void* m, int32_t on) { return 0; }
int qc_profile_read(void* m, double* s, int64_t* n, int32_t k) {
  for (int i = 0; i < k; ++i) { s[i] = 0.5 * i; n[i] = i; }
  return 0;
}
double qc_probe(void* m, int32_t what) { return 40.0 + what; }
void qc_close(void* m) {}
""".replace("CPU_ABI", str(CPU_ABI))


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that only counts, compiled once."""
    if COMPILER is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("stub")
    (folder / "model.c").write_text(STUB)
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-o", folder / "model.so", folder / "model.c"], check=True, capture_output=True
    )
    return folder / "model.so"


def write(path: Path, stub: Path, step: int = 3, tokenizer: bool = True, **changes: Any) -> Path:
    specs = [WeightSpec(f"w{i}", 64 * (i + 1)) for i in range(6)]
    with ArtifactWriter(path, shard_bytes=256) as writer:
        entries = writer.add_weights(specs, (bytes([step + i]) * spec.bytes for i, spec in enumerate(specs)))
        writer.add_file("kernels/stub/model.so", stub)
        if tokenizer:
            writer.add_file("tokenizer.json", byte_tokenizer().to_str())
        manifest: dict[str, Any] = {
            "target": {"name": "stub", "isa": "stub", "requires": []},
            "bits_per_weight": 8.0,
            "passes": [{"name": "raise", "fired": 1, "options": {}, "notes": []}],
            "qcompile_version": "0",
            "recipe": {"name": "stub", "options": {}},
            "versions": {"compiler": "stub"},
            "model": {
                "name": "stub",
                "parameters": 1,
                "max_position": 500,
                "bos_token_id": 0,
                "eos_token_ids": [0],
                "vocab_size": 260,
            },
            "runtime": {
                "abi": CPU_ABI,
                "library": "kernels/stub/model.so",
                "weights": entries,
                "max_tokens": 64,
                "vocab_size": 260,
                "kv": {"format": "stub", "layers": 1, "page_tokens": 64, "page_bytes": 4096},
            },
        }
        for name, value in changes.items():
            manifest[name] = manifest[name] | value
        writer.finish(manifest)
    return path


def key_paths(shape: Any, value: Any) -> Iterator[tuple[Any, ...]]:
    """Every place of `value` that `shape` asks for."""
    items = {**dict.fromkeys(value, shape[str])} if str in shape else shape
    for name, inner in items.items():
        if isinstance(inner, Maybe):
            continue
        yield (name,)
        if isinstance(inner, list) and isinstance(inner[0], dict):
            yield from ((name, 0, *rest) for rest in key_paths(inner[0], value[name][0]))
        if isinstance(inner, dict):
            yield from ((name, *rest) for rest in key_paths(inner, value[name]))


def test_sealed_manifest_with_a_key_missing_or_of_another_type_is_refused(tmp_path: Path, stub: Path) -> None:
    root = write(tmp_path / "out", stub)
    clean = read_manifest(root)
    anything = {("files", name) for name in clean["files"]} | {("versions", name) for name in clean["versions"]}
    places = [place for place in key_paths(SHAPE, clean) if place not in anything]
    assert len(places) > 40, places
    for place in places:
        for damage in ("missing", "type"):
            manifest = copy.deepcopy(clean)
            parent: Any = manifest
            for step in place[:-1]:
                parent = parent[step]
            if damage == "missing":
                del parent[place[-1]]
            else:
                parent[place[-1]] = None
            manifest["sha256"] = layout.seal(manifest)
            (root / layout.MANIFEST).write_bytes(layout.canonical_json(manifest))
            with pytest.raises(ArtifactError, match=str(place[-1])):
                load_artifact(root)


def sealed(root: Path, *place: Any, value: Any) -> None:
    """Write the manifest anew with one value replaced, and the right seal."""
    manifest = read_manifest(root)
    parent: Any = manifest
    for step in place[:-1]:
        parent = parent[step]
    parent[place[-1]] = value
    manifest["sha256"] = layout.seal(manifest)
    (root / layout.MANIFEST).write_bytes(layout.canonical_json(manifest))


PATH_STAGE = {
    "path": "draft1", "library": "kernels/stub/model.so", "gamma": 4, "threshold": 0.0, "max_position": 500,
    "vocab_size": 260, "kv": None, "weights": [0, 1],
}  # fmt: skip
TIMES = {"batch": 1, "context": 32, "plain": 1e-3, "rounds": {"1": 1e-3}}


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("runtime", "kv", "page_tokens"), 0, "page_tokens is not a whole number between 1 and"),
        (("runtime", "kv", "page_bytes"), -64, "page_bytes is not"),
        (("runtime", "kv", "ring_tokens"), 100, "ring_tokens is not three groups"),
        (("runtime", "max_tokens"), 10**30, "max_tokens is not"),
        (("files", "tokenizer.json", "bytes"), -1, "bytes is not"),
        (("model", "bos_token_id"), 260, "bos_token_id 260 is outside the vocabulary"),
        (("runtime", "levels"), 7, "levels is not a list"),
        (("runtime", "levels"), [[]], r"levels\[0\] is not an object"),
        (("runtime", "levels"), [{"lookup": "x", "gamma": 7}], "lookup is not"),
        (("runtime", "levels"), [PATH_STAGE | {"weights": [99]}], r"weights\[0\] is not a whole number between 0"),
        (("runtime", "levels"), [PATH_STAGE | {"threshold": "x"}], "threshold is not a number"),
        (("runtime", "levels"), [PATH_STAGE | {"kv": {}}], "kv lacks format"),
        (("tuned",), {"acceptance": 0.5}, "tuned lacks table"),
        (("tuned",), {"acceptance": 0.5, "table": [TIMES | {"plain": 0.0}]}, "a time outside 0 to 1e9 seconds"),
        (("tuned",), {"acceptance": 0.5, "table": [TIMES | {"rounds": {"x": 1.0}}]}, "same gammas"),
        (("tuned",), {"acceptance": 0.5, "table": [TIMES | {"rounds": {"0": 1.0}}]}, "same gammas"),
        (("tuned",), {"acceptance": 0.5, "table": [TIMES, TIMES | {"rounds": {"2": 1.0}}]}, "same gammas"),
        (("tuned",), {"acceptance": 0.5, "table": []}, "same gammas"),
    ],
)  # fmt: skip
def test_sealed_manifest_out_of_range_is_refused(
    place: tuple[str, ...], value: Any, message: str, tmp_path: Path, stub: Path
) -> None:
    root = write(tmp_path / "out", stub)
    sealed(root, *place, value=value)
    for read in (load, load_artifact, summary):
        with pytest.raises(ArtifactError, match=message) as raised:
            read(root)
        assert "\n" not in str(raised.value)


def test_manifest_and_library_of_other_sizes_are_refused(
    tmp_path: Path, stub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library trusts its caller: with sizes of another model it would write where nothing is its."""
    told = {"vocab_size": 260, "weights": 6, "max_position": 500}
    told["kv"] = {"page_tokens": 64, "page_bytes": 4096}  # type: ignore[assignment]
    root = write(tmp_path / "out", stub)
    monkeypatch.setattr(executor, "json", SimpleNamespace(loads=lambda text: json.loads(text) | told))
    load(root, threads=1).close()
    for place, value in (
        (("runtime", "vocab_size"), 261),
        (("runtime", "kv", "page_tokens"), 128),
        (("runtime", "kv", "page_bytes"), 2048),
        (("model", "max_position"), 501),
        (("runtime", "weights"), read_manifest(root)["runtime"]["weights"][:5]),
    ):
        shutil.rmtree(root)
        write(root, stub)
        sealed(root, *place, value=value)
        with pytest.raises(ArtifactError, match=f"manifest and library differ in {place[-1]}"):
            load(root, threads=1)


def test_weights_lie_where_the_pointers_say(tmp_path: Path, stub: Path) -> None:
    artifact = load_artifact(write(tmp_path / "out", stub))
    assert artifact.weights.address % (2 << 20) == 0
    for i, entry in enumerate(artifact.manifest["runtime"]["weights"]):
        assert artifact.pointers[i] % 64 == 0
        assert ctypes.string_at(artifact.pointers[i], entry["bytes"]) == bytes([3 + i]) * entry["bytes"]


def test_loaded_model_generates(tmp_path: Path, stub: Path) -> None:
    with load(write(tmp_path / "out", stub), threads=1) as llm:
        result = llm.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))[0]
        assert result.outputs[0].token_ids == [(2 + 3 * (i + 1)) % 260 for i in range(50)]
        assert llm.executor.profile_read() == {"a": (0.0, 0), "b": (0.5, 1)}
        assert llm.executor.peak("f32") == 42.0
        assert llm.engine.pool.total == 16 * 8 and llm.context == 500
        assert result.metrics.decode_seconds >= 0 and result.metrics.prefill_seconds > 0


def test_rebuilt_artifact_at_the_same_place_is_the_new_one(tmp_path: Path, stub: Path) -> None:
    for step in (3, 5):
        with load(write(tmp_path / "out", stub, step), threads=1) as llm:
            assert llm.generate([[1]], temperature=0, max_tokens=1)[0].outputs[0].token_ids == [1 + step]


def test_flipped_bit_anywhere_is_found_before_the_library_is_opened(
    tmp_path: Path, stub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write(tmp_path / "out", stub)
    opened: list[str] = []
    monkeypatch.setattr(loader, "_libraries", {})
    monkeypatch.setattr(loader.ctypes, "CDLL", lambda name: opened.append(name))
    rng = random.Random(4)
    files = sorted(p for p in root.rglob("*") if p.is_file())
    assert len(files) >= 6
    for file in files:
        clean = file.read_bytes()
        for _ in range(15):
            raw = bytearray(clean)
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
            file.write_bytes(raw)
            with pytest.raises(ArtifactError) as raised:
                load_artifact(root)
            assert file.name in str(raised.value) and "\n" not in str(raised.value)
        file.write_bytes(clean[:-1])
        with pytest.raises(ArtifactError):
            load_artifact(root)
        file.unlink()
        with pytest.raises(ArtifactError):
            load_artifact(root)
        file.write_bytes(clean)
    assert opened == []
    load_artifact(root)
    assert len(opened) == 1


def test_other_cpu_is_named(tmp_path: Path, stub: Path) -> None:
    target = {"requires": ["fpu_of_tomorrow"]}
    with pytest.raises(ArtifactError, match=r"no fpu_of_tomorrow: build it again here with --target cpu"):
        load_artifact(write(tmp_path / "out", stub, target=target))


def test_other_interface_is_refused(tmp_path: Path, stub: Path) -> None:
    with pytest.raises(ArtifactError, match=f"interface 1, this qcompile has {CPU_ABI}"):
        load_artifact(write(tmp_path / "out", stub, runtime={"abi": 1}))


def test_weight_outside_its_file_is_refused(tmp_path: Path, stub: Path) -> None:
    for weight in (
        {"name": "w", "file": "weights-00000.safetensors", "offset": 1 << 20, "bytes": 64},
        {"name": "w", "file": "weights-00000.safetensors", "offset": 3, "bytes": 64},
        {"name": "w", "file": "nowhere", "offset": 0, "bytes": 64},
    ):
        with pytest.raises(ArtifactError, match="weight w lies outside"):
            load_artifact(write(tmp_path / "out", stub, runtime={"weights": [weight]}))


def test_library_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a library")
    with pytest.raises(ArtifactError, match="cannot be opened"):
        load_artifact(write(tmp_path / "out", tmp_path / "text"))


def test_not_an_artifact(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such artifact"):
        load(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match="not an artifact"):
        load(tmp_path)


def test_bad_options_of_load(tmp_path: Path, stub: Path) -> None:
    root = write(tmp_path / "out", stub)
    for options, message in (
        ({"threads": 0}, "threads must be"),
        ({"max_batch": 0}, "max_batch must be between 1 and 64"),
        ({"kv_cache_bytes": 100}, "less than one page"),
        ({"kv_cache_bytes": "8G"}, "kv_cache_bytes must be a whole number"),
        ({"max_model_len": 0}, "max_model_len must be a whole number between 1 and the context"),
        ({"max_model_len": 1 << 20}, "max_model_len must be a whole number"),
        ({"max_model_len": "9"}, "max_model_len must be a whole number"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization must be above 0"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization must be above 0"),
    ):
        with pytest.raises(UsageError, match=message):
            load(root, **options)
    with pytest.raises(UsageError, match="kv_cache_bytes must be"):  # before anything asks for a GPU
        load(write(tmp_path / "gpu", stub, target={"kind": "cuda"}), kv_cache_bytes="8G")  # type: ignore[arg-type]
    with pytest.raises(ResourceError, match="13 threads"):
        load(root, threads=13)
    assert load(root, threads=1, kv_cache_bytes=9000).engine.pool.total == 2
    assert load(root, threads=1, max_model_len=7).context == 7


def test_a_tokenizer_is_one_of_the_artifacts_files(tmp_path: Path, stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies there beside them is nobody's, and what takes its place behind the check of all files is damage."""
    root = write(tmp_path / "out", stub, tokenizer=False)
    (root / "tokenizer.json").write_text(byte_tokenizer().to_str())
    with load(root, threads=1) as llm:
        assert llm.tokenizer is None
    root = write(tmp_path / "out", stub)
    read = loader._read_and_check

    def late(*arguments: Any) -> None:
        read(*arguments)
        with open(root / "tokenizer.json", "r+b") as file:
            file.write(b" ")

    monkeypatch.setattr(loader, "_read_and_check", late)
    with pytest.raises(ArtifactError, match="tokenizer"):
        load(root, threads=1)


def test_a_manifest_is_read_once(tmp_path: Path, stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else sizes could be of one artifact, and weights of another that took its place."""
    root, result = write(tmp_path / "out", stub), []
    monkeypatch.setattr(reader, "parse_manifest", lambda *given: result.append(parsed(*given)) or result[-1])
    with load(root, threads=1):
        assert len(result) == 1


def test_memory_that_is_not_there(tmp_path: Path, stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "available_memory", lambda: 100)
    with pytest.raises(ResourceError, match="100 are available"):
        load_artifact(write(tmp_path / "out", stub))
    with pytest.raises(ResourceError, match="cannot reserve"):
        Arena(1 << 62)


def test_threads_default_to_the_cores_allowed(tmp_path: Path, stub: Path) -> None:
    with load(write(tmp_path / "out", stub)) as llm:
        assert llm.threads == len(os.sched_getaffinity(0))


def test_loading_imports_no_torch(tmp_path: Path, stub: Path) -> None:
    root = write(tmp_path / "out", stub)
    script = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        f"import qcompile; print(qcompile.load({str(root)!r}, threads=1).generate('a', temperature=0))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_an_artifact_that_is_replaced_while_it_loads_is_loaded(
    tmp_path: Path, stub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of the newer one are not what the older one's manifest says."""
    root = write(tmp_path / "out", stub)
    read = loader._read_and_check

    def late(*arguments: Any) -> None:
        monkeypatch.setattr(loader, "_read_and_check", read)
        write(root, stub, model={"name": "another"})
        (root / "weights-00000.safetensors").write_bytes(b"")  # whatever it holds, it is not what was read of it
        write(tmp_path / "again", stub, model={"name": "another"})
        shutil.copy(tmp_path / "again" / "weights-00000.safetensors", tmp_path / "copy")
        with pytest.raises(ArtifactError, match="damaged") as raised:
            read(*arguments)
        shutil.copy(tmp_path / "copy", root / "weights-00000.safetensors")
        raise raised.value

    monkeypatch.setattr(loader, "_read_and_check", late)
    with load(root, threads=1) as llm:
        assert llm.manifest["model"]["name"] == "another"
