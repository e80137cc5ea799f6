"""Hugging Face checkpoints: the model on the meta device, its attention as one operator, its weights by name.

transformers builds the module, says which weights are tied and what files call them; nothing here knows a
model's name.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from qcompile import ops
from qcompile.artifact.layout import MANIFEST
from qcompile.checkpoints import frontend, huggingface_weights, state
from qcompile.checkpoints.checkpoint import Checkpoint, name_of, read_json
from qcompile.checkpoints.stored import formats
from qcompile.errors import ResourceError, UnsupportedError, UsageError
from qcompile.graph import Graph, ModelInfo

ATTENTION = "qcompile"
EXPERTS = "batched_mm"
"""How transformers writes out mixtures of experts: with each token's own expert weights, tokens in their order."""

LENGTH_KEYS = ("max_position_embeddings", "max_seq_len", "seq_length")
"""What configurations call the longest sequence; transformers translates other names to the first."""

DEPTH_KEY = "num_hidden_layers"
"""What configurations call their number of layers; transformers translates other names to this one."""

MOST_LAYERS = 1024
"""More is a mistake, or meant to keep the machine busy: models with weights to be had have at most about 130."""

UNSTATED_LENGTH = 2048
"""Context of a model that states none: one whose positions come from no table, which would end somewhere."""

HUB_PATTERNS = ["*.json", "*.safetensors", "tokenizer.model", "chat_template.jinja"]
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


def find(model: str | Path, allow_remote: bool = False) -> Path:
    """The local directory of `model`: itself when it is one, else fetched from the hub (safetensors only)."""
    if not str(model):
        raise UsageError("the model's name is empty: give a checkpoint directory, or a name on the model hub")
    path = Path(model)
    if path.is_dir():
        return path
    if path.exists() or str(model).count("/") != 1 or str(model).startswith((".", "/", "~")):
        raise UsageError(f"{model} is not a checkpoint directory")
    from huggingface_hub import snapshot_download

    patterns = [*HUB_PATTERNS, *(["*.py"] if allow_remote else [])]
    try:
        return Path(snapshot_download(str(model), allow_patterns=patterns))
    except Exception as error:  # the hub client raises a family of errors for offline, unknown and gated
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{model} is neither a directory nor reachable on the hub: {reason}") from error


def load(
    model: str | Path,
    *,
    name: str | None = None,
    allow_remote: bool = False,
    weights: bool = True,
    layers: int | None = None,
) -> Graph:
    """The checkpoint `model` as a Graph at stage `import`; only headers of its weight files are read.

    Without `weights` not even those: a configuration alone is enough, and loading a weight is an error. With `layers`
    it is only that deep.
    """
    directory = find(model, allow_remote)
    config = read_config(directory, allow_remote)
    if layers is not None:
        config = cut(config, layers)
    config.__dict__.pop("quantization_config", None)  # however it is stored, the model is one of floats
    checkpoint = formats.open_checkpoint(directory) if weights else None
    try:
        program, loaders = _trace(config, checkpoint, allow_remote)
    except _OwnAttention:
        program, loaders = _trace(config, checkpoint, allow_remote, None)
    info = _info(name or name_of(directory), directory, config, program)
    return frontend.import_program(program, loaders, info)


# ---- configuration ---------------------------------------------------------------------------------


def read_config(directory: Path, allow_remote: bool = False) -> Any:
    """The checkpoint's transformers configuration, refused when it is not of a plain decoder."""
    if (directory / MANIFEST).exists() and not (directory / "config.json").exists():
        raise UsageError(f"{directory} is an artifact, built already: give the folder of a model")
    raw = read_json(directory / "config.json")
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise UsageError(f"{directory / 'config.json'} has no model_type")
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if kind not in CONFIG_MAPPING and not (allow_remote and "auto_map" in raw):
        hint = " and wants its own code run (--allow-remote-code)" if "auto_map" in raw else ""
        raise UnsupportedError(f"model type {kind} is unknown to transformers{hint}")
    if (stored := raw.get("quantization_config")) is not None:
        formats.reader(stored)
    if raw.get("is_encoder_decoder"):
        raise UnsupportedError(f"model type {kind} is an encoder-decoder; only decoders are compiled")
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    stated = raw.get("architectures") or [causal]
    if kind in CONFIG_MAPPING and (causal is None or causal not in stated):
        raise UnsupportedError(f"{stated[0] or kind} is not a decoder language model; only those are compiled")
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=allow_remote, local_files_only=True)
    except Exception as error:  # validation of a configuration raises whatever it likes
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"{directory / 'config.json'} is not a valid {kind} configuration: {reason[:200]}") from error
    _check_sizes(directory / "config.json", config.get_text_config())
    return config


