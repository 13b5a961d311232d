"""``ringdance run --detach``: the launcher in the background, out of the reach of the terminal it came from.

What is wrong with the hosts or the command is still told there; then only the job's name is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ringdance.errors import LaunchError
from ringdance.launch.background import records
from ringdance.launch.cause import Verdict, render
from ringdance.launch.job import Job
from ringdance.launch.spec import JobSpec, PreparedJob

GRACE_S = 3600.0
"""How long ranks may take to end after they were asked to; whoever stops the job may end it before."""

_Say = Callable[[str], None]


def start(order: JobSpec, look: Callable[[PreparedJob, _Say], None], say: _Say) -> int:
    """Start a job and leave it alone; the exit code. Its name goes to stdout.

    Args:
        order: the job.
        look: looks for what is wrong with its hosts.
        say: shows a line to the person.

    Raises:
        LaunchError: nothing was started.
    """
    sys.stdout.flush()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os._exit(_background(order, look, write))
    os.close(write)
    job = ""
    try:
        with open(read, "rb") as told:
            for line in told:
                message = json.loads(line)
                if "say" in message:
                    say(message["say"])
                elif "problem" in message:
                    raise LaunchError(message["problem"])
                job = message.get("job", job)
    except KeyboardInterrupt:
        os.kill(child, signal.SIGTERM)
        raise
    if not job:
        raise LaunchError("the process in the background has ended without a word")
    print(job[:8])
    sys.stdout.flush()
    say(f"follow it: ringdance attach {job[:8]}; end it: ringdance stop {job[:8]}")
    return 0


def _background(order: JobSpec, look: Callable[[PreparedJob, _Say], None], pipe: int) -> int:
    """In the child: the whole job; its exit code."""
    os.setsid()
    _redirect(os.devnull)

    def tell(**message: Any) -> None:
        try:
            os.write(pipe, json.dumps(message).encode() + b"\n")
        except OSError:  # whoever waited is gone; the job is not for that
            pass

    try:
        ready = order.prepare(lambda text: tell(say=text))
        try:
            look(ready, lambda text: tell(say=text))
            output = records.Output()
            options = ready.options(out=output.sink(1), err=output.sink(2), grace=GRACE_S)
            job = Job(ready.plan, options, ready.remotes)
            hosts = [(host.name, len(host.ranks)) for host in ready.plan.hosts]
            record = records.own(job.id, list(ready.plan.command), hosts)
            descriptor = output.open(record.place)
        except BaseException:
            ready.close()
            raise
    except LaunchError as error:
        tell(problem=str(error))
        return 2
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    tell(job=job.id)
    os.close(pipe)
    code = 1
    try:
        code = _run(job, ready, options.err)
    finally:
        replace(record, ended=time.time(), code=code).write()
    return code


def _run(job: Job, ready: PreparedJob, err: Callable[[bytes], None]) -> int:
    try:
        outcome = job.run()
    except LaunchError as error:
        err(f"ringdance run: {error}\n".encode())
        return 2
    if isinstance(outcome, Verdict):
        err(render(outcome, ready.plan.ranks, ready.order.folder).encode() + b"\n")
        return outcome.code
    return outcome


def _redirect(path: str) -> None:
    descriptor = os.open(path, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
