"""Detection of the end of a response's reasoning, from its tokens."""

from collections.abc import Sequence
from enum import Enum, auto

from common.requests.reasoning import Thought


class Stage(Enum):
    AHEAD = auto()  # the first token decides whether there is reasoning
    INSIDE = auto()
    BEHIND = auto()


class ThoughtReader:
    """The reasoning of one response.

    Attributes:
        num_tokens: reasoning tokens so far, without the delimiters.
    """

    def __init__(self, thought: Thought | None) -> None:
        """Start at the first token of a response.

        Args:
            thought: None: there is no reasoning.
        """
        self._thought = thought
        self.num_tokens = 0
        if thought is None:
            self.stage = Stage.BEHIND
        else:
            self.stage = Stage.INSIDE if thought.open is None else Stage.AHEAD

    def read(self, tokens: Sequence[int]) -> Sequence[int]:
        """Read the next tokens. Return those after the reasoning."""
        if self._thought is None or not tokens:
            return tokens
        if self.stage is Stage.AHEAD:
            opens = tokens[0] == self._thought.open
            self.stage = Stage.INSIDE if opens else Stage.BEHIND
            tokens = tokens[1:] if opens else tokens
        if self.stage is Stage.BEHIND:
            return tokens
        if self._thought.close not in tokens:
            self.num_tokens += len(tokens)
            return ()
        end = tokens.index(self._thought.close)
        self.num_tokens += end
        self.stage = Stage.BEHIND
        return tokens[end + 1 :]
