"""Hugging Face checkpoints: the model on the meta device, its attention as one operator, its weights by name.

transformers builds the module, says which weights are tied, and how the files name them. No model's name is known here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from qcompile.checkpoints import (
    huggingface_weights,
    inputs_embeds,
    kernel_functions,
    left_out,
    positions,
    remarks,
    state,
)
from qcompile.checkpoints.attention_interface import ATTENTION, attention
from qcompile.checkpoints.attention_masks import ShortTable, UnknownMask, begin, causal_mask, rehearsed, shortened
from qcompile.checkpoints.branches import Branches, Condition, trace_all
from qcompile.checkpoints.checkpoint import Checkpoint, read_json
from qcompile.checkpoints.configuration import auto_class, context_length, cut, read_config, text_config
from qcompile.checkpoints.expert_loops import ExpertLoops
from qcompile.checkpoints.hub import find
from qcompile.checkpoints.loaders import Loader
from qcompile.checkpoints.model_names import name_of
from qcompile.checkpoints.programs import count_parameters, import_program, input_major, weights_read
from qcompile.checkpoints.stored import formats
from qcompile.checkpoints.token_loops import TokenLoops, recorded
from qcompile.checkpoints.tracing import EXAMPLE_BATCH, EXAMPLE_TOKENS, LengthError, export, hurried
from qcompile.errors import OwnAttention, UnsupportedError, UsageError
from qcompile.graph import Graph, ModelInfo

EXPERTS = "batched_mm"
"""How transformers writes out mixtures of experts: with each token's own expert weights, tokens in their order."""

REHEARSED = ((EXAMPLE_BATCH, EXAMPLE_TOKENS), (3, 12))
"""Numbers of sequences and tokens of the passes with numbers, for masks that depend on inputs."""


def load(
    model: str | Path,
    *,
    name: str | None = None,
    allow_remote: bool = False,
    weights: bool = True,
    layers: int | None = None,
    stored: Checkpoint | None = None,
) -> Graph:
    """The checkpoint `model` as a Graph at stage `import`; only headers of its weight files are read.

    Without `weights` no weight file is read: a configuration is enough, and loading a weight is an error. `layers` is
    the depth to truncate the model to. `stored` are its tensors, if they are not to be the files' own.
    """
    directory = find(model, allow_remote)
    config = read_config(directory, allow_remote)
    if layers is not None:
        config = cut(config, layers)
    config.__dict__.pop("quantization_config", None)  # stored weights are read as floats
    checkpoint = (stored or formats.open_checkpoint(directory)) if weights else None
    try:
        traced = _trace(config, checkpoint, allow_remote)
    except OwnAttention:
        traced = _trace(config, checkpoint, allow_remote, None)
    info = _info(name or name_of(directory), directory, config, traced)
    return import_program(traced.program, traced.loaders, info)


@dataclass(frozen=True)
class _Traced:
    """An exported model, the loaders of the weights that it reads, and bytes of the modules that it does not reach.

    embeds_scale: as in `ModelInfo`. remarks: those on the stored tensors.
    """

    program: ExportedProgram
    loaders: dict[str, Loader]
    left_out: dict[str, int]
    embeds_scale: float
    remarks: tuple[str, ...] = ()


def _trace(
    config: Any, checkpoint: Checkpoint | None, allow_remote: bool, attention_kind: str | None = ATTENTION
) -> _Traced:
    """Export the model of `config`. Its weights are found first, because that unties some."""
    module = build(config, allow_remote, attention_kind)
    names = huggingface_weights.settle(module, checkpoint) if checkpoint else None
    # A model's own masks may have the length of the context.
    most = 1 << 24 if attention_kind == ATTENTION else context_length(config)
    program = _export(module, most)
    require_numbering(module)
    read = weights_read(program)
    unread = left_out.modules(module, read)
    if checkpoint is None or names is None:
        loaders, sizes = huggingface_weights.no_loaders(module, read), left_out.sizes(unread)
        remarked: tuple[str, ...] = ()
    else:
        remarked = (*remarks.of_tensors(checkpoint, names.unused), *remarks.of_types(checkpoint))
        loaders = huggingface_weights.loaders(module, checkpoint, names, read, input_major(program))
        sizes = left_out.sizes(unread, functools.partial(names.stored_bytes, checkpoint))
    return _Traced(program, loaders, sizes, inputs_embeds.scale(module, loaders), remarked)


