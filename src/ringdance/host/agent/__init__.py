"""Supervise one host of a job: its ranks, mpiexec or its daemon, tasks, and the cleanup afterwards.

Standard library only: these modules run by path, without ``site`` and the rest of the package.
"""
