"""Whole steps of a tiny Llama through the generated library, against torch and bitwise comparisons."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qcompile.targets import TARGETS, get_target, missing_flags
from tests.support.cases import first
from tests.support.tiny import Chunk, Runner, Tiny, head_weight, reference

TOKENS = np.random.default_rng(7).integers(0, 203, 150).tolist()
FORMATS = {
    "f32": Tiny(),
    "bf16": Tiny("bf16", "bf16", "kv16"),
    "w8": Tiny("w8_sym_channel", "q8", "kv8"),
    "w4a16": Tiny("w4_asym_g128", "bf16", "kv16"),
    "w4a8": Tiny("w4_asym_g128", "q8", "kv8"),
    "qoq": Tiny("qoq_g128", "q8", "kv4"),
    "qoq_channel": Tiny("qoq_channel", "q8", "kv4"),
    "mxfp4": Tiny("mxfp4", "q8", "kv16", activation="int8_g128"),
    "quantized where made": Tiny(
        "w4_asym_g128", "q8", "kv16", activation="int8_g128", heads=8, kv_heads=2, head_dim=32, inner=256
    ),
    "w4a4": Tiny("w4_asym_g128", "q8", "kv8", activation="int4_g128_outlier128"),
    "nested": Tiny("nested_8_4", "q8", "kv16"),
}
FIRST_FORMATS = FORMATS.keys() - {"w8", "w4a16", "qoq_channel"}
"""Of the others each kernel alone is compared in test_gemm.py, and models in test_every_recipe.py."""
SHAPES = {
    "window and softcap": Tiny(window=50, softcap=15.0),
    "interleaved, partial, no grouping": Tiny(kv_heads=4, interleaved=True, rotary_dim=16),
    "odd widths": Tiny(hidden=72, inner=80, heads=6, kv_heads=1, head_dim=20, rotary_dim=20, vocab=77),
    "odd widths, kv4": Tiny(kv="kv4", hidden=72, inner=80, heads=6, kv_heads=1, head_dim=20, rotary_dim=20),
}
HOST = [name for name, target in TARGETS.items() if target.kind == "cpu" and not missing_flags(target.requires)]
Open = Callable[..., Runner]


@pytest.fixture
def opened() -> Iterator[Open]:
    """A factory for Runners that closes them after the test."""
    runners: list[Runner] = []

    def make(*args: Any, **options: Any) -> Runner:
        runners.append(Runner(*args, **options))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


@pytest.mark.parametrize("kv", first(("kv32", "kv8", "kv4"), ["kv32", "kv16", "kv8", "kv4"]))
def test_equals_torch_with_every_cache(opened: Open, kv: str) -> None:
    tiny = Tiny(kv=kv)
    error = np.abs(opened(tiny).forward(TOKENS, [3, 1, 7], 150) - reference(tiny, TOKENS))
    # A value halfway between two codes may round differently in double and float: rare and small.
    assert np.median(error) < 1e-4 and error.max() < {"kv32": 2e-5, "kv16": 5e-3, "kv8": 1e-2, "kv4": 0.2}[kv]


@pytest.mark.parametrize("shape", first(SHAPES.keys() - {"odd widths"}, SHAPES))
def test_equals_torch_with_every_shape(opened: Open, shape: str) -> None:
    tiny = SHAPES[shape]
    tokens = [t % tiny.vocab for t in TOKENS]
    tolerance = 2e-5 if tiny.kv == "kv32" else 5e-2
    np.testing.assert_allclose(opened(tiny).forward(tokens, [3, 1, 7], 150), reference(tiny, tokens), atol=tolerance)


@pytest.mark.parametrize("name", first(FIRST_FORMATS, FORMATS))
def test_close_to_torch_in_every_format(opened: Open, name: str) -> None:
    logits = opened(FORMATS[name]).forward(TOKENS, [3, 1, 7], 150)
    error = np.abs(logits - reference(FORMATS[name], TOKENS))
    assert np.median(error) < 1e-2 and error.max() < 0.3


# Each cache and each kind of product once.
PAIRS = [("f32", "kv32"), ("f32", "kv4"), ("bf16", "kv16"), ("w4a8", "kv8"), ("mxfp4", "kv16")]
AGREE = [(target, *pair) for target in HOST[1:] for pair in PAIRS]
# The portable level has all by default. The others have products of integers, in which they differ the most, and of the
# rest every second one by turns; tests of GEMM kernels have all levels.
FIRST = {
    target: PAIRS[1:4:2] if target == "cpu-portable" else [*PAIRS[i % 2 :: 2], ("w4a8", "kv8")]
    for i, target in enumerate(HOST[1:])
}


@pytest.mark.parametrize(
    ("target", "name", "kv"),
    [
        pytest.param(*case, marks=[] if case[1:] in FIRST[case[0]] else pytest.mark.exhaustive, id="-".join(case))
        for case in AGREE
    ],
)
def test_instruction_sets_agree(opened: Open, name: str, kv: str, target: str) -> None:
    """Over several pages of every cache format."""
    tiny = replace(FORMATS[name], kv=kv)
    best, rows = (opened(tiny, target=get_target(name)).forward(TOKENS, [3, 1, 7], 150) for name in ("cpu", target))
    # Fused versus separate multiply and add; with int8 activations this can flip a rounding.
    assert np.abs(rows - best).max() < (1e-4 if tiny.act == "f32" else 2e-2)


@pytest.mark.parametrize("name", first(FIRST_FORMATS, FORMATS))
def test_rows_are_bitwise_independent_of_the_step(opened: Open, name: str) -> None:
    whole = opened(FORMATS[name]).forward(TOKENS, [3, 1, 7], 150)
    for threads, count, chunks in ((1, 150, (1, 2, 3, 5, 8, 17, 64)), (2, 70, (1, 3, 8, 17)), (3, 70, (1, 5))):
        model = opened(FORMATS[name], threads=threads)
        for chunk in chunks:
            rows = model.forward(TOKENS[:count], [9, 4, 11], chunk)
            np.testing.assert_array_equal(rows, whole[:count], f"{threads=} {chunk=}")


HEADS = {
    **{name: FORMATS[name] for name in ("f32", "bf16", "w8", "w4a4")},
    "odd widths": SHAPES["odd widths"],
    "two scales a row": Tiny("w8_sym_channel", "q8", "kv16", activation="int8_g128", hidden=160, layers=1),
}


@pytest.mark.parametrize("head", first(HEADS.keys() - {"w8", "odd widths"}, HEADS))
def test_hidden_states_are_what_the_head_reads(opened: Open, head: str) -> None:
    """Their products with the head's weight are the logits, and their bits depend on nothing else in the step."""
    tiny = HEADS[head]
    tokens = [token % tiny.vocab for token in TOKENS[:70]]
    model = opened(tiny, threads=2)
    whole = model.hidden([Chunk(tokens, 0, [3, 1])])
    logits = model.step([Chunk(tokens, 0, [3, 1])])
    # Sums of at most 160 products in float32.
    np.testing.assert_allclose(whole @ head_weight(tiny).T.numpy(), logits, atol=2e-5, rtol=1e-5)
    for chunk in (1, 3, 64):
        starts = range(0, len(tokens), chunk)
        rows = np.concatenate([model.hidden([Chunk(tokens[at : at + chunk], at, [4, 0])]) for at in starts])
        np.testing.assert_array_equal(rows, whole)
    some = model.hidden([Chunk(tokens[5:25], 0, [2]), Chunk(tokens[:60], 0, [5])], [19, 20, 79])
    np.testing.assert_array_equal(some[1:], whole[[0, 59]])
    assert len(model.hidden([Chunk(tokens[:9], 0, [2])], [])) == 0


