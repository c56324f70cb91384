"""The drafter interface: proposes the tokens that follow a request's tokens. A wrong draft costs
time, but never changes the response."""

from typing import Protocol

from engine.batch.batch import Ints


class Drafter(Protocol):
    """A drafter of one node. Engine thread only. Called for every request and step: some
    microseconds each."""

    def propose(self, tokens: Ints, count: int) -> Ints:
        """Return the most likely continuation.

        Args:
            tokens: all tokens of a request that the CPU knows, at least one; a view. With
                overlap the request is already one step further.
            count: number of tokens wanted.
        Returns:
            At most `count` tokens, in order; none if there is no proposal.
        """
        ...
