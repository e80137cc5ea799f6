"""Recipes, options, targets and the roofline: all of it is data."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from qcompile import targets
from qcompile.errors import UsageError
from qcompile.formats.activations import ACTIVATIONS
from qcompile.formats.kv import KV_FORMATS
from qcompile.formats.registry import STORED_FORMATS
from qcompile.recipes import HEADS, RECIPES, allocation, apply_options, get_recipe, option_texts, parse_options
from qcompile.roofline import CPU_CORE, Peaks, StepShape, call_cost, peaks_of, predicted_us
from qcompile.targets import TARGET_NAMES, get_target

FIELDS = {
    "quantize": {"rounding": "nearest"},
    "clip": {"rounding": "nearest", "steps": 10, "ratio": 0.5, "search": True},
    "cache": {"format": "kv16"},
}
V3 = "avx2 bmi1 bmi2 f16c fma abm movbe"
V4 = "avx512f avx512bw avx512cd avx512vl avx512dq"


def test_every_recipe_names_formats_that_exist() -> None:
    for recipe in RECIPES.values():
        assert recipe.weight in STORED_FORMATS
        assert recipe.activation in ACTIVATIONS
        assert recipe.kv in KV_FORMATS
        assert HEADS[recipe.head][0] in STORED_FORMATS


def test_settings_are_the_recipe_and_its_head() -> None:
    settings = get_recipe("w4a8").settings()
    assert settings["assign_precision"] == {
        "weight": "w4_asym_g128",
        "activation": "int8",
        "head": "w8_sym_channel",
        "head_activation": "int8",
    }
    assert settings["cache"] == {"format": "kv16"}
    assert get_recipe("w4a8").settings("bf16")["assign_precision"]["head"] == "bf16"
    assert get_recipe("f32").settings()["assign_precision"]["head"] == "f32"


def test_activations_of_a_recipe_may_differ_on_cpus() -> None:
    on_cpu, on_gpu = (get_recipe("w8a8").settings(kind=kind)["assign_precision"] for kind in ("cpu", "cuda"))
    assert (on_cpu["activation"], on_cpu["head_activation"]) == ("int8_g128", "int8_g128")
    assert (on_gpu["activation"], on_gpu["head_activation"]) == ("int8", "int8")
    assert get_recipe("w8a8").settings("bf16")["assign_precision"]["head_activation"] == "bf16"
    for recipe in RECIPES.values():
        assert (recipe.cpu_activation or "int8") in ACTIVATIONS


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_heads_beside_bfloat16_activations_have_fine_ones_on_cpus(recipe: str) -> None:
    on_cpu, on_gpu = (get_recipe(recipe).settings("int8", kind)["assign_precision"] for kind in ("cpu", "cuda"))
    fine = on_cpu["activation"] == "bf16" or recipe in ("w8a8", "w8a8-g32")
    assert on_cpu["head_activation"] == ("int8_g128" if fine else "int8") and on_gpu["head_activation"] == "int8"
    assert get_recipe(recipe).settings("bf16")["assign_precision"]["head_activation"] == "bf16"


@pytest.mark.parametrize("name", ["", "W4A8", "gptq"])
def test_unknown_names_list_what_exists(name: str) -> None:
    with pytest.raises(UsageError, match=r"there are f32, bf16.*mxfp4"):
        get_recipe(name)
    with pytest.raises(UsageError, match=r"there are cpu, cpu-amx, cpu-avx512vnni"):
        get_target(name)
    if name:
        with pytest.raises(UsageError, match="there are int8, nested, bf16, f32"):
            get_recipe("w4a8").settings(name)


def test_an_option_names_a_field_of_a_pass() -> None:
    merged = apply_options({"cache": {"format": "kv4"}}, FIELDS, parse_options(["cache.format=kv8", "clip.steps=3"]))
    assert merged == {"cache": {"format": "kv8"}, "clip": {"steps": 3}}


def test_a_field_alone_goes_to_every_pass_that_has_it() -> None:
    merged = apply_options({}, FIELDS, {"rounding": "nearest"})
    assert merged == {"quantize": {"rounding": "nearest"}, "clip": {"rounding": "nearest"}}


def test_settings_given_are_not_changed() -> None:
    settings = {"cache": {"format": "kv16"}}
    apply_options(settings, FIELDS, {"cache.format": "kv8"})
    assert settings == {"cache": {"format": "kv16"}}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("cash.format=kv8", "pass cash is unknown; there are quantize, clip, cache"),
        ("cache.bits=8", "pass cache has no field bits; there are format$"),
        ("nothing=1", "a field of no pass; there are quantize.rounding"),
        ("clip.steps=many", "a whole number"),
        ("clip.ratio=nan", "a number"),
        ("clip.ratio=half", "a number"),
        ("clip.search=maybe", "true or false"),
        ("rounding", "write pass.field=value"),
        ("=nearest", "write pass.field=value"),
        ("rounding=", "write pass.field=value"),
    ],
)
def test_wrong_options_are_refused(option: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        apply_options({}, FIELDS, parse_options([option]))


def test_a_program_may_write_values_as_they_are() -> None:
    given = {"clip.ratio": 0.25, "clip.search": False, "clip.steps": 7, "cache.format": "kv8"}
    texts = option_texts(given)
    assert texts == {"clip.ratio": "0.25", "clip.search": "False", "clip.steps": "7", "cache.format": "kv8"}
    merged = apply_options({}, FIELDS, texts)
    assert merged == {"clip": {"ratio": 0.25, "search": False, "steps": 7}, "cache": {"format": "kv8"}}
    with pytest.raises(UsageError, match=r"option clip\.steps must be a text, a number, True or False, not \[7\]"):
        option_texts({"clip.steps": [7]})


def test_values_are_read_in_the_type_of_the_default() -> None:
    merged = apply_options({}, FIELDS, {"clip.ratio": "0.25", "clip.search": "False", "clip.steps": "7"})
    assert merged == {"clip": {"ratio": 0.25, "search": False, "steps": 7}}


def test_cpu_is_a_target_this_host_can_run() -> None:
    target = get_target("cpu")
    assert target.name == "cpu" and not targets.missing_flags(target.requires)


@pytest.mark.parametrize(
    ("flags", "isa"),
    [
        (f"{V3} {V4} avx512_vnni avx512_bf16 avx512vbmi amx_tile amx_int8 amx_bf16", "amx"),
        (f"{V3} {V4} avx512_vnni avx512_bf16 avx512vbmi amx_tile amx_int8", "avx512"),
        (f"{V3} {V4} avx512_vnni avx512_bf16 avx512vbmi", "avx512"),
        (f"{V3} {V4} avx512_vnni", "avx2"),
        (f"{V3} avx_vnni", "avx2vnni"),
        (V3, "avx2"),
        (V3.replace("bmi2", ""), "portable"),
        ("sse4_2", "portable"),
        ("", "portable"),
    ],
)
def test_cpu_is_the_best_level_the_flags_allow(flags: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "cpu_flags", lambda: frozenset(flags.split()))
    assert get_target("cpu").isa == isa


@pytest.mark.parametrize("granted", [True, False])
def test_tiles_that_the_system_does_not_grant_are_none(granted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        targets, "open", lambda *a, **k: io.StringIO("model name: x\nflags\t\t: fma amx_tile amx_int8\n"), raising=False
    )
    monkeypatch.setattr(targets, "_tiles_granted", lambda: granted)
    assert targets.cpu_flags.__wrapped__() == ({"fma", "amx_tile", "amx_int8"} if granted else {"fma"})


def test_every_target_name_is_a_target() -> None:
    assert [get_target(name).name for name in TARGET_NAMES] == list(TARGET_NAMES)


def test_roofline_takes_the_longer_of_moving_and_computing() -> None:
    peaks = Peaks(1e9, {"int8": 1e12, "f32": 1e10}, overhead_us=0.5)
    assert predicted_us(2e3, 10, peaks) == pytest.approx(2.5)
    assert predicted_us(10, 3e6, peaks) == pytest.approx(3.5)
    assert predicted_us(10, 3e6, peaks, "f32") == pytest.approx(300.5)


def test_a_gemm_costs_its_weights_and_its_rows() -> None:
    program = {
        "buffers": [{"name": "a", "dtype": "q8", "width": 64}, {"name": "b", "dtype": "f32", "width": 32}],
        "kv": {"page_bytes": 4864, "page_tokens": 64, "layers": 2, "layer_page_bytes": [1664, 3200]},
    }
    call = {"kernel": "gemm", "x": "a", "out": "b", "n": 32, "k": 64, "weights": {"codes": "w", "scale": "s"}}
    cost = call_cost(call | {"bias": None, "residual": None}, program, {"w": 1024, "s": 128}, StepShape(1))
    assert cost == (64 + 32 * 4 + 1024 + 128, 2 * 32 * 64, "int8")
    attention = {"kernel": "attention", "q": "b", "out": "b", "heads": 2, "head_dim": 16, "layer": 1, "value": None}
    assert call_cost(attention, program, {}, StepShape(10)).bytes == 2 * 128 + 10 * 50


def test_a_recurrent_layer_costs_its_state_whatever_the_context() -> None:
    program = {"buffers": [{"name": "x", "dtype": "f32", "width": 32}], "kv": {}}
    conv = {"kernel": "conv_step", "x": "x", "out": "x", "features": 32, "width": 4}
    assert call_cost(conv, program, {}, StepShape(10)) == (2 * 128 + 2 * 4 * 128, 2 * 128, "f32")
    step = {"kernel": "recurrence_step", "q": "x", "out": "x", "heads": 2, "key_dim": 8, "value_dim": 4, "delta": True}
    step |= {"key_heads": 1, "by_key": False}
    assert call_cost(step, program, {}, StepShape(10**6)) == (2 * 128 + 2 * 4 * 64, 8 * 64, "f32")
    # In bf16 it is read each time, and written every eighth. Of 18 numbers of the log, 3.5 times as many are read.
    rounded = call_cost(step | {"stored": "bf16"}, program, {}, StepShape(10**6))
    assert rounded.bytes == 2 * 128 + 2 * 64 * (1 + 1 / 8) + 4 * 18 * (3.5 + 7 / 8)


def test_the_readme_lists_every_recipe_and_target() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in text for name in RECIPES)
    assert all(f"`{name}`" in text for name in TARGET_NAMES)


def test_bits_or_a_limit_on_perplexity_are_options_of_a_pass() -> None:
    assert allocation(None, None) == {}
    assert allocation(4.4, None) == {"salience.target_bits": "4.4"}
    assert allocation(None, 0.05) == {"salience.max_perplexity_increase": "0.05"}
    with pytest.raises(UsageError, match="give one of them"):
        allocation(4.4, 0.05)
    for rise in (0.0, -1.0, float("nan")):
        with pytest.raises(UsageError, match="above 0"):
            allocation(None, rise)


def test_rates_of_a_gpu_are_its_data_sheets() -> None:
    assert peaks_of("cpu") is CPU_CORE is peaks_of("cpu-portable")
    peaks = peaks_of("h100")
    assert peaks.bytes_per_second == 3350e9 and peaks.ops_per_second["int8"] == 1979e12
    assert predicted_us(3350e6, 1.0, peaks) == pytest.approx(1000)
    assert peaks_of("l40s").ops_per_second == pytest.approx({"int8": 733e12, "bf16": 362e12, "f32": 91.6e12})
    with pytest.raises(UsageError, match="target z80 is unknown"):
        peaks_of("z80")
