"""Build the command lines of Ringdance's processes, even if the paths on a host differ from the launcher's.

mpiexec starts the same command line on all hosts. If paths differ between hosts, it is a shell command with
variables that the agent on each host sets. Standard library only.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, MutableMapping

BOOT = "import sys;sys.path.append(sys.argv[1]);from host.{0} import main;main(sys.argv[2:])"


def package_directory() -> str:
    """Return the directory of the ``ringdance`` package."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def bare_command(module: str, *arguments: str) -> list[str]:
    """Return a command line that runs ``host.<module>.main`` without ``site`` or PYTHON* settings.

    The program starts in about 20 ms, because neither ``ringdance`` nor ``.pth`` files are loaded.
    """
    return [sys.executable, "-I", "-S", "-c", BOOT.format(module), package_directory(), *arguments]


_FIND = (
    "import sys;from importlib.util import find_spec;s=find_spec('ringdance')"
    ";s or sys.exit('ModuleNotFoundError: ringdance');sys.path.append(s.submodule_search_locations[0])"
    ";from host.{0} import main;main(sys.argv[1:])"
)
_PYTHON, _PACKAGE, _CWD, _REPLACED = (
    f"RINGDANCE_JOB_{name}" for name in ("PYTHON", "PACKAGE", "CWD", "REPLACED")
)
_PATHS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX")


def module_line(python: str, module: str) -> list[str]:
    """Return a command line that runs ``host.<module>.main`` with another host's ``python``."""
    return [python, "-I", "-c", _FIND.format(module)]


def rank_line(bases: str, job: str) -> list[str]:
    """Return a command line for the ranks' wrappers that works on hosts with different paths.

    Args:
        bases: Candidate base directories for the job's directory, separated by colons.
        job: The job's ID.
    """
    line = f'exec "${_PYTHON}" -I -S -c "$0" "${_PACKAGE}" "$@"'
    return ["/bin/sh", "-c", line, BOOT.format("agent.rank"), bases, job]


def launcher_paths() -> dict[str, str]:
    """Return the paths of the launcher's interpreter, environment and package, for the agents."""
    return {"python": sys.executable, "prefix": sys.prefix, "package": package_directory()}


def variables(cwd: str, launcher: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return environment variables for the wrappers of this host's ranks.

    Args:
        cwd: The ranks' working directory on this host.
        launcher: ``launcher_paths()`` of the launcher's host, or None on that host itself.
    """
    result = {_PYTHON: sys.executable, _PACKAGE: package_directory(), _CWD: cwd}
    return result | ({_REPLACED: launcher["python"]} if launcher else {})


def translated(environ: Mapping[str, str], launcher: Mapping[str, str]) -> dict[str, str]:
    """Return the launcher's variables with the paths of its Python environment replaced by this host's."""
    result = dict(environ)
    for name in result.keys() & set(_PATHS):
        parts = result[name].split(os.pathsep)
        result[name] = os.pathsep.join(_moved(part, launcher) for part in parts)
    return result


def _moved(path: str, launcher: Mapping[str, str]) -> str:
    for old, new in ((launcher["package"], package_directory()), (launcher["prefix"], sys.prefix)):
        if path == old or path.startswith(old + os.sep):
            return new + path[len(old) :]
    return path


def translated_command(command: str, launcher: Mapping[str, str]) -> str:
    """Return mpiexec's command with the launcher's paths replaced by this host's, where these exist."""
    pattern = re.compile(re.escape(launcher["prefix"]) + r"(/[^\s\"':;=]+)")

    def own(found: re.Match[str]) -> str:
        path = sys.prefix + found[1]
        return path if os.path.exists(path) else found[0]

    return pattern.sub(own, command)


def enter(environ: MutableMapping[str, str], command: list[str]) -> list[str]:
    """Change to the rank's working directory. Return ``command``, adapted to this host's interpreter.

    Raises:
        OSError: The directory does not exist.
    """
    python, cwd = environ.pop(_PYTHON, ""), environ.pop(_CWD, "")
    environ.pop(_PACKAGE, None)
    if cwd:
        os.chdir(cwd)
    return [python, *command[1:]] if command[0] == environ.pop(_REPLACED, "") else command
