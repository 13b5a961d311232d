"""Run the launcher in the background, in a session of its own (``ringdance run --detach``).

The terminal still shows what is wrong with the hosts or the command, then only the job's name.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from ringdance.errors import LaunchError
from ringdance.launch.background import records
from ringdance.launch.cause import Verdict, render
from ringdance.launch.job import Job
from ringdance.launch.output.stream import Sink
from ringdance.launch.spec import JobSpec, PreparedJob

GRACE_S = 3600.0
"""How long ranks may take to end after SIGTERM; ``ringdance stop`` ends them earlier."""

_Say = Callable[[str], None]
_Look = Callable[[PreparedJob, _Say], None]


def start(spec: JobSpec, look: _Look, say: _Say) -> int:
    """Start a job in the background, print its name, and return the exit code.

    Args:
        spec: the job.
        look: checks its hosts.
        say: shows a line to the user.

    Raises:
        LaunchError: nothing was started.
    """
    sys.stdout.flush()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os._exit(_background(spec, look, write))
    os.close(write)
    job = ""
    try:
        with open(read, "rb") as messages:
            for line in messages:
                kind, text = json.loads(line)
                if kind == "problem":
                    raise LaunchError(text)
                if kind == "say":
                    say(text)
                else:
                    job = text[:8]
    except KeyboardInterrupt:
        os.kill(child, signal.SIGTERM)
        raise
    if not job:
        raise LaunchError("the background process ended unexpectedly")
    print(job, flush=True)
    say(f"follow it: ringdance attach {job}; end it: ringdance stop {job}")
    return 0


def _background(spec: JobSpec, look: _Look, pipe: int) -> int:
    """Run the job in the child and return its exit code."""
    os.setsid()
    records.redirect(os.devnull, os.O_RDWR, 0, 1, 2)

    def send(kind: str, text: str) -> None:
        try:
            os.write(pipe, json.dumps([kind, text]).encode() + b"\n")
        except OSError:  # the parent has ended; the job goes on
            pass

    def send_line(text: str) -> None:
        send("say", text)

    try:
        prepared = spec.prepare(send_line)
        try:
            look(prepared, send_line)
            options = prepared.options(records.log_sink(1), records.log_sink(2), grace=GRACE_S)
            job = Job(prepared.plan, options, prepared.remotes)
            hosts = {host.name: len(host.ranks) for host in prepared.plan.hosts}
            record = records.create(job.id, list(prepared.plan.command), hosts)
        except BaseException:
            prepared.close()
            raise
    except LaunchError as error:
        send("problem", str(error))
        return 2
    send("job", job.id)
    os.close(pipe)
    code = 1
    try:
        code = _run(job, prepared, options.err)
    finally:
        replace(record, ended=time.time(), code=code).write()
    return code


def _run(job: Job, prepared: PreparedJob, err: Sink) -> int:
    try:
        outcome = job.run()
    except LaunchError as error:
        err(f"ringdance run: {error}\n".encode())
        return 2
    if isinstance(outcome, Verdict):
        err(render(outcome, prepared.plan.ranks, prepared.order.folder).encode() + b"\n")
        return outcome.code
    return outcome
