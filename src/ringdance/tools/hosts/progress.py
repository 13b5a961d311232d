"""Show the progress of a copy on a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich import progress
from rich.console import Console


class CopyProgress:
    """A progress bar for the slowest host. There is no bar if stderr is not a terminal.

    Args:
        total: Bytes that each host has at the end.
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
        """Show the slowest host's number of bytes, and its name if it lags behind the others."""
        if not done:
            return
        slowest = min(done, key=done.__getitem__)
        task = self._progress.tasks[self._task]
        if not task.completed:  # bytes kept from an earlier copy must not count as speed
            self._progress.reset(self._task, completed=done[slowest])
        self._progress.start()
        behind = max(done.values()) - done[slowest] > (task.total or 0) / 50
        description = f"({slowest} is behind)" if behind else ""
        self._progress.update(self._task, completed=done[slowest], description=description)
