"""Show the progress of a copy on a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich import progress
from rich.console import Console


class CopyProgress(progress.Progress):
    """A progress bar that tracks the slowest host. It is hidden if stderr is not a terminal.

    Args:
        total: Number of bytes that a host has once its copy is complete.
    """

    def __init__(self, total: int) -> None:
        console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
        columns = (progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn())
        text = progress.TimeRemainingColumn(), progress.TextColumn("{task.description}")
        super().__init__(*columns, *text, console=console, transient=True, disable=not console.is_interactive)
        self._bar = self.add_task("", total=total)

    def show(self, done: Mapping[str, int]) -> None:
        """Show the slowest host's byte count, and the host's name if it lags behind the others.

        Args:
            done: Number of bytes that each host has.
        """
        if not done:
            return
        slowest = min(done, key=done.__getitem__)
        task = self.tasks[self._bar]
        if not task.completed:  # do not count bytes from an earlier copy in the speed
            self.reset(self._bar, completed=done[slowest])
        self.start()
        behind = max(done.values()) - done[slowest] > (task.total or 0) / 50
        self.update(
            self._bar, completed=done[slowest], description=f"({slowest} is behind)" if behind else ""
        )
