"""Which keys a class lets its queries see, asked of the class itself.

A class of transformers asks for a mask once per forward and hands it to its layers. In a probe it
gets a description instead, made from the rule by which the mask would have been filled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from engine.models.transformers_backend.refused import Refused

_FURTHEST = 1 << 17  # query that is asked for; a wider window is none
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
class Seen:
    """A query sees its own token and those before it, the last `window` of them if there is one.

    limit: of tokens, up to which that is true; None: always.
    """

    window: int | None = None
    limit: int | None = None

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Refused("its layers change their masks")


def seen_by(rule: Rule, chunk: int | None) -> Seen:
    """
    Args:
        rule: of batch, head, query and key, as transformers' mask functions are.
        chunk: tokens that attend among themselves alone, where the configuration has such chunks.
    Raises:
        Refused: what queries see is none of this.
    """
    try:
        counts = {query: _count(rule, query) for query in _QUERIES}
    except (RuntimeError, IndexError):
        reason = "its mask depends on more than positions"
    else:
        widest = counts[_FURTHEST]
        if all(count == min(query + 1, widest) for query, count in counts.items()):
            return Seen(window=widest if widest <= _FURTHEST else None)
        reason = "its mask is neither causal nor a window"
    if chunk is None:
        raise Refused(reason)
    return Seen(limit=chunk)


def _count(rule: Rule, query: int) -> int:
    """Keys that the query sees.

    Raises:
        Refused: one after its own token, or not the last ones before it.
    """
    zero = torch.zeros((), dtype=torch.int64)
    keys = torch.arange(query + 2)
    visible = rule(zero, zero, torch.tensor(query), keys).expand(keys.shape)
    count = int(visible.count_nonzero())
    if bool(visible[query + 1]) or not bool(visible[query + 1 - count : query + 1].all()):
        raise Refused("its queries see tokens after their own, or not the last ones before it")
    return count
