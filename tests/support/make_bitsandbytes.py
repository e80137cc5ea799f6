"""Write the files of tests/checkpoints/stored/files: linears as bitsandbytes stores them, and what it makes of them.

pip install bitsandbytes==0.50.2
python -m tests.support.make_bitsandbytes
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

FILES = Path(__file__).parents[1] / "checkpoints" / "stored" / "files"
FOUR_BITS = {"nf4": False, "nf4_double": True, "fp4": False, "fp4_double": True}
"""Linears of 4 bits, and whether they have double quantization."""


def digest(value: Tensor) -> str:
    """SHA-256 of the bytes of a float32 tensor."""
    return hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()


def main() -> None:
    """Make the files again. Inputs fill blocks of 64: bitsandbytes' kernel of CPUs is wrong where they do not."""
    import bitsandbytes
    from bitsandbytes import functional

    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}
    expected = {}
    for name, double in FOUR_BITS.items():
        outputs = 260 if name == "nf4_double" else 16  # more than 256 blocks: two of the largest values' own
        linear = bitsandbytes.nn.Linear4bit(64, outputs, quant_type=name[:3], compress_statistics=double)
        linear = linear.to("cpu")
        tensors |= {f"{name}.{key}": value for key, value in linear.state_dict().items()}
        state = linear.weight.quant_state
        state.dtype = torch.float32
        expected[f"{name}.weight"] = digest(functional.dequantize_4bit(linear.weight.data, state))
    linear = bitsandbytes.nn.Linear8bitLt(64, 16, has_fp16_weights=False).to("cpu")
    tensors |= {f"int8.{key}": value for key, value in linear.state_dict().items()}
    whole = functional.int8_vectorwise_dequant(linear.weight.data, linear.weight.SCB)
    expected["int8.weight"] = digest(whole.float())
    save_file({name: value.contiguous() for name, value in tensors.items()}, FILES / "bitsandbytes.safetensors")
    (FILES / "bitsandbytes.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
