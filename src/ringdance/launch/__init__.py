"""``ringdance run``: start N ranks on one or more hosts and clean up after them.

Processes of a running job::

    launcher (job.py; the user's process)      shows all output, decides, prints the cause, exits
     ├─ agent (agent/, own session)            parent of all below; cleans up and exits if the launcher dies
     │   ├─ its backup                         cleans up if the agent is killed
     │   └─ mpiexec (own session)              the MPI library's launcher
     │       ├─ wrapper (agent/rank.py)        one for each rank: reports start and end to the agent
     │       │   └─ the rank                   the user's program; pipes carry its output to the agent
     │       └─ agent/rsh.py, one per host     run by mpiexec as ssh: asks for the agent there
     └─ ssh or srun, one per host              the only connection to that host
         └─ agent, on that host                the same as here
             └─ mpiexec's daemon               started for agent/rsh.py
                 └─ wrapper and rank           as above

Launcher and agents monitor each other: a survivor ends every process of the job on its host and removes its
files. ``plan.py`` is pure: it describes what will be started as data.
"""
