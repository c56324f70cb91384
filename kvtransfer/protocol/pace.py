"""How long an owner may take for so many tokens, learnt from the hand-offs it has finished."""

# Until something is known: slow for a GPU, fast for a CPU. A dead owner is found out by its beats;
# this estimate only keeps a live one with a long queue from being given up.
_FIRST_GUESS_S = 0.005  # per token
_WEIGHT = 0.2  # of the newest hand-off
_PATIENCE = 5.0  # times the expected duration


class Pace:
    """Of one owner. `progress_s` is the shortest limit it ever gives."""

    def __init__(self, progress_s: float) -> None:
        self._progress_s = progress_s
        self._token_s = _FIRST_GUESS_S

    def limit_s(self, num_tokens: int) -> float:
        """The longest wait for a sign of progress, with so many tokens to compute until the end."""
        return max(self._progress_s, _PATIENCE * self._token_s * num_tokens)

    def learn(self, num_tokens: int, seconds: float) -> None:
        """So many tokens, of this hand-off and of those ahead of it, took so long."""
        if num_tokens > 0:
            self._token_s += _WEIGHT * (seconds / num_tokens - self._token_s)
