"""The interpreter of `tests.support.hardware.interpreter` converts operands like Triton's."""

import importlib.util
import itertools
from types import ModuleType

import numpy as np
import pytest
import triton.language as tl
from triton.language import semantic
from triton.runtime import interpreter

from kernels import device

pytestmark = pytest.mark.skipif(not device.INTERPRETED, reason="kernels are compiled")

SHAPES = [((), ()), ((4,), (4,)), ((4,), ()), ((), (2, 4)), ((2, 1), (1, 4)), ((4,), (2,))]
DTYPES = [
    *(tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64),
    *(tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.float8e4nv, tl.float8e5),
]


def original() -> ModuleType:
    """Return Triton's module of operations without patches."""
    spec = importlib.util.find_spec(semantic.__name__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def operand(dtype: tl.dtype, shape: tuple[int, ...]) -> tl.tensor:
    data = np.ones(shape or (1,), dtype=interpreter._get_np_dtype(dtype))
    handle = interpreter.TensorHandle(data, dtype)
    return tl.tensor(handle, tl.block_type(dtype, shape) if shape else dtype)


def converted(operations: object, *given: object, **options: bool) -> object:
    """Return types and numbers of both operands, or the kind of the error."""
    try:
        found = operations.binary_op_type_checking_impl(*given, **options)  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        return type(error).__name__
    return [(str(x.type), x.handle.data.dtype, x.handle.data.tolist()) for x in found]


@pytest.mark.parametrize("div_or_mod", [False, True])
def test_operands_are_converted_as_by_triton(div_or_mod: bool) -> None:
    its_own = original().TritonSemantic(interpreter.interpreter_builder)
    for (one, other), (left, right) in itertools.product(
        SHAPES, itertools.product(DTYPES, repeat=2)
    ):
        given = operand(left, one), operand(right, other)
        expected = converted(its_own, *given, div_or_mod=div_or_mod)
        actual = converted(interpreter.interpreter_semantic, *given, div_or_mod=div_or_mod)
        assert actual == expected, (left, one, right, other)
