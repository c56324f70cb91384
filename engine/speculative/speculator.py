"""The parts of speculation as they are configured."""

from dataclasses import dataclass, field
from typing import Self

from common.config import SpeculationConfig
from engine.speculative.drafter import Drafter
from engine.speculative.head import HeadDrafter
from engine.speculative.ngram import NgramDrafter
from engine.speculative.policy import AllDrafts, DraftPolicy, PayingDrafts
from engine.speculative.predictions import Predictions


@dataclass(frozen=True, slots=True, eq=False)
class Speculator:
    """max_drafts: for a row and step, less than a page has tokens."""

    drafter: Drafter
    policy: DraftPolicy
    max_drafts: int
    predictions: Predictions = field(default_factory=lambda: Predictions(min_match=1))

    @classmethod
    def of(cls, config: SpeculationConfig, num_slots: int) -> Self | None:
        """None: nothing is to be guessed."""
        if config.drafter == "none":
            return None
        most = config.max_drafts
        policy = PayingDrafts(num_slots, most) if config.adaptive else AllDrafts(most)
        drafter = HeadDrafter() if config.has_layer else NgramDrafter(config.min_match)
        return cls(drafter, policy, most, Predictions(config.min_match))
