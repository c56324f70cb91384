"""Find where the thought of an answer ends, from its tokens."""

from collections.abc import Sequence
from enum import Enum, auto

from common.requests.reasoning import Thought


class Stage(Enum):
    AHEAD = auto()  # the first token says whether there is any
    INSIDE = auto()
    BEHIND = auto()


class ThoughtReader:
    """Of one answer.

    Attributes:
        num_tokens: of thought so far, without those that begin and end it.
    """

    def __init__(self, thought: Thought | None) -> None:
        """
        Args:
            thought: None: there is none.
        """
        self._thought = thought
        self.num_tokens = 0
        if thought is None:
            self.stage = Stage.BEHIND
        else:
            self.stage = Stage.INSIDE if thought.open is None else Stage.AHEAD

    def read(self, tokens: Sequence[int]) -> Sequence[int]:
        """Takes the next tokens, and returns those that are behind the thought."""
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
