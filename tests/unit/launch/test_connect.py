"""Agents on many hosts: the limits that a process needs for them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

# Agents are local processes: a host name that stands for this machine needs no ssh.
BEGIN = """
import os, resource, sys
from ringdance.errors import LaunchError
from ringdance.launch.remote.connect import close_all, connect
from ringdance.launch.remote.shell import RemoteShell

def connected(count):
    names = [f"node{number}" for number in range(count)]
    remotes = connect(names, RemoteShell(local=names), 30.0)
    close_all(remotes)
    return [remote.host for remote in remotes if remote.facts.cores] == names
"""


def run(text: str) -> str:
    done = subprocess.run([sys.executable, "-c", BEGIN + text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_ctrl_c_leaves_no_ssh_whose_host_hangs(tmp_path: Path) -> None:
    """One host answers, one hangs, and the connection to a third is retried."""
    (tmp_path / "ssh").write_text(
        '#!/bin/sh\ncase "$*" in *-G*) exit 0;; *" fails "*) exit 255;; esac\nexec sleep 1000\n'
    )
    (tmp_path / "ssh").chmod(0o755)
    text = BEGIN + (
        "shell = RemoteShell(local=['here'], start_timeout=100.0)\n"
        "connect(['here', 'hangs', 'fails'], shell, 100.0)\n"
    )
    environ = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    with subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.PIPE, env=environ) as process:
        children: list[psutil.Process] = []
        until = time.monotonic() + 20.0
        while time.monotonic() < until and len(children) < 2:  # the local agent, and one ssh
            time.sleep(0.05)
            children = psutil.Process(process.pid).children(recursive=True)
            children = [child for child in children if child.name() in ("sleep", "python")]
        process.send_signal(signal.SIGINT)
        try:
            stderr = process.communicate(timeout=20.0)[1]
        finally:
            process.kill()
    assert b"KeyboardInterrupt" in stderr
    assert len(children) > 1
    assert not psutil.wait_procs(children, 10.0)[1]


def test_a_soft_limit_of_open_files_is_raised() -> None:
    text = "resource.setrlimit(resource.RLIMIT_NOFILE, (70, 1000))\nprint(connected(20))\n"
    assert run(text) == "True"


def test_descriptors_beyond_those_that_select_takes() -> None:
    text = """
resource.setrlimit(resource.RLIMIT_NOFILE, (1100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = [os.dup(2) for _ in range(1030)]
print(connected(1))
"""
    assert run(text) == "True"


def test_a_hard_limit_of_open_files_is_told_before_anything_starts() -> None:
    text = """
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 1024))
import subprocess
subprocess.Popen = None  # nothing is started
try:
    connected(400)
except LaunchError as error:
    print(error)
"""
    words = r"this process needs (\d+) open files for 400 hosts, but its hard limit is 1024 "
    told = re.match(words, run(text))
    assert told
    assert 1200 < int(told[1]) < 1300
