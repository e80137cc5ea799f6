"""Nothing below the front end knows a model by name: dataflow decides."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).parents[1]
FILES = [p for layer in ("passes", "codegen", "runtime") for p in sorted((ROOT / layer).rglob("*")) if p.is_file()]
SOURCES = [p for p in FILES if p.suffix in (".py", ".jinja", ".h", ".cpp")]

ORDINARY = {
    "align": "what is done to addresses",
    "bit": "a binary digit",
    "clip": "to bound values",
    "codegen": "the layer that generates code",
    "ctrl": "a key of the keyboard",
    "cvt": "an instruction of PTX, which converts",
    **dict.fromkeys(
        ("mistral", "granite", "jamba", "minimax_m2", "seed_oss"),
        "a format of tool calls, by its usual name (runtime/parsers/formats.py)",
    ),
    "minimax": "a part of the tags of such a format",
}
"""Names of transformers that are words of their own: why each may appear."""


def words(path: Path) -> set[str]:
    """Identifiers and words of a file, in lower case; `a-b` counts as a_b too."""
    text = path.read_text(encoding="utf-8").lower()
    return set(re.findall(r"[a-z0-9_]+", text)) | {w.replace("-", "_") for w in re.findall(r"[a-z0-9_-]+", text)}


def model_types() -> set[str]:
    return {name.lower().replace("-", "_") for name in CONFIG_MAPPING}


def class_names() -> set[str]:
    """Configurations and causal models, with and without what their names end in."""
    causal = [name for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if kind != "qcompile"]
    names = {name for result in causal for name in ([result] if isinstance(result, str) else result)}
    return {name.lower() for name in names | {CONFIG_MAPPING[kind].__name__ for kind in CONFIG_MAPPING}}


def parameter_names() -> set[str]:
    """Parts of parameter names of some families that are no single word."""
    result: set[str] = set()
    for kind in ("llama", "gpt2", "opt", "gpt_neox", "qwen3_moe", "bloom", "phi3", "falcon"):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind))
        result |= {part for name in model.state_dict() for part in name.split(".") if "_" in part}
    return result


@pytest.mark.parametrize("names", [model_types, class_names, parameter_names])
def test_no_name_of_a_model_appears(names: object) -> None:
    assert callable(names)
    forbidden = names() - set(ORDINARY)
    assert len(forbidden) > 20
    result = {str(p.relative_to(ROOT)): sorted(words(p) & forbidden) for p in SOURCES}
    assert not {path: hits for path, hits in result.items() if hits}
