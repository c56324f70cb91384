"""Detection of the keys that a class lets its queries see.

A transformers class requests a mask once per forward and passes it to its layers. In a probe it
gets a description instead, derived from the rule that would fill the mask.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from engine.models.transformers_backend.refused import UnsupportedModel

_FURTHEST = 1 << 17  # query that is probed, beyond which windows are not detected
_QUERIES = (
    *range(40),
    *(
        near
        for exponent in range(6, 17)
        for near in range((1 << exponent) - 2, (1 << exponent) + 3)
    ),
    _FURTHEST,
)

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class MaskRange:
    """The visible tokens of a query: its own and those before it, limited to a window if there is
    one.

    Attributes:
        limit: number of tokens up to which that holds. None: no limit.
    """

    window: int | None = None
    limit: int | None = None

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedModel("its layers modify the attention mask")


def seen_by(rule: Rule, chunk: int | None) -> MaskRange:
    """Return which keys a mask rule makes visible.

    Args:
        rule: function of batch, head, query and key, like transformers' mask functions.
        chunk: tokens per chunk that attends only to itself, if the configuration has such chunks.
    Raises:
        UnsupportedModel: the rule is not supported.
    """
    try:
        counts = {query: _count(rule, query) for query in _QUERIES}
    except (RuntimeError, IndexError):
        reason = "its attention mask depends on more than positions"
    else:
        widest = counts[_FURTHEST]
        if all(count == min(query + 1, widest) for query, count in counts.items()):
            return MaskRange(window=widest if widest <= _FURTHEST else None)
        reason = "its attention mask is neither causal nor a sliding window"
    if chunk is None:
        raise UnsupportedModel(reason)
    return MaskRange(limit=chunk)


def _count(rule: Rule, query: int) -> int:
    """Return the number of keys that the query sees.

    Raises:
        UnsupportedModel: it sees a key after its own token, or other keys than the last ones before
            it.
    """
    zero = torch.zeros((), dtype=torch.int64)
    keys = torch.arange(query + 2)
    visible = rule(zero, zero, torch.tensor(query), keys).expand(keys.shape)
    count = int(visible.count_nonzero())
    if bool(visible[query + 1]) or not bool(visible[query + 1 - count : query + 1].all()):
        raise UnsupportedModel("its attention mask is not causal, or skips recent tokens")
    return count