def build(config: Any, allow_remote: bool = False, attention_kind: str | None = ATTENTION) -> Any:
    """The model of `config` on the meta device in float32, its attention replaced by qcompile::attention.

    None as `attention_kind` selects transformers' default attention, in ATen operators. (A model's own kinds may
    differ: Falcon's eager attention adds its linear bias twice.)
    """
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface

    auto = auto_class(config.model_type, config.architectures or ()) or "AutoModelForCausalLM"
    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, functools.partial(causal_mask, context_length))
    try:
        with torch.device("meta"):
            module = getattr(transformers, auto).from_config(
                config,
                dtype=torch.float32,
                attn_implementation=attention_kind,
                experts_implementation=EXPERTS,
                trust_remote_code=allow_remote,
            )
    except MemoryError:
        raise
    except Exception as error:  # a model's constructor may raise anything
        if isinstance(error, KeyError) and error.args == (ATTENTION,):
            raise OwnAttention(f"{config.model_type} has an attention of its own that cannot be replaced") from error
        if isinstance(error, KeyError):  # its text is only the key
            raise UnsupportedError(f"{config.model_type} cannot be built: there is no {error}") from error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, ZeroDivisionError):  # its text names no field
            reason = "it divides by a number of its configuration that is 0"
        raise UnsupportedError(f"{config.model_type} cannot be built: {reason}") from error
    return module.eval()


class _Logits(state.Watched):
    """The part of a causal language model's interface that is compiled: token ids and positions -> logits.

    `decide` makes the mode that decides branches on the positions. Not `masked`, the model gets no padding mask.
    """

    def __init__(
        self,
        module: nn.Module,
        decide: Callable[[Tensor], AbstractContextManager[Any]],
        masked: bool = True,
        **how: Any,
    ) -> None:
        super().__init__(module, **how)
        self.decide, self.masked = decide, masked

    def run(self, *inputs: Tensor) -> Tensor:
        begin()
        token_ids, *places = inputs
        # A mask of ones means no padding, and keeps the search for packed sequences out of the graph.
        named = {"attention_mask": torch.ones_like(token_ids)} if self.masked else {}
        named |= {"position_ids": places[0]} if places else {}
        with self.decide(inputs[-1]), ExpertLoops(), TokenLoops(token_ids):
            return self.module(input_ids=token_ids, use_cache=False, **named).logits


@contextmanager
def _fake_weights(module: nn.Module, shapes: ShapeEnv | None = None) -> Iterator[FakeTensorMode]:
    """`module` with weights that have a shape and no memory, on the CPU, for as long as the context lasts.

    With `shapes`, code that asks for a number that depends on weights gets a symbol.

    Constants that a model's code creates on its weights' device keep their values on the CPU; on the meta device they
    would have none.
    """
    kept: list[tuple[dict[str, Any], str, Tensor]] = []
    made: dict[int, Tensor] = {}
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes) as mode:
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


