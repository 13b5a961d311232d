"""`ringdance hosts` on this machine and on simulated "hosts": see here_hosts.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import here_hosts
import psutil
import pytest
from processes import MARKER, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.limit(150),
    pytest.mark.skipif(bool(here_hosts.why_not()), reason=f"hosts: {here_hosts.why_not()}"),
]
Hosts = Callable[..., "subprocess.CompletedProcess[str]"]
OTHERS = ("-H", "other1,other2,other3")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {**here_hosts.environment(tmp_path / "bin"), "HOME": str(tmp_path), MARKER: tmp_path.name}


@pytest.fixture
def hosts(environ: dict[str, str]) -> Hosts:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "ringdance", "hosts", *words],
            capture_output=True, text=True, check=False, timeout=100, env=environ, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    return run


# --- copy --------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Create a directory with every kind of entry."""
    top = tmp_path / "data"
    (top / "deep" / "er").mkdir(parents=True)
    (top / "big").write_bytes(os.urandom(5_000_001))
    (top / "empty").touch()
    (top / "deep" / "er" / "ünï code '\"").write_text("x")
    (top / "deep" / "script").write_text("#!/bin/sh\n")
    (top / "deep" / "script").chmod(0o755)
    (top / "deep" / "er").chmod(0o555)
    (top / "link").symlink_to("deep/script")
    (top / "nowhere").symlink_to("/does/not/exist")
    os.mkfifo(top / "pipe")
    return top


@pytest.fixture
def apart(environ: dict[str, str], tmp_path: Path) -> Callable[[str], Path]:
    """Give every other host a separate $HOME/own. Returns a function from a host to its path here."""
    ssh = Path(tmp_path / "bin" / "ssh")
    text = ssh.read_text()
    places = f'mkdir -p {tmp_path}/own "{tmp_path}/of/$1"; mount --bind "{tmp_path}/of/$1" {tmp_path}/own; '
    ssh.write_text(text.replace("mount -t tmpfs", places + "mount -t tmpfs", 1))
    return lambda host: tmp_path / "of" / host


def listing(top: Path) -> dict[str, object]:
    """Return everything below a directory: kind, mode, modification time of files, contents."""
    entries: dict[str, object] = {}
    for path in sorted(top.rglob("*")):
        status = path.lstat()
        if path.is_symlink():
            entries[str(path.relative_to(top))] = os.readlink(path)
        elif path.is_file():
            key = (status.st_mode, status.st_mtime_ns, path.read_bytes())
            entries[str(path.relative_to(top))] = key
        else:
            entries[str(path.relative_to(top))] = status.st_mode
    return entries


