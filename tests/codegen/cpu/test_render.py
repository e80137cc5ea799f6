"""Rendering and compiling a program: golden step, cache, reproducibility, rejected inputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from threading import Event, Timer

import pytest

from qcompile import user_cache
from qcompile.codegen import children
from qcompile.codegen.calls import Attention, Elementwise, Gemm
from qcompile.codegen.cpu import build as cpu_build
from qcompile.codegen.cpu import compiler, flow, render
from qcompile.codegen.cpu.barriers import Barriers
from qcompile.codegen.cpu.statements import Statements
from qcompile.codegen.gpu.compile import compile_all
from qcompile.codegen.gpu.kernel import Kernel
from qcompile.codegen.program import Program
from qcompile.errors import ResourceError, UnsupportedError
from qcompile.targets import TARGETS
from tests.support.tiny import Tiny, build

AVX2 = TARGETS["cpu-avx2"]
SMALL = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernel cache; the compiler is searched for again."""
    monkeypatch.setenv("QCOMPILE_CACHE", str(tmp_path / "cache"))
    for remembered in (compiler.find, compiler.version):
        remembered.cache_clear()
        monkeypatch.setattr(compiler, remembered.__name__, remembered)
    return tmp_path / "cache"


def barriers_of(program: Program) -> Barriers:
    """The barriers of a program, as render has them."""
    return Barriers(flow.separate_buffers(program))


def step_of(source: str) -> str:
    """The generated part of a source: constants and step()."""
    model, program = source.index("// ---- the model"), source.index("// ---- the program")
    return source[model : source.index("// ---- model.h")] + source[program : source.index("// ---- probe.h")]


def test_step_reads_as_the_program(golden: Callable[[str, str], None]) -> None:
    tiny = Tiny("w4_asym_g128", "q8", "kv8", layers=1)
    golden("step_w4a8.cpp", step_of(render.render(build(tiny)[0], AVX2)))


def test_gated_products_have_the_activations_of_the_model() -> None:
    """Each of the others would add a tenth to a library and to the time that it takes to compile."""
    program = build(Tiny())[0]
    assert "\n#define QC_GATES kSilu\n" in render.render(program, AVX2)
    calls = [replace(c, epilogue="gelu_mul") if isinstance(c, Gemm) and c.epilogue == "silu_mul" else c
             for c in program.calls]  # fmt: skip
    assert "\n#define QC_GATES kGelu\n" in render.render(replace(program, calls=calls), AVX2)


def test_source_is_self_contained_and_stable() -> None:
    program = build(Tiny())[0]
    source = render.render(program, AVX2)
    assert '#include "' not in source and source.count("struct Barrier {") == 1
    assert source == render.render(program, AVX2)
    assert source != render.render(program, TARGETS["cpu-portable"])


def test_a_drafts_source_has_what_the_models_lacks() -> None:
    model, draft = (render.render(build(Tiny(format, "q8"))[0], AVX2) for format in ("w8_sym_channel", "w4_asym_g128"))
    kept = cpu_build.without_common_prefix(model, draft)
    first, rest = kept.split("\n", 1)
    same = int(first.split()[4])
    assert "".join(model.splitlines(keepends=True)[:same]) + rest == draft
    assert len(kept) < 0.5 * len(draft)
    assert cpu_build.without_common_prefix(model, model).count("\n") == 1


def test_rows_a_thread_keeps_need_no_barrier_unless_they_may_be_overwritten() -> None:
    program = build(Tiny("w8_sym_channel", "q8", layers=1))[0]
    assert "// 0.norm1" in render.render(program, AVX2)
    sync = {c.name: barriers_of(program).after(i) for i, c in enumerate(program.calls)}
    assert sync["0.norm1"] == "!s.few[kTokens]" and sync["0.qkv"] == sync["0.rope"] == "!s.by_head(2)"
    # Place the next value in the memory that the norm reads: a faster thread would overwrite it.
    stream = program.buffer("h")
    moved = tuple(replace(b, offset=stream.offset) if b.name == "0.inner" else b for b in program.buffers)
    program = replace(program, buffers=moved)
    sync = {c.name: barriers_of(program).after(i) for i, c in enumerate(program.calls)}
    assert sync["0.norm2"] == "true"


