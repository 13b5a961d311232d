"""``ringdance.run``: call a function on several ranks and return their results."""

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
    fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, np: int = 2, *,
    hosts: str | None = None, env: Mapping[str, str] | None = None,
    output_filename: str | os.PathLike[str] | None = None, prefix: bool = True, start_timeout: float = 60.0,
    grace: float = 30.0, verbose: bool = False,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ``np`` new ranks and wait for them.

    Args:
        fn: Any function that cloudpickle can serialize. It may be a lambda, or be defined in a notebook.
        args: Positional arguments for ``fn``, the same on all ranks.
        kwargs: Keyword arguments for ``fn``.
        np: Number of ranks.
        hosts: Hosts and slots, such as ``"h1:4,h2:4"``. Default: the scheduler's allocation, if there is one,
            otherwise this machine.
        env: Environment variables to set for the ranks.
        output_filename: Directory for a copy of each rank's output, as with ``--output-filename`` of
            ``ringdance run``.
        prefix: If True, prefix each output line with its rank.
        start_timeout: Seconds within which all ranks must start.
        grace: Seconds for ranks to exit after Ctrl-C or SIGTERM. A second Ctrl-C ends them immediately.
        verbose: If True, show each step of the launch.

    Returns:
        The return values of ``fn`` in rank order.

    Raises:
        LaunchError: The ranks could not be started, or a rank failed. The message includes the traceback of
            the first failure.
    """
    spec = JobSpec(
        command_of_call(), ranks=np, hosts=parse_hosts(hosts) if hosts else None, exports=env or {},
        source=f"hosts={hosts}" if hosts else "", style=Style() if prefix else Style(""),
        output_directory=os.fspath(output_filename) if output_filename else "", start_timeout=start_timeout,
        grace=grace, verbose=verbose,
    )
    return call(spec, fn, args, kwargs)


def command_of_call(executable: str | None = None) -> list[str]:
    """Return the command that ranks run for ``call()``. ``executable`` defaults to this interpreter."""
    return [executable or sys.executable, "-m", "ringdance.launch.call"]


def call(
    spec: JobSpec, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on the ranks that ``spec`` defines. Return the results in rank order.

    Raises:
        LaunchError: The ranks could not be started, or a rank failed, as in ``run()``.
    """
    import cloudpickle

    prepared = prepare(spec)
    plan = prepared.plan
    try:
        function = cloudpickle.dumps((fn, tuple(args), dict(kwargs or {})))
        files = {"call.pkl": pickle.dumps((sys.path, function))}
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


def _sink(name: str) -> Sink:
    """Return a sink that looks up ``sys.stdout`` or ``sys.stderr`` on each write, in case it is replaced."""

    def write(data: bytes) -> None:
        stream = getattr(sys, name)
        stream.write(data.decode(errors="replace"))
        stream.flush()

    return write
