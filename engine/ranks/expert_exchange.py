"""Exchange of tokens in a data-parallel group, whose nodes share the experts of each layer.

In each layer, all nodes gather all tokens, compute their own experts for them, and add the results.
Every node must therefore take part in every step, even without tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from common.errors import ConfigError, EngineFault
from engine.ranks.group import Group


class ExpertExchange:
    """The position of a node in its group, and the exchange of a step. Forward stream only.

    Args:
        group: the nodes. None: nothing is computed (a survey of the weights).
    """

    def __init__(self, rank: int, size: int, group: Group | None = None) -> None:
        self._rank = rank
        self._size = size
        self._group = group
        self._num_tokens: Sequence[int] = ()  # number of tokens of the current step, by node

    def part(self, count: int) -> range:
        """Return this node's part of `count` experts.

        Raises:
            ConfigError: the number of nodes does not divide `count`.
        """
        if count % self._size:
            raise ConfigError(
                f"engine.parallel.dp: {self._size} nodes cannot have equal parts of {count} experts"
            )
        own = count // self._size
        return range(self._rank * own, (self._rank + 1) * own)

    def begin(self, num_tokens: Sequence[int]) -> None:
        """Begin a step. `num_tokens` are the numbers of tokens of all nodes."""
        self._num_tokens = num_tokens

    def gather(self, x: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens of all nodes, in the order of nodes, with their weights and experts.

        The node of a token chooses its experts, so that all nodes use the same ones.

        Args:
            x: [own tokens, hidden].
            weights, ids: [own tokens, k].
        Raises:
            EngineFault: the number of own tokens is not the announced one.
        """
        if len(x) != self._num_tokens[self._rank]:
            raise EngineFault(
                f"this node has {len(x)} tokens in a step, and has announced "
                f"{self._num_tokens[self._rank]}"
            )
        parts = (x, weights, ids)
        packed = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)
        widths = [part.shape[1] * part.itemsize for part in parts]
        whole = torch.split(self._every(packed), widths, dim=1)
        of_x, of_weights, of_ids = (each.contiguous() for each in whole)
        return of_x.view(x.dtype), of_weights.view(weights.dtype), of_ids.view(ids.dtype)

    def own_sum(self, y: Tensor) -> Tensor:
        """Return the sum over all nodes for this node's tokens, [own tokens, hidden].

        Args:
            y: this node's part of the result for the tokens of all nodes.
        """
        assert self._group is not None
        first = sum(self._num_tokens[: self._rank])
        total = self._group.all_reduce(y.contiguous())
        return total[first : first + self._num_tokens[self._rank]]

    def close(self) -> None:
        if self._group is not None:
            self._group.close()

    def _every(self, rows: Tensor) -> Tensor:
        """Return the rows of all nodes. Each node sends as many rows as the node with the most
        tokens."""
        assert self._group is not None
        most, width = max(self._num_tokens), rows.shape[1]
        sent = rows.new_zeros(most, width)
        sent[: len(rows)] = rows
        received = self._group.all_gather(sent.view(-1)).view(self._size, most, width)
        return torch.cat([part[:n] for part, n in zip(received, self._num_tokens, strict=True)])