def test_what_a_thread_made_it_quantizes_before_it_waits() -> None:
    home = Tiny("w4_asym_g128", "q8", layers=2, activation="int8_g128", heads=8, kv_heads=2, head_dim=32, inner=256)
    program = build(home)[0]
    barriers = barriers_of(program)
    sync = {c.name: barriers.after(i) for i, c in enumerate(program.calls)}
    by_head, by_columns = barriers.conditions.values()
    assert sync["0.attention"] == f"!{by_head}" and sync["0.o.quantize"] == f"{by_head} || !s.few[kTokens]"
    assert sync["1.gate_up"] == f"!{by_columns}" and sync["1.down.quantize"] == f"{by_columns} || !s.few[kTokens]"
    # These buffers, and q, k and v, are separate from all others, at the same offset in both layers.
    separated = barriers.program
    apart = ("qkv", "attended", "o.in", "inner", "down.in")
    for name in apart:
        mine = separated.buffer(f"0.{name}")
        assert separated.buffer(f"1.{name}").offset == mine.offset
        assert not any(flow.overlap(mine, b) for b in separated.buffers if b.name[2:] != name)
    assert separated.arena_bytes("tokens") < 3 * program.arena_bytes("tokens")
    # No bytes are left unused where these buffers were, and all others overlap as before.
    places = {byte for b in separated.buffers if b.rows == "tokens" for byte in range(b.offset, b.offset + b.row_bytes)}
    assert separated.arena_bytes("tokens") - len(places) < flow.ALIGNMENT * len(separated.buffers)
    stay = [name for b in program.buffers if (name := b.name).partition(".")[2] not in apart]
    for one, other in combinations(stay, 2):
        before, after = (flow.overlap(p.buffer(one), p.buffer(other)) for p in (program, separated))
        assert before == after
    # Not if a scale covers a whole row, the last group is short, or another call reads the unquantized value.
    others = (replace(home, activation="int8"), replace(home, inner=160))
    for tiny, name in zip(others, ("0.o.quantize", "0.down.quantize"), strict=True):
        calls = build(tiny)[0].calls
        index = next(i for i, c in enumerate(calls) if c.name == name)
        assert flow.producer_share(build(tiny)[0], index) is None
    index = next(i for i, c in enumerate(program.calls) if c.name == "0.down.quantize")
    extra = Elementwise("also", "silu", "0.inner", "0.inner")
    assert flow.producer_share(program, index) is not None
    assert flow.producer_share(replace(program, calls=(*program.calls, extra)), index) is None


def test_a_thread_that_makes_its_own_heads_waits_where_it_would_overwrite_what_they_are_made_of() -> None:
    program = build(Tiny("w8_sym_channel", "q8", layers=1))[0]
    qkv = next(i for i, c in enumerate(program.calls) if c.name == "0.qkv")
    gemm, attention = program.calls[qkv], program.calls[qkv + 2]
    assert isinstance(gemm, Gemm) and isinstance(attention, Attention)
    assert "if (s.by_head(2)) g" in render.render(program, AVX2)
    read = program.buffer(gemm.x)
    moved = tuple(replace(b, offset=read.offset) if b.name == attention.out else b for b in program.buffers)
    crowded = barriers_of(replace(program, buffers=moved))
    assert crowded.after(qkv) == "true"
    assert not any("parts" in line for line in Statements(crowded.program, crowded).of(qkv))
    # Heads that are not a whole number of GEMM units.
    narrow = build(Tiny("w8_sym_channel", "q8", layers=1, heads=8, head_dim=16, kv_heads=4, rotary_dim=16))[0]
    assert barriers_of(narrow).after(qkv) == "true"


