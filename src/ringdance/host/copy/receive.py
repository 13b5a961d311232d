"""Receive files for ``ringdance hosts copy`` in an agent, and pass them on to the next host.

Over a separate connection to each host, the launcher sends the list of files (``begin``) and, once a file is
complete, its checksum (``end``). Chunks come from the launcher or, over TCP, from the previous host, and are
passed on to the next host. A machine between two hosts can thus corrupt a chunk, but the file is then
discarded. A file is written under another name in its directory, and renamed when it is complete and correct.
If a copy is interrupted, the next one continues it. Standard library only.

Launcher to agent, each a ``{"task": "copy", "do": ...}``: ``begin`` (``root``, ``checksum``) with a JSON
list of [path, kind, size, mode, time, text] as bytes, ``listen`` and ``next`` (``token``, ``port``,
``addresses``), ``chunk`` (``file``, ``at``) with bytes, ``end`` (``file``, ``digest``), ``over``.
Agent to launcher (``{"answer": "copy", "what": ...}``): ``begin`` with ``have`` and ``free``, ``listen``
with ``port``, ``next``, ``over``, each with a ``problem`` (may be empty). Unsolicited: ``file`` (its number,
``problem``, ``again``: true if it was corrupted), ``got`` (bytes written since the last report),
``cut`` (the previous host's connection has closed), ``lost`` (the next host's connection has closed).
"""

from __future__ import annotations

import json
import os
import select
import selectors
import shutil
import socket
import time
from typing import Any

from ..messages import Frames, watch
from ..system.machine import in_home
from ..system.tcp import accept, connect, listen
from .received_file import ReceivedFile, partials_in

_REPORT_S = 0.2
_Link = tuple[socket.socket, Frames]


