"""The tasks of an agent apart from jobs: receive and forward files, and run modules of this package.

Messages: ``{"task": name, ...}`` is answered by ``{"answer": name, "problem": text, ...}``. The messages of
``"copy"`` are handled in receive.py, ``"run"`` in ``Tasks``. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
from typing import Any

from ..copy.receive import Receiver
from ..messages import Frames, watch
from ..system import linux


class Tasks:
    """Carries out the tasks that the launcher requests.

    Args:
        launcher: Receives the answers.
        selector: The agent's event loop.
    """

    def __init__(self, launcher: Frames, selector: selectors.BaseSelector) -> None:
        self._launcher = launcher
        self._selector = selector
        self._receiver = Receiver(launcher, selector)
        self._processes: list[subprocess.Popen[bytes]] = []

    def take(self, message: dict[str, Any], payload: bytes) -> None:
        """Carry out the task that a message describes."""
        if message["task"] == "copy":
            self._receiver.take(message, payload)
            return
        try:
            self._run(message)
        except OSError as error:
            self._launcher.send({"answer": "run", "problem": f"{type(error).__name__}: {error}"})

    def _run(self, message: dict[str, Any]) -> None:
        """Start a module in a process that exits when this process does. Answer with its output.

        Args:
            message: ``argv``, the module's name and its arguments; optionally ``input``, a line for its
                standard input, and ``mark``, a text that precedes the JSON object at the end of its output.
        """
        process = subprocess.Popen(
            # -P prevents the import of modules in the working directory, such as a random.py.
            [sys.executable, "-P", "-m", *message["argv"]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=linux.die_with_parent,
        )
        stdin, printed = process.stdin, process.stdout
        assert stdin
        assert printed
        descriptor, output, mark = printed.fileno(), bytearray(), message.get("mark", "").encode()

        def read() -> None:
            data = os.read(descriptor, 65536)
            output.extend(data)
            # A thread that is stuck in a system call may keep the process alive and the pipe open.
            if not data or (mark and output.endswith(b"}\n") and mark in output):
                watch(self._selector, descriptor, 0, None)
                process.kill()
                stdin.close()
                printed.close()
                text = output.decode(errors="replace") or "no answer: the process has exited"
                self._launcher.send({"answer": "run", "problem": "", "output": text})

        watch(self._selector, descriptor, selectors.EVENT_READ, read)
        self._processes.append(process)  # the reference keeps the process's stdin open
        with contextlib.suppress(BrokenPipeError):  # the process has failed, and its output explains why
            stdin.write(message.get("input", "").encode() + b"\n")
            stdin.flush()
