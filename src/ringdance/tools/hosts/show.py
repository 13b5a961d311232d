"""How things are shown: tables, sizes, times."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows, the first of which has the columns' names, with equal widths."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


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
