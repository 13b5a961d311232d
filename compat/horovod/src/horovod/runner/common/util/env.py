"""Which variables of the caller's environment travel to the ranks, and a rank's numbers in it."""

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
    """Whether a variable of that name is given to processes on other hosts."""
    return not any(re.match(pattern, v) for pattern in IGNORE_REGEXES)


def get_env_rank_and_size(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """This process's rank and the number of ranks, as its launcher tells them; (0, 1) without one."""
    environ = os.environ if environ is None else environ
    if "HOROVOD_RANK" in environ and "HOROVOD_SIZE" in environ:
        return int(environ["HOROVOD_RANK"]), int(environ["HOROVOD_SIZE"])
    try:
        return rank_and_size(environ)
    except LookupError:
        return 0, 1
