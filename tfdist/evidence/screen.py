"""What the commands that prove something show while they run: lines, and a bar where there is a terminal."""

from __future__ import annotations

import os

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["RunBar", "open_console", "open_progress", "say"]


def open_console() -> Console:
    """As wide as the terminal; without one wide enough for tables."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=150)


def open_progress(console: Console) -> Progress:
    """A bar with a description, a count and the time; shown in a terminal only."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


def say(console: Console, line: str) -> None:
    """Print a line as it is."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


class RunBar:
    """What runs now, of several runs one after the other: a bar in a terminal, else a line for each."""

    def __init__(self, console: Console) -> None:
        self._progress, self._console = open_progress(console), console
        self._task = self._progress.add_task("", total=None)
        self._begun = False

    def total(self, runs: int) -> None:
        """So many runs there are."""
        self._progress.update(self._task, total=runs)

    def begin(self, what: str) -> None:
        """The run before is done, and this one begins; an empty text: there is none."""
        if self._begun:
            self._progress.advance(self._task)
        self._begun = True
        if what:
            self._progress.update(self._task, description=what)
            if not self._console.is_terminal:
                say(self._console, what)

    def __enter__(self) -> RunBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