def test_a_folder_comes_as_it_is(
    hosts: Hosts, data: Path, apart: Callable[[str], Path], tmp_path: Path
) -> None:
    done = hosts("copy", "-H", "other1,localhost,other2,other3", str(data), "~/own/copy", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"ringdance hosts: skipped {data}/pipe, which is not a file, directory or link\n"
    (data / "pipe").unlink()
    wanted = listing(data)
    tops = [apart(name) / "copy" for name in ("other1", "other2", "other3")]
    for top in (*tops, tmp_path / "own" / "copy"):
        assert listing(top) == wanted
        assert top.stat().st_mode == data.stat().st_mode
    assert {row["host"]: (row["files"], row["there"]) for row in json.loads(done.stdout)} == dict.fromkeys(
        ("other1", "localhost", "other2", "other3"), (4, 0)
    )
    again = hosts("copy", *OTHERS, str(data), str(tmp_path / "own" / "copy"))
    assert "0 files, 0 bytes, to 3 hosts" in again.stdout
    assert "4 were already up to date" in again.stdout
    # Only --checksum notices a file with the same size and time but different contents.
    victim = apart("other2") / "copy" / "big"
    status = victim.stat()
    victim.write_bytes(bytes(5_000_001))
    os.utime(victim, ns=(status.st_atime_ns, status.st_mtime_ns))
    hosts("copy", *OTHERS, str(data), "~/own/copy")
    assert listing(victim.parent) != wanted
    done = hosts("copy", *OTHERS, "--checksum", "--direct", str(data), "~/own/copy")
    assert done.returncode == 0, done.stderr
    assert listing(victim.parent) == wanted


def test_a_file_into_a_folder_and_to_the_same_place(
    hosts: Hosts, data: Path, apart: Callable[[str], Path], tmp_path: Path
) -> None:
    done = hosts("copy", *OTHERS, str(data / "big"), "~/own/")
    assert done.returncode == 0, done.stderr
    assert (apart("other3") / "big").read_bytes() == (data / "big").read_bytes()
    assert hosts("copy", "-H", "other1", str(data / "big"), "~/own/renamed").returncode == 0
    assert (apart("other1") / "renamed").read_bytes() == (data / "big").read_bytes()
    (tmp_path / "own" / "mine").write_text("mine")  # hosts have another directory at this path
    assert hosts("copy", *OTHERS, str(tmp_path / "own" / "mine")).returncode == 0
    assert (apart("other2") / "mine").read_text() == "mine"


def test_an_interrupted_copy_goes_on_where_it_was(
    hosts: Hosts, environ: dict[str, str], apart: Callable[[str], Path], tmp_path: Path
) -> None:
    source = tmp_path / "big"
    size = 400_000_000
    with open(source, "wb") as file:
        for _ in range(size // 1_000_000):
            file.write(os.urandom(1_000_000))
    line = [sys.executable, "-m", "ringdance", "hosts", "copy", *OTHERS, str(source), "~/own/"]
    copying = subprocess.Popen(line, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def partial(host: str) -> int:
        return sum(path.stat().st_size for path in apart(host).glob(".big.ringdance-*"))

    assert wait_until(lambda: partial("other3") > 10_000_000, 60.0) is not None
    copying.send_signal(signal.SIGKILL)
    copying.wait()
    time.sleep(0.5)
    kept = {host: partial(host) for host in ("other1", "other2", "other3")}
    assert all(10_000_000 < count < size for count in kept.values()), kept
    assert not list((tmp_path / "of").glob("*/big")), "no file gets its name before it is complete"
    # Corrupt what is left on one host. Another has been emptied.
    with open(next(apart("other1").glob(".big.ringdance-*")), "r+b") as spoiled:
        spoiled.write(b"nonsense")
    next(apart("other2").glob(".big.ringdance-*")).unlink()
    done = hosts("copy", *OTHERS, "--json", str(source), "~/own/")
    assert done.returncode == 0, done.stderr
    results = {row["host"]: row for row in json.loads(done.stdout)}
    assert results["other3"]["kept"] == kept["other3"]
    assert results["other3"]["bytes"] == size - kept["other3"]
    assert results["other2"]["bytes"] == size
    for host in kept:
        assert (apart(host) / "big").read_bytes() == source.read_bytes()
        assert [path.name for path in apart(host).iterdir()] == ["big"]


def test_a_host_that_dies_in_the_middle_does_not_stop_the_others(
    environ: dict[str, str], apart: Callable[[str], Path], tmp_path: Path
) -> None:
    source = tmp_path / "big"
    with open(source, "wb") as file:
        for _ in range(300):
            file.write(os.urandom(1_000_000))
    line = [sys.executable, "-m", "ringdance", "hosts", "copy", *OTHERS, str(source), "~/own/"]
    copying = subprocess.Popen(line, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert wait_until(lambda: bool(list(apart("other2").glob(".big*"))), 60.0) is not None
    children = psutil.Process(copying.pid).children()
    victim = next(child.pid for child in children if "other2" in child.cmdline())
    os.kill(victim, signal.SIGKILL)
    out, err = copying.communicate(timeout=100)
    assert copying.returncode == 1
    assert "host other2: host lost" in err, err
    assert "to 2 of 3 hosts" in out
    for host in ("other1", "other3"):
        assert (apart(host) / "big").read_bytes() == source.read_bytes()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("copy", *OTHERS, "nothing-there"), "nothing-there: No such file or directory"),
        (("copy", "-H", "other1", "/etc/hostname", "/tmp"), "/tmp is a directory on this host. To copy"),
        (("copy", "-H", "other1", "/etc/hostname", "/proc/no/x"), "host other1: /proc/no"),
        (("copy", "/etc/hostname"), "no hosts were given. Pass -H node1,node2"),
        (("copy", "-H=-oProxyCommand=x", "/etc/hostname"), "-oProxyCommand=x"),
        (("copy", "-H", "other1;x", "/etc/hostname"), "other1;x"),
        (("copy", "-H", "nowhere", "/etc/hostname"), "host nowhere: ssh cannot connect: ssh: Could not"),
    ],
)
def test_mistakes(hosts: Hosts, words: tuple[str, ...], said: str) -> None:
    done = hosts(*words)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr
