"""An agent's part in ``ringdance hosts copy``: files come in chunks, are written, and are passed on.

The launcher tells every host, over its own connection, what is to come (``files``) and the checksum of each
file when all of it has been sent (``end``); the chunks themselves come from the launcher or, over TCP, from
the host before, and go on to the host after. So whoever sits between two hosts can spoil a chunk, but not
have it kept. A file is written under another name beside its place and renamed when it is whole and right;
what an interrupted copy has left of it is where the next one goes on. Standard library only.

Launcher to agent, each a ``{"chore": "copy", "do": ...}``: ``begin`` (``root``, ``checksum``), ``files`` with
a JSON list of [path, kind, size, mode, time, text] as bytes, ``listen`` and ``next`` (``token``, ``port``,
``addresses``), ``chunk`` (``file``, ``at``) with bytes, ``end`` (``file``, ``digest``), ``over``.
Agent to launcher, each a ``{"did": "copy", "what": ...}``: ``begin``, ``files`` with ``have`` and ``free``,
``listen`` with ``port``, ``next``, ``over``; a ``problem`` in each, "" if there is none; and unasked ``file``
(its number, ``problem``, ``again``: whether it was spoiled on its way), ``got`` (bytes written since the
last), ``cut`` (the host before is gone), ``lost`` (the host after is).
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import socket
import time
from typing import Any

from ..messages import Frames
from ..remote.tcp import accept, connect, listen
from ..system.machine import in_home
from .target import DONE, ReceivedFile, partials_in

_FULL = 8 << 20  # bytes that wait for the next host, beyond which no more are read
_TELL_S = 0.2


class Receiver:
    """Files for this host, and for those behind it.

    Args:
        launcher: where reports go; its reading end may bring chunks.
        selector: the agent's loop.
    """

    def __init__(self, launcher: Frames, selector: selectors.BaseSelector) -> None:
        self._launcher, self._selector = launcher, selector
        self._root = "/"
        self._targets: list[ReceivedFile] = []
        self._folders: list[tuple[str, int, int]] = []
        self._known: dict[str, set[str]] = {}  # folder -> names of what earlier copies have left there
        self._checksum = False
        self._listener: socket.socket | None = None
        self._before: tuple[socket.socket, Frames] | None = None
        self._after: tuple[socket.socket, Frames] | None = None
        self._held: list[tuple[int, Any]] = []  # what is not read while the next host is behind
        self._got, self._told = 0, 0.0

    def take(self, message: dict[str, Any], payload: bytes) -> None:
        """Obey a message of the launcher's."""
        do = message["do"]
        if do == "chunk":
            self._chunk(message, payload)
            return
        if do == "end":
            self._end(message["file"], message["digest"])
            return
        try:
            answer = {
                "begin": self._begin, "files": self._files, "listen": self._listen, "next": self._next,
                "over": self._finish,
            }[do](message, payload)  # fmt: skip
        except OSError as error:
            answer = {"problem": _said(error)}
        self._tell(do, **{"problem": "", **answer})

    def _tell(self, what: str, **more: Any) -> None:
        self._launcher.send({"did": "copy", "what": what, **more})

    # --- what is to come -----------------------------------------------------------------------

    def _begin(self, message: dict[str, Any], payload: bytes) -> dict[str, Any]:
        self._close()
        self._root = os.path.abspath(in_home(message["root"]))
        self._checksum = message["checksum"]
        os.makedirs(self._root, exist_ok=True)
        return {"root": self._root}

    def _files(self, message: dict[str, Any], payload: bytes) -> dict[str, Any]:
        """Make folders and links; of each file, how many bytes are here, or that it is."""
        have: list[int] = []
        for path, kind, size, mode, changed, text in json.loads(payload):
            place = self._place(path)
            if kind == "folder":
                os.makedirs(place, exist_ok=True)
                os.chmod(place, mode | 0o700)
                self._folders.append((place, mode, changed))
            elif kind == "link":
                _link(text, place)
            else:
                folder = os.path.dirname(place)
                if folder not in self._known:
                    self._known[folder] = partials_in(folder)
                target = ReceivedFile(place, size, mode, changed)
                have.append(target.look(self._known[folder], text if self._checksum else ""))
                self._targets.append(target)
        return {"have": have, "free": shutil.disk_usage(self._root).free}

    def _place(self, path: str) -> str:
        if os.path.isabs(path) or ".." in path.split("/"):
            raise OSError(f"{path}: no path below {self._root}")
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
        if sock is None:  # somebody else
            return
        self._stop_listening()
        self._before = sock, Frames(sock.fileno(), sock.fileno())
        self._selector.register(sock, selectors.EVENT_READ, self._from_before)

    def _stop_listening(self) -> None:
        if self._listener:
            self._selector.unregister(self._listener)
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
            self._tell("cut")

    def _pass_on(self, message: dict[str, Any], payload: bytes) -> None:
        if self._after:
            self._after[1].send({"file": message["file"], "at": message["at"]}, payload)
            self._heed_fullness()

    def _heed_fullness(self) -> None:
        """Write when the next host takes something; read nothing while it is far behind."""
        assert self._after
        sock, frames = self._after
        frames.flush()
        if not frames.open:
            self._close_after()
            self._tell("lost")
            return
        watched = self._selector.get_map().get(sock.fileno()) is not None
        if frames.unsent and not watched:
            self._selector.register(sock, selectors.EVENT_WRITE, self._heed_fullness)
        elif watched and not frames.unsent:
            self._selector.unregister(sock)
        if frames.unsent > _FULL:
            self._hold()
        elif frames.unsent < _FULL // 2:
            self._release()

    def _hold(self) -> None:
        sources = [self._launcher.read_fd, *([self._before[0].fileno()] if self._before else [])]
        for descriptor in sources:
            key = self._selector.get_map().get(descriptor)
            if key is not None:
                self._selector.unregister(descriptor)
                self._held.append((descriptor, key.data))

    def _release(self) -> None:
        held, self._held = self._held, []
        for descriptor, action in held:
            self._selector.register(descriptor, selectors.EVENT_READ, action)

    # --- chunks --------------------------------------------------------------------------------

    def _chunk(self, message: dict[str, Any], payload: bytes) -> None:
        self._pass_on(message, payload)
        number = message["file"]
        if not 0 <= number < len(self._targets):
            return
        target = self._targets[number]
        if target.failed:
            return
        try:
            self._got += target.write(message["at"], payload)
        except OSError as error:
            self._report(number, _said(error))
            return
        if time.monotonic() - self._told > _TELL_S:
            self._tell_progress()
        self._complete(number)

    def _end(self, number: int, digest: str) -> None:
        self._targets[number].digest = digest
        self._complete(number)

    def _complete(self, number: int) -> None:
        """Give a file its name if all of it has come and is known to be right."""
        target = self._targets[number]
        if target.failed or target.have == DONE or not target.digest:
            return
        try:
            if not target.whole():
                return
            right = target.finish()
        except OSError as error:
            self._report(number, _said(error))
            return
        self._report(number, "" if right else "it was spoiled on its way", again=not right)

    def _report(self, number: int, problem: str, again: bool = False) -> None:
        target = self._targets[number]
        target.failed = bool(problem)
        target.give_up()
        self._tell_progress()
        self._tell("file", file=number, problem=problem, again=again)

    def _tell_progress(self) -> None:
        if self._got:
            self._tell("got", bytes=self._got)
        self._got, self._told = 0, time.monotonic()

    # --- the end -------------------------------------------------------------------------------

    def _finish(self, message: dict[str, Any], payload: bytes) -> dict[str, Any]:
        """Folders get their modes and times last: files have been made in them."""
        for place, mode, changed in reversed(self._folders):
            os.chmod(place, mode)
            os.utime(place, ns=(changed, changed))
        self._close()
        return {}

    def _close(self) -> None:
        """Keep what has come so far for the next copy, and forget the rest."""
        for target in self._targets:
            target.give_up()
        self._targets, self._folders, self._known = [], [], {}
        self._release()
        self._close_before()
        self._close_after()
        self._stop_listening()

    def _close_before(self) -> None:
        if self._before:
            sock, self._before = self._before[0], None
            self._held = [entry for entry in self._held if entry[0] != sock.fileno()]
            if self._selector.get_map().get(sock.fileno()) is not None:
                self._selector.unregister(sock)
            sock.close()

    def _close_after(self) -> None:
        if self._after:
            sock, self._after = self._after[0], None
            if self._selector.get_map().get(sock.fileno()) is not None:
                self._selector.unregister(sock)
            sock.close()
        self._release()


def _link(text: str, place: str) -> None:
    """Make a symbolic link that says `text`, in place of another, whole or not at all."""
    if os.path.islink(place) and os.readlink(place) == text:
        return
    if os.path.isdir(place) and not os.path.islink(place):
        raise OSError(f"{place} is a folder here; a link is to take its place")
    draft = f"{place}.ringdance-{os.urandom(8).hex()}"
    os.symlink(text, draft)
    os.replace(draft, place)


def _said(error: OSError) -> str:
    """What an error says, with the file."""
    if error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