class Receiver:
    """Receives files, writes them on this host, and passes them on to the next host.

    Args:
        launcher: Receives reports. Sends messages and, to the first host, chunks.
        selector: The agent's event loop.
    """

    def __init__(self, launcher: Frames, selector: selectors.BaseSelector) -> None:
        self._launcher, self._selector = launcher, selector
        self._root = "/"
        self._targets: list[ReceivedFile] = []
        self._directories: list[tuple[str, int, int]] = []
        self._listener: socket.socket | None = None
        self._before: _Link | None = None
        self._after: _Link | None = None
        self._got, self._reported = 0, 0.0

    def take(self, message: dict[str, Any], payload: bytes) -> None:
        """Handle a message from the launcher."""
        do = message["do"]
        if do == "chunk":
            self._chunk(message, payload)
            return
        if do == "end":
            self._targets[message["file"]].digest = message["digest"]
            self._complete(message["file"])
            return
        try:
            answer = {
                "begin": self._begin, "listen": self._listen, "next": self._next,
                "over": self._finish,
            }[do](message, payload)  # fmt: skip
        except OSError as error:
            answer = {"problem": _text(error)}
        self._send(do, **{"problem": "", **answer})

    def _send(self, what: str, **more: Any) -> None:
        self._launcher.send({"answer": "copy", "what": what, **more})

    # --- the list of files ---------------------------------------------------------------------

    def _begin(self, message: dict[str, Any], payload: bytes) -> dict[str, Any]:
        """Create directories and links. Return how many bytes of each file are here, and the free space."""
        self._close()
        self._root = os.path.abspath(in_home(message["root"]))
        os.makedirs(self._root, exist_ok=True)
        have: list[int] = []
        partials: dict[str, set[str]] = {}  # partial files from earlier copies, by directory
        for path, kind, size, mode, changed, text in json.loads(payload):
            own = self._own_path(path)
            if kind == "directory":
                os.makedirs(own, exist_ok=True)
                os.chmod(own, mode | 0o700)
                self._directories.append((own, mode, changed))
            elif kind == "link":
                _link(text, own)
            else:
                directory = os.path.dirname(own)
                if directory not in partials:
                    partials[directory] = partials_in(directory)
                target = ReceivedFile(own, size, mode, changed)
                have.append(target.check(partials[directory], text if message["checksum"] else ""))
                self._targets.append(target)
        return {"have": have, "free": shutil.disk_usage(self._root).free}

    def _own_path(self, path: str) -> str:
        if os.path.isabs(path) or ".." in path.split("/"):
            raise OSError(f"refused to write {path}, because it is not inside the destination {self._root}")
        return os.path.join(self._root, path) if path else self._root

    # --- the hosts before and after ------------------------------------------------------------

    def _listen(self, message: dict[str, Any], payload: bytes) -> dict[str, Any]:
        self._listener = listener = listen()
        token = bytes.fromhex(message["token"])
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(token))
        return {"port": listener.getsockname()[1]}

    def _accept(self, token: bytes) -> None:
        assert self._listener
        sock = accept(self._listener, token)
        if sock is not None:  # None if the peer failed to authenticate itself
            self._stop_listening()
            self._before = sock, Frames(sock.fileno(), sock.fileno())
            self._selector.register(sock, selectors.EVENT_READ, self._from_before)

    def _stop_listening(self) -> None:
        if self._listener:
            watch(self._selector, self._listener.fileno(), 0, None)
            self._listener.close()
            self._listener = None

    def _next(self, message: dict[str, Any], payload: bytes) -> dict[str, Any]:
        sock = connect(message["addresses"], message["port"], bytes.fromhex(message["token"]))
        self._after = sock, Frames(sock.fileno(), sock.fileno())
        return {}

    def _from_before(self) -> None:
        assert self._before
        try:
            messages, alive = self._before[1].receive()
        except ValueError:
            messages, alive = [], False
        for message, payload in messages:
            self._chunk(message, payload)
        if not alive and self._before:
            self._close_before()
            self._send("cut")

    def _pass_on(self, message: dict[str, Any], payload: bytes) -> None:
        """Send a chunk to the next host, and read nothing else until it is sent.

        The wait also ends when the launcher exits. Otherwise, a next host that has stopped would block this
        agent.
        """
        if not self._after:
            return
        frames, launcher = self._after[1], self._launcher.read_fd
        frames.send({"file": message["file"], "at": message["at"]}, payload)
        poll = select.poll()
        poll.register(frames.write_fd, select.POLLOUT)
        poll.register(launcher, 0)  # reports only that the launcher has closed its end
        while frames.unsent and frames.open and launcher not in dict(poll.poll()):
            frames.flush()
        if frames.unsent or not frames.open:
            self._close_after()
            self._send("lost")

    # --- chunks --------------------------------------------------------------------------------

    def _chunk(self, message: dict[str, Any], payload: bytes) -> None:
        self._pass_on(message, payload)
        number = message["file"]
        if not 0 <= number < len(self._targets) or self._targets[number].failed:
            return
        try:
            self._got += self._targets[number].write(message["at"], payload)
        except OSError as error:
            self._report(number, _text(error))
            return
        if time.monotonic() - self._reported > _REPORT_S:
            self._send_progress()
        self._complete(number)

    def _complete(self, number: int) -> None:
        """Rename a file to its final name if it is complete and correct."""
        target = self._targets[number]
        if not target.ready:
            return
        try:
            correct = target.finish()
        except OSError as error:
            self._report(number, _text(error))
            return
        self._report(number, "" if correct else "the file was corrupted in transit", again=not correct)

    def _report(self, number: int, problem: str, again: bool = False) -> None:
        target = self._targets[number]
        target.failed = bool(problem)
        target.close()
        self._send_progress()
        self._send("file", file=number, problem=problem, again=again)

    def _send_progress(self) -> None:
        if self._got:
            self._send("got", bytes=self._got)
        self._got, self._reported = 0, time.monotonic()

    # --- the end -------------------------------------------------------------------------------

    def _finish(self, message: dict[str, Any], payload: bytes) -> dict[str, Any]:
        """Set the modes and times of directories last, because creating files in them changes the times."""
        for path, mode, changed in reversed(self._directories):
            os.chmod(path, mode)
            os.utime(path, ns=(changed, changed))
        self._close()
        return {}

    def _close(self) -> None:
        """Close all files and connections. Partial files are kept for the next copy."""
        for target in self._targets:
            target.close()
        self._targets, self._directories = [], []
        self._close_before()
        self._close_after()
        self._stop_listening()

    def _close_before(self) -> None:
        if self._before:
            sock, self._before = self._before[0], None
            watch(self._selector, sock.fileno(), 0, None)
            sock.close()

    def _close_after(self) -> None:
        if self._after:
            self._after[0].close()
            self._after = None


def _link(text: str, path: str) -> None:
    """Create a symbolic link to ``text`` atomically. Replaces an existing link."""
    if os.path.islink(path) and os.readlink(path) == text:
        return
    if os.path.isdir(path) and not os.path.islink(path):
        raise OSError(
            f"{path} is a directory on this host, but a symbolic link in the source. Remove the directory."
        )
    draft = f"{path}.ringdance-{os.urandom(8).hex()}"
    os.symlink(text, draft)
    os.replace(draft, path)


def _text(error: OSError) -> str:
    """Return an error's text, with the file name if there is one."""
    if error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
