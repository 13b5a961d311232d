"""Run a job from the launcher: create its directories, start the local agent, and clean up at the end."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping

from ringdance.errors import LaunchError
from ringdance.host.directories import bases, host_directory, host_shared, usable
from ringdance.host.system.cleanup import Cleanup
from ringdance.host.system.signals import Signals
from ringdance.launch.cause import Verdict, write_outcome
from ringdance.launch.job_messages import Place, local_environment
from ringdance.launch.output.results import OutputDirectory, Results
from ringdance.launch.output.screen import Screen
from ringdance.launch.prepare import PreparedJob
from ringdance.launch.remote.connect import close_all, start_local
from ringdance.launch.running import RunningJob


class Job:
    """A job, which can be run only once.

    Args:
        prepared: The job's plan and the agents on other hosts, which end with the job.
        screen: Destination of the ranks' output.
        id: Job ID, 32 hexadecimal digits. Default: a new ID.
        stdin: File descriptor for rank 0's standard input if rank 0 runs on this host, -1 for none.
        files: Files to create in the job's directory on every host: contents by name (see call.py).
        results: Receives the ranks' ``result.*.pkl`` files if all ranks complete, or None if not needed.

    Raises (also from ``run()``):
        LaunchError: The job could not be started at all, or the output directory cannot be created.
    """

    def __init__(
        self, prepared: PreparedJob, screen: Screen, *, id: str = "", stdin: int = -1,
        files: Mapping[str, bytes] | None = None, results: Results | None = None,
    ) -> None:
        spec = prepared.spec
        self._output = OutputDirectory(spec.output_directory, spec.timeline, screen.show)
        self._prepared, self._screen = prepared, screen
        self.id = id or uuid.uuid4().hex
        self._stdin, self._files, self._results = stdin, files or {}, results
        self._began = time.time()
        self._signals = Signals()

    def run(self) -> Verdict | int:
        """Run the job. Returns 0, the verdict on a failure, or 128 + the signal that stopped the job."""
        plan, remotes = self._prepared.plan, self._prepared.remotes
        running: RunningJob | None = None
        try:
            candidates, wrong = usable(bases(os.environ))
            if not candidates:
                text = f"no directory for temporary files ({wrong})"
                raise LaunchError(f"{text}. Set TMPDIR to a writable directory.")
            place = Place(self.id, candidates, host_directory(candidates[0], self.id))
            for note in plan.notes:
                self._screen.show(note)
            name = next((host.name for host in plan.hosts if host.local), "localhost")
            local = start_local(name, local_environment(plan, place), self._stdin, remotes)
            own = self._screen, self._signals, self._output, self._results
            running = RunningJob(self._prepared, place, local, *own)
            outcome = running.run(self._files)
            if self._output.path:
                write_outcome(outcome, self._output.path)
            return outcome
        finally:
            # Close everything, because a notebook may run many jobs.
            if running is None:
                close_all(remotes)
            else:
                pids = running.close()
                if not local.clean:
                    self._clean(place.directory, pids)
            self._output.close()
            self._signals.restore()

    def _clean(self, directory: str, pids: list[int]) -> None:
        """Clean up this host if its agent has not done so. ``pids`` are the pids of the host's ranks."""
        shared = host_shared(self.id)
        cleanup = Cleanup(self.id, [directory, *([shared] if shared else [])], self._began)
        for pid in pids:
            cleanup.note(pid)
        cleanup.run()
