"""Run the launcher in the background, in its own session (``ringdance run --detach``).

The launcher writes to the terminal until the hosts have been checked and the job has a record. From then on,
it writes to the job's log.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from dataclasses import replace

from ringdance.launch.background import records
from ringdance.launch.job import Job
from ringdance.launch.output.screen import Screen
from ringdance.launch.output.stream import write_all
from ringdance.launch.parser import as_program
from ringdance.launch.prepare import Check, Log, prepare
from ringdance.launch.spec import JobSpec
from ringdance.launch.terminal import show_outcome

GRACE_S = 3600.0
"""Seconds that ranks may take to exit after SIGTERM. ``ringdance stop`` can end them earlier."""


def start(spec: JobSpec, check: Check, log: Log) -> int:
    """Start a job in the background, print its ID, and return the exit code.

    Args:
        spec: The job.
        check: Checks the job's hosts.
        log: Called with each line to show to the user.
    """
    sys.stdout.flush()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.setsid()
        os._exit(as_program("ringdance run", lambda: _background(spec, check, log, write)))
    os.close(write)
    try:
        with open(read) as pipe:
            job = pipe.read()[:8]
        if not job:  # the child failed and has already printed the reason
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except KeyboardInterrupt:
        os.kill(child, signal.SIGTERM)
        raise
    print(job, flush=True)
    log(f"follow it: ringdance attach {job}; end it: ringdance stop {job}")
    return 0


def _background(spec: JobSpec, check: Check, log: Log, pipe: int) -> int:
    """Run the job in the child process, write its ID to the pipe, and return its exit code."""
    prepared = prepare(replace(spec, grace=max(spec.grace, GRACE_S)), log)
    try:
        check(prepared, log)
        screen = Screen((write_all(1), write_all(2)))
        job = Job(prepared, screen)
        hosts = {host.name: len(host.ranks) for host in prepared.plan.hosts}
        record = records.create(job.id, list(prepared.spec.command), hosts, spec.grace)
    except BaseException:
        prepared.close()
        raise
    with contextlib.suppress(BrokenPipeError):  # the parent was killed, but the job continues
        os.write(pipe, job.id.encode())
    os.close(pipe)
    code = 1
    try:
        code = as_program("ringdance run", lambda: show_outcome(job.run(), prepared, screen))
    finally:
        with contextlib.suppress(OSError):
            os.fsync(1)  # so that other machines see all output before they see the job's end
        replace(record, ended=time.time(), code=code).write()
    return code
