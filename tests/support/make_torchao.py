"""Write the files of torchao in tests/checkpoints/stored/files: linears as it stores them, and what it makes of them.

pip install torchao==0.18.0
python -m tests.support.make_torchao
"""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from tests.support.make_bitsandbytes import FILES, digest


def configurations() -> dict[str, Any]:
    """Ways to store a weight, by the name of its linear."""
    from torchao import quantization as ao

    by_group, by_row = ao.PerGroup(32), ao.PerAxis(0)
    return {
        "int8": ao.Int8WeightOnlyConfig(version=2),
        "int8_groups": ao.Int8WeightOnlyConfig(version=2, granularity=by_group),
        "int8_activations": ao.Int8DynamicActivationInt8WeightConfig(version=2),
        "int4_groups": ao.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=by_group, mapping_type=ao.MappingType.ASYMMETRIC
        ),
        "int3": ao.IntxWeightOnlyConfig(weight_dtype=torch.int3, granularity=by_row),
        "float8": ao.Float8WeightOnlyConfig(),
    }


def main() -> None:
    """Make the files again."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import quantize_
    from torchao.quantization.quant_primitives import dequantize_affine

    torch.manual_seed(0)
    weights: dict[str, Any] = {"norm.weight": torch.ones(4, dtype=torch.bfloat16)}
    expected = {}
    for name, configuration in configurations().items():
        linear = nn.Sequential(nn.Linear(64, 8, bias=False, dtype=torch.bfloat16))
        quantize_(linear, configuration)
        weight: Any = linear[0].weight.data
        weights[f"{name}.weight"] = weight
        if name == "float8":
            value = weight.dequantize(torch.float32)
        else:
            parts = weight.qdata, weight.block_size, weight.scale.float(), weight.zero_point
            value = dequantize_affine(*parts, torch.int8, output_dtype=torch.float32)
        expected[f"{name}.weight"] = digest(value)
    tensors, texts = flatten_tensor_state_dict(weights)
    save_file(tensors, FILES / "torchao.safetensors", texts)
    (FILES / "torchao.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
