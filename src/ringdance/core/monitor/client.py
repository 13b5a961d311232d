"""Start a host's monitor, and ask it for a timeline."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_BOOT = "import sys;sys.path.insert(0,sys.argv.pop(1));from ringdance.core.monitor.main import main;main()"
_WRITING_S = 60.0  # timeout for writing a file, which takes at most about five seconds
_OTHERS_S = 2.0


class MonitorClient:
    """This host's monitor, started by this rank.

    Args:
        pids: Process ids of the host's ranks.
        metrics: True if ``metrics`` will be called. Until then, the monitor keeps this process's stderr open.

    Raises:
        OSError: The monitor cannot be started.
    """

    def __init__(self, pids: Sequence[int], metrics: bool) -> None:
        self._limit = _OTHERS_S
        root = str(Path(__file__).resolve().parents[3])
        # The monitor gets its own session, so that neither Ctrl-C nor this process's exit ends it too early.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOT, root, *map(str, pids)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None if metrics else subprocess.DEVNULL,
            start_new_session=True, bufsize=0,
        )  # fmt: skip

    def start(self, file: str, detail: int | None, anew: bool = True) -> None:
        """Start writing a timeline.

        Args:
            file: Path of the file.
            detail: Value for ``Recorder.detail``. If None, the ranks set it themselves.
            anew: If True, the timeline starts now instead of at the start of the job.

        Raises:
            OSError: The file cannot be written, or the monitor has exited.
        """
        self._limit = _WRITING_S
        self._ask(do="start", file=os.path.abspath(file), detail=detail, anew=anew)

    def stop(self) -> None:
        """Complete the timeline file. Raises OSError if the monitor has exited."""
        self._ask(do="stop")

    def metrics(self, **options: object) -> None:
        """Make the monitor write and serve the ranks' metrics. Does not wait. Problems are printed on stderr.

        Args:
            options: Arguments for ``metrics.Metrics`` except ``readers``, ``path`` and ``warn``.
        """
        with contextlib.suppress(OSError):  # training continues even if the monitor was killed
            self._send(do="metrics", path=sys.path, **options)

    def listen(self, others: int) -> dict[str, Any]:
        """Listen for other hosts' monitors. Returns the arguments for their ``connect``. Raises OSError."""
        return self._ask(do="listen", others=others)

    def connect(self, addresses: Sequence[str], port: int, token: str) -> None:
        """Send all records to another host's monitor. Does not wait for the connection."""
        with contextlib.suppress(OSError):  # as in ``metrics``
            self._send(do="connect", addresses=list(addresses), port=port, token=token)

    def _send(self, **command: object) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(command).encode() + b"\n")

    def _ask(self, **command: object) -> dict[str, Any]:
        self._send(**command)
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise OSError("the monitor process on this host has exited")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise OSError(answer["error"])
        return answer

    def killed(self) -> str:
        """Describe how the monitor ended, or return "" if it is still running. Call this before ``close``."""
        if (code := self._process.poll()) is None:
            return ""
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return f"the monitor (pid {self._process.pid}) {how}"

    def close(self) -> None:
        """Wait until the monitor has written everything. This rank's ring must already be closed."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the monitor may be waiting for other ranks
            self._process.wait(self._limit)
        self._process.stdout.close()
