"""Translate command lines written for Open MPI 4's ``mpirun`` into options for the launcher.

Batch scripts and SageMaker's toolkit contain such command lines. Open MPI 5 rejects some of the options, and
other MPI libraries reject nearly all of them. First, old spellings are replaced by the ones in Open MPI 5.
Then each option is either translated to an option for ``ringdance run`` or passed on to mpiexec.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ringdance.errors import LaunchError
from ringdance.host.schedulers.hostfile import HostList, merge, parse_hostfile, parse_hosts
from ringdance.launch.remote.environment import shown_text

_SPELLINGS = {
    "n": "np {}", "c": "np {}", "npernode": "N {}", "pernode": "N 1", "host": "H {}",
    "machinefile": "hostfile {}", "default-hostfile": "hostfile {}", "gmca": "mca {} {}", "wd": "wdir {}",
    "byslot": "map-by slot", "bynode": "map-by node", "bycore": "map-by core", "bysocket": "map-by socket",
    "oversubscribe": "map-by :oversubscribe", "cpu-list": "cpu-set {}", "bind-to-none": "bind-to none",
    "bind-to-core": "bind-to core", "bind-to-socket": "bind-to socket",
    "launch-agent": "prtemca prte_launch_agent {}", "tag-output": "output tag",
    "timestamp-output": "output timestamp", "display-map": "display map",
    "display-devel-map": "display map", "display-allocation": "display allocation",
    "ssh-args": "mca plm_rsh_args {}",
    "v": "verbose", "d": "verbose", "debug-daemons": "verbose", "do-not-launch": "dry-run", "h": "help",
    "V": "version",
}  # fmt: skip
"""Older options and their spellings in Open MPI 5. {} stands for a value."""

_PASSED_ON = ("prtemca", "pmixmca", "with-ft", "cpu-set", "report-bindings", "use-hwthread-cpus")
_NO_EFFECT = {
    "timeout": "the job has no time limit",
    "rankfile": "ranks are placed host by host",
    "rf": "ranks are placed host by host",
    "tune": "pass the parameters with --mca",
    "am": "pass the parameters with --mca",
    "nolocal": "name the other hosts with -H or --hostfile",
    "prefix": "all hosts use the MPI library that this Python loads",
    "merge-stderr-to-stdout": "the two streams stay separate",
    "enable-recovery": "a rank that fails ends the job",
}
"""Ignored options whose effect users may miss, and why they are ignored."""

_REFUSED = {
    "path": "pass the full path of the program, or set PATH",
    "stdin": "only rank 0 reads stdin. Let it broadcast its input, or let all ranks read a file",
    **dict.fromkeys(("map-by", "rank-by"), "specify ranks per host with -N, and their cores with --bind-to"),
}
"""Options that would change what the job does, and what to use instead."""

_VALUES: dict[str, int] = {name: text.count("{}") for name, text in _SPELLINGS.items()} | {
    **dict.fromkeys((
        "verbose", "dry-run", "no-check", "help", "version", "report-bindings", "use-hwthread-cpus",
        "nolocal", "merge-stderr-to-stdout", "enable-recovery",
        # these request what the launcher always does:
        "nooversubscribe", "q", "quiet", "allow-run-as-root", "hetero-nodes", "noprefix", "disable-recovery",
        "leave-session-attached",
    ), 0),
    **dict.fromkeys((
        "np", "N", "H", "hostfile", "x", "wdir", "bind-to", "map-by", "rank-by", "output", "output-filename",
        "display", "with-ft", "cpu-set", "timeout", "rankfile", "rf", "tune", "am", "stdin", "prefix", "path",
        "ssh-port", "ssh-identity-file", "python",
    ), 1),
    **dict.fromkeys(("mca", "prtemca", "pmixmca"), 2),
}  # fmt: skip
"""All options, and the number of values after each."""

_LAUNCH_PARAMETERS = re.compile(
    r"(plm|oob|orte|ras|rmaps|rml|routed|odls|ess|iof|grpcomm|errmgr|state|schizo|rtc|filem|snapc|regx|hwloc"
    r"|btl_vader)(_.*)?"
)
"""MCA parameters that control how Open MPI 4 starts processes or a component that Open MPI 5 lacks."""

_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")


@dataclass
class MpirunLine:
    """A parsed command line.

    Attributes:
        ranks: Number of ranks, or None if not given.
        per_host: Number of ranks per host, or 0 if not given.
        hosts: Host names and slots. None means the scheduler's allocation if there is one, otherwise this
            machine.
        source: Where ``hosts`` were specified, for messages.
        options: Options for ``ringdance run``, except ranks and hosts.
        ssh: Further arguments for ssh.
        mpi: Options for mpiexec, in Open MPI 5's spelling.
        cwd: Working directory of the ranks, if set.
        flags: "spread" (place ranks on the hosts round-robin), "oversubscribe", "tag" and "timestamp" (prefix
            output lines), "display" (show the plan), "closed" (no rank reads stdin), "help", "version".
        bound: Hardware unit to which ranks are bound, if set.
        notes: Warnings for the user.
        command: The program and its arguments.
    """

    ranks: int | None = None
    per_host: int = 0
    hosts: list[tuple[str, int]] | None = None
    source: str = ""
    options: list[str] = field(default_factory=list)
    ssh: list[str] = field(default_factory=list)
    mpi: list[str] = field(default_factory=list)
    cwd: str = ""
    flags: set[str] = field(default_factory=set)
    bound: str = ""
    notes: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)


def parse(words: Sequence[str], environ: Mapping[str, str]) -> MpirunLine:
    """Parse the arguments of ``mpirun``.

    Args:
        words: Options, followed by the command.
        environ: Environment that supplies the values for ``-x NAME``.

    Raises:
        LaunchError: An option is unknown, or its value is invalid or missing.
    """
    line, rest = MpirunLine(), list(words)
    named, dropped = list[str](), list[str]()
    while rest and rest[0].startswith("-") and rest[0] != "-" and not line.flags & {"help", "version"}:
        option, equals, value = rest.pop(0).partition("=")
        if option == "--":
            break
        name, values = option.lstrip("-"), [value] if equals else []
        if name not in _VALUES and equals and _VARIABLE.fullmatch(name):
            text = f"{option}={value} is not an option of mpirun. It is treated as -x {name}={value}"
            line.notes.append(shown_text(text))
            line.options += ["-x", f"{name}={value}"]
            continue
        if name not in _VALUES:
            raise LaunchError(f"unknown option {option}. See `ringdance mpirun --help`.")
        while len(values) < _VALUES[name]:
            if not rest:
                raise LaunchError(f"{option} requires a value")
            values.append(rest.pop(0))
        if name in _SPELLINGS:
            left = iter(values)
            name, *values = [next(left) if word == "{}" else word for word in _SPELLINGS[name].split()]
        if name == "H":
            named += [entry.strip() for entry in values[0].split(",")]
        elif name == "mca":
            dropped += _mca(line, option, *values)
        else:
            _apply(line, option, name, values, environ)
    line.command = rest
    if dropped:
        line.notes.append(f"-mca {', '.join(dropped)}: no effect, because this launcher starts the processes")
    if line.bound in ("", "none") and any(":PE=" in word.upper() for word in line.mpi):
        line.mpi += ["--bind-to", "core"]  # Open MPI requires binding for several cores per rank
        line.notes += ["--bind-to none: no effect, because PE=N binds ranks to N cores"] * bool(line.bound)
    if ":" in rest:
        raise LaunchError("a job with several programs, separated by `:`, is not supported")
    if named:  # select from the hosts of a host file, if there is one
        chosen, known = [parse_hosts(text)[0] for text in named], dict(line.hosts or ())
        line.hosts = merge((host, known.get(host, slots)) for host, slots in chosen)
        line.source = f"-H {','.join(named)}"
    return line


def _apply(
    line: MpirunLine, option: str, name: str, values: Sequence[str], environ: Mapping[str, str]
) -> None:
    value = values[0] if values else ""
    match name:
        case "np":
            line.ranks = _number(option, value)
        case "N":
            line.per_host = _number(option, value)
        case "hostfile":
            line.hosts = [*(line.hosts or ()), *parse_hostfile(value, option)]
            line.source = f"{option} {value}"
        case "x":
            variable, equals, text = value.partition("=")
            if equals or variable in environ:
                line.options += ["-x", f"{variable}={text if equals else environ[variable]}"]
            else:  # only a warning, as in mpirun
                line.notes.append(f"-x {value}: that variable is not set here")
        case "wdir":
            line.cwd = value
        case "map-by" | "rank-by":
            _map_by(line, name, value)
        case "bind-to":
            line.bound = value.lower()
            line.mpi += ["--bind-to", value] if line.bound != "none" else []
        case "output-filename":
            _output_filename(line, option, value)
        case "output":
            for part in value.split(","):
                kind, _, path = part.partition("=")
                if kind in ("dir", "directory", "file", "filename"):
                    _output_filename(line, option, path)
                elif (kind := "tag" if kind.startswith("tag") else kind) in ("tag", "timestamp"):
                    line.flags.add(kind)
                else:
                    line.notes.append(f"{option} {kind}: no effect")
        case "display":
            shown = [part for part in value.split(",") if not part.startswith(("map", "alloc"))]
            line.flags |= {name} if value.count(",") >= len(shown) else set()
            line.mpi += ["--display", ",".join(shown)] if shown else []
        case "stdin" if value in ("0", "none"):
            line.flags |= {"closed"} if value == "none" else set()
        case "help" | "version":
            line.flags.add(name)
        case "ssh-port" | "ssh-identity-file" | "python":
            line.options.append(f"--{name}={value}")
        case "verbose" | "dry-run" | "no-check":
            line.options.append(f"--{name}")
        case _ if name in _PASSED_ON:
            line.mpi += [f"--{name}", *values]
        case _ if name in _NO_EFFECT:
            line.notes.append(f"{option}: no effect; {_NO_EFFECT[name]}")
        case _ if name in _REFUSED:
            raise LaunchError(f"{option} {value}: not supported; {_REFUSED[name]}")


def _output_filename(line: MpirunLine, option: str, value: str) -> None:
    path, _, modifiers = value.partition(":")
    line.options += ["--output-filename", path]
    if "nocopy" in modifiers:
        line.notes.append(f"{option} {value}: the output is also shown here")


def _mca(line: MpirunLine, option: str, name: str, value: str) -> list[str]:
    """Translate an MCA parameter. Returns [name] if the parameter is dropped, otherwise an empty list."""
    if name in ("btl_tcp_if_include", "oob_tcp_if_include") and "/" not in value:
        line.options += ["--network-interface", value] if value not in line.options else []
    elif name in ("plm_rsh_args", "plm_ssh_args"):
        line.ssh += _words(option, name, value)
    elif name in ("plm_rsh_agent", "plm_ssh_agent"):
        program, *arguments = _words(option, name, value.partition(":")[0]) or [""]
        if os.path.basename(program) not in ("ssh", "rsh"):
            raise LaunchError(f"{option} {name} {value}: ssh is the only supported remote shell")
        line.ssh += arguments
    elif _LAUNCH_PARAMETERS.fullmatch(name):
        return [name]
    else:
        line.mpi += ["--mca", name, value]
    return []


def _words(option: str, name: str, value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError as error:
        raise LaunchError(f"{option} {name} {value}: not a valid list of shell words ({error})") from None


def _map_by(line: MpirunLine, name: str, value: str) -> None:
    policy, *modifiers = value.lower().split(":")
    line.flags |= {"oversubscribe"} & set(",".join(modifiers).split(","))
    if policy == "ppr":
        if len(modifiers) < 2 or modifiers[1] != "node":
            raise LaunchError(f"--map-by {value}: not supported; {_REFUSED[name]}")
        line.per_host, modifiers = _number("--map-by ppr", modifiers[0]), modifiers[2:]
    elif policy in ("slot", "") or (name, policy) == ("rank-by", "fill"):
        pass
    elif name == "rank-by" or policy in ("node", "seq", "rankfile"):
        line.notes.append(f"--{name} {value}: ranks are placed and numbered host by host")
        line.flags |= {"spread"} if policy == "node" and name == "map-by" else set()
    else:
        line.mpi += ["--map-by", value]
        return
    for word in {*",".join(modifiers).split(",")} - {"", "oversubscribe", "nooversubscribe"}:
        if word.startswith("pe="):
            line.mpi += ["--map-by", f"slot:{word.upper()}"]
        else:
            line.notes.append(f"--{name} {value}: {word} has no effect")


def _number(option: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise LaunchError(f"{option} {text}: must be an integer of at least 1")
    return int(text)


def slots_of(hosts: HostList, line: MpirunLine) -> tuple[HostList, int]:
    """Return the slots to use on each host, and the number of ranks."""
    if line.per_host:
        hosts = [(name, line.per_host) for name, _ in hosts]
    slots = sum(count for _, count in hosts)
    ranks = line.ranks or slots
    if "oversubscribe" in line.flags and ranks > slots:
        each, rest = divmod(ranks - slots, len(hosts))
        hosts = [(name, count + each + (n < rest)) for n, (name, count) in enumerate(hosts)]
    if "spread" in line.flags and ranks <= sum(count for _, count in hosts):
        turns = sorted((turn, n) for n, (_, count) in enumerate(hosts) for turn in range(count))[:ranks]
        dealt = [sum(number == n for _, number in turns) for n in range(len(hosts))]
        hosts = [(name, count) for (name, _), count in zip(hosts, dealt, strict=True) if count]
    return hosts, ranks
