"""A checkpoint's tensors as floats, under the names of the transformers class.

A quantised matrix is converted when it is read, not before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import EllipsisType

from torch import Tensor

from engine.models.checkpoint import Checkpoint, TensorRequest
from engine.models.quantized.protocol import Scheme


@dataclass(frozen=True, slots=True)
class Unread:
    """A tensor that `[...]` reads, as slices of safetensors are read. On any thread."""

    read: Callable[[], Tensor]

    def __getitem__(self, everything: EllipsisType) -> Tensor:
        return self.read()


def as_floats(checkpoint: Checkpoint, scheme: Scheme) -> dict[str, Unread]:
    """Return the tensors by name.

    Raises:
        ConfigError: parts of a matrix are missing, or have other shapes or dtypes.
    """
    wanted: dict[str, TensorRequest] = {}
    matrices: dict[str, Unread] = {}
    for name in checkpoint.tensors:
        module = name.removesuffix(scheme.numbers)
        if module != name and not checkpoint.has_floats(f"{module}.weight"):
            rows, columns = scheme.shape(module, checkpoint)
            wanted |= scheme.wanted(module, rows, columns, checkpoint)
            read = partial(_matrix, scheme, module, rows, columns, checkpoint)
            matrices[f"{module}.weight"] = Unread(read)
    ignored = tuple(scheme.ignored)
    whole = [n for n in checkpoint.tensors if n not in wanted and not n.endswith(ignored)]
    for name in whole:
        stored = checkpoint.tensors[name]
        wanted[name] = TensorRequest(stored.shape, (stored.dtype,))
    checkpoint.check(wanted, scheme.ignored)
    return matrices | {name: Unread(partial(checkpoint.read, name)) for name in whole}


def _matrix(scheme: Scheme, module: str, rows: int, columns: int, checkpoint: Checkpoint) -> Tensor:
    return scheme.matrix(module, rows, columns, checkpoint).floats()
