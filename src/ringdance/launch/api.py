"""``ringdance.run``: call a function on several ranks and get their results."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringdance.errors import LaunchError
from ringdance.host.schedulers.hostfile import parse_hosts
from ringdance.launch.cause import Verdict, render
from ringdance.launch.job import Job
from ringdance.launch.output.results import Results
from ringdance.launch.output.screen import Screen
from ringdance.launch.output.stream import Sink, Style
from ringdance.launch.prepare import prepare
from ringdance.launch.spec import JobSpec


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 2,
    *,
    hosts: str | None = None,
    env: Mapping[str, str] | None = None,
    output_filename: str | os.PathLike[str] | None = None,
    prefix: bool = True,
    start_timeout: float = 60.0,
    grace: float = 30.0,
    verbose: bool = False,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on `np` new ranks and wait for them.

    Args:
        fn: any function that cloudpickle can carry: also a lambda, or one of a notebook.
        args: its positional arguments, the same on all ranks.
        kwargs: its keyword arguments.
        np: number of ranks.
        hosts: ``"h1:4,h2:4"``; default: what a scheduler has allocated, else this machine.
        env: variables to set for the ranks.
        output_filename: directory for each rank's output, as of ``ringdance run --output-filename``.
        prefix: whether output lines carry their rank.
        start_timeout: seconds until all ranks must have started.
        grace: seconds that ranks have to end after Ctrl-C or SIGTERM; a second one ends them at once.
        verbose: whether to show steps.

    Returns:
        What `fn` returned, by rank.

    Raises:
        LaunchError: the ranks could not be started, or one failed: with the first failing rank's traceback.
    """
    spec = JobSpec(
        command_of_call(),
        ranks=np,
        hosts=parse_hosts(hosts) if hosts else None,
        exports=env or {},
        source=f"hosts={hosts}" if hosts else "",
        style=None if prefix else Style(""),
        output_directory=os.fspath(output_filename) if output_filename else "",
        start_timeout=start_timeout,
        grace=grace,
        verbose=verbose,
    )
    return call(spec, fn, args, kwargs)


def command_of_call(executable: str | None = None) -> list[str]:
    """Return the command of a job for :func:`call`; `executable` is its Python, by default this one."""
    return [executable or sys.executable, "-m", "ringdance.launch.call"]


def call(
    spec: JobSpec, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on the ranks of `spec`; return what it returned, by rank.

    Raises:
        LaunchError: as of :func:`run`.
    """
    prepared = prepare(spec)
    plan = prepared.plan
    try:
        files = {"call.pkl": _pack(fn, args, kwargs)}
        screen, results = Screen((_sink("stdout"), _sink("stderr"))), Results()
        job = Job(prepared, screen, files=files, results=results)
    except BaseException:
        prepared.close()
        raise
    outcome = job.run()
    if isinstance(outcome, Verdict):
        raise LaunchError("\n" + render(outcome, plan.ranks, spec.output_directory))
    if outcome:
        raise KeyboardInterrupt if outcome == 130 else SystemExit(outcome)
    try:
        return results.load(plan.ranks)
    finally:
        results.close()


def _pack(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes:
    import cloudpickle

    return pickle.dumps((sys.path, cloudpickle.dumps((fn, tuple(args), dict(kwargs or {})))))


def _sink(name: str) -> Sink:
    """Write to ``sys.stdout`` or ``sys.stderr`` as they are now: a notebook's or a test's as well."""

    def write(data: bytes) -> None:
        stream = getattr(sys, name)
        stream.write(data.decode(errors="replace"))
        stream.flush()

    return write
