"""Virtual time and seeded random numbers instead of the host's.

Only the process of a simulation installs them, before it imports anything else.
"""

import random
import secrets
import time

_BEGIN_S = 1000.0  # start of the monotonic clock
_UNIX_S = 1_700_000_000.0  # time.time() at that moment


class VirtualClock:
    """The time of a simulation. It moves only when `to` is called.

    Attributes:
        now: seconds, as time.monotonic() returns them.
    """

    def __init__(self) -> None:
        self.now = _BEGIN_S

    def to(self, now: float) -> None:
        """Move the time forward."""
        self.now = max(self.now, now)

    def install(self) -> None:
        """Replace the clocks of the module `time`."""
        time.monotonic = time.perf_counter = lambda: self.now
        time.monotonic_ns = lambda: round(self.now * 1e9)
        time.time = lambda: self.now - _BEGIN_S + _UNIX_S


def seed_all(seed: int) -> None:
    """Make the random numbers of this process repeatable, including those of `secrets`.

    Instance ids and the order of equal candidates depend on them.
    """
    random.seed(seed)
    chance = random.Random(seed)

    def randbits(k: int) -> int:
        return chance.getrandbits(k)

    secrets.randbits = randbits
    secrets.token_bytes = lambda nbytes=None: chance.randbytes(nbytes or 32)
    secrets.token_hex = lambda nbytes=None: chance.randbytes(nbytes or 32).hex()
