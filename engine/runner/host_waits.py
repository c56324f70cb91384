"""Detection of operations that no CUDA graph can contain, by running them before a capture."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ATEN = torch.ops.aten
_SIZED_BY_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_COPIES = (_ATEN._to_copy.default, _ATEN.copy_.default, _ATEN.lift_fresh.default)
# Indexing with a mask makes the host wait for the number of selected elements. Other indices have a
# known length.
_READS, _WRITES = (_ATEN.index.Tensor,), (_ATEN.index_put.default, _ATEN.index_put_.default)


class Uncapturable(Exception):
    """The work has operations that no graph can contain. Nothing was captured."""

    def __init__(self, operations: Iterable[str]) -> None:
        super().__init__(", ".join(operations))


def check_capturable(work: Callable[[], object], device: torch.device) -> None:
    """Run `work`, which must have run before, on the current stream of `device`.

    Raises:
        Uncapturable: the host waits for the device in it, or copies to or from the device.
    """
    with HostWaits(device) as waits:
        work()
    if waits.found:
        raise Uncapturable(waits.found)


class HostWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations of this thread for which the host waits for the device, or that copy
    between host and device. Results are not changed.

    Attributes:
        found: distinct names of these operations.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device.type
        self.found: dict[str, None] = {}

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with self:  # inference mode does not split composite operations
            decomposed = func.decompose(*args, **(kwargs or {}))
        if decomposed is not NotImplemented:
            return decomposed
        result = func(*args, **(kwargs or {}))
        given = list(_tensors((args, kwargs)))
        devices = {tensor.device.type for tensor in given}
        if func in _COPIES:
            uncapturable = func is _COPIES[-1] or len(devices | {result.device.type}) > 1
            if uncapturable and self._device in {result.device.type, *devices}:
                self.found[str(func)] = None
        elif self._device in devices and _needs_values(func, args):
            self.found[str(func)] = None
        return result


def _needs_values(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    """Return whether the host must know values of tensors to run the operation."""
    if func in _READS:
        return _selects(args[1])
    if func in _WRITES:
        return _selects(args[1]) and args[2].numel() != 1
    return any(tag in func.tags for tag in _SIZED_BY_VALUES)


def _selects(indices: Any) -> bool:
    return any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(indices))


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
