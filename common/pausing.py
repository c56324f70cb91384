"""Options of operator calls that pause a node, named as in SGLang: the treatment of requests in
flight, and the kinds of memory to release.
"""

from collections.abc import Sequence
from enum import Enum

from common.errors import InvalidRequest


class PauseMode(Enum):
    ABORT = "abort"  # requests are aborted
    RETRACT = "retract"  # requests release their KV and are recomputed from their tokens
    IN_PLACE = "in_place"  # requests keep their KV


PAUSE_MODES = tuple(mode.value for mode in PauseMode)


def pause_mode(name: str) -> PauseMode:
    """Parse a pause mode.

    Args:
        name: "": abort.
    Raises:
        InvalidRequest: the mode is unknown.
    """
    if name and name not in PAUSE_MODES:
        raise InvalidRequest(f"mode must be one of {', '.join(PAUSE_MODES)}")
    return PauseMode(name) if name else PauseMode.ABORT


KV_CACHE, WEIGHTS = "kv_cache", "weights"
MEMORY_TAGS = (KV_CACHE, WEIGHTS)


def memory_tags(names: Sequence[str]) -> tuple[str, ...]:
    """Return the memory tags in a fixed order, each once.

    Args:
        names: empty: all tags.
    Raises:
        InvalidRequest: a name is unknown.
    """
    if unknown := [name for name in names if name not in MEMORY_TAGS]:
        raise InvalidRequest(
            f"tags: {unknown[0][:50]!r} is invalid: expected {', '.join(MEMORY_TAGS)}"
        )
    return tuple(tag for tag in MEMORY_TAGS if not names or tag in names)
