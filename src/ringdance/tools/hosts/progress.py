"""Show the progress of a copy on a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich import progress
from rich.console import Console


class CopyProgress(progress.Progress):
    """A progress bar for the slowest host. It is hidden if stderr is not a terminal.

    Args:
        total: Total size in bytes of the files on a host when its copy is complete.
    """

    def __init__(self, total: int) -> None:
        console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
        columns = (progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn())
        text = progress.TimeRemainingColumn(), progress.TextColumn("{task.description}")
        super().__init__(*columns, *text, console=console, transient=True, disable=not console.is_interactive)
        self._bar = self.add_task("", total=total)

    def show(self, done: Mapping[str, int]) -> None:
        """Show the progress of the slowest host, and its name if it lags behind the other hosts.

        Args:
            done: Number of bytes that each host has, by host name.
        """
        if not done:
            return
        slowest = min(done, key=done.__getitem__)
        task = self.tasks[self._bar]
        if not task.completed:  # exclude bytes from an earlier copy from the displayed speed
            self.reset(self._bar, completed=done[slowest])
        self.start()
        behind = max(done.values()) - done[slowest] > (task.total or 0) / 50
        self.update(
            self._bar, completed=done[slowest], description=f"({slowest} is behind)" if behind else ""
        )
