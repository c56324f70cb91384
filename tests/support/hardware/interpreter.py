"""Makes Triton's interpreter faster, and its products independent of the place of a row.

The interpreter computes each operation in NumPy. Without this module, most of its CPU
time goes into other Python code: patches of the language, checks whose results are not used, and
the same types, which are derived again for each operation.
"""

import math
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter

Semantic = semantic.TritonSemantic
_Function = Callable[..., Any]


@cache
def patch_language_once() -> None:
    """Patch `triton.language` for the interpreter once in this process.

    The interpreter patches it in each call of a kernel and of each function that a kernel calls.
    It compiles nothing, so the patches may stay.
    """
    interpreter._patch_attr = _patch_attr
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    _drop_overflow_checks()
    _derive_types_once()
    _convert_only_different_operands()
    _multiply_each_row_alone()


def _patch_attr(obj: object, name: str, member: _Function, builder: object, scope: Any) -> None:
    """Patch a builtin with a call of its function, without the check of its `_semantic`."""
    function = getattr(member, "__wrapped__", member)

    def patched(*args: object, **kwargs: object) -> object:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, patched)


def _drop_overflow_checks() -> None:
    """Omit the check of each sum, which ends in an assertion that only `debug` switches on."""
    assert not interpreter.interpreter_builder.options.debug
    Semantic.binary_op_sanitize_overflow_impl = lambda self, lhs, rhs, binary_op: None


def _derive_types_once() -> None:
    """Derive what depends on a type alone once, and compare types without unwrapping them."""
    unwrap, equals, np_dtype = core._unwrap_if_constexpr, tl.dtype.__eq__, interpreter._get_np_dtype
    plain = {int, bool, float, str, type(None), tl.tensor, tl.dtype}
    np_dtypes: dict[str, np.dtype[Any]] = {}

    def unwrap_if_constexpr(value: object) -> object:
        return value if type(value) in plain else unwrap(value)

    def equal(self: tl.dtype, other: object) -> bool:
        return self is other or bool(equals(self, other))

    def get_np_dtype(of: tl.dtype) -> np.dtype[Any]:
        if (name := of.scalar.name) not in np_dtypes:
            np_dtypes[name] = np_dtype(of)
        return np_dtypes[name]

    @cache
    def numel(*shape: int) -> int:
        return int(core.validate_block_shape(shape))

    @cache
    def shape_and_numel(*shape: int) -> tuple[tl.tuple, tl.constexpr]:
        return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))

    def make_block_type(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        self.element_ty, self.shape = element_ty, tuple(core._unwrap_shape(shape))
        if not self.shape:
            raise TypeError("0d block_type is forbidden")
        self.numel = numel(*self.shape)

    def with_element_ty(self: tl.block_type, scalar_ty: tl.dtype) -> tl.block_type:
        made = object.__new__(tl.block_type)
        made.element_ty, made.shape, made.numel = scalar_ty, self.shape, self.numel
        return made

    def make_tensor(self: tl.tensor, handle: object, type: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_and_numel(*(type.shape if type.is_block() else ()))

    core._unwrap_if_constexpr, interpreter._get_np_dtype = unwrap_if_constexpr, get_np_dtype
    tl.dtype.__eq__, tl.tensor.__init__ = equal, make_tensor
    tl.block_type.__init__, tl.block_type.with_element_ty = make_block_type, with_element_ty
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")


def _convert_only_different_operands() -> None:
    """Leave two operands of one type as they are, which Triton would convert to that type."""
    convert, broadcast = Semantic.binary_op_type_checking_impl, Semantic.broadcast_impl_value
    Semantic.computation_type_impl = cache(Semantic.computation_type_impl)

    def convert_operands(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        tensors = type(lhs) is type(rhs) is tl.tensor
        if tensors and lhs.dtype is rhs.dtype and not lhs.dtype.is_ptr() and not div_or_mod:
            return self.broadcast_impl_value(lhs, rhs)
        pointers = allow_lhs_ptr, allow_rhs_ptr
        return convert(self, lhs, rhs, *pointers, arithmetic_check, div_or_mod)

    def broadcast_operands(self: Any, lhs: Any, rhs: Any) -> Any:
        same = lhs.shape is rhs.shape  # of one size, it is one object
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    Semantic.binary_op_type_checking_impl = convert_operands
    Semantic.broadcast_impl_value = broadcast_operands


def _multiply_each_row_alone() -> None:
    """Round each row of a product alike wherever it is.

    On a GPU, a row of `tl.dot` does not depend on the others. NumPy's BLAS rounds the last rows of
    a matrix differently on some processors.
    """
    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def create_dot(self: object, a: Any, b: Any, d: Any, *options: object) -> object:
        rows = interpreter.TensorHandle(a.data[..., None, :], a.dtype)
        matrices = interpreter.TensorHandle(b.data[..., None, :, :], b.dtype)
        sums = interpreter.TensorHandle(d.data[..., None, :], d.dtype)
        product = dot(self, rows, matrices, sums, *options)
        return interpreter.TensorHandle(product.data[..., 0, :], d.dtype.scalar)

    builder.create_dot = create_dot
