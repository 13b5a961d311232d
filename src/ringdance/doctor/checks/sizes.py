"""Numbers as people read them."""

from __future__ import annotations

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30


def size(count: float) -> str:
    """Bytes with a unit, powers of 1024."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", GB), ("MiB", MB), ("KiB", KB)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}" if count < 1000 * factor else f"{count / factor:.0f} {unit}"
    return f"{count:.0f} bytes"


def several(names: list[str] | tuple[str, ...], most: int = 5) -> str:
    """Names with commas, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
