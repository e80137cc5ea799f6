"""The files of a draft head, in the public layout: config.json and model.safetensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qcompile.checkpoints.checkpoint import read_header, read_json
from qcompile.errors import QCompileError, UsageError

CONFIG, WEIGHTS = "config.json", "model.safetensors"
ARCHITECTURE = "LlamaForCausalLMEagle3"
"""What other engines call a head of this layout."""

_FUSION = "fc.weight"


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head: `hidden` and `vocabulary` are the target's, `drafted` is the number of tokens it can propose.

    `layers` says which hidden states of the target it reads: n is the residual stream after n decoder layers.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    drafted: int
    layers: tuple[int, ...]
    norm_eps: float
    rope_theta: float
    context: int

    def config(self) -> dict[str, Any]:
        """The config.json."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "target_hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "vocab_size": self.vocabulary,
            "draft_vocab_size": self.drafted,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.context,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "norm_before_residual": False,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(self.layers),
                "use_aux_hidden_state": True,
            },
        }


def default_layers(depth: int) -> tuple[int, int, int]:
    """The hidden states that a head of a target with `depth` layers reads. Raises UsageError if it has too few."""
    if depth < 3:
        raise UsageError(f"the model has {depth} layers: a draft head needs a model of 3 or more")
    layers = (2, depth // 2, depth - 3)
    if not 0 < layers[0] < layers[1] < layers[2]:
        raise UsageError(f"the model has {depth} layers, too few for the usual choice of three: say which (--layers)")
    return layers


def is_head(path: Path) -> bool:
    """Whether the directory `path` holds a draft head: a weight that fuses the hidden states of a model into one.

    Heads of the types EAGLE and EAGLE-3 have it. Reads the headers of the safetensors files. A configuration that names
    a head decides, too: files may be damaged, or of another kind.
    """
    rows, columns = (*_shapes(path).get(_FUSION, ()), 0, 0)[:2]
    return (rows > 0 and columns >= 2 * rows and columns % rows == 0) or _names_a_head(path / CONFIG)


def _names_a_head(config: Path) -> bool:
    """Whether a config.json says that its directory holds a head."""
    try:
        named = read_json(config).get("architectures") if config.is_file() else None
    except QCompileError:
        return False
    return isinstance(named, list) and ARCHITECTURE in named


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in the safetensors files of the directory `path`; unreadable files are left to others."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(path.glob("*.safetensors")):
        try:
            entries = read_header(file)
        except (OSError, QCompileError):
            continue
        shapes |= {name: tuple(entry.shape) for name, entry in entries.items()}
    return shapes
