"""A draft head that a file holds: what its configuration says, and its weights, which stay on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from qcompile.checkpoints.checkpoint import Checkpoint, read_json
from qcompile.errors import UnsupportedError, UsageError
from qcompile.graph import Weight
from qcompile.heads.layout import CONFIG
from qcompile.heads.rotation import HeadRotation, head_rotation
from qcompile.heads.settings import HeadSettings

_LAYER_NAMES = ("midlayer.", "layers.0.")
"""How files call the decoder layer."""
_MAP, _MAPPED, EMBEDDING = "d2t", "t2d", "embed_tokens.weight"
_LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_FEED_FORWARD = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


@dataclass(frozen=True)
class HeadFile:
    """A head of the EAGLE-3 type in a directory.

    Sizes are as in layout.HeadShape. `layers` is empty if the configuration names none. `norm_first`: the residual of
    the decoder layer is the normalized hidden state, and not the hidden state. `weights` are named as in the public
    layout, the decoder layer's without a prefix.
    """

    path: Path
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    drafted: int
    layers: tuple[int, ...]
    norm_eps: float
    norm_first: bool
    rotation: HeadRotation
    weights: Mapping[str, Weight]

    @staticmethod
    def open(path: Path) -> HeadFile:
        """Read the configuration and the headers of the weights of the head in the directory `path`.

        Raises UsageError (damaged, or parts are missing) and UnsupportedError (another kind of head).
        """
        config = read_json(path / CONFIG)
        if not any(path.glob("*.safetensors")):
            raise UnsupportedError(
                f"draft {path} is a draft head without safetensors files: convert its weights to one"
            )
        stored = _stored(path)
        settings = HeadSettings(path, config)
        _check(settings, stored)
        hidden, drafted = stored["fc.weight"].shape[0], stored["lm_head.weight"].shape[0]
        heads = settings.whole("num_attention_heads")
        head_dim = settings.whole("head_dim", max(1, hidden // heads))
        if head_dim % 2:
            raise settings.wrong("head_dim", head_dim, "an even number, which rotary embeddings need")
        head = HeadFile(
            path,
            hidden=hidden,
            heads=heads,
            kv_heads=settings.whole("num_key_value_heads", heads),
            head_dim=head_dim,
            drafted=drafted,
            layers=_layers(settings),
            norm_eps=settings.real("rms_norm_eps", 1e-6),
            norm_first=settings.flag("norm_before_residual"),
            rotation=head_rotation(settings, head_dim),
            weights=stored,
        )
        head._check_shapes()
        return head

    @property
    def inner(self) -> int:
        """Features of the feed-forward layer."""
        return self.weights["mlp.gate_proj.weight"].shape[0]

    @property
    def fused(self) -> int:
        """Features of the target's hidden states beside each other."""
        return self.weights["fc.weight"].shape[1]

    def tokens(self, vocabulary: int) -> Tensor | None:
        """The target's tokens that the head can propose, int32 [drafted]; None if they are all, in order.

        `vocabulary` is the target's number of tokens. Raises UsageError for tokens that it does not have.
        """
        if _MAP not in self.weights:
            if self.drafted != vocabulary:
                raise UsageError(f"draft {self.path} proposes {self.drafted} of {vocabulary} tokens, but has no {_MAP}")
            return None
        stored = self.weights[_MAP]
        if stored.dtype not in (torch.int32, torch.int64):
            raise UsageError(f"draft {self.path}: {_MAP} holds {stored.dtype}, not whole numbers of 32 or 64 bits")
        tokens = stored.load().to(torch.int64) + torch.arange(self.drafted)
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
            raise UsageError(f"draft {self.path}: {_MAP} names tokens that the model does not have")
        if len(tokens.unique()) < self.drafted:
            raise UsageError(f"draft {self.path}: {_MAP} names a token twice")
        whole = self.drafted == vocabulary and torch.equal(tokens, torch.arange(vocabulary))
        return None if whole else tokens.to(torch.int32)

    def _check_shapes(self) -> None:
        """Raise UsageError for a weight with a shape that does not fit the others."""
        hidden, inner = self.hidden, self.inner
        attended, cached = self.heads * self.head_dim, self.kv_heads * self.head_dim
        wanted = {
            "self_attn.q_proj": (attended, 2 * hidden),
            "self_attn.k_proj": (cached, 2 * hidden),
            "self_attn.v_proj": (cached, 2 * hidden),
            "self_attn.o_proj": (hidden, attended),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            **dict.fromkeys((*_NORMS, "norm"), (hidden,)),
            "lm_head": (self.drafted, hidden),
        }
        shapes = {f"{name}.weight": shape for name, shape in wanted.items()}
        shapes |= {f"{name}.bias": shape[:1] for name, shape in wanted.items() if f"{name}.bias" in self.weights}
        shapes |= {_MAP: (self.drafted,)} if _MAP in self.weights else {}
        for name, shape in shapes.items():
            stored = self.weights[name].shape
            if stored != shape:
                raise UsageError(f"draft {self.path}: {name} has shape {list(stored)}, needed is {list(shape)}")
        if EMBEDDING in self.weights and len(self.weights[EMBEDDING].shape) != 2:
            raise UsageError(f"draft {self.path}: {EMBEDDING} is no matrix")


