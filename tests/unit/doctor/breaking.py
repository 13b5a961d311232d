"""Machines that are broken on purpose: the real probes run on them, in a process of their own.

What needs root (a mount, a network) is made in namespaces that end with the process.
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
SOURCE = Path(__file__).resolve().parents[3] / "src"
_sound: dict[str, dict[str, Any]] = {}  # facts of a sound machine, by what was asked


def breaks(*names: str) -> Callable[[T], T]:
    """Says which checks a test breaks the thing of; test_registry.py reads it from the source."""
    return lambda test: test


@functools.cache
def _namespaces(flags: tuple[str, ...]) -> bool:
    done = subprocess.run(["unshare", *flags, "true"], capture_output=True, check=False)
    return done.returncode == 0


def need_namespaces(*flags: str) -> None:
    """Skip where this user cannot make namespaces."""
    if shutil.which("unshare") is None or os.getuid() != 0 or not _namespaces(flags):
        pytest.skip(f"needs root that can do `unshare {' '.join(flags)}`")


@dataclass
class Machine:
    """How a probe process is started, so that it sees something broken.

    Attributes:
        env: variables to set; None removes one.
        shell: commands that run before it, as root in namespaces of its own.
        spaces: the namespaces besides that of mounts.
        limits: soft and hard limits, by constant.
        python: the interpreter.
        prefix: words before its command line.
    """

    env: Mapping[str, str | None] = field(default_factory=dict)
    shell: str = ""
    spaces: Sequence[str] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    python: str = sys.executable
    prefix: Sequence[str] = ()

    def facts(self, probes: Iterable[str], usage: Usage = NOTHING, seconds: float = 100.0) -> dict[str, Any]:
        """What the probes find there."""
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
            process.stdin.flush()  # and it stays open: the process ends with it
            output = process.stdout.read().decode()
        line = next((line for line in output.splitlines() if line.startswith(MARK)), "")
        assert line, (process.returncode, output[-2000:])
        found: dict[str, Any] = json.loads(line.removeprefix(MARK))
        return found

    def _limit(self) -> None:
        for name, value in self.limits.items():
            resource.setrlimit(getattr(resource, name), (value, value))


def sound_facts(probes: Iterable[str], usage: Usage) -> dict[str, Any]:
    """What the probes find where nothing is broken: asked once."""
    asked = request(probes, usage)
    if asked not in _sound:
        _sound[asked] = Machine().facts(probes, usage)
    return copy.deepcopy(_sound[asked])


def request(probes: Iterable[str], usage: Usage = NOTHING, seconds: float = 100.0) -> str:
    """What a probe process reads."""
    asked = {"probes": list(probes), "usage": asdict(usage), "seconds": seconds}
    return json.dumps(asked) + "\n"


def environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """A shell's environment in which nothing is odd, but for the changes."""
    kept = {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": os.environ.get("HOME", "/tmp"),
        "LANG": "C.UTF-8",
    }
    merged = {**kept, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def judged(check: str, facts: Facts, usage: Usage = NOTHING, slots: int = 0) -> list[Result]:
    """What a check says of these facts."""
    if slots:
        usage = Usage(**{**vars(usage), "slots": {HERE: slots}})
    return examine({HERE: facts}, usage, [check])


def wrong(check: str, facts: Facts, usage: Usage = NOTHING, slots: int = 0) -> list[Result]:
    """What it finds wrong; each must have a fix."""
    found = judged(check, facts, usage, slots)
    assert not any(result.severity == "unknown" for result in found), found
    for result in found:
        assert "\n" not in result.text + result.fix
        assert result.wrong == bool(result.fix)
    return [result for result in found if result.wrong]


def expect(
    check: str, broken: Machine, says: str, *, usage: Usage = NOTHING, slots: int = 0,
    sound: Machine | None = None, sound_usage: Usage | None = None,
) -> None:  # fmt: skip
    """The check finds it on the broken machine, in these words, and does not say so of the sound one."""
    needs = CHECKS[check].needs
    found = wrong(check, broken.facts(needs, usage), usage, slots)
    assert any(says in result.text for result in found), found
    usage = sound_usage or usage
    usual = wrong(check, sound.facts(needs, usage) if sound else sound_facts(needs, usage), usage)
    assert not any(says in result.text for result in usual), usual


def program(path: Path, text: str) -> Path:
    """A program of the shell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def distribution(directory: Path, name: str, version: str, files: Sequence[str] = ()) -> Path:
    """What pip leaves of an installed distribution."""
    info = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    for file in files:  # Python 3.12 lists no others
        (directory / file).parent.mkdir(exist_ok=True)
        (directory / file).touch()
    return directory
