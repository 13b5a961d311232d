"""Determine which host names refer to this machine."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_AT_ONCE, _KEPT_S = 64, 300.0  # maximum parallel lookups, and seconds for which results are cached


def local_names(names: Iterable[str]) -> frozenset[str]:
    """Return the ``names`` that refer to this machine: its own name, or names that resolve to it.

    Names are looked up in parallel. Results are cached, because they are needed several times per job start.
    """
    own, names = os.uname().nodename, set(names)
    known = names & {*LOCAL_NAMES, own, own.partition(".")[0]}
    others, when = list(names - known), time.monotonic() // _KEPT_S
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        local = pool.map(_is_own_address, others, itertools.repeat(when))
        return frozenset(known.union(itertools.compress(others, local)))


@lru_cache(4096)
def _is_own_address(name: str, when: float) -> bool:
    """Return True if a socket can bind to an address of ``name``. ``when`` makes cached results expire."""
    try:
        addresses = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, _, _, address in addresses:
        try:
            with socket.socket(family, kind) as sock:
                sock.bind(address)
                return True
        except OSError:
            continue
    return False
