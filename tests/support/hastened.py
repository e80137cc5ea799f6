"""Triton's interpreter without what takes it most of its time.

What kernels compute stays the same to the bit, but for sums of products, which are rounded once, and for numbers that
become bf16, which are rounded as on GPUs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any


def hasten() -> None:
    """Leave out what takes the interpreter three quarters of its time and finds nothing in our kernels."""
    import numpy as np
    from triton import language
    from triton.runtime import interpreter

    # An integer that overflows wraps, as on a GPU, and shows in what is computed.
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
    # Nor is each array measured against its type.
    interpreter.TensorHandle.__post_init__ = lambda self: None
    _patch_lang_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        _patch_lang_tensor(tensor, scope)
        # That of Triton 3.6 takes arrays of one number for numbers, which NumPy has stopped to do in 2.5.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor
    splat = interpreter.InterpreterBuilder.create_splat

    def create_splat(self: Any, type: Any, one: Any) -> Any:
        # That of Triton 3.9 makes integers of the outcome of a comparison, which its loads refuse as a mask.
        if one.data.dtype != bool:
            return splat(self, type, one)
        return interpreter.TensorHandle(np.full(type.shape, one.data, bool), language.int1)

    interpreter.InterpreterBuilder.create_splat = create_splat
    interpreter.InterpreterBuilder.create_dot = _rounded_once(interpreter.InterpreterBuilder.create_dot)
    _call_builtins_at_once(interpreter)
    # The interpreter puts functions of its own into Triton's language at each launch and at each call of a function
    # inside of one. Here they are put there once, and stay.
    seen = {"tl": language, "core": language.core}
    interpreter._patch_lang(FunctionType((lambda: None).__code__, seen))
    kept = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda function: kept
    _remember_types()
    _remember_constants()
    _shorten_operators()
    _round_at_once()
    _shorten_loads()
    _shorten_casts()
    _shorten_new_dimensions()
    _unwrap_at_once()


def _rounded_once(usual: Callable[..., Any]) -> Callable[..., Any]:
    """Products with sums that do not depend on the shape of their operands, in place of `usual` ones.

    NumPy adds float32 products in an order that depends on the shape; a tensor core does not. Sums of float64 differ by
    the order only beyond the digits of float32, to which they are rounded.
    """
    import numpy as np
    from triton.runtime.interpreter import TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if d.data.dtype != np.float32 or a.dtype.primitive_bitwidth == 8:
            return usual(self, a, b, d, *options)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return TensorHandle(product + d.data, d.dtype.scalar)

    return create_dot


def _remember_types() -> None:
    """Types, and what tensors say of theirs, are made once for each shape: the interpreter makes them anew always."""
    from triton import language
    from triton.runtime import interpreter

    core, semantic = language.core, type(interpreter.interpreter_semantic)
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    numpy_type, broadcast = interpreter._get_np_dtype, semantic.broadcast_impl_value
    blocks: dict[Any, dict[str, Any]] = {}
    numpy_types: dict[str, Any] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(int(size) for size in shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = vars(self)
        self.__dict__ = blocks[key]  # what is kept of a type is kept of all such

    def tensor(self: Any, handle: Any, type: Any) -> None:
        facts = vars(type).get("_facts")
        if facts is None:
            make_tensor(self, handle, type)
            type._facts = {name: value for name, value in vars(self).items() if name != "handle"}
        else:
            vars(self).update(facts, handle=handle)

    def get_np_dtype(type: Any) -> Any:
        scalar = type.scalar
        if scalar.name not in numpy_types:
            numpy_types[scalar.name] = numpy_type(scalar)
        return numpy_types[scalar.name]

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        of_block = lhs.type.is_block()
        if of_block == rhs.type.is_block() and (not of_block or lhs.type.shape.values == rhs.type.shape.values):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    core.block_type.__init__, core.tensor.__init__ = block, tensor
    interpreter._get_np_dtype, semantic.broadcast_impl_value = get_np_dtype, broadcast_impl_value


def _remember_constants() -> None:
    """Operands of the commonest types are brought together at once, and numbers made tensors once for each shape."""
    from triton import language
    from triton.runtime import interpreter

    core, semantic = language.core, type(interpreter.interpreter_semantic)
    check = semantic.binary_op_type_checking_impl
    constants: dict[Any, Any] = {}

    def constant(self: Any, value: Any, like: Any) -> Any:
        key = value, id(vars(like.type)) if like.type.is_block() else like.dtype.name
        if key not in constants:
            number = self.scalar_constant(value, like.dtype)
            constants[key] = self.splat(number, like.shape) if like.type.is_block() else number
        return constants[key]

    def binary_op_type_checking_impl(self: Any, lhs: Any, rhs: Any, *allowed: bool, **asked: bool) -> Any:
        pair = type(lhs) is core.tensor, type(rhs) is core.tensor
        if pair == (True, True):
            if lhs.dtype.name == rhs.dtype.name in ("int32", "fp32"):
                return self.broadcast_impl_value(lhs, rhs)
        elif any(pair) and all(allowed[2:3]) and asked.get("arithmetic_check", True):
            known, number = (lhs, rhs) if pair[0] else (rhs, lhs)
            name = known.dtype.name
            if (type(number) is int and abs(number) < 1 << 31 and name in ("int32", "fp32")) or (
                type(number) is float and name == "fp32"
            ):
                made = constant(self, number, known)
                return (lhs, made) if pair[0] else (made, rhs)
        return check(self, lhs, rhs, *allowed, **asked)

    semantic.binary_op_type_checking_impl = binary_op_type_checking_impl


_OPERATORS = {
    **dict.fromkeys(("add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne"), ("fp32", "int32", "int64")),
    **dict.fromkeys(("and", "or", "rshift", "lshift"), ("int1", "int32")),
}


def _shorten_operators() -> None:
    """Operators on the commonest types are NumPy's at once: Triton's way to them takes several times as long.

    Where two types meet, or a type and a number, for the first time, all goes Triton's way: it says of what type the
    result is from then on, and must come to the same numbers.
    """
    for name, types in _OPERATORS.items():
        operation = getattr(operator, f"{name}_" if name in ("and", "or") else name)
        _shorten(f"__{name}__", operation, types)
        if name in ("add", "sub", "mul"):
            _shorten(f"__r{name}__", lambda one, other, operation=operation: operation(other, one), types)


def _shorten(name: str, operation: Callable[[Any, Any], Any], types: tuple[str, ...]) -> None:
    import numpy as np
    from triton import language
    from triton.runtime import interpreter

    core, make = language.core, interpreter.TensorHandle
    whole = getattr(core.tensor, name)
    known: dict[Any, Any] = {}

    def operate(self: Any, other: Any) -> Any:
        own, data = self.dtype.name, self.handle.data
        if type(other) is core.constexpr:
            other = other.value
        kind = type(other)
        if kind is core.tensor:
            key, right = (_key(self), _key(other)), other.handle.data
            if name == "__add__" and other.dtype.name in ("int32", "int64") and self.dtype.is_ptr():
                right = _item_bytes(self) * right.astype(np.uint64)
            elif own not in types or other.dtype.name != own:
                return whole(self, other)
        elif own in types and ((kind is int and abs(other) < 1 << 31) or (kind is float and own == "fp32")):
            key, right = (_key(self), kind, other), data.dtype.type(other)
        elif kind is int and name == "__add__" and self.dtype.is_ptr():
            key, right = (_key(self), kind), np.array(_item_bytes(self) * other).astype(np.uint64)
        else:
            return whole(self, other)
        if key in known:
            type_, dtype = known[key]
            return core.tensor(make(operation(data, right), dtype), type_)
        result = whole(self, other)
        assert np.array_equal(operation(data, right), result.handle.data, equal_nan=True), (name, key)
        known[key] = result.type, result.handle.dtype
        return result

    setattr(core.tensor, name, operate)


def _item_bytes(pointer: Any) -> int:
    """Bytes of what `pointer` points to."""
    return max(1, pointer.dtype.element_ty.primitive_bitwidth // 8)


def _key(tensor: Any) -> Any:
    """What tensors of one type have alike (see `_remember_types`)."""
    type = tensor.type
    return id(vars(type)) if type.is_block() else type.name


def _round_at_once() -> None:
    """A float32 as bf16 is the nearest one, the even one of two, as GPUs round; a bf16 has its bits before 16 zeros.

    The interpreter finds out what bits stand for, and cuts off what GPUs round. Where it rounds, it halves a number if
    rounding carries into an odd exponent.
    """
    import numpy as np
    from triton._C.libtriton import ir
    from triton.runtime import interpreter

    convert_float, rounded = interpreter._convert_float, (None, ir.ROUNDING_MODE.RTNE)

    def convert(data: Any, from_type: Any, to_type: Any, rounding: Any) -> Any:
        if (from_type.name, to_type.name) == ("bf16", "fp32"):
            return data.view(np.uint16).astype(np.uint32) << 16
        if (from_type.name, to_type.name) == ("fp32", "bf16") and rounding in rounded:
            return _nearest(data)
        return convert_float(data, from_type, to_type, rounding)

    interpreter._convert_float = convert


def _nearest(data: Any) -> Any:
    """The bits of float32 numbers as bf16."""
    import numpy as np

    bits = np.ascontiguousarray(data).view(np.uint32).reshape(data.shape)
    result = ((bits + ((bits >> 16 & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    unknown = np.isnan(data)
    return np.where(unknown, np.uint16(0x7FC0), result) if unknown.any() else result


def _shorten_loads() -> None:
    """Loads that follow one of the same types, as `_shorten_operators` has them."""
    import numpy as np
    from triton import language
    from triton.runtime import interpreter

    core, make, read, whole = language.core, interpreter.TensorHandle, interpreter._interpreter.load, language.load
    known: dict[Any, Any] = {}

    def load(pointer: Any, mask: Any = None, other: Any = None, **hints: Any) -> Any:
        plain = (mask is None or type(mask) is core.tensor) and (other is None or type(other) in (int, float))
        if not plain or pointer.dtype.element_ty.name not in _LOADED:
            return whole(pointer, mask, other, **hints)
        key = _key(pointer), mask is None or _key(mask), other
        if key not in known:
            result = whole(pointer, mask, other, **hints)
            kept = result.handle.data
            if other and pointer.dtype.element_ty.name == "bf16":
                return result
            known[key] = result.type, result.handle.dtype, np.full(kept.shape, other or 0, kept.dtype)
            assert np.array_equal(load(pointer, mask, other).handle.data, kept, equal_nan=True), key
            return result
        type_, dtype, filled = known[key]
        places, live = pointer.handle.data, True if mask is None else mask.handle.data
        if places.shape != filled.shape:
            places = np.broadcast_to(places, filled.shape)
        if mask is None or live.shape != filled.shape:
            live = np.broadcast_to(live, filled.shape)
        return core.tensor(make(read(places, live, filled, filled.dtype), dtype), type_)

    language.load = load


_LOADED = ("fp32", "bf16", "int32", "int16", "int8")


def _shorten_casts() -> None:
    """Casts that NumPy has, as `_shorten_operators` has operators."""
    import numpy as np
    from triton import language
    from triton.runtime import interpreter

    core, make, whole = language.core, interpreter.TensorHandle, language.core.tensor.to
    known: dict[Any, Any] = {}

    def to(self: Any, dtype: Any, *rest: Any, **more: Any) -> Any:
        if type(dtype) is core.constexpr:
            dtype = dtype.value
        own = self.dtype.name
        widens, narrows = (own, dtype.name) == ("bf16", "fp32"), (own, dtype.name) == ("fp32", "bf16")
        if rest or more or not (widens or narrows or (own in _CAST and dtype.name in _CAST)):
            return whole(self, dtype, *rest, **more)

        def cast(to_type: Any) -> Any:
            data = self.handle.data
            if narrows:
                return _nearest(data).view(to_type)
            return (data.view(np.uint16).astype(np.uint32) << 16).view(to_type) if widens else data.astype(to_type)

        key = _key(self), dtype.name
        if key not in known:
            result = whole(self, dtype)
            kept = result.handle.data
            assert np.array_equal(cast(kept.dtype), kept, equal_nan=True), key
            known[key] = result.type, result.handle.dtype, kept.dtype
            return result
        type_, element, to_type = known[key]
        return core.tensor(make(cast(to_type), element), type_)

    core.tensor.to = to


_CAST = ("fp32", "fp16", "int64", "int32", "int16", "int8")


def _shorten_new_dimensions() -> None:
    """`x[:, None]`, as `_shorten_operators` has operators: the result has the numbers of `x` in another shape."""
    import numpy as np
    from triton import language
    from triton.runtime import interpreter

    core, make, whole = language.core, interpreter.TensorHandle, language.core.tensor.__getitem__
    known: dict[Any, Any] = {}

    def get(self: Any, places: Any) -> Any:
        if type(places) is not tuple or not self.type.is_block():
            return whole(self, places)
        key = id(vars(self.type)), *(place is None for place in places)
        if any(place is not None and place != slice(None) for place in places):
            return whole(self, places)
        if key not in known:
            result = whole(self, places)
            kept = result.handle.data
            assert np.array_equal(self.handle.data.reshape(kept.shape), kept, equal_nan=kept.dtype.kind == "f"), key
            known[key] = result.type, result.handle.dtype, kept.shape
            return result
        type_, element, shape = known[key]
        return core.tensor(make(self.handle.data.reshape(shape), element), type_)

    core.tensor.__getitem__ = get


def _call_builtins_at_once(interpreter: Any) -> None:
    """Functions of Triton's language are called with the interpreter's semantics without a look at each argument."""
    from triton import language

    semantic, check = interpreter.interpreter_semantic, language.core.load.__code__

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        # A builtin's wrapper checks only that there are semantics.
        inner = member.__wrapped__ if getattr(member, "__code__", None) is check else member

        def call(*args: Any, **more: Any) -> Any:
            more["_semantic"] = semantic
            return inner(*args, **more)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch_attr


def _unwrap_at_once() -> None:
    """Most arguments are tensors and numbers, in which no constants are to be looked for."""
    from triton import language

    core = language.core
    unwrap, plain = core._unwrap_if_constexpr, (core.tensor, int)

    def unwrap_if_constexpr(value: Any) -> Any:
        if type(value) is core.constexpr:
            return value.value
        return value if type(value) in plain else unwrap(value)

    core._unwrap_if_constexpr = unwrap_if_constexpr