@pytest.mark.parametrize("name", first(FIRST_FORMATS, FORMATS))
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_are_bitwise_independent_of_the_batch(opened: Open, name: str, threads: int) -> None:
    model = opened(FORMATS[name], threads=threads)
    alone = model.forward(TOKENS[:70], [0, 1], 70)
    others = [Chunk(TOKENS[5:25], 0, [2]), Chunk(TOKENS[30:31], 0, [3]), Chunk(TOKENS[40:43], 0, [4])]
    together = model.step([*others[:2], Chunk(TOKENS[:60], 0, [5, 6]), others[2]])
    np.testing.assert_array_equal(together[21:81], alone[:60])
    together = model.step([Chunk(TOKENS[25:30], 20, [2]), Chunk(TOKENS[60:70], 60, [5, 6])])
    np.testing.assert_array_equal(together[5:], alone[60:])


def test_only_wanted_rows_give_logits(opened: Open) -> None:
    model = opened(FORMATS["w4a8"], threads=2)
    whole = model.step([Chunk(TOKENS[:40], 0, [2])])
    np.testing.assert_array_equal(model.step([Chunk(TOKENS[:40], 0, [2])], [39, 3]), whole[[39, 3]])
    assert model.step([Chunk(TOKENS[:40], 0, [2])], []).shape == (0, 203)


