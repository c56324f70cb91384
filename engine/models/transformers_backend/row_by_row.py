"""Computation of a class row by row, for `engine.batch_invariant`.

In most functions of torch, the bits of a result depend on its place in the tensor. The last numbers
are computed without vector instructions, and threads divide large tensors. The bits of a class do
not depend on the batch if each operation is of one of these kinds:

- moves, and operations that round an exact result once. They are called as they are.
- functions of the last dimension. They are called for each row alone, which has the same shape in
  all steps.
- products whose sums have one term, such as positions times frequencies. They become element-wise
  products.

Other operations of torch are rejected. Matrices and attention are not computed by torch, see `held`
and `attention`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.errors import ConfigError

_EXACT = frozenset(
    (
        *("abs", "add", "clamp", "div", "gt", "minimum", "mul", "neg", "relu", "sub"),
        *("alias", "cat", "clone", "constant_pad_nd", "copy", "_to_copy", "detach", "lift_fresh"),
        *("empty", "empty_like", "new_empty", "full_like", "ones_like", "zeros_like"),
        *("embedding", "index", "index_put", "index_select", "masked_fill", "where"),
        *("expand", "repeat", "permute", "t", "transpose", "squeeze", "unsqueeze"),
        *("select", "slice", "split", "split_with_sizes", "stack", "_unsafe_view", "view"),
    )
)
_BY_ROW = frozenset(
    (
        *("cos", "exp", "expm1", "gelu", "pow", "rsqrt", "sigmoid", "silu", "sin", "softplus"),
        *("sqrt", "tanh", "mean", "native_layer_norm"),
    )
)
_PRODUCTS = frozenset(("bmm", "mm"))
_LARGEST_ROW = 1 << 15  # threads divide rows of this size or more


class RowByRow(TorchDispatchMode):
    """Computes the operations of one module. Forward stream only.

    Args:
        name: name of the class, for errors.
    """

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name
        self._widths: list[tuple[str, int]] = []
        self._always: Sequence[tuple[str, int]] = ()

    def call(self, module: nn.Module, **given: Any) -> Any:
        """Return the result of `module`.

        Raises:
            ConfigError: the bits of an operation may depend on the batch.
        """
        self._widths = []
        with self:
            output = module(**given)
        self._always = self._always or self._widths
        if self._widths != self._always:
            raise self._rejected("functions that depend on the size of a step")
        return output

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given, name = kwargs or {}, func.overloadpacket.__name__
        if name in _BY_ROW and isinstance(args[0], Tensor) and args[0].ndim:
            return self._by_row(name, func, args, given)
        if name in _PRODUCTS and args[0].shape[-1] == 1:
            return args[0] * args[1]
        adds = given.get("alpha", 1) != 1 or (name == "index_put_" and any(args[3:]))
        if name.removesuffix("_") in _EXACT and not adds:
            return func(*args, **given)
        tensors = [each for each in tree_leaves((args, given)) if isinstance(each, Tensor)]
        if not any(each.is_floating_point() or each.is_complex() for each in tensors):
            return func(*args, **given)
        with self:
            output = func.decompose(*args, **given)
        if output is NotImplemented:
            raise self._rejected(f"torch's {name}")
        return output

    def _by_row(
        self, name: str, func: Any, args: Sequence[Any], given: Mapping[str, Any]
    ) -> Tensor | tuple[Tensor, ...]:
        x, *others = args
        *outer, width = x.shape
        self._widths.append((name, width))
        of_a_row = name != "native_layer_norm" or others[0] == [width]
        if name == "mean":
            of_a_row = others[:1] in ([[-1]], [[len(outer)]])
            others = [[-1], *others[1:]]
        if not of_a_row or width >= _LARGEST_ROW:
            raise self._rejected(
                f"{name} of more than one row, or of a row of {_LARGEST_ROW} or more numbers"
            )
        # All copies have the same alignment.
        rows = [func(row.clone(), *others, **given) for row in x.reshape(-1, width).split(1)]

        def joined(parts: Sequence[Tensor]) -> Tensor:
            return torch.cat(tuple(parts)).view(*outer, *parts[0].shape[1:])

        if isinstance(rows[0], tuple):
            return tuple(map(joined, zip(*rows, strict=True)))
        return joined(rows)

    def _rejected(self, what: str) -> ConfigError:
        return ConfigError(
            f"engine.batch_invariant: {self._name} computes {what}, whose results may depend on "
            "the batch: serve a model of a native family, or unset it"
        )
