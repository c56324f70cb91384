"""A request that was taken out of the running batch, and that is in no launched step."""

from dataclasses import dataclass

from engine.batch.batch import Ints
from engine.batch.holding import PageHolding


@dataclass(frozen=True, slots=True, eq=False)
class PausedRequest:
    """A stopped request. token_ids: all tokens; the newest has no KV yet."""

    token_ids: Ints
    holding: PageHolding
