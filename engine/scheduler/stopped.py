"""A request that was taken out of the running batch, and that no launched step has any more."""

from dataclasses import dataclass

from engine.batch.batch import Ints
from engine.batch.holding import Holding


@dataclass(frozen=True, slots=True, eq=False)
class Stopped:
    """token_ids: all of them; the newest has no KV yet."""

    token_ids: Ints
    holding: Holding
