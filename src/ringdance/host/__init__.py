"""Code that runs on every host of a job, and functions that examine the local host.

``agent``, ``copy``, ``site`` and ``system`` use only the standard library, because they are run by path,
before Python's site packages are found. ``schedulers`` determines which hosts a scheduler has allocated.
"""
