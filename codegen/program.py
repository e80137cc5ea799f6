"""The program of one model step: buffers, weights, the KV cache, and kernel calls in order.

`codegen.lower` builds a Program from the final graph; `codegen.cpu` renders it to C++, `codegen.gpu` plans its
launches. A program and all its parts (buffers.py, calls.py, kv_layout.py) are values: frozen, comparable, and printable
as JSON (`Program.to_json`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from qcompile.codegen.buffers import Buffer
from qcompile.codegen.calls import Call, Embed
from qcompile.codegen.feature_calls import ReadFeatures, WriteFeatures
from qcompile.codegen.kv_layout import KVLayout
from qcompile.formats.states import StateLayout


@dataclass(frozen=True)
class Program:
    """One model step. `weights` are in the order of qc_config.weights."""

    vocab_size: int
    max_position: int
    buffers: tuple[Buffer, ...]
    calls: tuple[Call, ...]
    weights: tuple[str, ...]
    kv: KVLayout
    states: StateLayout = field(default_factory=StateLayout)
    head: str | None = None
    """The call that computes the logits of a model's final hidden states; None if passes have changed these."""
    _by_name: dict[str, Buffer] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {b.name: b for b in self.buffers})

    def buffer(self, name: str) -> Buffer:
        """The buffer called `name` (KeyError if there is none)."""
        return self._by_name[name]

    @property
    def reads_features(self) -> bool:
        """Whether a step needs features of each row: the program is a draft head's."""
        return any(isinstance(call, ReadFeatures) for call in self.calls)

    @property
    def features(self) -> int:
        """Width of the features that a step returns for each row besides logits; 0 if it returns none."""
        return next((self.buffer(call.x).width for call in self.calls if isinstance(call, WriteFeatures)), 0)

    @property
    def token_ids(self) -> int:
        """Number of tokens that rows may have: of a draft head more than it has logits."""
        tables = [call.vocab for call in self.calls if isinstance(call, Embed) and call.index == "tokens"]
        return max([self.vocab_size, *tables]) if self.reads_features else self.vocab_size

    def arena_bytes(self, rows: Literal["tokens", "outputs"]) -> int:
        """Arena bytes per row of that kind."""
        return max((b.offset + b.row_bytes for b in self.buffers if b.rows == rows), default=0)

    @property
    def cache_facts(self) -> dict[str, Any]:
        """What the manifest records about the KV cache, and the bytes of a sequence's recurrent states if any."""
        states: dict[str, Any] = {"slot_bytes": self.states.slot_bytes} if self.states.layers else {}
        return self.kv.facts | states | ({"state_format": form} if (form := self.states.stored) != "f32" else {})

    def to_json(self) -> str:
        """Canonical JSON with one object per buffer and call, for graphs/ and for reading."""
        data: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "max_position": self.max_position,
            "buffers": [asdict(b) for b in self.buffers],
            "calls": [{"kernel": c.kernel, **asdict(c)} for c in self.calls],
            "weights": list(self.weights),
            "kv": asdict(self.kv) | {"page_bytes": self.kv.page_bytes, "layer_page_bytes": self.kv.layer_page_bytes},
            "arena_bytes_per_token": self.arena_bytes("tokens"),
            "arena_bytes_per_output": self.arena_bytes("outputs"),
        }
        if self.head:
            data["head"] = self.head
        if self.states.layers:
            data["states"] = {"layers": len(self.states.layers), "slot_bytes": self.states.slot_bytes}
            data["states"] |= {"format": self.states.stored}
        return json.dumps(data, sort_keys=True, indent=1) + "\n"
