"""Machines that are broken on purpose. The real probes run on them, each in its own process.

Anything that needs root (a mount, a network) is made in namespaces that end with the process.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ringdance.tools.doctor.check import Facts, Result, Usage
from ringdance.tools.doctor.examine import CHECKS, examine
from ringdance.tools.doctor.probe import MARK

T = TypeVar("T")
HERE = "here"
NOTHING = Usage()
OTHER = Usage(hosts=("one", "two", "three"))
SOURCE = Path(__file__).resolve().parents[4] / "src"
_sound: dict[str, dict[str, Any]] = {}  # facts of an intact machine, by request


def breaks(*names: str) -> Callable[[T], T]:
    """Declare which checks a test provokes by breaking a machine. ``test_examine.py`` reads this."""
    return lambda test: test


@functools.cache
def _namespaces(flags: tuple[str, ...]) -> bool:
    done = subprocess.run(["unshare", *flags, "true"], capture_output=True, check=False)
    return done.returncode == 0


def need_namespaces(*flags: str) -> None:
    """Skip the test if this user cannot create these namespaces."""
    if shutil.which("unshare") is None or os.getuid() != 0 or not _namespaces(flags):
        pytest.skip(f"needs root that can do `unshare {' '.join(flags)}`")


@dataclass
class Machine:
    """Starts a probe process so that it sees a broken machine.

    Attributes:
        env: Environment variables to set. None removes a variable.
        shell: Commands to run first, as root in separate namespaces.
        spaces: Flags for namespaces in addition to the mount namespace.
        limits: Soft and hard limit of a resource, by the name of its constant.
        python: Python interpreter.
        prefix: Words before the command line of the probe.
    """

    env: Mapping[str, str | None] = field(default_factory=dict)
    shell: str = ""
    spaces: Sequence[str] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    python: str = sys.executable
    prefix: Sequence[str] = ()

    def facts(self, probes: Iterable[str], usage: Usage = NOTHING, seconds: float = 100.0) -> dict[str, Any]:
        """Run the probes on this machine and return their facts."""
        words = [*self.prefix, self.python, "-m", "ringdance.tools.doctor.probe"]
        if self.shell:
            flags = ("--mount", "--propagation", "private", *self.spaces)
            need_namespaces(*flags)
            words = ["unshare", *flags, "sh", "-ec", f'{self.shell}\nexec "$@"', "sh", *words]
        with subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=environment(self.env), preexec_fn=self._limit if self.limits else None,
        ) as process:  # fmt: skip
            assert process.stdin
            assert process.stdout
            process.stdin.write(request(probes, usage, seconds).encode())
            process.stdin.flush()  # stdin stays open, because the probe exits when it closes
            output = process.stdout.read().decode()
        line = next((line for line in output.splitlines() if line.startswith(MARK)), "")
        assert line, (process.returncode, output[-2000:])
        facts: dict[str, Any] = json.loads(line.removeprefix(MARK))
        return facts

    def _limit(self) -> None:
        for name, value in self.limits.items():
            resource.setrlimit(getattr(resource, name), (value, value))


def sound_facts(probes: Iterable[str], usage: Usage) -> dict[str, Any]:
    """Return the probes' facts on an intact machine. Each request runs once."""
    asked = request(probes, usage)
    if asked not in _sound:
        _sound[asked] = Machine().facts(probes, usage)
    return copy.deepcopy(_sound[asked])


def request(probes: Iterable[str], usage: Usage = NOTHING, seconds: float = 100.0) -> str:
    """Return the request that a probe process reads."""
    asked = {"probes": list(probes), "usage": asdict(usage), "seconds": seconds}
    return json.dumps(asked) + "\n"


def environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return a plain shell environment with these changes."""
    kept = {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": os.environ.get("HOME", "/tmp"),
        "LANG": "C.UTF-8",
    }
    merged = {**kept, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def judged(check: str, facts: Facts, usage: Usage = NOTHING, slots: int = 0) -> list[Result]:
    """Return what a check reports about these facts."""
    if slots:
        usage = Usage(**{**vars(usage), "slots": {HERE: slots}})
    return examine({HERE: facts}, usage, [check])


def wrong(check: str, facts: Facts, usage: Usage = NOTHING, slots: int = 0) -> list[Result]:
    """Return the problems that a check finds. Each must have a fix."""
    results = judged(check, facts, usage, slots)
    assert not any(result.severity == "unknown" for result in results), results
    for result in results:
        assert "\n" not in result.text + result.fix
        assert result.wrong == bool(result.fix)
    return [result for result in results if result.wrong]


def expect(
    check: str, broken: Machine, says: str, *, usage: Usage = NOTHING, slots: int = 0,
    sound: Machine | None = None, sound_usage: Usage | None = None,
) -> None:  # fmt: skip
    """Assert that a check reports these words on the broken machine, and not on the intact one."""
    needs = CHECKS[check].needs
    problems = wrong(check, broken.facts(needs, usage), usage, slots)
    assert any(says in result.text for result in problems), problems
    usage = sound_usage or usage
    usual = wrong(check, sound.facts(needs, usage) if sound else sound_facts(needs, usage), usage)
    assert not any(says in result.text for result in usual), usual


def program(path: Path, text: str) -> Path:
    """Write an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def distribution(directory: Path, name: str, version: str, files: Sequence[str] = ()) -> Path:
    """Write the metadata that pip leaves of an installed distribution."""
    info = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    for file in files:  # Python 3.12 only lists files that exist
        (directory / file).parent.mkdir(exist_ok=True)
        (directory / file).touch()
    return directory
