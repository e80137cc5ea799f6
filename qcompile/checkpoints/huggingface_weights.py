"""Weights of Hugging Face checkpoints by their names in the module, following transformers' loading rules."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qcompile.checkpoints.checkpoint import Checkpoint, require_finite
from qcompile.checkpoints.loaders import Loader, StoredLoader, TensorLoader, TurnedLoader
from qcompile.errors import UnsupportedError, UsageError


@dataclass(frozen=True)
class Names:
    """Where the weights of a module are: names in the module -> names in the files, or what they are assembled from.

    `unused` are stored tensors that are no weights of the module.
    """

    files: dict[str, str]
    assembled: dict[str, _Assembled]
    unused: tuple[str, ...]

    def stored_bytes(self, checkpoint: Checkpoint, name: str) -> int:
        """Bytes of the files that hold the weight `name`; 0 if it is not stored."""
        if name in self.assembled:
            group = self.assembled[name]
            total = sum(checkpoint.entries[stored].bytes for _, stored in group.pieces)
            return total // len(group.shapes())  # a converter may make several weights of its pieces
        return checkpoint.entries[self.files[name]].bytes if name in self.files else 0


def settle(module: Any, checkpoint: Checkpoint) -> Names:
    """Find the weights of `module`, and untie those that the files store twice with different values."""
    names = _file_names(module, checkpoint)
    _settle_ties(module, checkpoint, names.files)
    return names


def loaders(
    module: Any, checkpoint: Checkpoint, names: Names, read: Set[str], turned: Set[str] = frozenset()
) -> dict[str, Loader]:
    """Loaders of the parameters and buffers `read` of `module`, by their names in the exported program.

    `turned` are those that the program has as [inputs, outputs], which tools may store as [outputs, inputs]. Presence,
    shape and type of these weights are checked here, from the headers only; values when they are loaded.
    """
    files, assembled = names.files, names.assembled
    computed = _computed_buffers(module, read)
    groups: dict[int, list[str]] = {}
    for name, value in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(value), []).append(name)
    by_name: dict[str, Loader] = {}
    for name, value in itertools.chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    ):
        if name not in read:
            continue
        if name in computed:
            by_name[name] = TensorLoader(name, computed[name])
            continue
        alike = groups.get(id(value), [name])
        joined = next((assembled[n] for n in alike if n in assembled), None)
        stored = next((files[n] for n in alike if n in files), alike[0])
        if joined is not None:
            joined.require(name, tuple(value.shape))
            by_name[name] = AssembledLoader(joined, next(n for n in alike if n in assembled))
        elif name in turned and checkpoint.of_linear(stored):
            checkpoint.require(stored, tuple(value.shape[::-1]))
            by_name[name] = TurnedLoader(checkpoint, stored)
        elif isinstance(value, nn.Parameter):
            checkpoint.require(stored, tuple(value.shape))
            by_name[name] = StoredLoader(checkpoint, stored)
        elif stored in checkpoint:
            checkpoint.require(stored, tuple(value.shape), value.is_floating_point())
            by_name[name] = TensorLoader(name, checkpoint.raw(stored))
    return by_name


def no_loaders(module: Any, read: Set[str]) -> dict[str, Loader]:
    """Loaders of `read` for a model without its weights: of computed buffers, and placeholders for single numbers.

    Raising reads single numbers, as in activation functions, as kernel parameters; their values do not select the
    kernel.
    """
    computed = _computed_buffers(module, read)
    by_name: dict[str, Loader] = {name: TensorLoader(name, value) for name, value in computed.items()}

    def missing(name: str) -> Tensor:
        raise UnsupportedError(f"weight {name} was not given, and its values are needed: the model was read without")

    for name, value in itertools.chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    ):
        if name in read and name not in by_name:
            number = value.numel() == 1 and value.is_floating_point()
            by_name[name] = _stand_in(name, value.shape) if number else functools.partial(missing, name)
    return by_name


def _stand_in(name: str, shape: torch.Size) -> Loader:
    """A placeholder number for the weight `name`, unlike any constant in a pattern and any other weight's."""
    return TensorLoader(name, torch.full(shape, 0.37 + zlib.crc32(name.encode()) / 2**36))


