"""A client (an API key, or an IP address without one), and the limits and counters of a key."""

import ipaddress
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from xxhash import xxh3_64_intdigest

from api.auth.api_keys import KeyLimits
from common.errors import InvalidRequest, RateLimited

_MINUTE_NS = 60 * 10**9


class TokenBucket:
    """A token bucket: it holds one minute's worth of items, starts full and refills evenly.

    This is the generic cell rate algorithm (ITU-T I.371) in whole numbers, so that rounding loses
    nothing. A nanosecond has `per_minute` steps, and each item costs 60 * 10**9 steps. The state is
    a single number.
    """

    def __init__(self, per_minute: int, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.per_minute = per_minute
        self._clock_ns = clock_ns
        self._full_at = 0  # time at which the bucket is full, in steps

    def wait_s(self, number: int) -> float:
        """Return the seconds until `number` items, at most a minute's worth, are free. 0: now."""
        missing = self._lacking() + (number - self.per_minute) * _MINUTE_NS
        return self._seconds(max(missing, 0))

    def take(self, number: int) -> None:
        """Take `number` items even if fewer are available. The debt refills first."""
        self._full_at = self._now() + self._lacking() + number * _MINUTE_NS

    @property
    def remaining(self) -> int:
        return max(self.per_minute - -(-self._lacking() // _MINUTE_NS), 0)

    @property
    def full_in_s(self) -> float:
        return self._seconds(self._lacking())

    def _now(self) -> int:
        return self._clock_ns() * self.per_minute

    def _lacking(self) -> int:
        return max(self._full_at - self._now(), 0)

    def _seconds(self, steps: int) -> float:
        return steps / (self.per_minute * 10**9)


class KeyUsage:
    """Usage of one API key. For one event loop. The counters may be read on any thread.

    Attributes:
        limits: set by `limit`.
    """

    def __init__(self, limits: KeyLimits, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.num_requests = 0
        self.num_refused = 0  # rejected for one of the client's limits
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.limit(limits)

    def limit(self, limits: KeyLimits) -> None:
        """Set the limits. A limit that does not change keeps its state."""
        self.limits = limits
        self._requests = self._bucket(self._requests, limits.requests_per_minute)
        self._tokens = self._bucket(self._tokens, limits.tokens_per_minute)

    def _bucket(self, before: TokenBucket | None, per_minute: int | None) -> TokenBucket | None:
        if per_minute is None:
            return None
        if before is not None and before.per_minute == per_minute:
            return before
        return TokenBucket(per_minute, self._clock_ns)

    def begin(self, num_requests: int = 1) -> None:
        """Count requests that arrived together, before any work on them.

        Args:
            num_requests: 0 if the number is not known yet.

        Raises:
            RateLimited: one of the rates is used up. Nothing was counted.
            InvalidRequest: the limit never allows that many at once.
        """
        requests, tokens = self._requests, self._tokens
        if requests is not None and num_requests > requests.per_minute:
            raise InvalidRequest(
                f"{num_requests} requests at once: this key may send {requests.per_minute} a minute"
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
        """Count the prompts of requests that arrived together, before they are sent to nodes.

        Args:
            num_tokens: total prompt tokens.
            num_requests: requests counted by `begin`, which a retry would count again.

        Raises:
            RateLimited: too few tokens are left. None were counted.
            InvalidRequest: the limit never allows that many.
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
        """Count tokens of a running response, which continues even if it exceeds the limit."""
        if self._tokens is not None:
            self._tokens.take(num_tokens)
        self.num_generated_tokens += num_tokens

    def refused(self) -> None:
        """Count a rejection for a limit that is checked elsewhere."""
        self.num_refused += 1

    def headers(self) -> tuple[tuple[str, str], ...]:
        """Return OpenAI's rate limit headers."""
        return tuple(
            header
            for what, bucket in (("requests", self._requests), ("tokens", self._tokens))
            if bucket is not None
            for header in (
                (f"x-ratelimit-limit-{what}", str(bucket.per_minute)),
                (f"x-ratelimit-remaining-{what}", str(bucket.remaining)),
                (f"x-ratelimit-reset-{what}", f"{bucket.full_in_s:.3f}s"),
            )
        )

    def _refused(self, limit: str, wait_s: float) -> RateLimited:
        self.num_refused += 1
        return RateLimited(f"this key has used up its {limit}", wait_s)


def _wait_s(bucket: TokenBucket | None, number: int) -> float:
    return 0.0 if bucket is None else bucket.wait_s(number)


# An IPv6 customer has at least a /64 network and can call from any of its addresses.
_IPV6_NETWORK_BITS = 64
_REMEMBERED = 4096  # entries of a cache: parsing an address takes ten times as long as a hit


@dataclass(frozen=True, slots=True, eq=False)
class Client:
    """A client and its limits.

    Attributes:
        name: unique name. Capacity is shared fairly between names.
        usage: usage of its API key. A client without a key has no limits.
        weight: relative share while other clients also have requests.
        namespaces_of: owner of the namespaces of its prompts. "": shared by all clients.
        priority: highest and default priority of its requests. None: the router's setting.
    """

    name: str
    usage: KeyUsage = field(default_factory=lambda: KeyUsage(KeyLimits()))
    weight: float = 1.0
    operator: bool = False
    namespaces_of: str = ""
    priority: int | None = None


@lru_cache(maxsize=_REMEMBERED)
def number_of(name: str) -> int:
    """Return the number by which nodes know the client of this name, the same on every router."""
    return xxh3_64_intdigest(name.encode()) or 1


@lru_cache(maxsize=_REMEMBERED)
def by_address(address: str) -> Client:
    """Return the client for an IP address, or for any other text that identifies the caller."""
    return Client(network_of(address))


@lru_cache(maxsize=_REMEMBERED)
def network_of(address: str) -> str:
    """Return the network that counts as one client: an IPv4 address or an IPv6 /64."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, _IPV6_NETWORK_BITS), strict=False))
