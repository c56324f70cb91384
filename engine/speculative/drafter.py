"""What a drafter is: it guesses what follows a request's tokens. A wrong guess costs time, never an
answer."""

from typing import Protocol

from engine.batch.batch import Ints


class Drafter(Protocol):
    """Engine thread only, for every request and step: some microseconds each."""

    def propose(self, tokens: Ints, count: int) -> Ints:
        """The likeliest continuation.

        Args:
            tokens: all that the CPU knows of a request, at least one; a view. With overlap the
                request is one step further already.
            count: of tokens wanted.
        Returns:
            At most so many, in their order; none where there is no idea.
        """
        ...
