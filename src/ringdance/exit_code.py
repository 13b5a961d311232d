"""The exit code with which this program ends. Python does not tell it to the functions of ``atexit``.

Standard library only: launch/site/sitecustomize.py loads this file by its path.
"""

from __future__ import annotations

import _sitebuiltins
import functools
import sys
from typing import Any

_taken: list[Any] = []
_CODE: Any = SystemExit.code


class _Exit(SystemExit):
    """A SystemExit that notes when Python itself asks for its code, which it does in order to end with it."""

    def _take(self) -> Any:
        code = _CODE.__get__(self)
        if sys._getframe().f_back is None:  # else a function has caught it, and asks
            _taken.append(code)
        return code

    code = property(_take, _CODE.__set__)

    def __reduce__(self) -> tuple[Any, ...]:
        return SystemExit, self.args


_Exit.__name__ = _Exit.__qualname__ = "SystemExit"  # for logs


def watch() -> None:
    """Note from now on with which code ``sys.exit()``, ``exit()`` and ``quit()`` end the program.

    A ``raise SystemExit(...)`` of the script's own cannot be noted. A second call changes nothing.
    """
    if "SystemExit" in vars(_sitebuiltins):
        return
    vars(_sitebuiltins)["SystemExit"] = _Exit  # which exit() and quit() raise
    former = sys.exit

    @functools.wraps(former)
    def leave(*status: Any) -> None:
        try:
            former(*status)
        except SystemExit as error:
            if type(error) is not SystemExit:
                raise
            args = error.args
        raise _Exit(*args)

    sys.exit = leave  # type: ignore[assignment]


def exit_code() -> int:
    """Return the code, as the parent process gets it: 0 also as long as none is known."""
    code = _taken[-1] if _taken else None
    return 0 if code is None else code & 255 if isinstance(code, int) else 1
