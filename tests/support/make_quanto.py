"""Write the files of quanto in tests/checkpoints/stored/files: linears as it stores them, and what it makes of them.

pip install optimum-quanto==0.2.7
python -m tests.support.make_quanto
"""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from tests.support.make_bitsandbytes import FILES, digest

WAYS: dict[str, tuple[str, torch.dtype, int, int]] = {
    "bytes": ("qint8", torch.float16, 6, 64),
    "floats": ("qfloat8_e4m3fn", torch.bfloat16, 6, 64),
    "wide_floats": ("qfloat8_e5m2", torch.float32, 6, 64),
    "rows": ("qint4", torch.float16, 6, 64),
    "groups": ("qint4", torch.bfloat16, 16, 256),
    "odd_groups": ("qint4", torch.float16, 3, 192),
    "two_bits": ("qint2", torch.float16, 5, 64),
    "rounded_inputs": ("qint8", torch.float16, 6, 64),
}
"""Type of the weights, type of the model, outputs and inputs by the name of a linear."""


def whole(weight: Any) -> torch.Tensor:
    """The numbers of a weight of quanto, computed in float32."""
    if hasattr(weight, "weight_qbits_tensor") and type(weight).__name__ != "WeightQBitsTensor":
        weight = weight.weight_qbits_tensor()  # from the order of a kernel
    for part in ("_scale", "_shift"):
        if hasattr(weight, part):
            setattr(weight, part, getattr(weight, part).float())
    return weight.dequantize()


def main() -> None:
    """Make the files again."""
    from optimum.quanto import freeze, quantization_map, quantize

    torch.manual_seed(0)
    model = nn.Module()
    for name, (_, dtype, outputs, inputs) in WAYS.items():
        model.add_module(name, nn.Linear(inputs, outputs, bias=False, dtype=dtype))
    for name, (kind, *_) in WAYS.items():
        rounded = {"activations": "qint8"} if name == "rounded_inputs" else {}
        quantize(model, weights=kind, include=[name], **rounded)
    freeze(model)
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, FILES / "quanto.safetensors")
    with torch.no_grad():
        expected = {f"{name}.weight": digest(whole(model.get_submodule(name).weight)) for name in WAYS}
    (FILES / "quanto.json").write_text(
        json.dumps({"map": quantization_map(model), "sha256": expected}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
