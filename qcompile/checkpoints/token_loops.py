"""Loops over tokens in a model's Python code, traced as recurrences of any number of tokens.

A trace has a loop over tokens with one length only. While `TokenLoops` is active, a loop `for t in range(T)` over the
T tokens of the model's inputs runs ITERATIONS times, and t is a `TokenNumber`, which can only take the token's slice of
a tensor. Each function that the body calls is recorded. The body is one token of a recurrence if all recorded tokens
are treated alike, the Python code finds nothing changed by which it could treat later ones differently, and the values
that one token leaves to the next start from zeros. Then loop_recurrence.py writes it in qcompile's operators for all
tokens. Everything else is refused.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from qcompile.checkpoints.loop_blocks import block_size
from qcompile.checkpoints.loop_body import Body, Recorder
from qcompile.checkpoints.loop_counts import Counts, Held, TokenIterator
from qcompile.checkpoints.loop_numbers import BlockNumber, LoopError, TokenNumber, refused
from qcompile.checkpoints.loop_recurrence import Recurrence
from qcompile.checkpoints.tensor_memory import Zeros, memory
from qcompile.errors import UnsupportedError

ITERATIONS = 6
"""Tokens for which a loop runs: the first, with the initial state; two to find all that the code reads; two to compare
it (loop_counts.py); and one more, which must be treated as those before."""

_KEEPS_ZEROS = {"to", "type", "float", "expand", "expand_as", "view", "reshape", "unsqueeze", "clone", "contiguous"}
_EARLY = "may end before the last token"
_active: list[TokenLoops] = []


class TokenLoops(TorchFunctionMode):
    """Writes loops over the tokens of `inputs` [B, T] as recurrences, while it is active."""

    def __init__(self, inputs: Tensor) -> None:
        super().__init__()
        self.batch, self.tokens = inputs.shape
        self._outside: FrameType | None = None  # the frame that enters the mode
        self._recorder: Recorder | None = None
        self._iterators: list[Held] = []  # those that the loop combines, as zip does
        self.stepping: list[Held] = []  # the iterator that was asked last for a value
        self._name = ""
        self._ended = False  # whether a loop has ended before its last token
        self._zeros = Zeros()
        self._finished: list[tuple[Recorder, Recurrence]] = []
        self._written: dict[int, tuple[Tensor, Tensor]] = {}

    def __enter__(self) -> Any:
        _active.append(self)
        self._outside = sys._getframe(1)
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        _active.pop()
        self._outside = None
        super().__exit__(kind, error, trace)
        if error is None and self._ended:
            error = refused(_EARLY)
        if isinstance(error, LoopError):
            raise UnsupportedError(f"{self._name} {error}") from error

    def covers(self, count: Any) -> bool:
        """Whether `count` is the symbolic number of tokens."""
        return isinstance(count, torch.SymInt) and repr(count) == repr(self.tokens)

    def places(self, name: str, block: int | None = None) -> Iterator[TokenNumber | BlockNumber]:
        """What the loop `name` over all tokens, or over all blocks of `block` tokens, iterates over."""
        if self._recorder is not None:
            raise refused("contains another loop over tokens")
        for recorder in self._iterations(name, block):
            yield TokenNumber(recorder) if block is None else BlockNumber(recorder)

    def parts(self, source: Tensor, dim: int, name: str) -> Iterator[Tensor]:
        """The parts of `source` for each token, which a loop iterates over; together with others, as in zip."""
        for recorder in self._iterations(name, None):
            yield recorder.part(source, dim, TokenNumber(recorder))

    def _iterations(self, name: str, block: int | None) -> Iterator[Recorder]:
        """The recorder in each iteration of a loop; several iterators of the loop share it."""
        self._name = name
        counts = None if self._recorder else Counts(self._outside)
        recorder = self._recorder or Recorder(self.batch, self.tokens, self._zeros, block, name)
        self._iterators = [*(self._iterators if counts is None else []), *self.stepping]
        self._recorder = recorder
        try:
            for number in range(ITERATIONS):
                recorder.begin(number)
                if counts:
                    counts.look(number, self._iterators)
                yield recorder
        except GeneratorExit:  # an error raised here would be lost
            self._ended = self._ended or self._recorder is recorder
            return
        finally:
            if counts:
                counts.close()
            ends, self._recorder = self._recorder is recorder, None
        if ends:
            self._finish(recorder)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._ended:
            raise refused(_EARLY)
        if self._written:
            args, kwargs = tree_map(self._current, (args, kwargs))
        name = _name(func)
        if self._recorder is not None:
            return self._recorder.call(func, name, args, kwargs)
        if self._finished and (later := self._after(name, args, kwargs)) is not None:
            return later
        if name == "unbind" and isinstance(args[0], Tensor):
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            if self.covers(args[0].shape[dim]):
                return TokenParts(self, args[0], dim)
        result = func(*args, **kwargs)
        self._note_zeros(name, args, result)
        return result

    def _current(self, item: Any) -> Any:
        if id(item) in self._written:
            return self._written[id(item)][1]
        if isinstance(item, Tensor) and any(memory(item) == memory(holder) for holder, _ in self._written.values()):
            raise refused("writes results into a tensor that is read through another view of it")
        return item

    def _note_zeros(self, name: str, args: Any, result: Any) -> None:
        """Remember tensors of zeros."""
        kept = name in _KEEPS_ZEROS and id(args[0]) in self._zeros
        full = name in ("full", "full_like", "new_full") and len(args) > 1 and type(args[1]) in (int, float)
        if name in ("zeros", "zeros_like", "new_zeros") or kept or (full and args[1] == 0):
            self._zeros.add(result)

    def _finish(self, recorder: Recorder) -> None:
        """The loop is over: tensors into which it wrote the results of all tokens hold those from now on."""
        recurrence = Recurrence(Body.of(recorder))
        self._finished.append((recorder, recurrence))
        for target, (step, dim) in recorder.writes().items():
            holder = recorder.outside[target]
            self._written[target] = holder, recurrence.stacked(step, dim)

    def _after(self, name: str, args: Any, kwargs: Any) -> Any:
        """A function of what a loop made, after the loop: the results of all tokens, stacked or concatenated."""
        for recorder, recurrence in self._finished:
            made = [item for item in tree_flatten((args, kwargs))[0] if recorder.made(item)]
            if not made:
                continue
            parts, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else 0)
            step = recorder.in_order(parts) if name in ("stack", "cat", "concat", "concatenate") else None
            if step is None or len(made) != len(parts):
                raise refused(f"leaves a value of one token, which {name} uses after it")
            return recurrence.stacked(step, dim) if name == "stack" else recurrence.joined(step, dim)
        return None


def _name(func: Any) -> str:
    """The name of a function of torch; with its library, if it is an operator of another one."""
    is_operator = isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
    other = is_operator and not str(func).startswith("aten.")
    return str(func) if other else getattr(func, "__name__", "")


class TokenParts:
    """The parts of `source` for each token along `dim`: what unbind gives, for a number of tokens that is not known."""

    def __init__(self, loops: TokenLoops, source: Tensor, dim: int) -> None:
        self._loops, self._source, self._dim = loops, source, dim

    def __iter__(self) -> Iterator[Tensor]:
        code, line = sys._getframe(1).f_code, sys._getframe(1).f_lineno
        name = f"the loop over tokens in {code.co_qualname} (line {line})"
        return TokenIterator(self._loops.parts(self._source, self._dim, name), self._loops.stepping)

    def __len__(self) -> int:
        raise refused("counts the parts of tokens: use range over the number of tokens")

    def __getitem__(self, _: Any) -> Any:
        raise refused("takes single parts of tokens out of a tensor")


# ---- range -------------------------------------------------------------------------------------


class _Kind(type):
    """isinstance(x, range) stays what it was."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, builtins.range)


class _Range(metaclass=_Kind):
    """range, but for a range over all tokens, which is a loop of the active TokenLoops."""

    def __new__(cls, *bounds: Any) -> Any:
        loops = _active[-1] if bounds and bounds[:-1] in ((), (0,)) and _active else None
        block = block_size(bounds[-1], loops.tokens) if loops is not None else None
        if loops is not None and (block or loops.covers(bounds[-1])):
            code, line = sys._getframe(1).f_code, sys._getframe(1).f_lineno
            name = f"the loop over tokens in {code.co_qualname} (line {line})"
            return TokenIterator(loops.places(name, block), loops.stepping)
        return builtins.range(*bounds)


@contextmanager
def recorded(module: nn.Module) -> Iterator[None]:
    """For as long as the context lasts, range knows loops over tokens in the files of the code of `module`."""
    names = {kind.__module__ for part in module.modules() for kind in type(part).__mro__}
    names = {name for name in names if name in sys.modules and name.partition(".")[0] not in ("torch", "builtins")}
    spaces = [vars(sys.modules[name]) for name in sorted(names)]
    changed = [space for space in spaces if "range" not in space]
    for space in changed:
        space["range"] = _Range
    try:
        yield
    finally:
        for space in changed:
            del space["range"]
