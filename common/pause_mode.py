"""What becomes of the requests that are under way when generation is paused, as SGLang names it."""

from enum import Enum

from common.errors import InvalidRequest


class PauseMode(Enum):
    ABORT = "abort"  # they end
    RETRACT = "retract"  # they let go of their KV, and are computed anew from their tokens
    IN_PLACE = "in_place"  # they keep all that they have


PAUSE_MODES = tuple(mode.value for mode in PauseMode)


def pause_mode(name: str) -> PauseMode:
    """
    Args:
        name: "": abort.
    Raises:
        InvalidRequest: there is no such mode.
    """
    if name and name not in PAUSE_MODES:
        raise InvalidRequest(f"mode: one of {', '.join(PAUSE_MODES)}")
    return PauseMode(name) if name else PauseMode.ABORT
