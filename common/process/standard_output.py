"""Text for standard output whose reader may have closed it: `baton --help | head -1`."""

import os
import sys


def say(text: str) -> None:
    """Write `text` at once. Output after the reader has closed the pipe is discarded."""
    try:
        print(text.removesuffix("\n"), flush=True)
    except BrokenPipeError:
        # Python would flush the rest again at its end and report an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
