"""The variables of the caller's environment that are passed to the ranks, and a rank's numbers in them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ringdance.host.agent.rank import rank_and_size

__all__ = ["IGNORE_REGEXES", "LOG_LEVEL_STR", "RUNTIME_PATHS", "get_env_rank_and_size", "is_exportable"]

LOG_LEVEL_STR = ["FATAL", "ERROR", "WARNING", "INFO", "DEBUG", "TRACE"]
RUNTIME_PATHS = ["PATH", "PYTHONPATH", "LD_LIBRARY_PATH"]
IGNORE_REGEXES = {"BASH_FUNC_.*", "OLDPWD", ".*CUDA_VISIBLE_DEVICES"}


def is_exportable(v: str) -> bool:
    """Return True if a variable with this name is passed to processes on other hosts."""
    return not any(re.match(pattern, v) for pattern in IGNORE_REGEXES)


def get_env_rank_and_size(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Return this process's rank and the number of ranks, as set by its launcher, or (0, 1) without one."""
    environ = os.environ if environ is None else environ
    if "HOROVOD_RANK" in environ and "HOROVOD_SIZE" in environ:
        return int(environ["HOROVOD_RANK"]), int(environ["HOROVOD_SIZE"])
    try:
        return rank_and_size(environ)
    except LookupError:
        return 0, 1
