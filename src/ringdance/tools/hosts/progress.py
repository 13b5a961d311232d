"""Show the progress of a copy on a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich import progress
from rich.console import Console


class CopyProgress:
    """A progress bar that tracks the slowest host. It is hidden if stderr is not a terminal.

    Args:
        total: Number of bytes that a complete host has.
    """

    def __init__(self, total: int) -> None:
        self._console = console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
        columns = (progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn())
        text = progress.TimeRemainingColumn(), progress.TextColumn("{task.description}")
        hidden = not console.is_interactive
        self._progress = progress.Progress(*columns, *text, console=console, transient=True, disable=hidden)
        self._task = self._progress.add_task("", total=total)
        self.stop = self._progress.stop

    def print(self, text: str) -> None:
        """Print a message above the bar."""
        self._console.print(f"ringdance hosts: {text}")

    def update(self, done: Mapping[str, int]) -> None:
        """Update the bar to the slowest host's byte count. Shows its name if it lags behind the others."""
        if not done:
            return
        slowest = min(done, key=done.__getitem__)
        task = self._progress.tasks[self._task]
        if not task.completed:  # exclude bytes kept from an earlier copy from the speed
            self._progress.reset(self._task, completed=done[slowest])
        self._progress.start()
        behind = max(done.values()) - done[slowest] > (task.total or 0) / 50
        description = f"({slowest} is behind)" if behind else ""
        self._progress.update(self._task, completed=done[slowest], description=description)
