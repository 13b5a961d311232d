"""The limit of open files of this process."""

from __future__ import annotations

import resource
import sys


def raise_open_files(wanted: int) -> int:
    """Raise the soft limit of open files to `wanted` where the hard limit allows; return what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