def _export(module: Any, most: int) -> ExportedProgram:
    shape = (EXAMPLE_BATCH, EXAMPLE_TOKENS)
    with _fake_weights(module) as mode, kernel_functions.replaced(module), recorded(module):
        with mode:
            ids = [torch.zeros(shape, dtype=torch.int64) for _ in range(2)]

        def trace(forced: Mapping[Condition, bool], open_conditions: set[Condition]) -> ExportedProgram:
            decide = functools.partial(
                Branches, context=context_length(module.config), forced=forced, open=open_conditions
            )
            return export(functools.partial(_Logits, module, decide), ids, module.config.model_type, most)

        try:
            return trace_all(trace, module.config.model_type)
        except UnknownMask:
            try:
                with rehearsed((None, functools.partial(_run, module, *sizes)) for sizes in REHEARSED):
                    return trace_all(trace, module.config.model_type)
            except ShortTable:
                # Token ids without numbers: a table that depends on them has none, and its masks are refused.
                longest = context_length(module.config)
                sizes = ((EXAMPLE_BATCH, longest), (EXAMPLE_BATCH + 1, longest // 2 + 1))
                with rehearsed((size[1], functools.partial(_run, module, *size, mode)) for size in sizes):
                    return trace_all(trace, module.config.model_type)
        except LengthError:
            if most <= (context := context_length(module.config)):
                raise
        most = context  # of a table with a row for each position, for example
        return trace_all(trace, module.config.model_type)


def _run(module: Any, batch: int, tokens: int, mode: FakeTensorMode | None = None) -> None:
    """A forward pass with numbers as inputs, of which those of its results have numbers that need no weights.

    With `mode`, the token ids have no numbers, either.
    """
    positions = torch.arange(tokens).expand(batch, tokens)
    with mode or contextlib.nullcontext():
        ids = torch.zeros(batch, tokens, dtype=torch.int64)
    with torch.no_grad():
        _Logits(module, lambda _: contextlib.nullcontext())(ids, positions.contiguous())


def require_numbering(module: Any) -> None:
    """Raise UnsupportedError unless `module` numbers tokens from 0 on if it is given no positions."""
    for masked, symbols in ((True, False), (True, True), (False, True)):
        given, own = (_recorded(module, positioned, masked, symbols) for positioned in (True, False))
        if not (given.error or own.error):
            break
    positions.require_same(module.config.model_type, given, own)


def _recorded(module: Any, positioned: bool, masked: bool, symbols: bool) -> positions.Calls:
    """What `module` computes with positions, if it is `positioned`, and a mask of ones, if it is `masked`."""
    inputs = [torch.arange(1, positions.TOKENS + 1)[None], torch.arange(positions.TOKENS)[None]][: 1 + positioned]
    model = _Logits(module, lambda _: contextlib.nullcontext(), masked)
    with (
        huggingface_weights.numbered(module),
        _fake_weights(module, ShapeEnv() if symbols else None),
        kernel_functions.replaced(module),
        recorded(module),
        shortened(positions.TOKENS),
        hurried(),
    ):
        return positions.record(functools.partial(model, *inputs))


def _info(name: str, directory: Path, config: Any, traced: _Traced) -> ModelInfo:
    generation = directory / "generation_config.json"
    settings = read_json(generation) if generation.is_file() else {}
    text = text_config(config)

    def token(key: str) -> Any:
        return settings.get(key, getattr(text, key, None))

    end = token("eos_token_id")
    ends = () if end is None else tuple(end) if isinstance(end, (list, tuple)) else (end,)
    begin = token("bos_token_id")
    if not all(type(number) is int for number in (*ends, *(() if begin is None else (begin,)))):
        raise UsageError(f"{directory}: bos_token_id {begin} and eos_token_id {end} must be token numbers")
    parameters, size = count_parameters(traced.program), int(text.vocab_size)
    # Defaults of another vocabulary are outside this embedding.
    stated = {"bos_token_id": () if begin is None else (begin,), "eos_token_id": ends}
    known = {name: tuple(each for each in tokens if 0 <= each < size) for name, tokens in stated.items()}
    return ModelInfo(
        name,
        size,
        context_length(config),
        next(iter(known["bos_token_id"]), None),
        known["eos_token_id"],
        parameters,
        left_out=traced.left_out,
        embeds_scale=traced.embeds_scale,
        remarks=(*traced.remarks, *remarks.of_tokens(stated, size)),
    )
