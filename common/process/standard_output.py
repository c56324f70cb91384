"""Text for standard output, whose reader may have gone: `baton --help | head -1`."""

import os
import sys


def say(text: str) -> None:
    """Writes `text` at once. A reader who has gone has read what it wanted: what is said to it
    after that goes nowhere."""
    try:
        print(text.removesuffix("\n"), flush=True)
    except BrokenPipeError:
        # Python would write what is left once more, at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
