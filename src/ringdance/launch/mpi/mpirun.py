"""What a command line of Open MPI 4's ``mpirun`` asks for, as data; ``ringdance mpirun`` then does it.

Scripts, job files and SageMaker's toolkit write such lines. Open MPI 5 no longer takes some of their words,
other MPI libraries take none; here they are read once, and become an order for the launcher.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ringdance.cluster.hostfile import HostList, merge, parse_hostfile, parse_hosts
from ringdance.errors import LaunchError
from ringdance.launch.environment import shown_text

_VALUES = {
    "np": 1, "n": 1, "c": 1, "N": 1, "npernode": 1, "H": 1, "host": 1, "hostfile": 1, "machinefile": 1,
    "default-hostfile": 1, "x": 1, "mca": 2, "gmca": 2, "prtemca": 2, "pmixmca": 2, "bind-to": 1,
    "map-by": 1, "rank-by": 1, "wdir": 1, "wd": 1, "output-filename": 1, "output": 1, "display": 1,
    "launch-agent": 1, "with-ft": 1, "cpu-set": 1, "cpu-list": 1, "timeout": 1, "stdin": 1, "prefix": 1,
    "path": 1, "tune": 1, "am": 1, "report-pid": 1, "report-uri": 1, "personality": 1, "max-restarts": 1,
    "server-wait-time": 1, "preload-files": 1, "cpus-per-proc": 1, "cpus-per-rank": 1, "npersocket": 1,
    "ompi-server": 1, "max-vm-size": 1, "rankfile": 1, "rf": 1, "app": 1,
}  # fmt: skip
"""Options that are followed by so many words."""

_SWITCHES = frozenset({
    "pernode", "byslot", "bynode", "bycore", "bysocket", "bind-to-none", "bind-to-core", "bind-to-socket",
    "tag-output", "timestamp-output", "merge-stderr-to-stdout", "oversubscribe", "nooversubscribe", "v",
    "verbose", "q", "quiet", "display-map", "display-devel-map", "display-allocation", "display-topo",
    "report-bindings", "allow-run-as-root", "hetero-nodes", "enable-recovery", "disable-recovery",
    "continuous", "leave-session-attached", "debug-daemons", "debug-daemons-file", "d", "debug-devel",
    "novm", "use-hwthread-cpus", "show-progress", "noprefix", "nolocal", "overload-allowed", "xml",
    "no-check", "dry-run", "do-not-launch",
})  # fmt: skip

_OF_THE_LAUNCH = re.compile(
    r"(plm|oob|orte|ras|rmaps|rml|routed|odls|ess|iof|grpcomm|errmgr|state|schizo|rtc|filem|snapc|regx|hwloc"
    r"|btl_vader)(_.*)?"
)
"""Parameters of how Open MPI 4 starts its processes, and of a part that later ones have no more."""

_NO_EFFECT = {
    "timeout": "the job has no limit of time",
    "rankfile": "ranks are put host by host",
    "rf": "ranks are put host by host",
    "npersocket": "give --npernode",
    "preload-files": "the files must be on all hosts",
    "max-restarts": "a rank that has ended is not started again",
    "enable-recovery": "a rank that has ended is not started again",
    "tune": "give the parameters by --mca",
    "am": "give the parameters by --mca",
}

_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")


@dataclass
class Asked:
    """What the line says.

    Attributes:
        ranks: number of ranks, None if it is not said.
        hosts: names and slots, None for what a scheduler has given, else this machine.
        source: where they come from, for people.
        per_host: ranks on each host, 0 if it is not said.
        spread: whether each host in turn gets a rank, in place of all slots of a host before the next.
        oversubscribe: whether a host may have more ranks than slots.
        exports: variables for the ranks.
        interfaces: network interfaces to use.
        ssh: more arguments of ssh.
        mpi: options for mpiexec, as Open MPI 5 spells them.
        tag, clock: whether the rank, and the time, stand before each line of output.
        folder: for a copy of the output, or "".
        cwd: folder in which the ranks run, or "".
        show: whether the plan is shown.
        check, dry, verbose: as of ``ringdance run``.
        notes: what is said to the user.
        about: "help" or "version", if one of these is all that is asked for.
        command: the program and its arguments.
    """

    ranks: int | None = None
    hosts: list[tuple[str, int]] | None = None
    source: str = ""
    per_host: int = 0
    spread: bool = False
    oversubscribe: bool = False
    exports: dict[str, str] = field(default_factory=dict)
    interfaces: list[str] = field(default_factory=list)
    ssh: list[str] = field(default_factory=list)
    mpi: list[str] = field(default_factory=list)
    tag: bool = False
    clock: bool = False
    folder: str = ""
    cwd: str = ""
    show: bool = False
    check: bool = True
    dry: bool = False
    verbose: bool = False
    notes: list[str] = field(default_factory=list)
    about: str = ""
    command: list[str] = field(default_factory=list)


def understand(words: Sequence[str], environ: Mapping[str, str]) -> Asked:
    """Read the words after ``mpirun``.

    Args:
        words: options, then the command.
        environ: where ``-x NAME`` finds values.

    Raises:
        LaunchError: an option that nobody knows, or one without its value.
    """
    asked, rest = Asked(), list(words)
    named: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.lstrip("-").partition("=")
        if name in ("h", "help", "V", "version"):
            asked.about = "help" if name[0] == "h" else "version"
            break
        count = _VALUES.get(name, 0)
        if name not in _VALUES and name not in _SWITCHES:
            if not equals or not _VARIABLE.fullmatch(name):
                raise LaunchError(
                    f"{word} is no option of mpirun that is known here; see: ringdance mpirun --help"
                )
            asked.notes.append(
                shown_text(f"{word} is no option of mpirun: it is taken for -x {name}={value}")
            )
            asked.exports[name] = value
            continue
        values = [value] if equals else []
        if len(rest) < count - len(values):
            raise LaunchError(f"{word}: its value is missing")
        while len(values) < count:
            values.append(rest.pop(0))
        _take(asked, word if not equals else word.partition("=")[0], name, values, environ, named)
    asked.command = rest
    if ":" in rest:
        raise LaunchError("several programs in one job (`:` between them) cannot be started")
    if named:  # among those of a host file, if there is one
        chosen = [_entry(text) for text in named]
        known = dict(asked.hosts or ())
        asked.hosts = merge((host, known.get(host, count)) for host, count in chosen)
        asked.source = f"-H {','.join(named)}"
    return asked


def _take(
    asked: Asked, word: str, name: str, values: Sequence[str], environ: Mapping[str, str], named: list[str]
) -> None:
    """One option with its values."""
    match name:
        case "np" | "n" | "c":
            asked.ranks = _number(word, values[0])
        case "N" | "npernode":
            asked.per_host = _number(word, values[0])
        case "pernode":
            asked.per_host = 1
        case "H" | "host":
            named += [entry.strip() for entry in values[0].split(",")]
        case "hostfile" | "machinefile" | "default-hostfile":
            asked.hosts = [*(asked.hosts or ()), *parse_hostfile(values[0], word)]
            asked.source = f"{word} {values[0]}"
        case "x":
            _export(asked, values[0], environ)
        case "mca" | "gmca":
            _parameter(asked, *values)
        case "prtemca" | "pmixmca" | "with-ft":
            asked.mpi += [f"--{name}", *values]
        case "launch-agent":
            asked.mpi += ["--prtemca", "prte_launch_agent", values[0]]
        case "wdir" | "wd":
            asked.cwd = values[0]
        case "oversubscribe":
            asked.oversubscribe = True
        case "no-check":
            asked.check = False
        case "dry-run" | "do-not-launch":
            asked.dry = True
        case "v" | "verbose":
            asked.verbose = True
        case "app":
            raise LaunchError(f"{word} {values[0]}: files of programs cannot be started")
        case "nolocal":
            asked.notes.append(f"{word}: give the other hosts by -H or --hostfile instead")
        case _ if name in _NO_EFFECT:
            asked.notes.append(f"{word}: no effect, {_NO_EFFECT[name]}")
        case _:
            _place(asked, name, values)
            _show(asked, name, values)


def _place(asked: Asked, name: str, values: Sequence[str]) -> None:
    """Where ranks go, and to which cores they are bound."""
    match name:
        case "map-by" | "rank-by":
            way, *more = values[0].lower().split(":")
            asked.oversubscribe |= "oversubscribe" in ",".join(more).split(",")
            if way == "ppr" and len(more) > 1 and more[1].startswith("node"):
                asked.per_host = _number("--map-by ppr", more[0])
            elif way == "node":
                asked.spread = asked.spread or name == "map-by"
            elif name == "map-by" and way not in ("slot", "ppr", "seq", ""):
                asked.mpi += ["--map-by", values[0]]
        case "bynode":
            asked.spread = True
        case "bycore" | "bysocket":
            asked.mpi += ["--map-by", name[2:]]
        case "bind-to" if values[0].lower() != "none":
            asked.mpi += ["--bind-to", values[0]]
        case "bind-to-core" | "bind-to-socket":
            asked.mpi += ["--bind-to", name[8:]]
        case "cpu-set" | "cpu-list":
            asked.mpi += ["--cpu-set", values[0]]
        case "report-bindings" | "use-hwthread-cpus":
            asked.mpi.append(f"--{name}")


def _show(asked: Asked, name: str, values: Sequence[str]) -> None:
    """How the output is shown; what is left over needs nothing to be done."""
    match name:
        case "tag-output":
            asked.tag = True
        case "timestamp-output":
            asked.clock = True
        case "output-filename":
            asked.folder = values[0].partition(":")[0]
        case "output":
            for part in values[0].split(","):
                kind, _, value = part.partition("=")
                asked.tag |= kind.startswith("tag")
                asked.clock |= kind == "timestamp"
                asked.folder = value if kind in ("dir", "directory", "file", "filename") else asked.folder
        case "display-map" | "display-devel-map" | "display-allocation" | "display":
            asked.show = True


def _export(asked: Asked, text: str, environ: Mapping[str, str]) -> None:
    name, equals, value = text.partition("=")
    if not equals and name not in environ:  # mpirun only warns, too
        asked.notes.append(f"-x {text}: that variable is not set here")
    else:
        asked.exports[name] = value if equals else environ[name]


def _parameter(asked: Asked, name: str, value: str) -> None:
    if name in ("btl_tcp_if_include", "oob_tcp_if_include") and "/" not in value:
        asked.interfaces += [one for one in value.split(",") if one not in asked.interfaces]
    elif name in ("plm_rsh_args", "plm_ssh_args"):
        asked.ssh += shlex.split(value)
    elif name in ("plm_rsh_agent", "plm_ssh_agent"):
        program, *more = shlex.split(value.partition(":")[0]) or [""]
        if os.path.basename(program) not in ("ssh", "rsh"):
            raise LaunchError(f"--mca {name} {value}: hosts are reached by ssh only")
        asked.ssh += more
    elif not _OF_THE_LAUNCH.fullmatch(name):
        asked.mpi += ["--mca", name, value]


def _number(option: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise LaunchError(f"{option} {text}: it must be a number, 1 or more")
    return int(text)


def _entry(text: str) -> tuple[str, int]:
    """A name is a slot; given twice it is two."""
    bare = ":" not in text or text.endswith("]")
    return parse_hosts(f"{text}:1" if bare else text)[0]


def counts(hosts: HostList, asked: Asked) -> tuple[HostList, int]:
    """How many ranks each host gets, and how many there are.

    Raises:
        LaunchError: there are fewer slots than ranks.
    """
    if asked.per_host:
        hosts = [(name, asked.per_host) for name, _ in hosts]
    slots = sum(count for _, count in hosts)
    ranks = asked.ranks or slots
    if asked.oversubscribe and ranks > slots:
        more = ranks - slots
        each, rest = divmod(more, len(hosts))
        hosts = [(name, count + each + (n < rest)) for n, (name, count) in enumerate(hosts)]
    if asked.spread and ranks <= sum(count for _, count in hosts):
        found = dict.fromkeys((name for name, _ in hosts), 0)
        left = ranks
        while left:
            for name, count in hosts:
                if left and found[name] < count:
                    found[name] += 1
                    left -= 1
        hosts = [(name, count) for name, count in found.items() if count]
    return hosts, ranks
