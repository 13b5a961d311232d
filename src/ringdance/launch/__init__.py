"""``ringdance run``: from a command line to N running ranks on one host or many, and to nothing afterwards.

Who is who in a running job::

    launcher (job.py; the user's process)      reads all output, decides, prints the cause, exits
     ├─ guardian (guardian.py, own session)    parent of all below; ends and cleans up if the launcher dies
     │   └─ mpiexec (own session)              the MPI library's launcher
     │       ├─ wrapper (rank.py), one a rank  reports start and end of its rank over a unix socket
     │       │   └─ the rank                   the user's program; its output goes by pipe to the launcher
     │       └─ door (door.py), one a host     what mpiexec takes for ssh: asks the agent there
     └─ ssh or srun, one a host                the only connection to that host
         └─ agent (agent.py, on that host)     there what launcher and guardian are here
             └─ mpiexec's daemon               started for the door
                 └─ wrapper, and rank          as above; the agent passes on reports and output

Guardian and launcher watch each other, and so do agents and launcher: whichever survives ends every
process of the job on its host and removes its files. ``plan.py`` is pure: what will be started, as data.
"""
