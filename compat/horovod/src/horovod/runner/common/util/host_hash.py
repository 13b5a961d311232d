"""A string that distinguishes machines."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

__all__ = ["host_hash"]


def host_hash(salt: str | None = None) -> str:
    """Return this machine's name, and a hash that distinguishes it (and this container) from namesakes."""
    name = os.uname().nodename
    words = [name, os.environ.get("CONTAINER_ID", "")]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/uts"):
        try:
            words.append(os.readlink(path) if os.path.islink(path) else Path(path).read_text())
        except OSError:
            continue
    text = "\0".join([*words, *([salt] if salt else [])])
    return f"{name.partition('.')[0]}-{hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()}"
