"""Options of calls that pause a node, named as in SGLang: the treatment of requests in flight, and
the parts of a node's memory that can be released for a while.
"""

from collections.abc import Sequence
from enum import Enum

from common.errors import InvalidRequest


class PauseMode(Enum):
    ABORT = "abort"  # they are aborted
    RETRACT = "retract"  # they release their KV and are recomputed from their tokens
    IN_PLACE = "in_place"  # they keep their KV


PAUSE_MODES = tuple(mode.value for mode in PauseMode)


def pause_mode(name: str) -> PauseMode:
    """Return the pause mode of a name.

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
    """Return the tags in a fixed order, each once.

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
