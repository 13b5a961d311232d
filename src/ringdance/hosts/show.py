"""How sizes and times are shown."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes in the unit that leaves three digits: ``1.07 GB``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            break
        count /= 1000.0
    return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.3g} {unit}"


def seconds(count: float) -> str:
    """``42 s``, ``3:07``, ``2:15:00``, ``3 d 4 h``."""
    whole = int(count)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    if whole < 86400:
        return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
    return f"{whole // 86400} d {whole // 3600 % 24} h"
