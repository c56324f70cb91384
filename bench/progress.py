"""Progress of a benchmark on standard error: bars on a terminal, lines elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress


class ProgressView:
    """A progress display. Use as a context manager."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._progress = Progress(console=self._console, disable=not self._console.is_terminal)

    def __enter__(self) -> "ProgressView":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def say(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False)

    def plan(self, what: str, total: int) -> Callable[[], None]:
        """Show a bar for the whole session. Call the returned function after each of `total`."""
        task = self._progress.add_task(what, total=total)
        return lambda: self._progress.advance(task)

    @contextmanager
    def doing(self, what: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        """Show a bar while the block runs.

        Call the yielded function after each of `total` (None: unknown).
        """
        if not self._console.is_terminal:
            self.say(f"{what} ...")
        task = self._progress.add_task(what, total=total)
        try:
            yield lambda: self._progress.advance(task)
        finally:
            self._progress.remove_task(task)