def _check_sizes(path: Path, config: Any) -> None:
    """Refuse sizes that no model has, before anything is made of them."""
    layers = getattr(config, DEPTH_KEY, 1)
    if isinstance(layers, int) and not 1 <= layers <= MOST_LAYERS:
        raise UsageError(f"{path}: {DEPTH_KEY} is {layers}; it must be from 1 to {MOST_LAYERS}")
    for name, value in vars(config).items():
        if isinstance(value, int) and value >= 1 << 31:
            raise UsageError(f"{path}: {name} is {value}; sizes must be below 2^31")
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{path}: {name} is {value}; it must be a number")


def cut(config: Any, layers: int) -> Any:
    """`config` with its first `layers` layers; lists that say something of each layer are cut too."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    depth = getattr(text, DEPTH_KEY)
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == depth:
            setattr(text, name, value[:layers])
    setattr(text, DEPTH_KEY, layers)
    return config


class _OwnAttention(UnsupportedError):
    """The model does not let its attention be replaced."""


def _trace(
    config: Any, checkpoint: Checkpoint | None, allow_remote: bool, attention_kind: str | None = ATTENTION
) -> tuple[torch.export.ExportedProgram, dict[str, frontend.Loader]]:
    """The export of the model of `config`, and how to load its weights (which settles what is tied, so it is first)."""
    module = build(config, allow_remote, attention_kind)
    loaders = huggingface_weights.loaders(module, checkpoint) if checkpoint else huggingface_weights.no_loaders(module)
    longest = 1 << 24 if attention_kind == ATTENTION else _longest(config)  # own masks may be stored to that length
    return _export(module, longest), loaders


def build(config: Any, allow_remote: bool = False, attention_kind: str | None = ATTENTION) -> Any:
    """The model of `config` on the meta device in float32, its attention replaced by qcompile::attention.

    With None as `attention_kind` it is the one that transformers runs by default, in ATen operators. (A model's own
    kinds may differ: Falcon adds its linear bias twice where its attention is eager.)
    """
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, causal_mask)
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=attention_kind,
                experts_implementation=EXPERTS,
                trust_remote_code=allow_remote,
            )
    except MemoryError:
        raise
    except Exception as error:  # a model's constructor raises whatever it likes
        if isinstance(error, KeyError) and error.args == (ATTENTION,):
            raise _OwnAttention(f"{config.model_type} has an attention of its own that cannot be replaced") from error
        if isinstance(error, KeyError):  # its words are the key alone
            raise UnsupportedError(f"{config.model_type} cannot be built: there is no {error}") from error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnsupportedError(f"{config.model_type} cannot be built: {reason}") from error
    return module.eval()


# ---- attention ---------------------------------------------------------------------------------------

_HARMLESS = {"position_ids", "use_cache", "cache_position", "output_attentions", "return_dict", "is_causal"}


class _Mask(Tensor):
    """An empty tensor that stands for a causal mask with a `window`; nothing can be computed from it."""

    window: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            return super().__torch_function__(func, types, args, kwargs)
        raise _OwnAttention("model computes with its attention mask in its own way")


def causal_mask(*, mask_function: Callable[..., Tensor], config: Any, **_: Any) -> Tensor:
    """What transformers gets for a mask: a token that carries the sliding window, 0 for none.

    The window is read off `mask_function` itself, over whole rows of the longest mask; a function that is not
    causal, or hides anything but old tokens, raises UnsupportedError.
    """
    longest = _longest(config)
    rows = sorted({*range(8), *(longest * i // 16 for i in range(1, 16)), longest - 1, *_powers(longest)})
    with torch.utils._python_dispatch._disable_current_modes():
        keys, zero, window = torch.arange(longest), torch.zeros((), dtype=torch.int64), longest
        for row in reversed(rows):  # one at a time: where texts hold millions of tokens all would take gigabytes
            seen = mask_function(zero, zero, torch.tensor([[row]]), keys).expand(1, longest)[0]
            window = int(seen.sum()) if row == longest - 1 else window
            if not torch.equal(seen, (keys <= row) & (keys > row - window)):
                raise UnsupportedError("attention mask is neither causal nor a causal sliding window")
        mask = torch.Tensor._make_subclass(_Mask, torch.empty(0))
    mask.window = 0 if window == longest else window
    return mask


def _powers(limit: int) -> list[int]:
    """Neighbours of the powers of two below `limit`, where windows like to end."""
    near = (2**p + d for p, d in itertools.product(range(limit.bit_length()), (-1, 0, 1)))
    return [n for n in near if 0 <= n < limit]


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, H, T, D], key and value [B, Hk, T, D] -> [B, T, H, D]."""
    named = ("sliding_window", "softcap", "s_aux", "scaling", "dropout")
    window, softcap, sinks, scaling, dropout = (options.pop(key, None) for key in named)
    unknown = [
        name for name, option in options.items() if name not in _HARMLESS and not (option is None or option is False)
    ]
    if unknown or dropout:
        raise UnsupportedError(f"attention option {(unknown or ['dropout'])[0]} is not supported")
    if options.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise UnsupportedError("attention is not causal")
    if not isinstance(mask, _Mask):
        raise _OwnAttention("attention makes its mask in its own way")
    if window not in (None, 0, mask.window) and mask.window:
        raise UnsupportedError(f"attention has a window of {window}, its mask one of {mask.window}")
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))  # [B, T, H, D]
    scale = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return ops.op("attention")(q, k, v, scale, mask.window, float(softcap or 0.0), sinks), None


