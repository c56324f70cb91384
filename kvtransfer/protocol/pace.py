"""Time limits for an owner's progress, learnt from the hand-offs that it has finished."""

# Until something is known: slow for a GPU, fast for a CPU. Heartbeats detect a dead owner. This
# estimate only prevents that hand-offs of a live owner with a long queue are abandoned.
_FIRST_GUESS_S = 0.005  # per token
_WEIGHT = 0.2  # of the newest hand-off
_PATIENCE = 5.0  # times the expected duration


class ForgetRate:
    """The learnt pace of one owner. `progress_s` is the minimum of all limits."""

    def __init__(self, progress_s: float) -> None:
        self._progress_s = progress_s
        self._token_s = _FIRST_GUESS_S

    def limit_s(self, num_tokens: int) -> float:
        """Return the longest wait for progress, with so many tokens left to compute."""
        return max(self._progress_s, _PATIENCE * self._token_s * num_tokens)

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Record that so many tokens, of this hand-off and of those queued before it, took
        `seconds`.
        """
        if num_tokens > 0:
            self._token_s += _WEIGHT * (seconds / num_tokens - self._token_s)
