"""Hosts whose environment or directory differs from the launcher's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ringdance.host.agent import paths
from ringdance.host.agent.paths import package_directory

THERE = {"python": "/far/env/bin/python", "prefix": "/far/env", "package": "/far/src/ringdance"}


def test_paths_of_the_launchers_environment_become_those_of_this_one() -> None:
    site = "/far/src/ringdance/host/site"
    environ = {"PATH": "/far/env/bin:/bin:/far/environment", "PYTHONPATH": site, "A": "/far/env"}
    assert paths.translated(environ, THERE) == {
        "PATH": f"{sys.prefix}/bin:/bin:/far/environment",
        "PYTHONPATH": f"{package_directory()}/host/site",
        "A": "/far/env",
    }


def test_mpis_daemon_is_that_of_this_environment_if_it_has_one() -> None:
    here = f"/bin/{os.path.basename(sys.executable)}"
    line = f"PATH=/far/env/bin:$PATH ; /far/env{here} --a=/far/env/no-such-file"
    expected = f"PATH={sys.prefix}/bin:$PATH ; {sys.prefix}{here} --a=/far/env/no-such-file"
    assert paths.translated_command(line, THERE) == expected


def test_a_ranks_wrapper_goes_to_its_directory_and_runs_its_interpreter(tmp_path: Path) -> None:
    former = os.getcwd()
    environ = paths.variables(str(tmp_path), THERE) | {"OTHER": "1"}
    try:
        assert paths.enter(environ, ["/far/env/bin/python", "train.py"]) == [sys.executable, "train.py"]
        assert os.getcwd() == str(tmp_path)
    finally:
        os.chdir(former)
    assert environ == {"OTHER": "1"}
    assert paths.enter(paths.variables(former), ["/bin/true"]) == ["/bin/true"]
