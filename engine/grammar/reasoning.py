"""Detection of the end of a response's reasoning, from its tokens."""

from collections.abc import Sequence
from enum import Enum, auto

from common.requests.reasoning import ReasoningTokens


class ReasoningStage(Enum):
    AHEAD = auto()  # the first token decides whether there is reasoning
    INSIDE = auto()
    BEHIND = auto()


class ReasoningTracker:
    """The reasoning of one response.

    Attributes:
        num_tokens: reasoning tokens so far, without the delimiters.
    """

    def __init__(self, thought: ReasoningTokens | None) -> None:
        """Start at the first token of a response.

        Args:
            thought: None: there is no reasoning.
        """
        self._thought = thought
        self.num_tokens = 0
        if thought is None:
            self.stage = ReasoningStage.BEHIND
        else:
            self.stage = ReasoningStage.INSIDE if thought.open is None else ReasoningStage.AHEAD

    def read(self, tokens: Sequence[int]) -> Sequence[int]:
        """Read the next tokens. Return those after the reasoning."""
        if self._thought is None or not tokens:
            return tokens
        if self.stage is ReasoningStage.AHEAD:
            opens = tokens[0] == self._thought.open
            self.stage = ReasoningStage.INSIDE if opens else ReasoningStage.BEHIND
            tokens = tokens[1:] if opens else tokens
        if self.stage is ReasoningStage.BEHIND:
            return tokens
        if self._thought.close not in tokens:
            self.num_tokens += len(tokens)
            return ()
        end = tokens.index(self._thought.close)
        self.num_tokens += end
        self.stage = ReasoningStage.BEHIND
        return tokens[end + 1 :]