def _file_names(module: Any, checkpoint: Checkpoint) -> Names:
    """Where the weights of `module` are.

    Follows transformers' own rules for renaming, joining and splitting, for instance of experts stored separately.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(module)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = module.state_dict()
    computed = dict(module.named_buffers())
    stored_names: dict[str, str] = {}
    groups: dict[str, _Assembled] = {}
    unused = []
    for stored in sorted(checkpoint, key=dot_natural_key):  # pieces are joined in numerical order
        name, pattern = rename_source_key(stored, renamings, converters, module.base_model_prefix, state)
        if name not in state and stored in state:
            name, pattern = stored, None
        if name in state and pattern is not None:
            group = groups.setdefault(name, _Assembled(module, checkpoint, by_pattern[pattern], name))
            group.pieces.append((pattern, stored))
        else:
            if name in state and name in stored_names:
                _require_equal(checkpoint, name, stored_names[name], stored)
            elif name not in state and name not in computed:
                unused.append(stored)
            stored_names[name] = stored
    assembled = {name: group for group in groups.values() for name in group.shapes()}
    return Names(stored_names, assembled, tuple(unused))


def _require_equal(checkpoint: Checkpoint, name: str, one: str, other: str) -> None:
    """Raise UsageError if two stored tensors that both mean the weight `name` differ."""
    if not _are_equal(checkpoint, one, other):
        raise UsageError(
            f"tensors {one} and {other} differ, and both are weight {name} of the model: remove one of them"
        )


def _are_equal(checkpoint: Checkpoint, one: str, other: str) -> bool:
    a, b = checkpoint.raw(one), checkpoint.raw(other)
    return a.shape == b.shape and torch.equal(a, b)


@dataclass
class _Assembled:
    """Weights of the module that one of transformers' converters makes from several stored tensors.

    `pieces` are (source pattern, stored name) in order; `target` is transformers' key for the group.
    """

    module: Any
    checkpoint: Checkpoint
    converter: Any
    target: str
    pieces: list[tuple[str, str]] = field(default_factory=list)

    def _convert(self, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        old = self.converter  # which accumulates tensors, so make a new one
        patterns = list(old._original_source_patterns), list(old._original_target_patterns)
        converter = type(old)(*patterns, operations=old.operations)
        converter.scope_prefix, converter.base_model_prefix = old.scope_prefix, old.base_model_prefix
        for pattern, stored in self.pieces:
            converter.add_tensor(self.target, stored, pattern, functools.partial(read, stored))
        try:
            made = converter.convert(self.target, model=self.module, config=self.module.config)
        except Exception as error:  # conversion operations may raise anything
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UsageError(f"weight {self.target} cannot be assembled from {self.pieces[0][1]}: {reason}") from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names in the module and shapes of the converted weights, from the headers of the files only."""

        def read(stored: str) -> Tensor:
            return torch.empty(self.checkpoint.entries[stored].shape, device="meta")

        return {name: tuple(value.shape) for name, value in self._convert(read).items()}

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise UsageError unless the converted weight `name` has `shape`."""
        made = self.shapes().get(name)
        if made != shape:
            raise UsageError(f"weight {name} is assembled to shape {made} from {len(self.pieces)} tensors, not {shape}")

    def load(self, name: str) -> Tensor:
        """The weight `name` in float32. Raises UsageError if a piece holds NaN or infinity."""
        return self._convert(self.checkpoint.load)[name].contiguous()


@dataclass(frozen=True)
class AssembledLoader:
    """Loads the weight `name` of a group of stored tensors."""

    group: _Assembled
    name: str

    def __call__(self) -> Tensor:
        return self.group.load(self.name)

    @property
    def few_bits(self) -> bool:
        """Whether all tensors of the group are stored in few bits."""
        return all(self.group.checkpoint.in_few_bits(stored) for _, stored in self.group.pieces)


def _settle_ties(module: Any, checkpoint: Checkpoint, files: dict[str, str]) -> None:
    """Untie weights that the files store twice with different values, as transformers does."""
    for target, source in dict(getattr(module, "all_tied_weights_keys", None) or {}).items():
        if target not in files or source not in files:
            continue
        if _are_equal(checkpoint, files[target], files[source]):
            continue
        parent, _, leaf = target.rpartition(".")
        owner = module.get_submodule(parent)
        setattr(owner, leaf, nn.Parameter(torch.empty_like(getattr(owner, leaf)), requires_grad=False))


@contextmanager
def numbered(module: Any) -> Iterator[None]:
    """`module` with the values of its whole numbers that are not stored, such as positions, while the context lasts."""
    kept = {
        f"{path}.{name}".removeprefix("."): (owner, name, owner._buffers[name])
        for path, owner in module.named_modules()
        for name in owner._non_persistent_buffers_set
        if owner._buffers.get(name) is not None and owner._buffers[name].dtype in (torch.int32, torch.int64)
    }
    computed = _computed_buffers(module, kept.keys())
    try:
        for path, (owner, name, _) in kept.items():
            owner._buffers[name] = computed[path]
        yield
    finally:
        for owner, name, value in kept.values():
            owner._buffers[name] = value


def _computed_buffers(module: Any, read: Set[str]) -> dict[str, Tensor]:
    """Values of buffers that are not stored, such as rotary frequencies, computed by the model's own code.

    Only modules with a buffer in `read` are asked.

    They are moved to the CPU temporarily, filled by transformers' initialization of their modules, or of modules that
    contain these, and removed again; parameters stay on the meta device, where initialization does nothing.
    """
    computed: dict[str, Tensor] = {}
    for path, owner in module.named_modules():
        names = [name for name in owner._non_persistent_buffers_set if owner._buffers.get(name) is not None]
        if read.isdisjoint(f"{path}.{name}".removeprefix(".") for name in names):
            continue
        kept = {name: owner._buffers[name] for name in names}
        for name, buffer in kept.items():
            fill = float("nan") if buffer.is_floating_point() else 0
            owner._buffers[name] = torch.full(buffer.shape, fill, dtype=buffer.dtype, device="cpu")
        _fill(module, path, [owner._buffers[name] for name in kept])
        for name, buffer in kept.items():
            computed[f"{path}.{name}" if path else name] = owner._buffers[name]
            owner._buffers[name] = buffer
    for name, value in computed.items():
        if value.is_floating_point():
            require_finite(name, value)
    return computed


def _fill(module: Any, path: str, buffers: Sequence[Any]) -> None:
    """Initialize the submodule at `path` of `module`, and then what contains it, until all its `buffers` are filled."""
    from transformers import PreTrainedModel

    around = [module, *(module.get_submodule(path[:i]) for i, c in enumerate(path + ".") if c == "." and i)]
    initializers = [m for m in around if isinstance(m, PreTrainedModel)]
    for owner in reversed(around):
        with torch.no_grad():
            initializers[-1]._init_weights(owner)
        if all(bool(buffer.isfinite().all()) for buffer in buffers):  # integers, too, are finite
            return