# ---- export ------------------------------------------------------------------------------------------


class _Logits(state.Watched):
    """The part of a causal language model's interface that is compiled: ids and positions to logits."""

    def run(self, *inputs: Tensor) -> Tensor:
        token_ids, positions = inputs
        # The mask of ones says that nothing is padding, which spares the graph the search for packed sequences.
        mask = torch.ones_like(token_ids)
        return self.module(input_ids=token_ids, position_ids=positions, attention_mask=mask, use_cache=False).logits


@contextmanager
def _fake_weights(module: nn.Module) -> Iterator[FakeTensorMode]:
    """`module` with weights that have a shape and no memory, on the CPU, for as long as the context lasts.

    Tensors of numbers that a model's code makes on its weights' device keep their values there; on the meta device
    they have none.
    """
    kept: list[tuple[dict[str, Any], str, Tensor]] = []
    made: dict[int, Tensor] = {}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for owner in module.modules():
            tables: tuple[Any, ...] = (owner._parameters, owner._buffers)
            for table in tables:
                for name, value in table.items():
                    if value is None or value.device.type != "meta":
                        continue
                    kept.append((table, name, value))
                    if id(value) not in made:
                        empty = torch.empty(value.shape, dtype=value.dtype, device="cpu")
                        made[id(value)] = nn.Parameter(empty, False) if isinstance(value, nn.Parameter) else empty
    try:
        for table, name, value in kept:
            table[name] = made[id(value)]
        yield mode
    finally:
        for table, name, value in kept:
            table[name] = value


def _export(module: Any, longest: int) -> torch.export.ExportedProgram:
    shape = (frontend.EXAMPLE_BATCH, frontend.EXAMPLE_TOKENS)
    with _fake_weights(module) as mode:
        with mode:
            ids = [torch.zeros(shape, dtype=torch.int64) for _ in range(2)]
        return frontend.export(functools.partial(_Logits, module), ids, module.config.model_type, longest)


