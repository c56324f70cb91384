"""Tokens that a node tells anew of an answer that goes on there."""

from collections.abc import Sequence

from common.errors import NodeUnavailable


class Repeats:
    """Of one submission, which was made with some tokens of an answer less than its client has by
    now."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        """token_ids: those that the client has besides."""
        self._left = list(token_ids)

    def dropped(self, token_ids: Sequence[int]) -> int:
        """How many of these come again, from the first one on.

        Raises:
            NodeUnavailable: they are others. Whoever says so is not to be followed.
        """
        if not self._left:
            return 0
        num_again = min(len(self._left), len(token_ids))
        expected, self._left = self._left[:num_again], self._left[num_again:]
        if list(token_ids[:num_again]) != expected:
            raise NodeUnavailable("a decode node goes on with other tokens than were generated")
        return num_again
