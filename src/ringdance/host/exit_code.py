"""The exit code with which this program ends. Python does not tell it to the functions of ``atexit``.

Standard library only: host/site/sitecustomize.py loads this file by its path.
"""

from __future__ import annotations

import _sitebuiltins
import contextlib
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

_taken: list[Any] = []
_told: list[Callable[[], None]] = []
_CODE: Any = SystemExit.code


class _Exit(SystemExit):
    """A SystemExit that notes when Python itself asks for its code, which it does in order to end with it."""

    def _take(self) -> Any:
        code = _CODE.__get__(self)
        if sys._getframe().f_back is None:  # else a function has caught it, and asks
            if code is not None and not isinstance(code, int):
                with contextlib.suppress(Exception):  # as Python does, but before it ends the job
                    sys.stderr.write(f"{code}\n")
                    code = 1
            _taken.append(code)
            for tell in _told:
                with contextlib.suppress(Exception):  # it would change the code
                    tell()
        return code

    code = property(_take, _CODE.__set__)

    def __reduce__(self) -> tuple[Any, ...]:
        return SystemExit, self.args


_Exit.__name__ = _Exit.__qualname__ = "SystemExit"  # for logs


def _new_exit(*args: Any) -> SystemExit:
    """Return what to raise; in other threads Python's own, which ends them without a word."""
    return (_Exit if threading.current_thread() is threading.main_thread() else SystemExit)(*args)


def watch(tell: Callable[[], None] | None = None) -> None:
    """Note from now on with which code ``sys.exit()``, ``exit()`` and ``quit()`` end the program.

    A ``raise SystemExit(...)`` of the script's own cannot be noted. A second call only adds ``tell``.

    Args:
        tell: called once the code is known; Python waits for threads before the functions of ``atexit``.
    """
    if tell is not None:
        _told.append(tell)
    if "SystemExit" in vars(_sitebuiltins):
        return
    vars(_sitebuiltins)["SystemExit"] = _new_exit  # which exit() and quit() raise
    former = sys.exit

    @functools.wraps(former)
    def leave(*status: Any) -> None:
        try:
            former(*status)
        except SystemExit as error:
            if type(error) is not SystemExit:
                raise
            args = error.args
        raise _new_exit(*args)

    sys.exit = leave  # type: ignore[assignment]


def exit_code() -> int:
    """Return the code, as the parent process gets it: 0 also as long as none is known."""
    code = _taken[-1] if _taken else None
    return 0 if code is None else code & 255 if isinstance(code, int) else 1
