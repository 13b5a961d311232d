"""``ringdance run``: start N ranks on one or more hosts and clean up after them.

Processes of a running job::

    launcher (job.py; the user's process)      controls the job, shows all output, prints why it failed
     ├─ agent (agent/, own session)            parent of the rest; cleans up and exits if the launcher dies
     │   ├─ its backup                         cleans up if the agent is killed
     │   └─ mpiexec (own session)              the MPI library's launcher
     │       ├─ wrapper (agent/rank.py)        one per rank: reports the rank's start and end to the agent
     │       │   └─ the rank                   the user's program; pipes carry its output to the agent
     │       └─ agent/rsh.py, one per host     run by mpiexec in place of ssh: requests a daemon
     └─ ssh or srun, one per host              the only connection to that host
         └─ agent, on that host                the same as above
             └─ mpiexec's daemon               requested by agent/rsh.py
                 └─ wrapper and rank           as above

The launcher and the agents monitor each other. If one side dies, the survivor kills every process that the
job started on its host and removes the job's files. ``plan.py`` has no side effects: it only builds a
description of what to start.
"""
