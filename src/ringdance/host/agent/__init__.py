"""Supervise one host of a job: its ranks, mpiexec or its daemon, tasks, and the cleanup afterwards.

Standard library only: these modules are run by path, without ``site`` or the rest of the package.
"""
