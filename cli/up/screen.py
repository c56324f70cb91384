"""Progress output of `baton up`: spinners on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Remark: TypeAlias = Callable[[str, str], None]  # takes the name of a process, and a remark


class Screen:
    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)

    def say(self, text: str = "", style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False)

    def warn(self, text: str) -> None:
        """Print a warning about a problem that is being handled."""
        self.say(text, style="yellow")

    @contextmanager
    def waiting_for(self, names: Sequence[str]) -> Iterator[tuple[Remark, Remark]]:
        """Show all of `names` as not ready.

        Yields two functions to call with a name and a remark: one when that process is ready, and
        one to show its progress.
        """
        if not self._console.is_terminal:
            yield self._line_by_line(), self._starting
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

            def starting(name: str, remark: str) -> None:
                progress.update(tasks[name], remark=escape(remark))

            yield ready, starting

    def _starting(self, name: str, remark: str) -> None:
        self.say(f"{name} is starting: {remark}")

    def _line_by_line(self) -> Remark:
        started = time.monotonic()

        def ready(name: str, remark: str) -> None:
            self.say(f"{name} ready after {time.monotonic() - started:.1f} s, {remark}")

        return ready
