"""Products that consist of several parts.

The parts are modules of a checkpoint, which adapters may change, or outputs that ranks compute
separately and then gather.
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
    """A Linear that concatenates several modules of a checkpoint along the outputs.

    Attributes:
        parts: full name of a module -> its part on this rank.
    """

    linear: Linear
    parts: Mapping[str, MatrixPart]

    @property
    def modules(self) -> Mapping[str, int]:
        """Number of outputs on this rank, by the module's full name."""
        return {name: part.num_outputs for name, part in self.parts.items()}

    @property
    def inputs(self) -> int:
        """Number of inputs on this rank, common to all modules."""
        return len(next(iter(self.parts.values())).inputs)


@dataclass(frozen=True, slots=True, eq=False)
class GatheredLinear:
    """A Linear with all outputs. Each rank computes a part of them.

    Attributes:
        own: this rank's part, see `own_outputs`.
        outputs: number of outputs of all ranks.
    """

    own: Linear
    group: Group
    outputs: int

    def apply(self, x: Tensor) -> Tensor:
        return gathered(self.own.apply(x), self.outputs, self.group)


def gathered(own: Tensor, outputs: int, group: Group) -> Tensor:
    """Gather the outputs of all ranks: [..., outputs].

    Args:
        own: contiguous, this rank's outputs in the last dimension, see `own_outputs`.
    """
    missing = _part_size(outputs, group.size) - own.shape[-1]
    whole = group.all_gather(F.pad(own, (0, missing)) if missing else own)
    if whole.shape[-1] == outputs:
        return whole
    return whole[..., :outputs].contiguous()


def own_outputs(outputs: int, share: Share) -> range:
    """Return a rank's part of the outputs of a GatheredLinear. The last ranks may have smaller or
    empty parts."""
    size = _part_size(outputs, share.size)
    return range(min(share.rank * size, outputs), min((share.rank + 1) * size, outputs))


def _part_size(outputs: int, ranks: int) -> int:
    return -(-outputs // ranks)
