"""The cost of a decode step, as a linear fit over past steps: a fixed part and a part per token.
Both change with the batch's contexts and with the machine's other load, so older steps count less.

Steps with the same number of tokens as usual give no information about the cost per token. The
estimate stays until a step differs.
"""

_NEWEST_WEIGHT = 0.05
# Assumed while all steps had the same number of tokens: the token's share of a one-token step. It
# keeps large batches from drafting, which costs most there, before drafting is known to pay off.
_FIRST_SHARE = 0.15
_FIRST_WEIGHT = 0.5  # of this assumption, in tokens squared
_LEAST_DIFFERENCE = 0.5  # tokens


class StepCosts:
    def __init__(self) -> None:
        self._seconds: float | None = None
        self._tokens = 0.0
        self._variance = 0.0
        self._covariance = 0.0

    def took(self, num_tokens: int, seconds: float) -> None:
        if self._seconds is None:
            self._tokens, self._seconds = float(num_tokens), seconds
            return
        more_tokens, more_seconds = num_tokens - self._tokens, seconds - self._seconds
        self._tokens += _NEWEST_WEIGHT * more_tokens
        self._seconds += _NEWEST_WEIGHT * more_seconds
        if abs(more_tokens) < _LEAST_DIFFERENCE:
            return
        kept = 1 - _NEWEST_WEIGHT
        self._variance = kept * (self._variance + _NEWEST_WEIGHT * more_tokens**2)
        self._covariance = kept * (self._covariance + _NEWEST_WEIGHT * more_tokens * more_seconds)

    def share(self, num_tokens: int) -> float:
        """Return the tokens' share of the time of a step with this many tokens, between 0 and 1."""
        if self._seconds is None:
            return _FIRST_SHARE * num_tokens / _first_step(num_tokens)
        average = self._seconds / self._tokens
        first = _FIRST_SHARE * self._seconds / _first_step(self._tokens)
        covariance = self._covariance + _FIRST_WEIGHT * first
        of_token = min(max(covariance / (self._variance + _FIRST_WEIGHT), 0.0), average)
        of_tokens = of_token * num_tokens
        of_step = self._seconds - of_token * self._tokens
        return of_tokens / (of_step + of_tokens) if of_tokens > 0 else 0.0


def _first_step(num_tokens: float) -> float:
    """Return the assumed time of a step of this many tokens, relative to a step of one token."""
    return 1 - _FIRST_SHARE + _FIRST_SHARE * num_tokens
