"""Small readings that several probes share. Absent files are empty text."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence


def text(path: str) -> str:
    """Content of a small file, stripped; "" if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def number(path: str) -> int | None:
    """Content of a file that holds one whole number."""
    try:
        return int(text(path))
    except ValueError:
        return None


def listed(folder: str) -> list[str]:
    """Names in a folder, sorted; none if it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def run(
    words: Sequence[str], seconds: float = 10.0, environ: dict[str, str] | None = None
) -> tuple[int, str, str]:
    """Exit code, output and errors of a program; -1 and the reason if it did not start or end in time."""
    try:
        done = subprocess.run(
            list(words), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            check=False, timeout=seconds, env=environ,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return -1, "", f"no answer within {seconds:g} s"
    except OSError as error:
        return -1, "", error.strerror or str(error)
    return done.returncode, done.stdout, done.stderr


def last_line(said: str) -> str:
    """The last line of a program's words that is not empty."""
    return next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")


def mounted(path: str) -> str:
    """The type of the file system that `path` lies in; "" if that is not known."""
    best, kind = "", ""
    for line in text("/proc/mounts").splitlines():
        words = line.split()
        place = words[1].replace("\\040", " ")
        inside = path == place or path.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(best):  # of several at one place the last is on top
            best, kind = place, words[2]
    return kind


def cgroup_limits(controller: str, names: Sequence[str]) -> list[int]:
    """Numbers in the files `names` of this process's cgroups of a controller, up to the root (v1 and v2).

    Words such as ``max``, and v1's number for "no limit", are left out.
    """
    found = []
    for folder in _cgroup_folders(controller):
        for name in names:
            value = number(f"{folder}/{name}")
            if value is not None and value < 1 << 60:
                found.append(value)
    return found


def _cgroup_folders(controller: str) -> list[str]:
    folders = []
    for line in text("/proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers == "":
            bases = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            bases = [f"/sys/fs/cgroup/{controllers}", f"/sys/fs/cgroup/{controller}"]
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for base in bases:
            folders += ["/".join([base, *parts[:depth]]) for depth in range(len(parts) + 1)]
    return folders
