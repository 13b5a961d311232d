"""``ringdance run``: from a command line to N running ranks on one machine, and to nothing afterwards.

Who is who in a running job::

    launcher (job.py; the user's process)      reads all output, decides, prints the cause, exits
     └─ guardian (guardian.py, own session)    parent of all below; ends and cleans up if the launcher dies
         └─ mpiexec (own session)              the MPI library's launcher
             └─ wrapper (rank.py), one a rank  reports start and end of its rank over a unix socket
                 └─ the rank                   the user's program; its output goes by pipe to the launcher

The guardian and the launcher watch each other: whichever survives ends every process of the
job and removes its files. ``plan.py`` is pure: what will be started, as data.
"""
