"""Checks of one machine's memory, cores, disks and networks, which the tests really break."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from breaking import HERE, NOTHING, Machine, breaks, expect, wrong

from ringdance.tools.doctor.check import Usage
from ringdance.tools.doctor.examine import examine


def replaced(tmp_path: Path, file: str, text: str) -> str:
    """Return a line of shell that replaces the content of ``file``."""
    (tmp_path / "text").write_text(text)
    return f"mount --bind {tmp_path}/text {file}"


def changed(file: str, *lines: tuple[str, str]) -> str:
    """Return the file's text, with each line that starts with one of these words replaced."""
    changed_lines = []
    for line in Path(file).read_text().splitlines():
        changed_lines.append(next((new for start, new in lines if line.startswith(start)), line))
    return "\n".join(changed_lines) + "\n"


@breaks("shm-size")
def test_shared_memory_of_a_container() -> None:
    expect(
        "shm-size",
        Machine(shell="mount -t tmpfs -o size=64m none /dev/shm"),
        "/dev/shm has 64 MiB, but the ranks need at least 256 MiB",
    )


@breaks("shm-size")
def test_the_fix_is_that_of_the_container() -> None:
    facts = Machine(
        env={"KUBERNETES_SERVICE_HOST": "x"}, shell="mount -t tmpfs -o size=64m none /dev/shm"
    ).facts(["memory", "machine"])
    assert "emptyDir" in wrong("shm-size", facts)[0].fix


@breaks("shm-free")
def test_full_shared_memory() -> None:
    shell = "mount -t tmpfs -o size=300m none /dev/shm; head -c 290m /dev/zero >/dev/shm/x"
    expect("shm-free", Machine(shell=shell), "/dev/shm has 10 MiB of 300 MiB free")


@breaks("shm-there")
@pytest.mark.parametrize(
    ("shell", "says"),
    [
        ("mount -t tmpfs -o ro none /dev/shm", "/dev/shm is not writable: Read-only file system"),
        ("mount -t tmpfs none /dev", "there is no /dev/shm"),
    ],
)
def test_no_shared_memory(tmp_path: Path, shell: str, says: str) -> None:
    expect("shm-there", Machine(shell=shell, env={"T": str(tmp_path)}), says)


def in_cgroup(controller: str, settings: dict[str, str], usage: Usage, probes: list[str]) -> dict[str, Any]:
    """Return the facts inside a temporary cgroup. ``settings`` has the names of both cgroup versions."""
    if os.getuid():
        pytest.skip("needs root")
    for base in (f"/sys/fs/cgroup/{controller}", "/sys/fs/cgroup/unified", "/sys/fs/cgroup"):
        directory = Path(base) / f"ringdance-test-{os.getpid()}"
        if not (Path(base) / "cgroup.procs").exists():
            continue
        try:
            directory.mkdir()
        except OSError:
            continue
        try:
            known = [name for name in settings if (directory / name).exists()]
            for name in known:
                (directory / name).write_text(settings[name])
            if known:
                prefix = ["sh", "-c", f'echo $$ >{directory}/cgroup.procs; exec "$@"', "sh"]
                return Machine(prefix=prefix).facts(probes, usage)
        except OSError:
            continue
        finally:
            directory.rmdir()
    pytest.skip(f"cannot create a {controller} cgroup here")


@breaks("memory-limit")
def test_a_limit_of_memory() -> None:
    settings = {"memory.max": str(600 << 20), "memory.limit_in_bytes": str(600 << 20)}
    facts = in_cgroup("memory", settings, Usage(), ["memory"])
    assert "this shell is limited to 600 MiB" in wrong("memory-limit", facts)[0].text


@breaks("ranks-per-core")
def test_more_ranks_than_cores() -> None:
    expect("ranks-per-core", Machine(), "1000 ranks on", slots=1000)


@breaks("folder-writable")
def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "good").mkdir()
    usage = Usage(directories=(str(tmp_path / "file" / "logs"),))
    good = Usage(directories=(str(tmp_path / "good" / "new"),))
    expect("folder-writable", Machine(), "is not writable: Not a directory", usage=usage, sound_usage=good)


@breaks("folder-writable")
def test_a_folder_mounted_for_reading(tmp_path: Path) -> None:
    usage = Usage(directories=(str(tmp_path),))
    machine = Machine(shell=f"mount -t tmpfs -o ro none {tmp_path}")
    expect("folder-writable", machine, "is not writable: Read-only file system", usage=usage)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "du -xh '/a b'"),
        (errno.EDQUOT, "quota -s"),
        (errno.EROFS, "findmnt -T '/a b'"),
        (errno.EACCES, "sudo chown $USER '/a b'"),
        (errno.EIO, "ls -ld '/a b'"),
    ],
)
def test_the_fix_follows_the_error(number: int, words: str) -> None:
    facts = {"error": os.strerror(number), "nearest": "/a b"}
    ((result),) = examine({HERE: {"disk": {"directories": {"/a b/c": facts}}}}, NOTHING, ["folder-writable"])
    assert words in result.fix
    assert ("chown" in result.fix) == (number == errno.EACCES)


@breaks("folder-exists")
def test_a_directory_that_is_not_there() -> None:
    directory = {"exists": False, "nearest": "/", "free": 100 << 30, "total": 200 << 30}
    facts = {HERE: {"disk": {"directories": {"/not mounted": directory}}}}
    [missing] = examine(facts, NOTHING, ["folder-exists"])
    assert "/not mounted does not exist, so a job would create it in /" in missing.text
    assert missing.fix == "mkdir -p '/not mounted', or mount the disk that contains it"


@breaks("temporary-folder", "temporary-path-length")
def test_temporary_files(tmp_path: Path) -> None:
    machine = Machine(shell="mount -t tmpfs -o ro none $TMPDIR", env={"TMPDIR": str(tmp_path)})
    expect("temporary-folder", machine, "is not writable: Read-only")


def test_a_path_too_long_for_sockets(tmp_path: Path) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    expect("temporary-path-length", Machine(env={"TMPDIR": str(long)}), "paths of MPI's sockets")


INFINIBAND = "mount -t tmpfs none /sys/class; mkdir -p /sys/class/net /sys/class/infiniband/mlx5_0"


@breaks("own-name")
def test_a_name_that_stands_for_nothing() -> None:
    machine = Machine(shell="echo no-such-host.invalid >/proc/sys/kernel/hostname", spaces=["--uts"])
    expect("own-name", machine, "the host name no-such-host.invalid does not resolve")


@breaks("own-name")
def test_a_name_that_stands_for_another_machine(tmp_path: Path) -> None:
    shell = replaced(tmp_path, "/etc/hosts", "127.0.0.1 localhost\n192.0.2.7 node7\n")
    machine = Machine(shell=f"{shell}; echo node7 >/proc/sys/kernel/hostname", spaces=["--uts"])
    expect("own-name", machine, "node7 resolves to 192.0.2.7, but this host has other addresses")


@breaks("localhost")
def test_localhost_that_is_somewhere_else(tmp_path: Path) -> None:
    machine = Machine(shell=replaced(tmp_path, "/etc/hosts", "192.0.2.7 localhost\n"))
    expect("localhost", machine, "localhost resolves to 192.0.2.7, not")


@breaks("limit-locked-memory")
def test_infiniband() -> None:
    machine = Machine(shell=INFINIBAND, limits={"RLIMIT_MEMLOCK": 64 << 10})
    expect("limit-locked-memory", machine, "may lock only 64 KiB")
