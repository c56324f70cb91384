"""Progress output of `baton up`: spinners on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Screen:
    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)

    def say(self, text: str = "", style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False)

    def warn(self, text: str) -> None:
        """Print a warning about a problem that is being handled."""
        self.say(text, style="yellow")

    @contextmanager
    def waiting_for(self, names: Sequence[str]) -> Iterator[Callable[[str, str], None]]:
        """Show all of `names` as not ready.

        Yields a function to call with a name and a remark when that process is ready.
        """
        if not self._console.is_terminal:
            yield self._line_by_line()
            return
        columns = (
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description:<10}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[remark]}"),
        )
        with Progress(*columns, console=self._console) as progress:
            tasks = {name: progress.add_task(name, total=1, remark="starting") for name in names}

            def ready(name: str, remark: str) -> None:
                progress.update(tasks[name], completed=1, remark=remark)

            yield ready

    def _line_by_line(self) -> Callable[[str, str], None]:
        started = time.monotonic()

        def ready(name: str, remark: str) -> None:
            self.say(f"{name} ready after {time.monotonic() - started:.1f} s, {remark}")

        return ready
