"""A line on the terminal that says what is being waited for, and for how long already."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

_EVERY_S = 0.25


class Waiting:
    """Show the line until it is closed; silent where stderr is no terminal.

    Args:
        write: shows a text.
    """

    def __init__(self, write: Callable[[str], None] | None = None) -> None:
        self._write = write or (_to_terminal if sys.stderr.isatty() else None)
        self._text = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __call__(self, text: str) -> None:
        """Set the text, and show it from now on."""
        self._text = text
        if self._write and not self._thread.is_alive():
            self._thread.start()

    def __enter__(self) -> Waiting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._write and self._thread.is_alive():
            self._thread.join()
            self._write("\r\033[K")

    def _show(self) -> None:
        assert self._write
        began = time.monotonic()
        while True:
            line = f"{self._text}: {time.monotonic() - began:.0f} s"
            self._write("\r\033[K" + line[: shutil.get_terminal_size().columns - 1])
            if self._over.wait(_EVERY_S):
                return


def _to_terminal(text: str) -> None:
    try:
        os.write(2, text.encode(errors="replace"))
    except OSError:
        pass
