"""Products of several parts.

The parts are modules of a checkpoint, to which adapters may add, or outputs that are split between
ranks and gathered on all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from engine.models.linear.matrix import MatrixPart
from engine.models.linear.protocol import Linear
from engine.ranks import Group, Share


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A Linear that joins several modules of a checkpoint along the outputs.

    Attributes:
        parts: full name of a module -> its part on this rank.
    """

    linear: Linear
    parts: Mapping[str, MatrixPart]

    @property
    def modules(self) -> Mapping[str, int]:
        """Outputs on this rank by the module's full name."""
        return {name: part.num_outputs for name, part in self.parts.items()}

    @property
    def inputs(self) -> int:
        """Inputs on this rank, common to all modules."""
        return len(next(iter(self.parts.values())).inputs)


@dataclass(frozen=True, slots=True, eq=False)
class GatheredLinear:
    """A Linear of all outputs, of which each rank multiplies a part.

    Attributes:
        own: this rank's part, see `own_outputs`.
        outputs: of all ranks.
    """

    own: Linear
    group: Group
    outputs: int

    @property
    def nbytes(self) -> int:
        return self.own.nbytes

    def apply(self, x: Tensor) -> Tensor:
        return gathered(self.own.apply(x), self.outputs, self.group)


def gathered(own: Tensor, outputs: int, group: Group) -> Tensor:
    """Return all outputs [..., outputs], of which each rank has a part, see `own_outputs`.

    Args:
        own: contiguous, this rank's outputs in the last dimension.
    """
    missing = _part_size(outputs, group.size) - own.shape[-1]
    whole = group.all_gather(F.pad(own, (0, missing)) if missing else own)
    if whole.shape[-1] == outputs:
        return whole
    return whole[..., :outputs].contiguous()


def own_outputs(outputs: int, share: Share) -> range:
    """Return a rank's part of the outputs of a GatheredLinear. Parts of the last ranks may be
    smaller than the others, or empty."""
    size = _part_size(outputs, share.size)
    return range(min(share.rank * size, outputs), min((share.rank + 1) * size, outputs))


def _part_size(outputs: int, ranks: int) -> int:
    return -(-outputs // ranks)
