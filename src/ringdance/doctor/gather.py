"""Facts of several hosts at once: a probe process on each, over ssh where it is not this machine."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ringdance.doctor.probe import MARK, request
from ringdance.doctor.registry import Facts, Wanted
from ringdance.errors import LaunchError
from ringdance.launch.remote.shell import RemoteShell

_SPARE_S = 30.0  # for ssh and for starting Python, beyond the time that the probes have

_MOST_NAMED = 4  # hosts that have not answered

_KINDS = (
    ("Permission denied", "refused"),
    ("Host key verification failed", "key"),
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "key"),
    ("Could not resolve", "name"),
    ("Name or service not known", "name"),
    ("No module named 'ringdance", "package"),
    ("No module named ringdance", "package"),
    ("No such file or directory", "python"),
    ("not found", "python"),
    ("Connection refused", "closed"),
    ("timed out", "silent"),
    ("No route to host", "silent"),
)
"""What ssh or the shell there says, and what kind of problem that is."""


def python_line(module: str) -> list[str]:
    """Runs a module of ours with this interpreter; -P: a random.py in the working folder must not matter."""
    return [sys.executable, "-P", "-m", f"ringdance.doctor.{module}"]


def command(host: str, module: str, local: Collection[str], reach: RemoteShell) -> list[str]:
    """The command line that runs a module of ours on `host`."""
    line = python_line(module)
    return line if host in local else reach.command(host, line)


def gather(
    hosts: Sequence[str],
    probes: Collection[str],
    wanted: Wanted,
    seconds: float,
    reach: RemoteShell,
    local: Collection[str],
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Facts]:
    """Facts of each host, all asked at once; one that does not answer: only why, under "reach".

    Args:
        hosts: their names.
        probes: what to look at.
        wanted: what the hosts are to be used for.
        seconds: time for the probes.
        reach: how other hosts are reached.
        local: those of `hosts` that are this machine.
        report: called with a text that names what is being waited for.
    """
    found: dict[str, Facts] = {}
    slow = ", importing frameworks" if "frameworks" in probes else ""

    def report_progress() -> None:
        left = [host for host in hosts if host not in found]
        more = f" and {len(left) - _MOST_NAMED} more" if len(left) > _MOST_NAMED else ""
        report(f"checking {', '.join(left[:_MOST_NAMED])}{more}{slow}")

    report_progress()
    with _marks(wanted.folders) as marks:
        asked = request(probes, replace(wanted, marks=marks), seconds)

        def one(host: str) -> None:
            found[host] = _ask(host, asked, seconds + _SPARE_S, reach, local)
            report_progress()

        threads = [threading.Thread(target=one, args=(host,), daemon=True) for host in hosts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return {host: found[host] for host in hosts}


@contextmanager
def _marks(folders: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """A small file in each folder that can be written, for as long as the hosts are looked at."""
    made = []
    for folder in folders:
        path = os.path.join(folder, f".ringdance-doctor-{secrets.token_hex(8)}")
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except OSError:
            continue
        made.append(path)
    try:
        yield tuple(made)
    finally:
        for path in made:
            try:
                os.unlink(path)
            except OSError:
                pass


def _ask(host: str, asked: bytes, seconds: float, reach: RemoteShell, local: Collection[str]) -> Facts:
    sent = time.time()
    try:
        line = command(host, "probe", local, reach)
        done = subprocess.run(
            line, input=asked, capture_output=True, check=False, timeout=seconds, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        return {"reach": {"error": "silent", "said": f"no answer within {seconds:g} s"}}
    except LaunchError as error:
        return {"reach": {"error": "name", "said": str(error)}}
    except OSError as error:
        return {"reach": {"error": "client", "said": f"{line[0]}: {error.strerror}"}}
    received = time.time()
    said, mark, text = done.stdout.decode(errors="replace").partition(MARK)
    if not mark:
        return {"reach": _why(done.returncode, done.stderr.decode(errors="replace"), said)}
    facts: dict[str, Any] = json.loads(text)
    facts["reach"] = {
        "error": "",
        "local": host in local,
        "noise": said.strip()[:200],
        # Its clock is ahead by some number between these two.
        "ahead": [facts["times"]["ended"] - received, facts["times"]["began"] - sent],
    }
    return facts


def _why(code: int, errors: str, said: str) -> dict[str, Any]:
    lines = [line.strip() for line in f"{said}\n{errors}".splitlines() if line.strip()]
    kind = next((kind for sign, kind in _KINDS if any(sign in line for line in lines)), "other")
    telling = [line for line in lines if any(sign in line for sign, known in _KINDS if known == kind)]
    return {"error": kind, "said": (telling or lines or [f"exit code {code}"])[-1][:300]}
