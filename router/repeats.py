"""Tokens that a node repeats when it continues a response."""

from collections.abc import Sequence

from common.errors import NodeUnavailable


class RepeatedTokens:
    """Repeated tokens of one submission, which had fewer tokens than its client has now."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        """Start with the tokens that the client has and the submission did not have."""
        self._left = list(token_ids)

    def dropped(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens, from the first on, are repeats.

        Raises:
            NodeUnavailable: the tokens differ, so the node must not be used for this response.
        """
        if not self._left:
            return 0
        num_again = min(len(self._left), len(token_ids))
        expected, self._left = self._left[:num_again], self._left[num_again:]
        if list(token_ids[:num_again]) != expected:
            raise NodeUnavailable("a decode node continues with other tokens than were generated")
        return num_again
