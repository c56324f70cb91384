"""Standard output whose reader may have closed it, as in `baton --help | head -1`."""

import os
import sys


def say(text: str) -> None:
    """Write `text` without buffering. Discard it if the reader has closed the pipe."""
    try:
        print(text.removesuffix("\n"), flush=True)
    except BrokenPipeError:
        # Python would flush the rest again at exit and report an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
