"""The log of this process."""

from __future__ import annotations

import logging

from ringdance.settings import Settings

_log = logging.getLogger("ringdance")


def configure(settings: Settings) -> None:
    """Write the log to stderr, unless the script has configured logging."""
    if _log.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    stamp = "" if settings.log_hide_time else "[%(asctime)s] "
    handler.setFormatter(logging.Formatter(stamp + "%(message)s"))
    _log.addHandler(handler)
    _log.propagate = False
    _log.setLevel({"trace": "DEBUG", "fatal": "CRITICAL"}.get(settings.log_level, settings.log_level.upper()))
