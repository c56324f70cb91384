"""Treatment of requests in flight when generation is paused, named as in SGLang."""

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
