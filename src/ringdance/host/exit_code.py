"""The exit code of this program, which Python does not pass to ``atexit`` functions, and ``CAUSE_MARK``.

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

CAUSE_MARK = "::ringdance-cause::"
"""Start of a line on stderr in which a rank tells the launcher, in JSON, why it fails (launch/cause.py)."""

_taken: list[Any] = []
_told: list[Callable[[], None]] = []
_CODE: Any = SystemExit.code


class _Exit(SystemExit):
    """A SystemExit that records its code when Python itself reads the code in order to exit."""

    def _take(self) -> Any:
        code = _CODE.__get__(self)
        if sys._getframe().f_back is None:  # otherwise a function has caught the exception and reads its code
            if code is not None and not isinstance(code, int):
                with contextlib.suppress(Exception):  # print what Python would, but before the job ends
                    sys.stderr.write(f"{code}\n")
                    code = 1
            _taken.append(code)
            for tell in _told:
                with contextlib.suppress(Exception):  # an exception would change the code
                    tell()
        return code

    code = property(_take, _CODE.__set__)

    def __reduce__(self) -> tuple[Any, ...]:
        return SystemExit, self.args


_Exit.__name__ = _Exit.__qualname__ = "SystemExit"  # for logs


def _new_exit(*args: Any) -> SystemExit:
    """Build the exception to raise. Outside the main thread, use SystemExit, which ends threads silently."""
    return (_Exit if threading.current_thread() is threading.main_thread() else SystemExit)(*args)


def watch(tell: Callable[[], None] | None = None) -> None:
    """Start recording the code with which ``sys.exit()``, ``exit()`` or ``quit()`` ends the program.

    A ``raise SystemExit(...)`` in the script cannot be recorded. A second call only adds ``tell``.

    Args:
        tell: Called as soon as the code is known. ``atexit`` functions run only after all threads have ended.
    """
    if tell is not None:
        _told.append(tell)
    if "SystemExit" in vars(_sitebuiltins):
        return
    vars(_sitebuiltins)["SystemExit"] = _new_exit  # exit() and quit() raise the exception by this name
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
    """Return the code as the parent process will see it, or 0 while no code is known."""
    code = _taken[-1] if _taken else None
    return 0 if code is None else code & 255 if isinstance(code, int) else 1