# ---- facts and files ---------------------------------------------------------------------------------


def _info(name: str, directory: Path, config: Any, program: torch.export.ExportedProgram) -> ModelInfo:
    generation = directory / "generation_config.json"
    settings = read_json(generation) if generation.is_file() else {}
    text = config.get_text_config()

    def token(key: str) -> Any:
        return settings.get(key, getattr(text, key, None))

    end = token("eos_token_id")
    ends = () if end is None else tuple(end) if isinstance(end, (list, tuple)) else (end,)
    begin = token("bos_token_id")
    if not all(type(number) is int for number in (*ends, *(() if begin is None else (begin,)))):
        raise UsageError(f"{directory}: bos_token_id {begin} and eos_token_id {end} must be token numbers")
    if begin is not None and not 0 <= begin < text.vocab_size:  # a default of another vocabulary: nothing can embed it
        begin = None
    return ModelInfo(name, int(text.vocab_size), _longest(config), begin, ends, frontend.count_parameters(program))


def _longest(config: Any) -> int:
    """The longest sequence the model is said to hold."""
    text = config.get_text_config()
    for key in LENGTH_KEYS:
        value = getattr(text, key, None)
        if value is not None:
            if value < 1:
                raise UsageError(f"the configuration says {key} = {value}; it must be a number of tokens")
            return int(value)
    return UNSTATED_LENGTH


def tokenizer_files(model: str | Path) -> dict[str, bytes]:
    """The tokenizer of a checkpoint, by file name, as an artifact carries it; empty when it has none.

    A checkpoint with only a SentencePiece model gets the tokenizer.json that transformers converts it to.
    """
    directory = find(model)
    for name in TOKENIZER_FILES:
        if (directory / name).exists() and not (directory / name).is_file():
            raise UsageError(f"{directory / name} is no plain file")
    files = {name: (directory / name).read_bytes() for name in TOKENIZER_FILES if (directory / name).is_file()}
    if "tokenizer.json" not in files and (directory / "tokenizer.model").is_file():
        _check_converters(directory / "tokenizer.model")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from transformers import AutoTokenizer

        try:
            backend = AutoTokenizer.from_pretrained(directory, local_files_only=True).backend_tokenizer
        except Exception as error:  # the converters raise whatever they like
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UnsupportedError(f"{directory / 'tokenizer.model'} cannot be converted: {reason}") from error
        files["tokenizer.json"] = backend.to_str(pretty=False).encode()
    _check_tokenizer(directory, files)
    return files


def other_tokenizer(model: Any, draft: Any) -> bytes | None:
    """The tokenizer.json of `draft` if both are checkpoints with one and it differs from the model's; else None."""
    if not all(isinstance(source, (str, Path)) for source in (model, draft)):
        return None
    own, other = (tokenizer_files(source).get("tokenizer.json") for source in (model, draft))
    return other if own is not None and other is not None and own != other else None


def _check_converters(file: Path) -> None:
    """ResourceError where packages are missing that transformers reads a SentencePiece model with."""
    for package, module in (("sentencepiece", "sentencepiece"), ("protobuf", "google.protobuf")):
        try:
            found = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            raise ResourceError(
                f"{file} needs the {package} package to be converted: pip install 'qcompile[sentencepiece]'"
            )


def _check_tokenizer(directory: Path, files: dict[str, bytes]) -> None:
    """Refuse what an artifact could carry, but nobody use."""
    if "tokenizer.json" in files:
        from tokenizers import Tokenizer

        try:
            Tokenizer.from_buffer(files["tokenizer.json"])
        except Exception as error:  # tokenizers raises plain Exception
            raise UsageError(f"{directory / 'tokenizer.json'} is not a tokenizer: {error}") from error
    if "tokenizer_config.json" in files:
        read_json(directory / "tokenizer_config.json")
    try:
        files.get("chat_template.jinja", b"").decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{directory / 'chat_template.jinja'} is not text in UTF-8: {error}") from error
