"""What runs on every host of a job, and what a process can learn about its own host.

``agent``, ``copy``, ``site`` and ``system`` use only the standard library, because they are run by path,
before Python's site packages are found. ``schedulers`` reads which hosts a scheduler has allocated.
"""
