"""Decoder layers as one call into the compiled library (layers.cpp).

It supports layers with paged attention and a gated net, whose matrices are in panels. Results equal
those of the separate operations in `kernels` bit for bit.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.operators import ACTIVATIONS, DTYPES, Operators


@dataclass(frozen=True, slots=True, eq=False)
class PanelMatrix:
    """A matrix in panels.

    Attributes:
        panels: from `Operators.pack_panels`, with rows of whole words, or from `pack_codes`.
        scales, zeros: for int8 and 4-bit numbers, see `int8_product`, `weight_only_product`.
        group: inputs that share a scale. 0: the numbers have 8 bits or more.
    """

    operators: Operators
    panels: Tensor
    outputs: int
    inputs: int
    bias: Tensor | None
    scales: Tensor | None = None
    zeros: Tensor | None = None
    group: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class NormWeight:
    """The weight of a norm.

    Attributes:
        weight: in the compute dtype, or float32.
    """

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class CompiledLayer:
    """The weights and numbers of a layer, as defined by the separate operations.

    Attributes:
        rotation: index of its angles among those of a step.
    """

    mixer_norm: NormWeight
    mixer_post_norm: NormWeight | None
    q_norm: NormWeight | None
    k_norm: NormWeight | None
    ffn_norm: NormWeight
    ffn_post_norm: NormWeight | None
    qkv: PanelMatrix
    output: PanelMatrix
    gate_up: PanelMatrix
    down: PanelMatrix
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    activation: str  # argument of `act_and_mul`
    rotation: int
    scale: float
    soft_cap: float | None


@dataclass(frozen=True, slots=True, eq=False)
class CompiledStep:
    """The tokens of a forward, as `plan_attention` and `rope_and_store` take them.

    Attributes:
        locations, page_starts: for each page table.
        angles: for each rotation.
    """

    page_ids: Tensor
    query_starts: Tensor
    lengths: Tensor
    num_decodes: int
    locations: Sequence[Tensor]
    page_starts: Sequence[Tensor]
    angles: Sequence[Tensor]


class CompiledPool:
    """The keys and values of all layers, in order.

    Args:
        views: as attention takes them, [num_pages, kv_heads, 2, page_size, head_dim].
        tables: page table of each layer.
    """

    def __init__(self, views: Sequence[Tensor], tables: Sequence[int]) -> None:
        self.views = views
        self.page_size: int = views[0].shape[3]
        self.keys = (_Keys * len(views))(
            *(
                _Keys(view.data_ptr(), *view.stride()[:4], table)
                for view, table in zip(views, tables, strict=True)
            )
        )


class CompiledLayers:
    """Layers in order.

    Args:
        layers: at least one, all with the same hidden size, dtype and operators.
        sum_ranks: returns the sum of an output over the ranks of a node, each of which has a part
            of the layers. None: the layers are whole.
    """

    def __init__(
        self,
        layers: Sequence[CompiledLayer],
        sum_ranks: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._operators = layers[0].qkv.operators
        self._sum_ranks = sum_ranks
        self._layers = layers  # keeps alive what the structures below point into
        self._structures = (_Layer * len(layers))(*map(_structure, layers))
        matrices = [
            matrix
            for layer in layers
            for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)
        ]
        self._most_outputs = max(matrix.outputs for matrix in matrices)
        self._most_inputs = max(matrix.inputs for matrix in matrices)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        step: CompiledStep,
        pool: CompiledPool,
        group: tuple[int, int],
    ) -> tuple[Tensor, Tensor]:
        """Run layers `group[0]` to `group[1] - 1`.

        Args:
            x: contiguous [num_tokens, hidden], embeddings, or the output of the layer before the
                group. Overwritten.
            residual: to be added to x. Overwritten. None: the group begins with the first layer.
        Returns:
            The output of the group's last net and the residual to be added to it, both [num_tokens,
            hidden].
        Raises:
            ValueError: keys and values of another dtype.
            RankLost: another rank has ended, or is too late.
        """
        if any(view.dtype != x.dtype for view in pool.views):
            raise ValueError(f"keys and values must have the dtype {x.dtype} of x")
        num_tokens, hidden = x.shape
        locations, page_starts, angles = map(
            _addresses, (step.locations, step.page_starts, step.angles)
        )
        structure = _Step(
            DTYPES[x.dtype],
            x.itemsize,
            hidden,
            num_tokens,
            step.lengths.shape[0],
            step.num_decodes,
            pool.page_size,
            step.page_ids.data_ptr(),
            step.query_starts.data_ptr(),
            step.lengths.data_ptr(),
            ctypes.addressof(locations),
            ctypes.addressof(page_starts),
            ctypes.addressof(angles),
        )
        residual = torch.empty_like(x) if residual is None else residual
        wide = x.new_empty(num_tokens, self._most_outputs)
        other = x.new_empty(num_tokens, self._most_inputs)
        total = None if self._sum_ranks is None else _SumInPlace(self._sum_ranks, x)
        if total is not None:
            structure.sum = total.function
        self._operators.compute_layers(
            self._structures, pool.keys, group, structure, x, residual, wide, other
        )
        if total is not None and total.error is not None:
            raise total.error
        return x, residual


class _SumInPlace:
    """The callback for sums over ranks. Keeps an exception, because none may pass through the
    library.

    Attributes:
        function: replaces `x` by its sum over ranks and returns 1. Returns 0 after an error.
        error: exception of the sum. None: no error.
    """

    def __init__(self, sum_ranks: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self._sum_ranks = sum_ranks
        self._x = x
        self.error: BaseException | None = None
        self.function = _SUM(self._sum)

    def _sum(self) -> int:
        try:
            self._x.copy_(self._sum_ranks(self._x))
        except BaseException as error:  # noqa: BLE001  it is raised after the call
            self.error = error
            return 0
        return 1


# The structures of layers.cpp:
_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_SUM = ctypes.CFUNCTYPE(ctypes.c_int)


class _Norm(ctypes.Structure):
    _fields_ = (("weight", _POINTER), ("dtype", _INT), ("eps", _DOUBLE))


class _Matrix(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("panels", "scales", "zeros", "bias")),
        *((name, _INT) for name in ("inputs", "outputs", "group")),
    )


_NORMS = ("mixer_norm", "mixer_post_norm", "q_norm", "k_norm", "ffn_norm", "ffn_post_norm")
_MATRICES = ("qkv", "output", "gate_up", "down")


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Norm) for name in _NORMS),
        *((name, _Matrix) for name in _MATRICES),
        *(
            (name, _INT)
            for name in ("heads", "kv_heads", "head_dim", "window", "activation", "rotation")
        ),
        *((name, _DOUBLE) for name in ("scale", "soft_cap")),
    )


class _Keys(ctypes.Structure):
    _fields_ = (
        ("start", _POINTER),
        *((f"{of}_stride", _INT) for of in ("page", "head", "kv", "token")),
        ("table", _INT),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, _INT) for name in ("dtype", "itemsize", "hidden")),
        *((name, _INT) for name in ("num_tokens", "num_rows", "num_decodes", "page_size")),
        *((name, _POINTER) for name in ("page_ids", "query_starts", "lengths")),
        *((name, _POINTER) for name in ("locations", "page_starts", "angles", "team")),
        ("sum", _SUM),
    )


def _structure(layer: CompiledLayer) -> _Layer:
    return _Layer(
        *(_norm(getattr(layer, name)) for name in _NORMS),
        *(_matrix(getattr(layer, name)) for name in _MATRICES),
        layer.heads,
        layer.kv_heads,
        layer.head_dim,
        layer.window or 0,
        ACTIVATIONS[layer.activation],
        layer.rotation,
        layer.scale,
        layer.soft_cap or 0.0,
    )


def _norm(norm: NormWeight | None) -> _Norm:
    if norm is None:
        return _Norm()
    return _Norm(norm.weight.data_ptr(), DTYPES[norm.weight.dtype], norm.eps)


def _matrix(matrix: PanelMatrix) -> _Matrix:
    return _Matrix(
        matrix.panels.data_ptr(),
        _address(matrix.scales),
        _address(matrix.zeros),
        _address(matrix.bias),
        matrix.inputs,
        matrix.outputs,
        matrix.group,
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
