"""Write the files of HQQ in tests/checkpoints/stored/files: linears as it stores them, and what it makes of them.

pip install hqq==0.2.8.post1
python -m tests.support.make_hqq
"""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support.make_bitsandbytes import FILES, digest

WAYS: dict[str, dict[str, Any]] = {
    "four": {"nbits": 4, "group_size": 32, "axis": 1},
    "four_columns": {"nbits": 4, "group_size": 16, "axis": 0},
    "whole_rows": {"nbits": 8, "group_size": None, "axis": 1},
    "three": {"nbits": 3, "group_size": 32, "axis": 1},
    "two": {"nbits": 2, "group_size": 16, "axis": 1},
    "one": {"nbits": 1, "group_size": 16, "axis": 1},
    "as_floats": {"nbits": 4, "group_size": 32, "axis": 1, "view_as_float": True},
}
"""Options of HQQ by the name of a linear."""


def main() -> None:
    """Make the files again."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer

    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}
    expected = {}
    for name, way in WAYS.items():
        linear = nn.Linear(64, 8, bias=False)
        made = HQQLinear(linear, BaseQuantizeConfig(**way), compute_dtype=torch.bfloat16, device="cpu")
        tensors |= {f"{name}.{key}": value for key, value in made.state_dict().items() if value is not None}
        meta = made.meta | {"compute_dtype": torch.float32}
        meta |= {part: meta[part].float() for part in ("scale", "zero")}
        expected[f"{name}.weight"] = digest(Quantizer.dequantize(made.W_q.data, meta))
    save_file({name: value.contiguous() for name, value in tensors.items()}, FILES / "hqq.safetensors")
    (FILES / "hqq.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