def _stored(path: Path) -> dict[str, Weight]:
    """The tensors of the head in `path` by name, without the decoder layer's prefix."""
    checkpoint = Checkpoint(path)
    stored = {}
    for name, entry in checkpoint.entries.items():
        short = next((name.removeprefix(prefix) for prefix in _LAYER_NAMES if name.startswith(prefix)), name)
        floats = entry.dtype.is_floating_point
        load: Callable[[], Tensor] = partial(_loaded, checkpoint, name) if floats else partial(checkpoint.raw, name)
        dtype = torch.float32 if floats else entry.dtype
        stored[short.removeprefix("model.")] = Weight(
            tuple(entry.shape), dtype, load, stored=entry.dtype if floats else None
        )
    return stored


def _loaded(checkpoint: Checkpoint, name: str) -> Tensor:
    """The tensor in float32. Raises UsageError, which names the head, if the tensor holds NaN or infinity."""
    try:
        return checkpoint.load(name)
    except UsageError as error:
        raise UsageError(f"draft {checkpoint.directory}: {error}") from error


def _check(settings: HeadSettings, stored: Mapping[str, Weight]) -> None:
    """Raise UnsupportedError unless the head is of the kind that is compiled, UsageError for a weight without axes."""
    path, config = settings.path, settings.config
    layer = [*_LINEARS, *_FEED_FORWARD, *_NORMS]
    needed = [f"{name}.weight" for name in (*layer, "fc", "norm", "lm_head")]
    missing = [name for name in needed if name not in stored]
    if missing:
        raise UnsupportedError(f"draft {path} is no head of the EAGLE-3 type: it has no {missing[0]}")
    known = {*needed, *(f"{name}.bias" for name in (*_LINEARS, *_FEED_FORWARD)), _MAP, _MAPPED, EMBEDDING}
    more = sorted(set(stored) - known)
    if more:
        raise UnsupportedError(f"draft {path} has a weight {more[0]}, of which this qcompile does not know the use")
    if flat := next(
        (name for name in ("fc", "lm_head", "mlp.gate_proj") if len(stored[f"{name}.weight"].shape) != 2), None
    ):
        raise UsageError(f"draft {path}: {flat}.weight is no matrix")
    if (count := settings.whole("num_hidden_layers", 1)) != 1:
        raise UnsupportedError(f"draft {path} has {count} layers: heads of one are compiled")
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedError(f"draft {path} has activation {config['hidden_act']}: heads with silu are compiled")


def _layers(settings: HeadSettings) -> tuple[int, ...]:
    """The layers after which the head reads hidden states, as the configuration states them."""
    nested, key = settings.config.get("eagle_config"), "eagle_aux_hidden_state_layer_ids"
    return (settings.rising(key, nested) if isinstance(nested, dict) else ()) or settings.rising(key, settings.config)
