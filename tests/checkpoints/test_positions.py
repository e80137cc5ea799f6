"""Models that number tokens in a way of their own if they are given no positions are refused, and no others."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from qcompile.checkpoints import frontend, huggingface, positions
from qcompile.errors import UnsupportedError

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
DECODER = SMALL | {"is_decoder": True, "intermediate_size": 32, "max_position_embeddings": 32}
LLAMA = SMALL | {"intermediate_size": 32, "num_key_value_heads": 1, "max_position_embeddings": 32}


def load(folder: Path, kind: str, settings: dict[str, Any]) -> Any:
    AutoConfig.for_model(kind, **settings).save_pretrained(folder)
    return frontend.load(folder, weights=False)


def test_positions_that_depend_on_padding_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"^roberta computes something else with the positions 0, 1, 2"):
        load(tmp_path, "roberta", DECODER)


def test_an_offset_that_only_own_positions_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaModel

    plain = LlamaModel.forward

    @functools.wraps(plain)
    def forward(self: Any, input_ids: Any = None, position_ids: Any = None, **more: Any) -> Any:
        if position_ids is None:
            position_ids = torch.arange(2, 2 + input_ids.shape[1])[None]
        return plain(self, input_ids=input_ids, position_ids=position_ids, **more)

    monkeypatch.setattr(LlamaModel, "forward", forward)
    with pytest.raises(UnsupportedError, match=r"^llama computes something else with the positions 0, 1, 2"):
        load(tmp_path, "llama", LLAMA)


@pytest.mark.parametrize(
    "kind, settings",
    [
        ("llama", LLAMA),
        ("bert-generation", DECODER),  # reads a buffer of positions that no file has
        ("xglm", {"vocab_size": 64, "d_model": 32, "num_layers": 1, "attention_heads": 2, "ffn_dim": 32}),  # from 2 on
    ],
)
def test_numbers_from_0_on_are_the_same_with_and_without_positions(kind: str, settings: dict[str, Any]) -> None:
    module = huggingface.build(AutoConfig.for_model(kind, **settings), attention_kind=None)
    huggingface.require_numbering(module)


def test_a_call_that_fails_is_compared_up_to_there() -> None:
    same, other = [("embedding", 0), ("add", 1)], [("embedding", 1)]
    positions.require_same("m", positions.Calls(same, ""), positions.Calls(same[:1], "no images"))
    with pytest.raises(UnsupportedError, match="m computes something else"):
        positions.require_same("m", positions.Calls(same, ""), positions.Calls(other, "no images"))
    with pytest.raises(UnsupportedError, match="m computes something else"):  # it goes on where the other ends
        positions.require_same("m", positions.Calls(same, ""), positions.Calls(same[:1], ""))
    with pytest.raises(UnsupportedError, match="m cannot be compared with and without positions: no images"):
        positions.require_same("m", positions.Calls(same, "no images"), positions.Calls(same, ""))
