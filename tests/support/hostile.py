"""Random damage to the files that others make: headers of weights, configurations, tokenizers, manifests, GGUF files.

Case s of a kind damages a good file, by a random generator that begins with s. It is right if what reads the file
accepts it, or refuses it in one line with a documented exit code, in little time and memory.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import struct
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qcompile import pipeline
from qcompile.artifact.layout import MANIFEST, canonical_json, seal
from qcompile.artifact.reader import verify
from qcompile.checkpoints import hub, huggingface
from qcompile.checkpoints.checkpoint import SINGLE, Checkpoint
from qcompile.checkpoints.configuration import read_config, text_config
from qcompile.checkpoints.gguf.header import KINDS as GGUF_KINDS
from qcompile.checkpoints.gguf.header import read_header
from qcompile.checkpoints.stored import formats
from qcompile.checkpoints.tokenizer_files import tokenizer_files
from qcompile.cli import inspect
from qcompile.errors import QCompileError
from qcompile.runtime.chat import chat_template
from qcompile.runtime.generation_config import sampling_defaults
from qcompile.runtime.special_tokens import end_tokens
from qcompile.runtime.tokenizer import encode, load_tokenizer
from tests.checkpoints.gguf import writing
from tests.support.fake import byte_tokenizer, listed
from tests.support.make_gguf import FILES

CODES = frozenset({2, 3, 5, 6})
"""Exit codes that refuse a file."""
MOST_SECONDS, MOST_BYTES, MOST_LETTERS = 2.0, 1 << 30, 1000
"""Processor time and additional memory of a case, and the length of a message."""
TRACE_SECONDS, _MOST_LAYERS = 40.0, 2
"""Processor time of a case that traces a model and compiles it, and the layers of the largest one."""

DEEP = "[" * 3000 + "]" * 3000
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**63 - 1, 2**64, 10**300, 0.5, -0.0, 1e308, float("inf"), float("nan")),
    *("", "x", "\x1b[31m", "\ud800", "\0", "../../../etc/passwd", "{{ 9 ** 9 }}", "é" * 300, "F32", "auto", "default"),
    *([], [[]], [None], [0], [-1, 2**40], ["a", "a"], {}, {"": None}, {"rope_type": "linear"}, {"a": {"b": [1]}}),
)
CONFIGS: tuple[Mapping[str, Any], ...] = tuple(
    {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64} | settings
    for settings in (
        {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8},
        {
            "model_type": "gpt2",
            "n_embd": 32,
            "n_layer": 1,
            "n_head": 4,
            "n_positions": 64,
            "activation_function": "gelu",
        },
        {"model_type": "gemma3_text", "hidden_size": 32, "intermediate_size": 48, "layer_types": ["full_attention"]},
        {"model_type": "mixtral", "hidden_size": 32, "intermediate_size": 48, "num_local_experts": 4},
        {
            **{"model_type": "phi3", "hidden_size": 32, "intermediate_size": 48, "pad_token_id": 0},
            "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
        },
        {"model_type": "mamba2", "hidden_size": 32, "num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8},
        {"model_type": "falcon", "hidden_size": 32, "alibi": True, "new_decoder_architecture": False},
        {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 64}, "vision_config": {}},
    )
)


@dataclass(frozen=True)
class Verdict:
    """What became of a case. wrong: what it did that it must not; empty if it is right."""

    wrong: str
    code: int
    seconds: float


def damaged(value: Any, draw: random.Random) -> Any:
    """A JSON value with something odd at a random place, or something missing or more."""
    place = draw.random()
    if isinstance(value, dict) and value and place < 0.9:
        name = draw.choice(sorted(value))
        if place < 0.08:
            return {key: part for key, part in value.items() if key != name}
        if place < 0.16:
            return value | {draw.choice([name + "x", "", "a\ud800", draw.choice(sorted(value))]): draw.choice(ODD)}
        return value | {name: damaged(value[name], draw)}
    if isinstance(value, list) and value and place < 0.9:
        index = draw.randrange(len(value))
        parts = [damaged(value[index], draw)] if place < 0.8 else []
        return [*value[:index], *parts, *value[index + 1 :], *([draw.choice(ODD)] if place < 0.1 else [])]
    if type(value) is int and place < 0.5:
        return draw.choice(
            [value + 1, value - 1, -value, value * 2, value << 20, value << 40, value % 99 / 4, str(value)]
        )
    return draw.choice(ODD)


def text_of(value: Any, draw: random.Random) -> bytes:
    """A value as JSON, sometimes with damage that no value has: bytes that are wrong, missing, or a name twice."""
    text = json.dumps(value).encode()
    place = draw.random()
    if place < 0.75:
        return text
    at = draw.randrange(len(text) + 1)
    if place < 0.83:
        return text[:at] + bytes(draw.randrange(256) for _ in range(draw.randrange(1, 5))) + text[at + 2 :]
    if place < 0.9:
        return text[:at]
    if place < 0.95:
        return text[:1] + b'"a":1,"a":2,' + text[1:]
    return text[:at] + draw.choice([DEEP, "1" * 5000, "NaN", "\n", "﻿"]).encode() + text[at:]


# ---- the kinds ------------------------------------------------------------------------------------


def header(seed: int, folder: Path) -> Callable[[], Any]:
    """A safetensors file; each of its tensors is read."""
    draw = random.Random(seed)
    entries = {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        "c": {"dtype": "I64", "shape": [], "data_offsets": [32, 40]},
        "__metadata__": {"format": "pt"},
    }
    changed: Any = entries
    for _ in range(draw.randrange(1, 4)):
        changed = damaged(changed, draw)
    text = text_of(changed, draw)
    length = (
        len(text) if draw.random() < 0.85 else draw.choice([0, 1, 7, max(0, len(text) - 1), 2**31, 2**63, 2**64 - 1])
    )
    data = bytes(draw.randrange(256) for _ in range(draw.choice([40, 40, 40, 0, 39, 41])))
    content = length.to_bytes(8, "little") + text + data
    (folder / SINGLE).write_bytes(content if draw.random() < 0.95 else content[: draw.randrange(len(content))])

    def read() -> None:
        checkpoint = Checkpoint(folder)
        for name in checkpoint:
            checkpoint.raw(name)

    return read


def configuration(seed: int, folder: Path) -> Callable[[], Any]:
    """A config.json; its model is made without memory for weights."""
    draw = random.Random(seed)
    changed: Any = dict(draw.choice(CONFIGS))
    for _ in range(draw.randrange(1, 4)):
        changed = damaged(changed, draw)
    (folder / "config.json").write_bytes(text_of(changed, draw))
    return lambda: huggingface.build(read_config(folder))


def tokenizer(seed: int, folder: Path) -> Callable[[], Any]:
    """A tokenizer with its settings, as a build takes it, and as the runtime opens it."""
    draw = random.Random(seed)
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    special = {"eos_token": {"content": "<eos>"}, "bos_token": "<s>"}
    files: dict[str, Any] = {
        "tokenizer.json": json.loads(byte_tokenizer().to_str()),
        "tokenizer_config.json": {"chat_template": template, "model_max_length": 100, **special},
        "special_tokens_map.json": special,
        "generation_config.json": {"eos_token_id": [0, 1], "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    }
    chosen = draw.choice(sorted(files))
    for _ in range(draw.randrange(1, 4)):
        files[chosen] = damaged(files[chosen], draw)
    for name, value in files.items():
        (folder / name).write_bytes(text_of(value, draw) if name == chosen else json.dumps(value).encode())

    def read() -> None:
        tokenizer_files(folder)
        entries = listed(folder)
        opened = load_tokenizer(folder, entries)
        chat_template(folder, entries)
        sampling_defaults(folder, entries)
        end_tokens(folder, entries, opened)
        if opened is not None:
            encode(opened, "def main(é")

    return read


def manifest(seed: int, folder: Path) -> Callable[[], Any]:
    """A manifest with the right hash of itself, of the artifact at `folder`, as `inspect` and `verify` read it."""
    draw = random.Random(seed)
    good = folder / "good.json"
    if not good.exists():
        good.write_bytes((folder / MANIFEST).read_bytes())
    changed: Any = json.loads(good.read_bytes())
    for _ in range(draw.randrange(1, 4)):
        changed = damaged(changed, draw)
    try:
        content = canonical_json(changed | {"sha256": seal(changed)})
    except (ValueError, TypeError, AttributeError):  # no object, or no number of JSON
        content = text_of(changed, draw)
    (folder / MANIFEST).write_bytes(content if draw.random() < 0.95 else text_of(changed, draw))

    def read() -> None:
        inspect.as_text(inspect.summary(folder))
        inspect.passes_as_text(inspect.passes(folder))
        verify(folder)

    return read


def gguf(seed: int, folder: Path) -> Callable[[], Any]:
    """A GGUF file with the weights, configuration and tokenizer of a model; each of its tensors is read."""
    draw = random.Random(seed)
    good, path = draw.choice(sorted(FILES.glob("*.gguf"))), folder / f"{seed}.gguf"
    content, numbers = good.read_bytes(), {kind: number for number, kind in GGUF_KINDS.items()}
    result = read_header(good)
    places = {name: {"shape": list(at.shape), "kind": numbers[at.kind]} for name, at in result.tensors.items()}
    more = {"split.count": 0, "tokenizer.chat_template": "{{ messages }}", "general.alignment": 32}
    changed: Any = {"metadata": more | result.metadata, "tensors": places}
    for _ in range(draw.randrange(1, 4)):
        changed = damaged(changed, draw)
    try:
        data = {name: content[at.begin : at.end] for name, at in result.tensors.items()}
        tensors = {
            name: writing.Tensor(tuple(at["shape"]), data[name], at["kind"]) for name, at in changed["tensors"].items()
        }
        metadata = {name: _gguf_value(value) for name, value in changed["metadata"].items()}
        writing.File(metadata, tensors).write(path)
    except (KeyError, TypeError, AttributeError, ValueError, struct.error):  # what no file can say
        path.write_bytes(_damaged_bytes(content, draw))
    if draw.random() < 0.3:
        path.write_bytes(_damaged_bytes(path.read_bytes(), draw))

    def read() -> None:
        made = hub.find(path)
        huggingface.build(read_config(made))
        checkpoint = formats.open_checkpoint(made)
        for name in checkpoint:
            checkpoint.raw(name)
        tokenizer_files(made)

    return read


def _gguf_value(value: Any) -> bytes:
    """A value with its type, of the types that a GGUF file has."""
    if isinstance(value, list):
        kinds = {_gguf_value(one)[:4] for one in value}
        value = value if len(kinds) == 1 else [str(one) for one in value] or [""]
        parts = [_gguf_value(one) for one in value]
        head = struct.pack("<I", writing.LIST) + parts[0][:4] + struct.pack("<Q", len(parts))
        return head + b"".join(part[4:] for part in parts)
    if type(value) is int:
        if 0 <= value < 1 << 32:
            return writing.value(value)
        return struct.pack("<Iq", 11, value) if value < 1 << 63 else struct.pack("<IQ", 10, value)
    if isinstance(value, float):
        return struct.pack("<Id", 12, value)
    if isinstance(value, bool):
        return writing.value(value)
    return struct.pack("<I", writing.TEXT) + writing.text(str(value).encode("utf-8", "surrogatepass"))


def _damaged_bytes(content: bytes, draw: random.Random) -> bytes:
    """A file that ends early, or differs in bytes at a few places, most of them at its beginning."""
    if draw.random() < 0.2:
        return content[: draw.randrange(len(content))]
    changed = bytearray(content)
    for _ in range(draw.randrange(1, 6)):
        at = draw.randrange(draw.choice([32, 400, len(content)]))
        odd = draw.choice([b"\xff" * 8, bytes(8), (1 << 40).to_bytes(8, "little"), bytes([draw.randrange(256)])])
        changed[at : at + len(odd)] = odd
    return bytes(changed[: len(content)])


def trace(seed: int, folder: Path) -> Callable[[], Any]:
    """A config.json of which a model can be made; it is traced, and compiled without its weights."""
    draw = random.Random(seed)
    for _ in range(200):
        changed: Any = dict(draw.choice(CONFIGS))
        for _ in range(draw.randrange(1, 3)):
            changed = damaged(changed, draw)
        (folder / "config.json").write_text(json.dumps(changed))
        with contextlib.suppress(QCompileError):
            config = read_config(folder)
            huggingface.build(config)
            if getattr(text_config(config), "num_hidden_layers", 0) <= _MOST_LAYERS:
                break
    return lambda: pipeline.plan(str(folder), recipe="w8a8", weights=False)


KINDS = {
    **{"header": header, "configuration": configuration, "tokenizer": tokenizer, "manifest": manifest},
    **{"gguf": gguf, "trace": trace},
}


MADE = ("configuration", "gguf", "trace")
"""Kinds of which models are made."""


def warm_up(folder: Path) -> None:
    """Import what making a model needs: it counts for no case. Leaves no file."""
    place = folder / "config.json"
    for config in CONFIGS:
        place.write_text(json.dumps(config))
        with contextlib.suppress(QCompileError):
            huggingface.build(read_config(folder))
    place.unlink()


def examine(kind: str, seed: int, folder: Path) -> Verdict:
    """Case `seed` of a kind, with its files in `folder`."""
    read = KINDS[kind](seed, folder)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    wrong, code = "", 0
    try:
        read()
    except QCompileError as error:
        code, message = error.exit_code, str(error)
        if code not in CODES or "\n" in message or len(message) > MOST_LETTERS:
            wrong = f"exit code {code}: {message[:200]!r} of {len(message)} letters"
    except Exception as error:  # whatever else is a bug
        last = traceback.extract_tb(error.__traceback__)[-1]
        code, wrong = 1, f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {str(error)[:200]}"
    seconds = time.process_time() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if seconds > (TRACE_SECONDS if kind == "trace" else MOST_SECONDS):
        wrong = wrong or f"takes {seconds:.1f} s"
    if grown > MOST_BYTES:
        wrong = wrong or f"takes {grown:,} bytes"
    return Verdict(wrong, code, seconds)