def test_curves_are_there_where_a_call_takes_one() -> None:
    program = build(Tiny(layers=1))[0]
    bend = Elementwise("bend", "xielu", "h", "h", weight=program.weights[0])
    bent = render.render(replace(program, calls=(*program.calls[:-1], bend)), AVX2)
    assert "void xielu(" in bent and "xielu" not in render.render(program, AVX2)


def test_refuses_shapes_without_kernels() -> None:
    program = build(Tiny(layers=1))[0]
    with pytest.raises(UnsupportedError, match="2048"):
        render.render(replace(program, kv=replace(program.kv, head_dim=2048)), AVX2)
    odd = Elementwise("wave", "sine", "h", "h")
    with pytest.raises(UnsupportedError, match=r"wave: .* sine"):
        render.render(replace(program, calls=(*program.calls[:-1], odd)), AVX2)


def test_compiles_once_and_byte_for_byte_alike(own_cache: Path) -> None:
    first = compiler.compile(SMALL, AVX2)
    (entry,) = own_cache.iterdir()
    assert entry.suffix == ".so" and user_cache.recall(entry) == first
    user_cache.remember(entry, b"kept")
    assert compiler.compile(SMALL, AVX2) == b"kept"
    entry.unlink()
    assert compiler.compile(SMALL, AVX2) == first
    assert str(own_cache.parent).encode() not in first and b"GCC" not in first and b"/tmp" not in first


def test_a_damaged_entry_is_compiled_again(own_cache: Path) -> None:
    """A full disk or a power loss must not break later builds."""
    first = compiler.compile(SMALL, AVX2)
    (entry,) = own_cache.iterdir()
    whole = entry.read_bytes()
    for damage in (b"", whole[:-1], whole[:100], whole[:50] + b"?" + whole[51:], first):
        entry.write_bytes(damage)
        assert compiler.compile(SMALL, AVX2) == first and entry.read_bytes() == whole


def test_a_full_disk_leaves_no_part_of_an_entry(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(user_cache.swap.os, "replace", full)
    assert compiler.compile(SMALL, AVX2)[:4] == b"\x7fELF" and not list(own_cache.iterdir())


def test_without_a_home_nothing_is_kept(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("QCOMPILE_CACHE")
    monkeypatch.setattr(user_cache.Path, "home", staticmethod(homeless))
    assert compiler.compile(SMALL, AVX2) == compiler.compile(SMALL, AVX2) != b""
    assert user_cache.recall(user_cache.cache_dir() / "x") is None


def test_a_cache_that_cannot_be_written_does_no_harm(own_cache: Path) -> None:
    own_cache.write_text("a file, not a folder")
    assert compiler.compile(SMALL, AVX2)[:4] == b"\x7fELF"


def test_a_compiler_ends_when_nobody_wants_what_it_makes(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers an interrupt that reaches only the build and not its children, as from a notebook."""
    given_up, started = Event(), time.monotonic()
    Timer(0.3, given_up.set).start()
    with pytest.raises(children.GivenUpError):
        children.run(["sleep", "60"], "", given_up)
    assert time.monotonic() - started < 30
    with pytest.raises(children.GivenUpError):
        compile_all([Kernel("never", "", ())], 80, given_up=given_up)
    assert children.run(["cat"], "text", None).stdout == "text"


def test_no_compiler_is_said_in_one_line(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(own_cache))
    with pytest.raises(ResourceError, match=r"no C\+\+ compiler found: put g\+\+ or clang\+\+ on the PATH"):
        compiler.compile(SMALL, AVX2)


def test_an_error_of_the_compiler_is_said_in_one_line(own_cache: Path) -> None:
    with pytest.raises(ResourceError, match=r"could not compile the kernels for cpu-avx2: .*error") as caught:
        compiler.compile("int x = ;\n", AVX2)
    assert "\n" not in str(caught.value)
    assert not own_cache.exists() or not list(own_cache.iterdir())