@pytest.mark.parametrize("threads", [1, 2])
def test_decode_feeds_its_tokens_back(opened: Open, threads: int) -> None:
    model = opened(FORMATS["w4a8"], threads=threads)
    prompts = {0: TOKENS[:61], 1: TOKENS[70:80]}
    pages = {0: [0, 1], 1: [2, 3]}
    expected: dict[int, list[int]] = {}
    for s, prompt in prompts.items():
        model.forward(prompt[:-1], pages[s], 64)
        tokens = list(prompt)
        for _ in range(12):
            tokens.append(int(model.step([Chunk(tokens[-1:], len(tokens) - 1, pages[s])]).argmax()))
        expected[s] = tokens[len(prompt) :]
    for s, prompt in prompts.items():
        model.forward(prompt[:-1], pages[s], 64)
    batch, arrays = model.batch([Chunk(prompts[s][-1:], len(prompts[s]) - 1, pages[s]) for s in (0, 1)])
    out = np.zeros((12, 2), np.int32)
    assert model.library.qc_decode(model.handle, ctypes.byref(batch), 12, out.ctypes.data) == 0
    assert out.T.tolist() == [expected[0], expected[1]]
    assert arrays["token_ids"].tolist() == [prompts[0][-1], prompts[1][-1]], "the caller's arrays are only read"


BAD = {
    "no tokens": {"tokens": 0},
    "more tokens than opened for": {"tokens": 161},
    "no sequences": {"sequences": 0},
    "table too narrow": {"block_stride": 0},
    "more outputs than rows opened for": {"outputs": 161},
    "null token ids": {"token_ids": None},
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD.keys())
def test_bad_batches_are_refused(opened: Open, change: dict[str, Any]) -> None:
    model = opened(Tiny())
    batch, arrays = model.batch([Chunk(TOKENS[:4], 0, [0])])
    for name, value in change.items():
        setattr(batch, name, value)
    assert model.library.qc_step(model.handle, ctypes.byref(batch)) == 1
    assert np.isnan(arrays["logits"]).all()


@pytest.mark.parametrize(
    ("array", "index", "value"),
    [
        ("token_ids", 1, -1),
        ("token_ids", 1, 203),
        ("positions", 0, -1),
        ("positions", 2, 7),
        ("positions", slice(None), [510, 511, 512, 513]),
        ("query_start", 0, 1),
        ("query_start", 1, 3),
        ("block_table", (0, 0), -1),
        ("block_table", (0, 0), 24),
        ("output_rows", 0, 4),
        ("output_rows", 0, -1),
    ],
)
def test_bad_values_are_refused(opened: Open, array: str, index: Any, value: Any) -> None:
    model = opened(Tiny())
    batch, arrays = model.batch([Chunk(TOKENS[:4], 0, [0] * 10)])
    arrays[array][index] = value
    assert model.library.qc_step(model.handle, ctypes.byref(batch)) == 1
    assert np.isnan(arrays["logits"]).all()


def test_profile_counts_every_call(opened: Open) -> None:
    model = opened(Tiny(), threads=2)
    names = json.loads(model.library.qc_describe())["calls"]
    assert model.library.qc_profile(model.handle, 1) == 0
    for _ in range(3):
        model.step([Chunk(TOKENS[:4], 0, [0])])
    seconds, counts = np.zeros(len(names)), np.zeros(len(names), np.int64)
    read = model.library.qc_profile_read
    assert read(model.handle, seconds.ctypes.data, counts.ctypes.data, len(names)) == 0
    assert (counts == 3).all() and (seconds > 0).all()
    assert read(model.handle, seconds.ctypes.data, counts.ctypes.data, len(names) + 1) == 1


def test_probes_measure(opened: Open) -> None:
    model = opened(Tiny())
    read, int8, f32, bf16 = (model.library.qc_probe(model.handle, what) for what in range(4))
    assert 0.5 < read < 5000 and int8 > f32 > 1 and bf16 > 1
    assert model.library.qc_probe(model.handle, 4) == 0


def test_layers_with_other_rotations_have_their_own_table(opened: Open) -> None:
    """Programs that differ only in their rotation use different tables."""
    tiny = Tiny()
    slow = replace(tiny, rotary_dim=16)
    a, b = opened(tiny).forward(TOKENS[:9], [0], 9), opened(slow).forward(TOKENS[:9], [0], 9)
    np.testing.assert_array_equal(a[0], b[0])  # position 0 is not rotated
    assert np.abs(a[8] - b[8]).max() > 1e-3
