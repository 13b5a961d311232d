"""Turn Horovod's arguments into a job for Ringdance's launcher, and report options without effect."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence

from horovod.runner.common.util import config_parser
from ringdance.errors import LaunchError
from ringdance.host.schedulers.hostfile import HostList, parse_hostfile, parse_hosts
from ringdance.host.schedulers.this_machine import local_names
from ringdance.launch.output.stream import Style
from ringdance.launch.remote.shell import RemoteShell
from ringdance.launch.spec import JobSpec
from ringdance.settings import WARNED, without_effect

__all__ = ["order_of", "tell"]

_GONE = {
    "use_gloo": "--gloo: Gloo is not used; MPI and shared memory connect the processes",
    "use_jsrun": "--jsrun: jsrun is not used; mpiexec starts the processes",
}
_ELASTIC = ("min_num_proc", "max_num_proc", "host_discovery_script", "reset_limit", "cooldown_range")


def order_of(args: argparse.Namespace, command: Sequence[str]) -> JobSpec:
    """Return the job for parsed arguments. Options for the processes become environment variables.

    Raises:
        ValueError: An option's text cannot be used.
        LaunchError: The hosts cannot be parsed or found.
    """
    exports: dict[str, str] = {}
    config_parser.set_env_from_args(exports, args)
    timeline = ""  # A file on this host, no matter where rank 0 runs.
    if exports.get("HOROVOD_TIMELINE") != "DYNAMIC":
        timeline = exports.pop("HOROVOD_TIMELINE", "")
    if args.elastic_timeout is not None:
        exports["HOROVOD_ELASTIC_TIMEOUT"] = str(args.elastic_timeout)
    ranks, hosts = _size(args)
    names = [name for name, _ in hosts or ()]
    if len(local_names(names)) == len(set(names)):  # Interfaces of other hosts are checked there.
        _check_interfaces(args.nics or ())
    # The ranks need not repeat the warnings that ``tell`` prints.
    exports[WARNED] = ",".join(name for name, _, _ in without_effect({**os.environ, **exports}))
    return JobSpec(
        command,
        ranks=ranks,
        hosts=hosts,
        source=_source(args) if hosts else "",
        shell=RemoteShell(port=args.ssh_port or 0, identity=args.ssh_identity_file or ""),
        interfaces=sorted(args.nics or ()),
        exports=exports,
        style=Style("[{rank}]<{stream}>:", clock=args.prefix_output_with_timestamp, closes=False),
        output_directory=args.output_filename or "",
        timeline=timeline,
        start_timeout=args.start_timeout,
        grace=5.0,  # Horovod's value.
        verbose=args.verbose,
        binding=None if args.binding_args is None else _words("--binding-args", args.binding_args),
        mpi_args=_words("--mpi-args", args.mpi_args or ""),
    )


def _source(args: argparse.Namespace) -> str:
    if args.host_discovery_script:
        return f"--host-discovery-script {args.host_discovery_script}"
    return "-H" if args.hosts else f"--hostfile {args.hostfile}"


def _words(option: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{option}={text!r} cannot be split into words: {error}") from None


def _check_interfaces(names: Collection[str]) -> None:
    here = {name for _, name in socket.if_nameindex()}
    for name in sorted(names):
        if name not in here:
            raise ValueError(
                f"network interface {name!r} does not exist here; there are: {', '.join(sorted(here))}"
            )


def _size(args: argparse.Namespace) -> tuple[int | None, HostList | None]:
    """Return the number of ranks, and their hosts."""
    hosts: HostList | None = None
    if args.host_discovery_script:
        hosts = _discover(args.host_discovery_script, args.slots, args.start_timeout)
    elif args.hosts:
        hosts = parse_hosts(args.hosts, slots=None)
    elif args.hostfile:
        hosts = parse_hostfile(args.hostfile)
    least = args.num_proc or args.min_num_proc
    slots = sum(count for _, count in hosts or ())
    elastic = args.host_discovery_script or args.min_num_proc
    if elastic and hosts and least and slots >= least:
        # As in an elastic job: use all available slots, up to the maximum.
        return min(slots, args.max_num_proc or slots), hosts
    return least, hosts


def _discover(script: str, slots: int | None, timeout: float) -> list[tuple[str, int]]:
    """Return the hosts that the discovery script prints now, one per line: ``host`` or ``host:slots``."""
    path = os.path.abspath(script) if os.path.exists(script) else script
    process = None
    try:
        process = subprocess.Popen(
            [path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
            start_new_session=True,
        )
        out, err = process.communicate(timeout=timeout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"--host-discovery-script {script}: {error}") from None
    finally:
        if process is not None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise LaunchError(
            f"--host-discovery-script {script} ended with exit code {process.returncode}: {err.strip()}"
        )
    found: dict[str, int] = {}
    for line in out.split():
        counted = ":" in line
        if not counted and slots is None:
            raise LaunchError(
                f"--host-discovery-script {script} prints {line!r} without a number of slots: "
                "print HOST:SLOTS, or pass --slots-per-host"
            )
        for host, count in parse_hosts(line if counted else f"{line}:{slots}", slots=None):
            found[host] = count
    if not found:
        raise LaunchError(f"--host-discovery-script {script} prints no host")
    return list(found.items())


def tell(args: argparse.Namespace, order: JobSpec, say: Callable[[str], None]) -> None:
    """Report which of the passed options have no effect, with one line per reason."""
    for line in _lines(args, order):
        say(line)


def _lines(args: argparse.Namespace, order: JobSpec) -> Iterator[str]:
    yield from (line for dest, line in _GONE.items() if getattr(args, dest))
    given = [_option(dest) for dest in _ELASTIC if getattr(args, dest) is not None]
    if given:
        yield (
            f"{', '.join(given)}: this job keeps the processes and hosts that it starts with; "
            "adding or removing processes is not supported yet"
        )
    options = {s.variable: s.option for s in config_parser.SETTINGS if s.variable in order.exports}
    reasons: dict[str, list[str]] = {}
    for name, text, reason in without_effect({**os.environ, **order.exports}):
        reasons.setdefault(reason, []).append(options.get(name, f"{name}={text}"))
    for reason, names in reasons.items():
        yield f"{', '.join(names)}: no effect, {reason}"
    if args.config_file:
        for key in config_parser.unknown_keys(config_parser.read_config(args.config_file)):
            yield f"--config-file {args.config_file}: {key} is not known and has no effect"


def _option(dest: str) -> str:
    if dest == "cooldown_range":
        return "--blacklist-cooldown-range"
    return "--" + dest.replace("_num_proc", "_np").replace("_", "-")
