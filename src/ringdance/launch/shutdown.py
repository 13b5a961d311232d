"""Decide how long ranks may keep running after the launcher has received signals."""

from __future__ import annotations

import signal
import time
from typing import Any

from ringdance.launch.cause import signal_name

_STAY_S = 1.5
_SAME_S = 0.2  # signals that arrive within this time may be one signal that was sent to all processes
_OF_A_TERMINAL: dict[int, str] = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "its terminal"}
_BEFORE_KILL_S = 5.0  # time left after SIGINT and SIGTERM; LSF sends both, then SIGKILL, 10 s apart


class Shutdown:
    """Keeps track of the signals that end a job.

    Args:
        grace: Time in seconds for ranks to exit after the first signal.

    Attributes:
        signal: Number of the first signal, or 0. The other attributes are valid only after a signal.
        came: Time of the first signal (``time.monotonic()``).
        kill_at: Time at which ranks that are still running are killed.
        caused_failures: True if the signal may have caused the failures recorded before it.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self.signal = 0
        self.came = self.kill_at = 0.0
        self.caused_failures = True

    def add(self, number: int, latest: float, caused_failures: bool) -> None:
        """Record a signal. The first sets ``kill_at`` (at most ``latest``). A later SIGINT ends the wait."""
        now = time.monotonic()
        if not self.signal:
            self.signal, self.came, self.caused_failures = number, now, caused_failures
            self.kill_at = min(now + self._grace, latest)
        elif number == signal.SIGINT:
            if self.signal != signal.SIGINT or now - self.came > _SAME_S:
                self.kill_at = now
        elif self.signal == signal.SIGINT and number == signal.SIGTERM:
            self.kill_at = min(self.kill_at, now + _BEFORE_KILL_S)

    def sentence(self) -> str:
        """Describe how the job was ended and how to continue it."""
        text = f"the job was ended by {signal_name(self.signal)}, sent to its launcher"
        if self.signal in _OF_A_TERMINAL:
            text += ". If the script loads its last checkpoint, the same command continues from there. "
            text += f"A job started with --detach does not end with {_OF_A_TERMINAL[self.signal]}"
        return text

    def sigterm(self) -> dict[str, Any]:
        """Build the message that makes a wrapper ask its rank to exit and delay its report to mpiexec.

        mpiexec would end the other ranks as soon as it learned that one has exited.
        """
        stay = max(self.kill_at - time.monotonic(), 0.0) + _STAY_S
        return {"signal": int(signal.SIGTERM), "after": _SAME_S if self.signal else 0.0, "stay": stay}
