"""Which names are this machine."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_AT_ONCE, _KEPT_S = 64, 300.0  # names that are looked up at a time; how long an answer holds


def local_names(names: Iterable[str]) -> frozenset[str]:
    """Return which of `names` are this machine: its own name or one of its addresses.

    They are looked up at the same time, and once in a start: it asks several times.
    """
    own, names = os.uname().nodename, set(names)
    known = names & {*LOCAL_NAMES, own, own.partition(".")[0]}
    others, when = list(names - known), time.monotonic() // _KEPT_S
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = pool.map(_is_own_address, others, itertools.repeat(when))
        return frozenset(known.union(itertools.compress(others, found)))


@lru_cache(4096)
def _is_own_address(name: str, when: float) -> bool:
    """Return whether a socket of this machine can have `name`'s address; `when` is a part of the key."""
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as sock:
                sock.bind(address)
                return True
        except OSError:
            continue
    return False
