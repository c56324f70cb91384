"""The configured parts of speculative decoding."""

from dataclasses import dataclass, field
from typing import Self

from common.config import SpeculativeConfig
from engine.speculative.drafter import Drafter
from engine.speculative.head import HeadDrafter
from engine.speculative.ngram import NgramDrafter
from engine.speculative.policy import AdaptiveDrafts, AllDrafts, DraftPolicy
from engine.speculative.predictions import Predictions


@dataclass(frozen=True, slots=True, eq=False)
class Speculator:
    """The parts of speculation. max_drafts: per row and step, fewer than a page has tokens."""

    drafter: Drafter
    policy: DraftPolicy
    max_drafts: int
    predictions: Predictions = field(default_factory=lambda: Predictions(min_match=1))

    @classmethod
    def of(cls, config: SpeculativeConfig, num_slots: int) -> Self | None:
        """Create the parts, or return None if speculation is disabled."""
        if config.method == "none":
            return None
        most = config.num_speculative_tokens
        policy = AdaptiveDrafts(num_slots, most) if config.adaptive else AllDrafts(most)
        drafter = HeadDrafter() if config.has_layer else NgramDrafter(config.prompt_lookup_min)
        return cls(drafter, policy, most, Predictions(config.prompt_lookup_min))
