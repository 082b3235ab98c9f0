"""Shows how far a build is: a bar on a terminal, a line for each tenth elsewhere. Called by `build.py`."""

from __future__ import annotations

import re
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

__all__ = ["BuildProgress", "percentage"]

_MAKE_PERCENTAGE = re.compile(r"^\s*\[\s*(\d{1,3})%\]")


def percentage(line: str) -> int | None:
    """The share that make has reached by this line of its output, in percent, or None."""
    match = _MAKE_PERCENTAGE.match(line)
    return int(match.group(1)) if match else None


class BuildProgress:
    """Takes each line of the build's output and shows the share that it names."""

    def __init__(self, title: str, console: Console) -> None:
        self._title = title
        self._console = console
        self._shown = 0
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                console=console,
            )
            self._task = self._bar.add_task(title, total=100)

    def __enter__(self) -> Self:
        """Show the bar."""
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the bar as it is."""
        if self._bar:
            self._bar.stop()

    def line(self, line: str) -> None:
        """Take one line of the build's output."""
        done = percentage(line)
        if done is None or done <= self._shown:
            return
        if self._bar:
            self._bar.update(self._task, completed=done)
        elif done // 10 > self._shown // 10:
            self._console.print(f"{self._title}: {done} %", highlight=False, soft_wrap=True)
        self._shown = done
