"""What one client has taken of the rates it is allowed, and what is counted about it."""

import time
from collections.abc import Callable, Iterable

from api.auth.api_keys import KeyLimits
from api.auth.bucket import Bucket
from common.errors import InvalidRequest, RateLimited


class Usage:
    """For one event loop; the numbers may be read on any thread."""

    def __init__(self, limits: KeyLimits, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.num_requests = 0
        self.num_refused = 0  # for one of its limits
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.limit(limits)

    def limit(self, limits: KeyLimits) -> None:
        """From now on. A limit that stays the same is as used up as it was."""
        self._requests = self._bucket(self._requests, limits.requests_per_minute)
        self._tokens = self._bucket(self._tokens, limits.tokens_per_minute)

    def _bucket(self, before: Bucket | None, per_minute: int | None) -> Bucket | None:
        if per_minute is None:
            return None
        if before is not None and before.per_minute == per_minute:
            return before
        return Bucket(per_minute, self._clock_ns)

    def begin(self, num_requests: int = 1) -> None:
        """Before any work on requests that came together; of 0 for what is not known yet.

        Raises:
            RateLimited: one of the rates is used up. Nothing was counted then.
            InvalidRequest: so many are never allowed together.
        """
        requests, tokens = self._requests, self._tokens
        if requests is not None and num_requests > requests.per_minute:
            raise InvalidRequest(
                f"these are {num_requests} requests at once; "
                f"this key has {requests.per_minute} a minute"
            )
        requests_s = _wait_s(requests, max(num_requests, 1))
        if tokens is not None and (tokens_s := tokens.wait_s(1)):
            raise self._refused(f"{tokens.per_minute} tokens a minute", max(tokens_s, requests_s))
        if requests is not None:
            if requests_s:
                raise self._refused(f"{requests.per_minute} requests a minute", requests_s)
            requests.take(num_requests)
        self.num_requests += num_requests

    def prompts(self, num_tokens: int, num_requests: int = 1) -> None:
        """Before the prompts of requests that came together are sent to nodes.

        Args:
            num_tokens: of all of them.
            num_requests: that were begun, and would be again.
        Raises:
            RateLimited: there are not so many tokens left. None was counted then.
            InvalidRequest: there are never so many.
        """
        if self._tokens is not None:
            allowed = self._tokens.per_minute
            if num_tokens > allowed:
                raise InvalidRequest(
                    f"prompt has {num_tokens} tokens; this key has {allowed} a minute"
                )
            if wait_s := self._tokens.wait_s(num_tokens):
                requests_s = _wait_s(self._requests, num_requests)
                raise self._refused(f"{allowed} tokens a minute", max(wait_s, requests_s))
            self._tokens.take(num_tokens)
        self.num_prompt_tokens += num_tokens

    def generated(self, num_tokens: int) -> None:
        """Of an answer under way, which goes on in any case: the next request pays."""
        if self._tokens is not None:
            self._tokens.take(num_tokens)
        self.num_generated_tokens += num_tokens

    def refused(self) -> None:
        """For a limit that is looked after elsewhere."""
        self.num_refused += 1

    def headers(self) -> Iterable[tuple[str, str]]:
        """As OpenAI tells clients what they have left."""
        for what, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                yield f"x-ratelimit-limit-{what}", str(bucket.per_minute)
                yield f"x-ratelimit-remaining-{what}", str(bucket.remaining)
                yield f"x-ratelimit-reset-{what}", f"{bucket.full_in_s:.3f}s"

    def _refused(self, limit: str, wait_s: float) -> RateLimited:
        self.num_refused += 1
        return RateLimited(f"this key has used up its {limit}", wait_s)


def _wait_s(bucket: Bucket | None, number: int) -> float:
    return 0.0 if bucket is None else bucket.wait_s(number)
